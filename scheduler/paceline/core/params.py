"""What a request asks for, validated. Field names in errors are the proto's, so a client recognises them."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from paceline.errors import InvalidArgument

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256


class Method(enum.StrEnum):
    """How drafts are made."""

    NONE = "none"
    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's logits become a distribution.

    Attributes:
        temperature: 0 is greedy (argmax, ties to the lowest id).
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidArgument("sampling.temperature", self.temperature, "a finite number >= 0")
        if self.top_k < 0:
            raise InvalidArgument("sampling.top_k", self.top_k, "an integer >= 0 (0 keeps every token)")
        if not 0 < self.top_p <= 1:
            raise InvalidArgument("sampling.top_p", self.top_p, "in (0, 1]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a completion ends.

    Attributes:
        max_tokens: completion tokens at most; None means up to the model's length.
        strings: stop strings, matched in the text across token boundaries; cut from the text unless
            `include_stop_string`.
        token_ids: stop ids; the id itself ends the completion's ids and is no part of its text.
        ignore_eos: the model's end-of-sequence ids do not end the completion.
    """

    max_tokens: int | None = None
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidArgument("stop.max_tokens", self.max_tokens, "an integer >= 1")
        if len(self.strings) > MAX_STOP_STRINGS:
            raise InvalidArgument("stop.strings", f"{len(self.strings)} strings", f"at most {MAX_STOP_STRINGS} strings")
        if len(self.token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidArgument("stop.token_ids", f"{len(self.token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        for string in self.strings:
            if not 1 <= len(string) <= MAX_STOP_STRING_CHARS:
                raise InvalidArgument("stop.strings", string, f"strings of 1 to {MAX_STOP_STRING_CHARS} characters")


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Bounds on speculation; within them the scheduler chooses the depth of every step.

    Attributes:
        method: how drafts are made; None leaves the choice to the server.
        min_depth: lowest depth the policy may choose (the end of a completion or of memory still goes below it).
        max_depth: highest depth; None leaves it to the server.
    """

    method: Method | None = None
    min_depth: int = 0
    max_depth: int | None = None

    def __post_init__(self) -> None:
        if self.min_depth < 0:
            raise InvalidArgument("speculation.min_draft_tokens", self.min_depth, "an integer >= 0")
        if self.max_depth is not None and self.max_depth < self.min_depth:
            raise InvalidArgument(
                "speculation.max_draft_tokens", self.max_depth, f"an integer >= min_draft_tokens ({self.min_depth})"
            )
