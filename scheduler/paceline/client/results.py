"""What a generation gives back, as frozen values; times are seconds, token counts are tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from paceline.v1 import generation_pb2 as pb


class FinishReason(StrEnum):
    """Why a completion ended. `UNSPECIFIED` stands for a reason that this client does not know."""

    UNSPECIFIED = "unspecified"
    EOS = "eos"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"
    MAX_TOKENS = "max_tokens"
    CONTEXT_LENGTH = "context_length"
    DEAD_END = "dead_end"


T = TypeVar("T")


def _words(enum: Any) -> dict[int, str]:
    """The numbers of an enum of the contract, each with its name as people write it: 3 -> "ngram"."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {value.number: value.name.removeprefix(prefix).lower() for value in enum.values}


_FINISH_REASONS: Final = {
    number: FinishReason(word) for number, word in _words(pb.DESCRIPTOR.enum_types_by_name["FinishReason"]).items()
}
_MODES: Final = _words(pb.DESCRIPTOR.enum_types_by_name["SpeculationMode"])


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable a token was, and what would have been more so.

    Attributes:
        logprob: natural logarithm of the token's probability.
        rank: 1 for the most probable token: 1 + how many are more probable.
        top_token_ids: the most probable tokens, best first, as many as were asked for.
        top_logprobs: theirs; -inf for a token that was cut away, with `logprobs_mode="processed"`.
    """

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Newly generated output.

    Attributes:
        text: what was added to the text; empty while a stop string or a split character is held back.
        token_ids: what was added to the tokens; several at once when drafts were accepted.
        token_offset: index of the first of `token_ids` in the completion.
        choice: which of the n completions grew.
        logprobs: one for each new token, if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    token_offset: int
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """What the server says before the first token.

    Attributes:
        seed: the request's own.
        prompt_logprobs: one for each token of the prompt, if asked for; None for the first, which nothing predicts.
    """

    request_id: str
    model: str
    prompt_tokens: int
    cached_prompt_tokens: int
    seed: int | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What speculation did for one request.

    Attributes:
        mode: the method in use: "off", "auto", "ngram", "draft_model" or "unspecified".
        verify_steps: decode steps, with drafts or without.
        draft_steps: those of them that verified at least one draft.
        drafted_tokens: draft tokens proposed.
        accepted_tokens: draft tokens kept.
        accepted_by_position: per draft position, the steps in which it was accepted.
        acceptance_length: emitted tokens over verify steps.
        engine_seconds: engine time charged for this request.
        rejected_seconds: the part of it spent on rejected drafts.
        depths: verify steps by the number of drafts verified, from 0.
        saved_seconds: what the same tokens would have taken without drafts, less what they took.
    """

    mode: str
    verify_steps: int
    draft_steps: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...]
    acceptance_length: float
    engine_seconds: float
    rejected_seconds: float
    depths: tuple[int, ...]
    saved_seconds: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from arrival at the server to admission, first token and end; how often the request was preempted."""

    queue: float
    time_to_first_token: float
    total: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Finished:
    """How a completion ended.

    Attributes:
        stop_string, stop_token_id: what matched, where something did.
        detail: why, in words, after a dead end; else empty.
    """

    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    usage: Usage
    speculation: SpeculationStats
    timing: Timing
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole completion, collected. `logprobs` has one entry for each of `token_ids`, if asked for."""

    text: str
    token_ids: tuple[int, ...]
    started: Started
    finished: Finished
    logprobs: tuple[TokenLogprobs, ...] = ()


def read_delta(message: pb.GenerateResponse) -> Delta:
    """What a message adds to a completion."""
    return Delta(
        text=message.text,
        token_ids=tuple(message.token_ids),
        token_offset=message.token_offset,
        choice=message.choice,
        logprobs=tuple(_read_token(token) for token in message.logprobs),
    )


def _read_token(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, message.rank, tuple(message.top_token_ids), tuple(message.top_logprobs))


def read_started(message: pb.Started) -> Started:
    """The value of a `Started` message."""
    return Started(
        request_id=message.request_id,
        model=message.model,
        prompt_tokens=message.prompt_tokens,
        cached_prompt_tokens=message.cached_prompt_tokens,
        seed=message.seed if message.HasField("seed") else None,
        # No token ranks below 1: 0 is the empty entry of the first.
        prompt_logprobs=tuple(_read_token(token) if token.rank else None for token in message.prompt_logprobs),
    )


def read_finished(message: pb.Finished) -> Finished:
    """The value of a `Finished` message; parts the server left out are zero."""
    usage, timing = message.usage, message.timing
    return Finished(
        reason=_FINISH_REASONS.get(message.reason, FinishReason.UNSPECIFIED),
        stop_string=message.stop_string if message.HasField("stop_string") else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        usage=Usage(usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens),
        speculation=_read_speculation(message.speculation),
        timing=Timing(
            queue=seconds(timing.queue),
            time_to_first_token=seconds(timing.time_to_first_token),
            total=seconds(timing.total),
            preemptions=timing.preemptions,
        ),
        detail=message.detail,
    )


def _read_speculation(message: pb.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        mode=_MODES.get(message.mode, "unspecified"),
        verify_steps=message.verify_steps,
        draft_steps=message.draft_steps,
        drafted_tokens=message.drafted_tokens,
        accepted_tokens=message.accepted_tokens,
        accepted_by_position=tuple(message.accepted_by_position),
        acceptance_length=message.acceptance_length,
        engine_seconds=message.engine_seconds,
        rejected_seconds=message.rejected_seconds,
        depths=tuple(message.depths),
        saved_seconds=message.saved_seconds,
    )


def seconds(duration: Duration) -> float:
    """A duration as a number."""
    return duration.seconds + duration.nanos / 1e9


def read_fields(kind: type[T], message: Message, **given: object) -> T:
    """The value of a message whose fields have the names of the dataclass's: durations as seconds, enums as words,
    lists as tuples, and None for what has presence and is unset. Fields that are messages of their own are `given`.
    """
    names = [field.name for field in fields(kind) if field.name not in given]  # type: ignore[arg-type]
    return kind(**given, **{name: _read_field(message, name) for name in names})


def _read_field(message: Message, name: str) -> object:
    field = message.DESCRIPTOR.fields_by_name[name]
    value: Any = getattr(message, name)
    if isinstance(value, Duration):
        return seconds(value)
    if field.has_presence and not message.HasField(name):
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if field.enum_type is not None:
        words = _words(field.enum_type)
        if field.is_repeated:
            return tuple(words.get(number, "unspecified") for number in value)
        return words.get(value, "unspecified")
    return tuple(value) if field.is_repeated else value
