"""Options that are lists of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from paceline.errors import InvalidArgument

MOST_STREAMS: Final = 1 << 14  # at once; simulations of more would take hours, or all memory


def parse_numbers(
    option: str, text: str, is_allowed: Callable[[float], bool], allowed: str, separator: str = ","
) -> list[float]:
    """ "0.7,1" -> [0.7, 1.0]. Raises InvalidArgument, which names the option and says what is allowed."""
    try:
        values = [float(part) for part in text.split(separator)]
    except ValueError as error:
        raise InvalidArgument(option, text, allowed) from error
    if not all(map(is_allowed, values)):
        raise InvalidArgument(option, text, allowed)
    return values


def parse_sizes(text: str, option: str = "concurrency", least: int = 1, most: int = MOST_STREAMS) -> list[int]:
    """ "1,4,16" -> [1, 4, 16]. Raises InvalidArgument, which names the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and least <= int(part) <= most for part in parts):
        raise InvalidArgument(option, text, f"integers >= {least}, at most {most}, separated by commas")
    return [int(part) for part in parts]
