"""Keyword arguments by their names."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """Raises TypeError: an option that does not exist, with the one that was meant, perhaps."""
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(f"unknown option {', '.join(_told(name, known) for name in unknown)}")


def _told(name: str, known: Collection[str]) -> str:
    nearest = get_close_matches(name, known, n=1)
    return f"{name} (did you mean {nearest[0]}?)" if nearest else name
