"""How benchmarks speak to a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

FILE_WIDTH = 150  # where the output is no terminal and has no width of its own


def console() -> Console:
    """Standard output, wide enough for tables where it is no terminal."""
    made = Console()
    if not made.is_terminal:
        made.width = FILE_WIDTH
    return made


def num_streams(count: int) -> str:
    """ "1 stream", "2 streams"."""
    return f"{count} stream{'s' if count > 1 else ''}"


def verdict(missed: Sequence[str]) -> list[str]:
    """A line for each bound that is not kept, or one for all."""
    return [f"MISSED: {line}" for line in missed] or ["every bound is kept"]
