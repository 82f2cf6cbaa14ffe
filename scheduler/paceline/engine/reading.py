"""Iterating over a stream. An asynchronous generator, which nothing can compile yet, so it stands by itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from paceline.engine.delta import Delta


class Readable(Protocol):
    """See `Stream`."""

    async def get(self) -> Delta | None: ...

    async def aclose(self) -> None: ...


async def read_all(stream: Readable) -> AsyncGenerator[Delta, None]:
    """Its deltas, one after the other. Leaving the loop closes the stream."""
    try:
        while (delta := await stream.get()) is not None:
            yield delta
    finally:
        await stream.aclose()
