"""Between the contract's messages and the engine's values.

Presence decides everywhere: a field that is unset means the model's default, 0 means 0.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from paceline.core.params import Method, SamplingParams, SpeculationParams, StopParams
from paceline.core.plan import Finish, FinishReason
from paceline.core.request import RequestStats
from paceline.engine import ChatMessage, Delta, GenerationRequest, Prompt
from paceline.errors import FailedPrecondition, InvalidArgument
from paceline.v1 import generation_pb2 as pb

# Fields of a request that this server knows and cannot honour yet. Setting one is an error that names it; a feature
# that arrives deletes its line.
UNSUPPORTED: Final = frozenset(
    {
        "sampling.min_p",
        "sampling.presence_penalty",
        "sampling.frequency_penalty",
        "sampling.repetition_penalty",
        "sampling.seed",
        "sampling.logit_bias",
        "sampling.typical_p",
        "sampling.allowed_token_ids",
        "sampling.bad_words",
        "stop.min_tokens",
        "output.logprobs",
        "output.prompt_logprobs",
        "output.logprobs_mode",
        "output.max_chunk_delay",
        "scheduling.tenant",
        "scheduling.priority",
        "scheduling.queue_timeout",
        "scheduling.time_to_first_token",
        "scheduling.time_per_output_token",
        "structured",
    }
)
MAX_COMPLETIONS: Final = 1  # n

# No blanks: they would not survive the trip through HTTP headers at either end of an id.
REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")

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
REASONS: Final[dict[FinishReason, pb.FinishReason]] = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.MAX_TOKENS: pb.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_LENGTH: pb.FINISH_REASON_CONTEXT_LENGTH,
}
WITH_TEXT: Final = frozenset(
    {pb.OUTPUT_CONTENT_UNSPECIFIED, pb.OUTPUT_CONTENT_TEXT, pb.OUTPUT_CONTENT_TEXT_AND_TOKEN_IDS}
)
WITH_TOKEN_IDS: Final = frozenset({pb.OUTPUT_CONTENT_TOKEN_IDS, pb.OUTPUT_CONTENT_TEXT_AND_TOKEN_IDS})


# -- requests ---------------------------------------------------------------------------------------------------------


def check_supported(message: Message, path: str = "") -> None:
    """Refuse what is set in `message` and cannot be honoured; `path` is its own dotted name, with a dot at the end.

    Raises:
        FailedPrecondition: a field of `UNSUPPORTED` is set.
        InvalidArgument: an enum has a number without a name.
    """
    for field, value in message.ListFields():
        name = path + field.name
        if name in UNSUPPORTED:
            raise FailedPrecondition(f"{name} is set, but this server does not support it yet")
        if field.enum_type is not None and value not in field.enum_type.values_by_number:
            names = ", ".join(known.name for known in field.enum_type.values)
            raise InvalidArgument(name, value, f"one of {names}")
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                check_supported(part, name + ".")


def read_request_id(message: pb.GenerateRequest) -> str:
    """The client's name for the request, or "". Raises InvalidArgument."""
    if message.request_id and not REQUEST_ID.fullmatch(message.request_id):
        raise InvalidArgument("request_id", message.request_id, "1 to 128 printable ASCII characters without blanks")
    return message.request_id


def read_request(message: pb.GenerateRequest, default_sampling: SamplingParams) -> GenerationRequest:
    """What the engine is to do.

    Raises:
        FailedPrecondition: a field that is set is not supported.
        InvalidArgument: a value that no model allows; the engine judges the rest, against its own.
    """
    check_supported(message)
    if message.n > MAX_COMPLETIONS:
        raise FailedPrecondition(f"n = {message.n}, but this server does not support more than one completion yet")
    return GenerationRequest(
        prompt=_read_prompt(message),
        sampling=_read_sampling(message.sampling, default_sampling),
        stop=_read_stop(message.stop),
        speculation=_read_speculation(message.speculation),
    )


def _read_prompt(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "prompt_text":
            return message.prompt_text
        case "prompt_tokens":
            return tuple(message.prompt_tokens.ids)
        case "chat":
            if not message.chat.messages:  # to the engine, nothing at all is a list of ids
                raise InvalidArgument("chat.messages", [], "at least one message")
            return tuple(ChatMessage(turn.role, turn.content) for turn in message.chat.messages)
        case _:
            raise InvalidArgument("prompt", None, "one of prompt_text, prompt_tokens and chat")


def _read_sampling(message: pb.SamplingParams, default: SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=_shortest_decimal(message.temperature) if message.HasField("temperature") else default.temperature,
        top_k=message.top_k if message.HasField("top_k") else default.top_k,
        top_p=_shortest_decimal(message.top_p) if message.HasField("top_p") else default.top_p,
    )


def _shortest_decimal(value: float) -> float:
    """What the client most likely wrote: a float32 of 0.7, merely widened, would be 0.699999988079071.

    So a request over the wire samples exactly as the same request offline, and errors show the number that was meant.
    """
    return float(str(np.float32(value)))


def _read_stop(message: pb.StopParams) -> StopParams:
    return StopParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        strings=tuple(message.strings),
        token_ids=tuple(message.token_ids),
        ignore_eos=message.ignore_eos,
        include_stop_string=message.include_stop_string,
    )


def _read_speculation(message: pb.SpeculationParams) -> SpeculationParams:
    return SpeculationParams(
        method=METHODS[message.mode],
        min_depth=message.min_draft_tokens,
        max_depth=message.max_draft_tokens if message.HasField("max_draft_tokens") else None,
    )


# -- responses --------------------------------------------------------------------------------------------------------


def write_delta(delta: Delta, content: pb.OutputContent) -> pb.GenerateResponse:
    """The message for a delta, with the parts of it that the client asked for."""
    return pb.GenerateResponse(
        token_offset=delta.token_offset,
        token_ids=delta.token_ids if content in WITH_TOKEN_IDS else (),
        text=delta.text if content in WITH_TEXT else "",
        finished=None if delta.finish is None else _write_finished(delta.finish, delta.stats),
    )


def _write_finished(finish: Finish, stats: RequestStats | None) -> pb.Finished:
    assert stats is not None, "a completion ended without its account"
    return pb.Finished(
        reason=REASONS[finish.reason],
        stop_string=finish.stop_string,
        stop_token_id=finish.stop_token_id,
        usage=pb.Usage(prompt_tokens=stats.prompt_tokens, completion_tokens=stats.completion_tokens),
        speculation=pb.SpeculationStats(
            mode=MODES[stats.method],
            verify_steps=stats.verify_steps,
            draft_steps=stats.draft_steps,
            drafted_tokens=stats.drafted_tokens,
            accepted_tokens=stats.accepted_tokens,
            accepted_by_position=stats.accepted_by_position,
            acceptance_length=stats.acceptance_length,
        ),
        timing=pb.Timing(
            queue=_duration(stats.queue_seconds),
            time_to_first_token=_duration(stats.time_to_first_token),
            total=_duration(stats.total_seconds),
            preemptions=stats.preemptions,
        ),
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
