"""From Python values to the request message.

The server judges values; here only what the contract cannot carry is refused, as `InvalidArgument` naming the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypeVar, Unpack, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from paceline.chat import is_turn, read_turn
from paceline.errors import InvalidArgument
from paceline.options import (
    LONGEST_TIME,
    MAX_CHUNK_DELAY,
    MAX_COMPLETIONS,
    CompletionOptions,
    check_names,
    check_seconds,
    is_integer,
    items_of,
    json_text,
)
from paceline.v1 import admin_pb2, model_pb2
from paceline.v1 import generation_pb2 as pb

AnyMessage = TypeVar("AnyMessage", bound=Message)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a chat; `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage | Mapping[str, str]]
Content: TypeAlias = Literal["text", "token_ids", "text_and_token_ids"]


class GenerateOptions(CompletionOptions, total=False):
    """The keyword arguments of `generate` and `complete`: those of `CompletionOptions`, and what servers know besides.

    What is absent or None is the server's default. Several choices are read with `complete_all`, or by `Delta.choice`.

    Output: `content` ("text_and_token_ids"), `final_only` (one message for each choice, when it ends),
    `max_chunk_delay` (seconds that tokens may be held, for fewer and larger messages).
    Scheduling: `priority` (higher goes first within the tenant); in seconds, `queue_timeout`, `time_to_first_token` and
    `time_per_output_token`. What cannot be in time ends as `DeadlineExceeded`, as soon as that is seen, and who waits
    longer than `queue_timeout` for admission as `Unavailable`, once the retries (`max_retries`) are over, too.
    Naming: `request_id`, `model`, `tenant` (whose request it is; its drafts are expected to fare as theirs did).
    """

    content: Content | None
    final_only: bool | None
    max_chunk_delay: float | None
    request_id: str | None
    model: str | None
    tenant: str | None
    priority: int | None
    queue_timeout: float | None
    time_to_first_token: float | None
    time_per_output_token: float | None


_TIMES: Final = ("queue_timeout", "time_to_first_token", "time_per_output_token")
_MODES: Final[dict[str, pb.SpeculationMode]] = {
    "auto": pb.SPECULATION_MODE_AUTO,
    "off": pb.SPECULATION_MODE_OFF,
    "ngram": pb.SPECULATION_MODE_NGRAM,
    "draft_model": pb.SPECULATION_MODE_DRAFT_MODEL,
}
_CONTENTS: Final[dict[str, pb.OutputContent]] = {
    "text": pb.OUTPUT_CONTENT_TEXT,
    "token_ids": pb.OUTPUT_CONTENT_TOKEN_IDS,
    "text_and_token_ids": pb.OUTPUT_CONTENT_TEXT_AND_TOKEN_IDS,
}
_RULES: Final[dict[str, pb.VerificationRule]] = {
    "token_wise": pb.VERIFICATION_RULE_TOKEN_WISE,
    "block": pb.VERIFICATION_RULE_BLOCK,
}
_LOGPROBS_MODES: Final[dict[str, pb.LogprobsMode]] = {
    "raw": pb.LOGPROBS_MODE_RAW,
    "processed": pb.LOGPROBS_MODE_PROCESSED,
}
LARGEST_FLOAT: Final = 3.4028235e38  # of 32 bits
_ALLOWED: Final = {
    FieldDescriptor.TYPE_UINT32: "an integer in 0..2^32-1",
    FieldDescriptor.TYPE_UINT64: "an integer in 0..2^64-1",
    FieldDescriptor.TYPE_INT32: "an integer in -2^31..2^31-1",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_STRING: "text that UTF-8 can hold",
}


def build_request(prompt: Prompt, **options: Unpack[GenerateOptions]) -> pb.GenerateRequest:
    """The message for a prompt: a text, token ids, or the turns of a chat (`ChatMessage`, or mappings with its keys).

    Raises:
        InvalidArgument: a value that the message cannot carry, such as a negative count.
        TypeError: an option that does not exist.
    """
    check_names(options, GenerateOptions.__annotations__)
    get = options.get  # untyped on purpose: `_fill` lets the message judge the values
    request = pb.GenerateRequest()
    _set_prompt(request, prompt)
    n: Any = get("n")
    if n is not None and (not is_integer(n) or n < 1):  # in the message, 0 stands for 1
        raise InvalidArgument("n", n, f"an integer in 1..{MAX_COMPLETIONS}")
    _fill(request, "", request_id=get("request_id"), model=get("model"), n=n)
    _fill(
        request.sampling,
        "sampling",
        temperature=get("temperature"),
        top_p=get("top_p"),
        top_k=get("top_k"),
        min_p=get("min_p"),
        typical_p=get("typical_p"),
        presence_penalty=get("presence_penalty"),
        frequency_penalty=get("frequency_penalty"),
        repetition_penalty=get("repetition_penalty"),
        logit_bias=get("logit_bias"),
        allowed_token_ids=get("allowed_token_ids"),
        bad_words=get("bad_words"),
        seed=get("seed"),
    )
    if get("allowed_token_ids") is not None and not request.sampling.allowed_token_ids:  # which is as good as unset
        raise InvalidArgument("sampling.allowed_token_ids", [], "at least one token id; leave it out to allow all")
    _set_structure(request.structured, options)
    stop = get("stop")
    _fill(
        request.stop,
        "stop",
        max_tokens=get("max_tokens"),
        min_tokens=get("min_tokens"),
        strings=[stop] if isinstance(stop, str) else stop,
        token_ids=get("stop_token_ids"),
        ignore_eos=get("ignore_eos"),
        include_stop_string=get("include_stop_string"),
    )
    _fill(
        request.speculation,
        "speculation",
        mode=_choose("speculation.mode", options.get("speculation"), _MODES, pb.SPECULATION_MODE_AUTO),
        max_draft_tokens=get("max_draft_tokens"),
        min_draft_tokens=get("min_draft_tokens"),
        verification=_choose("speculation.verification", options.get("verification"), _RULES),
    )
    _fill_scheduling(request, options)
    _fill(
        request.output,
        "output",
        content=_choose("output.content", options.get("content"), _CONTENTS, pb.OUTPUT_CONTENT_TEXT_AND_TOKEN_IDS),
        include_special_tokens=get("include_special_tokens"),
        final_only=get("final_only"),
        logprobs=get("logprobs"),
        prompt_logprobs=get("prompt_logprobs"),
        logprobs_mode=_choose("output.logprobs_mode", options.get("logprobs_mode"), _LOGPROBS_MODES),
    )
    if options.get("max_chunk_delay") is not None:
        _fill_time(
            request.output.max_chunk_delay, "output.max_chunk_delay", options["max_chunk_delay"], MAX_CHUNK_DELAY
        )
    return request


def build_tokenize(prompt: Prompt, model: str) -> model_pb2.TokenizeRequest:
    """The message that asks for the tokens of a text or of the turns of a chat. Raises InvalidArgument."""
    request = model_pb2.TokenizeRequest()
    _fill(request, "", model=model)
    if isinstance(prompt, str):
        _fill(request, "", text=prompt)
        return request
    turns = pb.GenerateRequest()
    _set_prompt(turns, prompt, allowed="text or chat messages")
    if not turns.HasField("chat"):
        raise InvalidArgument("prompt", prompt, "text or chat messages")
    request.chat.CopyFrom(turns.chat)
    return request


def build_detokenize(token_ids: Sequence[int], include_special_tokens: bool, model: str) -> model_pb2.DetokenizeRequest:
    """The message that asks for the text of tokens. Raises InvalidArgument."""
    request = model_pb2.DetokenizeRequest()
    _fill(request, "", model=model, token_ids=token_ids, include_special_tokens=include_special_tokens)
    return request


def build_named(message: AnyMessage, **names: object) -> AnyMessage:
    """The message with these fields. Raises InvalidArgument."""
    _fill(message, "", **names)
    return message


def build_drain(grace: float | None) -> admin_pb2.DrainRequest:
    """The message that drains a server; `grace` in seconds. Raises InvalidArgument."""
    request = admin_pb2.DrainRequest()
    if grace is not None:
        _fill_time(request.grace, "grace", grace)
    return request


def _set_prompt(
    request: pb.GenerateRequest, prompt: Prompt, *, allowed: str = "text, token ids or chat messages"
) -> None:
    if isinstance(prompt, str):
        _fill(request, "", prompt_text=prompt)
        return
    items = items_of(prompt)
    if items is None:
        raise InvalidArgument("prompt", prompt, allowed)
    if items and is_turn(items[0]):
        for index, item in enumerate(items):
            field = f"chat.messages[{index}]"
            role, content = read_turn(field, item)
            _fill(request.chat.messages.add(), field, role=role, content=content)
        return
    request.prompt_tokens.SetInParent()  # an empty list too is a choice of the oneof: the server says what is wrong
    _fill(request.prompt_tokens, "prompt_tokens", ids=items)


def _set_structure(structured: pb.StructuredOutput, options: GenerateOptions) -> None:
    names = ("json_schema", "regex", "grammar", "choices")
    given = [name for name in names if options.get(name) is not None]
    if len(given) > 1:
        raise InvalidArgument("structured", " and ".join(given), f"one of {', '.join(names)}")
    choices = options.get("choices")
    if choices is not None:
        structured.choice.SetInParent()  # an empty list too is a choice of the oneof: the server says what is wrong
        _fill(structured.choice, "structured.choice", values=choices)
        return
    schema = options.get("json_schema")
    _fill(
        structured,
        "structured",
        json_schema=schema
        if schema is None or isinstance(schema, str)
        else json_text("structured.json_schema", schema),
        regex=options.get("regex"),
        grammar=options.get("grammar"),
    )


def _choose(field: str, value: object, choices: Mapping[str, int], default: int | None = None) -> int | None:
    if value is None:
        return default
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgument(field, value, f"one of {', '.join(choices)}")
    return choices[value]


def _fill_scheduling(request: pb.GenerateRequest, options: GenerateOptions) -> None:
    if any(options.get(name) is not None for name in ("tenant", "priority", *_TIMES)):
        request.scheduling.SetInParent()
        _fill(request.scheduling, "scheduling", tenant=options.get("tenant"), priority=options.get("priority"))
    for name in _TIMES:
        if options.get(name) is not None:
            _fill_time(getattr(request.scheduling, name), f"scheduling.{name}", options[name], above_zero=True)


def _fill_time(
    duration: Duration, field: str, seconds: Any, most: float = LONGEST_TIME, *, above_zero: bool = False
) -> None:
    check_seconds(field, seconds, most, above_zero=above_zero)
    duration.FromNanoseconds(round(float(seconds) * 1e9))


def _refuse_changed(values: list[Any]) -> None:
    """What the message would take for another value: True for 1, and for infinity what 32 bits cannot hold. Raises
    TypeError or OverflowError.
    """
    if any([value is True or value is False for value in values]):
        raise TypeError
    if any([isinstance(value, float) and LARGEST_FLOAT < abs(value) < math.inf for value in values]):
        raise OverflowError


def _fill(message: Message, path: str, **values: object) -> None:
    """Set the fields of `message` that have a value; `path` is its own dotted name, for errors."""
    for name, value in values.items():
        if value is None:
            continue
        field = message.DESCRIPTOR.fields_by_name[name]
        held = getattr(message, name)
        allowed = _ALLOWED.get(field.type, "a known value")
        try:
            if isinstance(held, MutableMapping):
                allowed = "a mapping of token ids to numbers"
                pairs = dict(cast("Mapping[int, float]", value))
                _refuse_changed([*pairs.keys(), *pairs.values()])
                held.update(pairs)
            elif field.is_repeated:
                allowed = f"a sequence, each {allowed}"
                if isinstance(value, str):  # a sequence of texts too, but hardly meant as one
                    raise TypeError
                items = list(cast("Iterable[object]", value))
                _refuse_changed(items)
                held.extend(items)
            else:
                if field.type != FieldDescriptor.TYPE_BOOL:
                    _refuse_changed([value])
                setattr(message, name, value)
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, OverflowError):
                allowed += " that 32 bits can hold"
            raise InvalidArgument(f"{path}.{name}".lstrip("."), value, allowed) from error
