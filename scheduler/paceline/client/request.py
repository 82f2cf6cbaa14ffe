"""From Python values to the request message.

The server judges values; here only what the contract cannot carry is refused, as `InvalidArgument` naming the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypedDict, Unpack

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from paceline.errors import InvalidArgument
from paceline.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a chat; `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage | Mapping[str, str]]
Speculation: TypeAlias = Literal["auto", "off", "ngram", "draft_model"]
Content: TypeAlias = Literal["text", "token_ids", "text_and_token_ids"]


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `generate` and `complete`; what is absent or None is the server's default.

    Sampling: `temperature` (0 is greedy), `top_p`, `top_k`, `min_p`, `presence_penalty`, `frequency_penalty`,
    `repetition_penalty`, `seed`.
    Stopping: `max_tokens`, `min_tokens`, `stop` (one string or several), `stop_token_ids`, `ignore_eos`,
    `include_stop_string`.
    Speculation: `speculation` ("auto"), `max_draft_tokens`, `min_draft_tokens` (bounds of the depth, in tokens).
    Output: `content` ("text_and_token_ids"), `final_only` (one message, at the end).
    Naming: `request_id`, `model`.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_string: bool | None
    speculation: Speculation | None
    max_draft_tokens: int | None
    min_draft_tokens: int | None
    content: Content | None
    final_only: bool | None
    request_id: str | None
    model: str | None


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
_ALLOWED: Final = {
    FieldDescriptor.TYPE_UINT32: "an integer in 0..2^32-1",
    FieldDescriptor.TYPE_UINT64: "an integer in 0..2^64-1",
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
    if unknown := options.keys() - GenerateOptions.__annotations__.keys():
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}")
    get = options.get  # untyped on purpose: `_fill` lets the message judge the values
    request = pb.GenerateRequest()
    _set_prompt(request, prompt)
    _fill(request, "", request_id=get("request_id"), model=get("model"))
    _fill(
        request.sampling,
        "sampling",
        temperature=get("temperature"),
        top_p=get("top_p"),
        top_k=get("top_k"),
        min_p=get("min_p"),
        presence_penalty=get("presence_penalty"),
        frequency_penalty=get("frequency_penalty"),
        repetition_penalty=get("repetition_penalty"),
        seed=get("seed"),
    )
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
        mode=_choose("speculation.mode", options.get("speculation") or "auto", _MODES),
        max_draft_tokens=get("max_draft_tokens"),
        min_draft_tokens=get("min_draft_tokens"),
    )
    _fill(
        request.output,
        "output",
        content=_choose("output.content", options.get("content") or "text_and_token_ids", _CONTENTS),
        final_only=get("final_only"),
    )
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, bytes | bytearray | Mapping):  # all iterable, none of them a prompt
        raise InvalidArgument("prompt", prompt, "text, token ids or chat messages")
    if isinstance(prompt, str):
        _fill(request, "", prompt_text=prompt)
        return
    items = list(prompt)
    if items and isinstance(items[0], ChatMessage | Mapping):
        for index, item in enumerate(items):
            role, content = _turn(f"chat.messages[{index}]", item)
            _fill(request.chat.messages.add(), f"chat.messages[{index}]", role=role, content=content)
        return
    request.prompt_tokens.SetInParent()  # an empty list too is a choice of the oneof: the server says what is wrong
    _fill(request.prompt_tokens, "prompt_tokens", ids=items)


def _turn(field: str, item: object) -> tuple[str, str]:
    if isinstance(item, ChatMessage):
        return item.role, item.content
    if isinstance(item, Mapping) and item.keys() == {"role", "content"}:
        return item["role"], item["content"]
    raise InvalidArgument(field, item, "a ChatMessage, or a mapping with the keys role and content")


def _choose(field: str, value: str, choices: Mapping[str, int]) -> int:
    if value not in choices:
        raise InvalidArgument(field, value, f"one of {', '.join(choices)}")
    return choices[value]


def _fill(message: Message, path: str, **values: object) -> None:
    """Set the fields of `message` that have a value; `path` is its own dotted name, for errors."""
    for name, value in values.items():
        if value is None:
            continue
        field = message.DESCRIPTOR.fields_by_name[name]
        try:
            if field.is_repeated:
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        except (TypeError, ValueError) as error:
            allowed = _ALLOWED.get(field.type, "a known value")
            if field.is_repeated:
                allowed = f"a sequence, each {allowed}"
            raise InvalidArgument(f"{path}.{name}".lstrip("."), value, allowed) from error
