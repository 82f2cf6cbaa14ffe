"""A plugin of pytest: dozens of engines are built. Nobody needs to know to the percent what their steps cost, and there
is nothing that Triton's interpreter would have to compile ahead.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, TypeVar

from paceline import wiring
from paceline.engine import Engine

_A = TypeVar("_A")
_R = TypeVar("_R")

warm_up: Final = wiring._warm_up  # for tests of it


def _warm_up(engine: Engine, *, on_gpu: bool) -> None:
    if not (on_gpu and os.environ.get("TRITON_INTERPRET") == "1"):
        warm_up(engine, on_gpu=on_gpu)


wiring.PROFILE_SECONDS = 0.2
wiring._warm_up = _warm_up


def call(function: Callable[[_A], _R], argument: _A) -> _R:
    """What a new process is told to call, so that it reads this module before."""
    return function(argument)
