"""One question, one answer: the calls that are no generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """A call as both clients make it.

    Attributes:
        method: full name, with a slash in front.
        answer: the message that comes back.
        read: what the caller gets of it.
        repeatable: it may be asked again where its answer may have been lost.
    """

    method: str
    request: Message
    answer: type[Message]
    read: Callable[[Any], T]
    repeatable: bool = True
