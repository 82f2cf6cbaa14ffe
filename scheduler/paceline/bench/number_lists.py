"""Options that are lists of numbers."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import InvalidArgument


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
