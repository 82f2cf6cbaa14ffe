"""The turns of a chat, as callers give them: mappings, or objects such as the `ChatMessage` of client and engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline.errors import InvalidArgument

_KEYS: Final = ("role", "content")


def is_turn(item: object) -> bool:
    """Whether it is meant as one."""
    return isinstance(item, Mapping) or all(hasattr(item, key) for key in _KEYS)


def read_turn(field: str, item: object) -> tuple[str, str]:
    """Role and content. Raises InvalidArgument: that is not what there is, or no text; names `field`, or what of it."""
    given: Mapping[Any, Any] = (
        item if isinstance(item, Mapping) else {key: getattr(item, key) for key in _KEYS if hasattr(item, key)}
    )
    if given.keys() != set(_KEYS):
        raise InvalidArgument(field, item, "a ChatMessage, or a mapping with the keys role and content")
    for key in _KEYS:
        if not isinstance(given[key], str):
            raise InvalidArgument(f"{field}.{key}", given[key], "text")
    return given["role"], given["content"]
