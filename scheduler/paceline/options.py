"""Keyword arguments: their names, and those values that several parts take."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Final

from paceline.errors import InvalidArgument

LONGEST_TIME: Final = 1e9  # seconds


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """Raises TypeError: an option that does not exist, with the one that was meant, perhaps."""
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(f"unknown option {', '.join(_told(name, known) for name in unknown)}")


def check_timeout(timeout: object) -> float | None:
    """Seconds that a call may take. None has no end, and so has what is longer than gRPC can count, such as inf.

    Raises:
        InvalidArgument: no number above 0.
    """
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout > 0:
        raise InvalidArgument("timeout", timeout, "seconds above 0, or None")
    return timeout if timeout <= LONGEST_TIME else None


def _told(name: str, known: Collection[str]) -> str:
    nearest = get_close_matches(name, known, n=1)
    return f"{name} (did you mean {nearest[0]}?)" if nearest else name
