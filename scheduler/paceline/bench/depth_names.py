"""Depths by name: `off`, `auto`, and fixed ones as numbers."""

from __future__ import annotations

from paceline.core.adaptive_depth import MAX_DEPTH
from paceline.core.method import Method
from paceline.core.params import SpeculationParams
from paceline.errors import InvalidArgument

OFF = "off"
AUTO = "auto"


def check_depth(depth: int) -> int:
    """Raises InvalidArgument: an engine of a benchmark drafts no deeper."""
    if depth > MAX_DEPTH:
        raise InvalidArgument("depth", depth, f"at most {MAX_DEPTH}, the engine's highest depth")
    return depth


def parse_depths(text: str) -> dict[str, SpeculationParams]:
    """Each name of a depth, and the bounds that make a request speculate so. Raises InvalidArgument."""
    depths: dict[str, SpeculationParams] = {}
    for name in (part.strip() for part in text.split(",")):
        if name == OFF:
            depths[name] = SpeculationParams(method=Method.NONE)
        elif name == AUTO:
            depths[name] = SpeculationParams()
        elif name.isdecimal():
            depth = check_depth(int(name))
            depths[name] = SpeculationParams(min_depth=depth, max_depth=depth)
        else:
            raise InvalidArgument("depth", text, "off, auto or integers >= 0, separated by commas")
    return depths
