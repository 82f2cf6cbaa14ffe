"""Between the contract's messages and the engine's values.

Presence decides everywhere: a field that is unset means the model's default, 0 means 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from paceline.core.grammar import GrammarKind, GrammarSpec
from paceline.core.method import Method
from paceline.core.params import (
    MAX_LOGIT_BIASES,
    LogprobsMode,
    LogprobsParams,
    SamplingParams,
    SchedulingParams,
    SpeculationParams,
    StopParams,
    Verification,
)
from paceline.core.plan import Finish, FinishReason, TokenLogprobs
from paceline.core.request import RequestStats
from paceline.engine import ChatMessage, GenerationRequest, Prompt
from paceline.errors import InvalidArgument, NotFound, PacelineError
from paceline.headers import check_name
from paceline.options import LONGEST_TIME, MAX_CHUNK_DELAY, check_seconds
from paceline.server.status import retry_ms, rule_for
from paceline.v1 import generation_pb2 as pb

# Each message is looked at by itself, on the event loop.
MAX_CHAT_MESSAGES: Final = 1 << 14
# Of any list: more than the longest contexts have tokens.
MAX_ITEMS: Final = 1 << 20

Item = TypeVar("Item")

METHODS: Final[dict[int, Method | None]] = {
    pb.SPECULATION_MODE_UNSPECIFIED: None,
    pb.SPECULATION_MODE_AUTO: None,
    pb.SPECULATION_MODE_OFF: Method.NONE,
    pb.SPECULATION_MODE_NGRAM: Method.NGRAM,
    pb.SPECULATION_MODE_DRAFT_MODEL: Method.DRAFT_MODEL,
}
MODES: Final[dict[Method, pb.SpeculationMode]] = {
    Method.NONE: pb.SPECULATION_MODE_OFF,
    Method.NGRAM: pb.SPECULATION_MODE_NGRAM,
    Method.DRAFT_MODEL: pb.SPECULATION_MODE_DRAFT_MODEL,
}
RULES: Final[dict[int, Verification | None]] = {
    pb.VERIFICATION_RULE_UNSPECIFIED: None,
    pb.VERIFICATION_RULE_TOKEN_WISE: Verification.TOKEN_WISE,
    pb.VERIFICATION_RULE_BLOCK: Verification.BLOCK,
}
LOGPROBS_MODES: Final[dict[int, LogprobsMode]] = {
    pb.LOGPROBS_MODE_UNSPECIFIED: LogprobsMode.RAW,
    pb.LOGPROBS_MODE_RAW: LogprobsMode.RAW,
    pb.LOGPROBS_MODE_PROCESSED: LogprobsMode.PROCESSED,
}
REASONS: Final[dict[FinishReason, pb.FinishReason]] = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.MAX_TOKENS: pb.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_LENGTH: pb.FINISH_REASON_CONTEXT_LENGTH,
    FinishReason.DEAD_END: pb.FINISH_REASON_DEAD_END,
}
WITH_TEXT: Final = frozenset(
    {pb.OUTPUT_CONTENT_UNSPECIFIED, pb.OUTPUT_CONTENT_TEXT, pb.OUTPUT_CONTENT_TEXT_AND_TOKEN_IDS}
)
WITH_TOKEN_IDS: Final = frozenset({pb.OUTPUT_CONTENT_TOKEN_IDS, pb.OUTPUT_CONTENT_TEXT_AND_TOKEN_IDS})


# -- requests ---------------------------------------------------------------------------------------------------------


def check_enums(message: Message, path: str = "") -> None:
    """Raises InvalidArgument: an enum has a number without a name. `path` is the message's own dotted name, with a dot
    at the end. Lists are not looked into, since they may be long: their elements have no enums.
    """
    for field, value in message.ListFields():
        name = path + field.name
        if field.enum_type is not None and value not in field.enum_type.values_by_number:
            names = ", ".join(known.name for known in field.enum_type.values)
            raise InvalidArgument(name, value, f"one of {names}")
        if field.message_type is not None and not field.is_repeated:
            check_enums(value, name + ".")


def is_map(field: FieldDescriptor) -> bool:
    """The field's entries are pairs of plain values."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def check_model(named: str, served: str) -> None:
    """Raise NotFound if a request names (or not: "") another model than the one served."""
    if named not in ("", served):
        # Cut short, because a status travels in headers, which have a limit.
        name = named[:80]
        raise NotFound(f"model {name!r} is not served here; this server has {served!r}", kind="model", name=name)


