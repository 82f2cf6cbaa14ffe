"""A plugin of pytest: dozens of engines are built. Nobody needs to know to the percent what their steps cost, least of
all a server that is started later, so this is kept away from the user's own cache; and there is nothing that Triton's
interpreter would have to compile ahead.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypeVar

from paceline import cost_cache, wiring
from paceline.engine import Engine
from paceline_kernels.cpu.build import CACHE_VARIABLE, cache_folder

_A = TypeVar("_A")
_R = TypeVar("_R")

warm_up: Final = wiring._warm_up  # for tests of it


def _warm_up(engine: Engine, *, on_gpu: bool) -> None:
    if not (on_gpu and os.environ.get("TRITON_INTERPRET") == "1"):
        warm_up(engine, on_gpu=on_gpu)


_folder = TemporaryDirectory(prefix="paceline-costs-")  # gone with this process


def _cache_folder() -> Path | None:
    return cache_folder() if CACHE_VARIABLE in os.environ else Path(_folder.name)


wiring.PROFILE_SECONDS = 0.2
wiring._warm_up = _warm_up
cost_cache.cache_folder = _cache_folder


def call(function: Callable[[_A], _R], argument: _A) -> _R:
    """What a new process is told to call, so that it reads this module before."""
    return function(argument)
