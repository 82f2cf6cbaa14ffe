"""Keyword arguments: those that a completion is asked for with, their names, and values that several parts take."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, TypeAlias, TypedDict, get_args

from paceline.errors import InvalidArgument

Speculation: TypeAlias = Literal["auto", "off", "ngram", "draft_model"]
Verification: TypeAlias = Literal["token_wise", "block"]
LogprobsMode: TypeAlias = Literal["raw", "processed"]


class CompletionOptions(TypedDict, total=False):
    """What a completion may be asked for with, offline or of a server; what is absent or None is the model's default.

    The contract, `paceline/v1/generation.proto`, has ranges and meanings.

    Sampling: `temperature` (0 is greedy), `top_p`, `top_k`, `min_p`, `typical_p`, `presence_penalty`,
    `frequency_penalty`, `repetition_penalty`, `logit_bias` (token id to bias), `allowed_token_ids` (at least
    one), `bad_words`, `seed`.
    Choices: `n` completions of the prompt (1).
    Structure, one of: `json_schema` (text, or what JSON can hold), `regex`, `grammar` (Lark),
    `choices` (the completion is one of these texts).
    Stopping: `max_tokens` (up to the model's length), `min_tokens`, `stop` (one string or several), `stop_token_ids`,
    `ignore_eos`, `include_stop_string`.
    Speculation: `speculation` ("auto"), `max_draft_tokens`, `min_draft_tokens` (bounds of the depth, in tokens),
    `verification` (the best; for sampled requests without a seed).
    Output: `include_special_tokens` (in the text), `logprobs` and `prompt_logprobs` (how many alternatives to each
    token, 0 for none), `logprobs_mode` ("raw", or "processed": of the distribution that was sampled).
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    seed: int | None
    n: int | None
    json_schema: str | Mapping[str, object] | None
    regex: str | None
    grammar: str | None
    choices: Sequence[str] | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_string: bool | None
    speculation: Speculation | None
    max_draft_tokens: int | None
    min_draft_tokens: int | None
    verification: Verification | None
    include_special_tokens: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    logprobs_mode: LogprobsMode | None


LONGEST_TIME: Final = 1e9  # seconds
MAX_CHUNK_DELAY: Final = 60.0  # seconds
MAX_COMPLETIONS: Final = 64  # of one prompt
# What values of a type are given as, and how that is said.
_TYPES: Final[Mapping[Any, tuple[type, str]]] = {
    str: (str, "text"),
    Path: (Path, "a path"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    NoneType: (NoneType, "None"),
}


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """Raises TypeError: an option that does not exist, with the one that was meant, perhaps."""
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(f"unknown option {', '.join(_told(name, known) for name in unknown)}")


def check_types(given: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Values against their annotations, as far as those are simple types: Python's own complaint would come later, and
    not say which value it is about.

    Raises:
        InvalidArgument: a value of another type.
    """
    for name, value in given.items():
        types = get_args(hints[name]) or (hints[name],)
        if not all(one in _TYPES for one in types):
            continue
        kinds, words = zip(*(_TYPES[one] for one in types), strict=True)
        # True is an integer to Python, and a mistake here.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in types):
            raise InvalidArgument(name, value, " or ".join(words))


def is_number(value: object) -> bool:
    """Python's numbers and those of others, such as numpy's. True is a number to Python, and a mistake here."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """The same of integers."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def items_of(prompt: object) -> list[Any] | None:
    """What a prompt, or a batch of them, consists of, if it is of any kind that has items in order: lists, numpy's
    arrays. None of text and of what is iterable, but no prompt.
    """
    if not isinstance(prompt, Iterable) or isinstance(prompt, str | bytes | bytearray | Mapping | set | frozenset):
        return None
    try:
        return list(prompt)
    except TypeError:  # a numpy array of no dimension
        return None


def plain_numbers(given: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers where annotations have them, as Python's own of those types: compiled code wants no others, as numpy's.

    Raises:
        InvalidArgument: a number too large for a float.
    """
    plain = dict(given)
    for name, value in given.items():
        types = get_args(hints[name]) or (hints[name],)
        if is_number(value) and (float in types or int in types):
            try:
                plain[name] = float(value) if float in types else int(value)
            except OverflowError as error:
                raise InvalidArgument(name, value, "a number that a float can hold") from error
    return plain


def check_seconds(field: str, seconds: Any, most: float = LONGEST_TIME, *, above_zero: bool = False) -> None:
    """Raises InvalidArgument: no number in [0, most], or (0, most]."""
    if not is_number(seconds) or not 0.0 <= seconds <= most or (above_zero and seconds == 0.0):
        raise InvalidArgument(field, seconds, f"seconds in {'(' if above_zero else '['}0, {most:g}]")


def check_timeout(timeout: Any) -> float | None:
    """Seconds that a call may take. None has no end, and so has what is longer than gRPC can count, such as inf.

    Raises:
        InvalidArgument: no number above 0.
    """
    if timeout is None:
        return None
    if not is_number(timeout) or not timeout > 0:
        raise InvalidArgument("timeout", timeout, "seconds above 0, or None")
    return float(timeout) if timeout <= LONGEST_TIME else None


def json_text(field: str, schema: object) -> str:
    """A JSON schema as text. Raises InvalidArgument: it is nothing that JSON can hold."""
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(field, schema, "JSON text, or what JSON can hold") from error


def _told(name: str, known: Collection[str]) -> str:
    nearest = get_close_matches(name, known, n=1)
    return f"{name} (did you mean {nearest[0]}?)" if nearest else name