def read_request_id(message: pb.GenerateRequest) -> str:
    """The client's name for the request, or "". Raises InvalidArgument."""
    return _read_name("request_id", message.request_id)


def _read_name(field: str, name: str) -> str:
    if name:
        check_name(field, name)
    return name


def read_request(
    message: pb.GenerateRequest, default_sampling: SamplingParams, deadline: float | None = None
) -> GenerationRequest:
    """What the engine is to do.

    Args:
        deadline: on the engine's clock, when the RPC ends.

    Raises:
        InvalidArgument: a value that no model allows; the engine judges the rest, against its own.
    """
    check_enums(message)
    return GenerationRequest(
        prompt=_read_prompt(message),
        sampling=_read_sampling(message.sampling, default_sampling),
        stop=_read_stop(message.stop, message.output),
        speculation=_read_speculation(message.speculation),
        logprobs=_read_logprobs(message.output),
        grammar=_read_grammar(message.structured),
        n=message.n or 1,
        scheduling=_read_scheduling(message.scheduling, deadline),
    )


def _read_prompt(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "prompt_text":
            return message.prompt_text
        case "prompt_tokens":
            return _items("prompt_tokens.ids", message.prompt_tokens.ids)
        case "chat":
            return read_chat(message.chat)
        case _:
            raise InvalidArgument("prompt", None, "one of prompt_text, prompt_tokens and chat")


def _items(field: str, values: Sequence[Item]) -> tuple[Item, ...]:
    """All of a list, which others judge. Raises InvalidArgument: it takes long to copy, and can only be wrong."""
    if len(values) > MAX_ITEMS:
        raise InvalidArgument(field, f"{len(values)} values", f"at most {MAX_ITEMS} values")
    return tuple(values)


def read_chat(chat: pb.ChatMessages) -> tuple[ChatMessage, ...]:
    """A conversation. Raises InvalidArgument: there is none, or too much of it."""
    if not chat.messages:  # to the engine, nothing at all is a list of ids
        raise InvalidArgument("chat.messages", [], "at least one message")
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        size = f"{len(chat.messages)} messages"
        raise InvalidArgument("chat.messages", size, f"at most {MAX_CHAT_MESSAGES} messages")
    return tuple(ChatMessage(turn.role, turn.content) for turn in chat.messages)


def _read_sampling(message: pb.SamplingParams, default: SamplingParams) -> SamplingParams:
    # Both sides have the same names, and only fields that are set are listed.
    given: dict[str, Any] = {}
    for field, value in message.ListFields():
        if is_map(field):
            given[field.name] = _read_biases(field.name, value)
        elif field.is_repeated:
            given[field.name] = _items(f"sampling.{field.name}", value)
        else:
            given[field.name] = _shortest_decimal(value) if isinstance(value, float) else value
    return replace(default, **given)


def _read_biases(name: str, biases: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_LOGIT_BIASES:  # before each is looked at
        raise InvalidArgument(f"sampling.{name}", f"{len(biases)} tokens", f"at most {MAX_LOGIT_BIASES} tokens")
    return tuple((key, _shortest_decimal(biases[key])) for key in sorted(biases))


def _shortest_decimal(value: float) -> float:
    """What the client most likely wrote: a float32 of 0.7, merely widened, would be 0.699999988079071.

    So a request over the wire samples exactly as the same request offline, and errors show the number that was meant.
    """
    return float(str(np.float32(value)))


def _read_stop(message: pb.StopParams, output: pb.OutputParams) -> StopParams:
    return StopParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        strings=_items("stop.strings", message.strings),
        token_ids=_items("stop.token_ids", message.token_ids),
        ignore_eos=message.ignore_eos,
        include_stop_string=message.include_stop_string,
        min_tokens=message.min_tokens,
        include_special_tokens=output.include_special_tokens,
    )


def _read_speculation(message: pb.SpeculationParams) -> SpeculationParams:
    return SpeculationParams(
        method=METHODS[message.mode],
        min_depth=message.min_draft_tokens,
        max_depth=message.max_draft_tokens if message.HasField("max_draft_tokens") else None,
        verification=RULES[message.verification],
    )


def _read_scheduling(message: pb.SchedulingParams, deadline: float | None) -> SchedulingParams:
    return SchedulingParams(
        tenant=_read_name("scheduling.tenant", message.tenant),
        priority=message.priority,
        deadline=deadline,
        queue_timeout=_read_seconds(message, "scheduling", "queue_timeout", above_zero=True),
        time_to_first_token=_read_seconds(message, "scheduling", "time_to_first_token", above_zero=True),
        time_per_output_token=_read_seconds(message, "scheduling", "time_per_output_token", above_zero=True),
    )


def read_hold(output: pb.OutputParams) -> float:
    """How long tokens may wait for others to go with them, in seconds; `math.inf`: until their choice ends. Raises
    InvalidArgument.
    """
    delay = _read_seconds(output, "output", "max_chunk_delay", MAX_CHUNK_DELAY) or 0.0
    return math.inf if output.final_only else delay


def _read_seconds(
    message: pb.SchedulingParams | pb.OutputParams,
    path: str,
    name: Any,
    most: float = LONGEST_TIME,
    *,
    above_zero: bool = False,
) -> float | None:
    if not message.HasField(name):
        return None
    duration: Duration = getattr(message, name)
    if abs(duration.nanos) >= 10**9 or duration.seconds * duration.nanos < 0:
        given = f"{duration.seconds} s {duration.nanos} ns"
        raise InvalidArgument(f"{path}.{name}", given, "a Duration: less than a second of ns, of the same sign")
    seconds = duration.seconds + duration.nanos / 1e9
    check_seconds(f"{path}.{name}", seconds, most, above_zero=above_zero)
    return seconds


def _read_logprobs(message: pb.OutputParams) -> LogprobsParams:
    return LogprobsParams(
        completion=message.logprobs if message.HasField("logprobs") else None,
        prompt=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        mode=LOGPROBS_MODES[message.logprobs_mode],
    )


def _read_grammar(message: pb.StructuredOutput) -> GrammarSpec | None:
    kind = message.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "choice":
        if not message.choice.values:
            raise InvalidArgument("structured.choice", [], "at least one text")
        return GrammarSpec(GrammarKind.CHOICE, choices=_items("structured.choice.values", message.choice.values))
    text: str = getattr(message, kind)
    if not text:
        raise InvalidArgument(f"structured.{kind}", text, "at least one character")
    return GrammarSpec(GrammarKind(kind), text)


# -- responses --------------------------------------------------------------------------------------------------------


def write_error(error: PacelineError) -> pb.GenerationError:
    """A failure in band: what the status of an RPC would say, without its details."""
    failure = pb.GenerationError(code=rule_for(error).code.value[0], message=str(error), reason=error.reason)
    delay = retry_ms(error)
    if delay is not None and delay > 0:
        failure.retry_after.FromMilliseconds(delay)
    return failure


def write_logprobs(logprobs: Iterable[TokenLogprobs | None]) -> list[pb.TokenLogprobs]:
    """One message for each token; an empty one, whose rank is 0, for a token without logprobs."""
    return [
        pb.TokenLogprobs()
        if token is None
        else pb.TokenLogprobs(
            logprob=token.logprob,
            rank=token.rank,
            top_token_ids=token.top_token_ids,
            top_logprobs=token.top_logprobs,
        )
        for token in logprobs
    ]


def write_finished(finish: Finish, stats: RequestStats | None) -> pb.Finished:
    assert stats is not None, "a completion ended without its account"
    return pb.Finished(
        reason=REASONS[finish.reason],
        stop_string=finish.stop_string,
        stop_token_id=finish.stop_token_id,
        detail=finish.detail or "",
        usage=pb.Usage(
            prompt_tokens=stats.prompt_tokens,
            cached_prompt_tokens=stats.cached_prompt_tokens,
            completion_tokens=stats.completion_tokens,
        ),
        speculation=pb.SpeculationStats(
            mode=MODES[stats.method],
            verify_steps=stats.verify_steps,
            draft_steps=stats.draft_steps,
            drafted_tokens=stats.drafted_tokens,
            accepted_tokens=stats.accepted_tokens,
            accepted_by_position=stats.accepted_by_position,
            acceptance_length=stats.acceptance_length,
            engine_seconds=stats.engine_seconds,
            rejected_seconds=stats.rejected_seconds,
            depths=stats.depths,
            saved_seconds=stats.saved_seconds,
        ),
        timing=pb.Timing(
            queue=write_duration(stats.queue_seconds),
            time_to_first_token=write_duration(stats.time_to_first_token),
            total=write_duration(stats.total_seconds),
            preemptions=stats.preemptions,
        ),
    )


def write_duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
