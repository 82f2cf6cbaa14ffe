"""A plugin of pytest: dozens of engines are built, and nobody needs to know to the percent what their steps cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline import wiring

wiring.PROFILE_SECONDS = 0.2

_A = TypeVar("_A")
_R = TypeVar("_R")


def call(function: Callable[[_A], _R], argument: _A) -> _R:
    """What a new process is told to call, so that it reads this module before."""
    return function(argument)
