"""What a caller hands to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.params import SamplingParams, SpeculationParams, StopParams


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str


# Text, token ids, or the turns of a conversation. An empty sequence counts as token ids.
Prompt = str | Sequence[int] | Sequence[ChatMessage]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to complete it. The parameters have validated themselves; the engine validates the prompt."""

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopParams = field(default_factory=StopParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
