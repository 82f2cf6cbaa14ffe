"""What a caller hands to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.grammar import GrammarSpec
from paceline.core.params import LogprobsParams, SamplingParams, SchedulingParams, SpeculationParams, StopParams
from paceline.errors import InvalidArgument
from paceline.options import MAX_COMPLETIONS


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str


# Text, token ids, or the turns of a conversation. An empty sequence counts as token ids.
Prompt = str | Sequence[int] | Sequence[ChatMessage]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to complete it. The parameters have validated themselves; the engine validates the rest.

    Attributes:
        grammar: what every completion must match.
        n: independent completions; they share the prompt's KV.
        scheduling: whose request it is, and when it is wanted.
    """

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopParams = field(default_factory=StopParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    logprobs: LogprobsParams = field(default_factory=LogprobsParams)
    grammar: GrammarSpec | None = None
    n: int = 1
    scheduling: SchedulingParams = field(default_factory=SchedulingParams)

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_COMPLETIONS:
            raise InvalidArgument("n", self.n, f"an integer in 1..{MAX_COMPLETIONS}")
