"""How a stream is read, as far as that has to wait. Coroutines stay interpreted (decision 012)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from paceline.engine.delta import Delta


class Readable(Protocol):
    """See `Stream`."""

    @property
    def exhausted(self) -> bool: ...

    def take(self) -> Delta | None: ...

    def wait(self) -> asyncio.Future[None]: ...

    def close(self) -> None: ...


async def read_next(stream: Readable) -> Delta | None:
    """The next delta, once one is due; None behind the last."""
    while True:
        delta = stream.take()
        if delta is not None or stream.exhausted:
            return delta
        await stream.wait()


async def read_all(stream: Readable) -> AsyncGenerator[Delta, None]:
    """Its deltas, one after the other. Leaving the loop closes the stream."""
    try:
        while (delta := await read_next(stream)) is not None:
            yield delta
    finally:
        stream.close()


async def close(stream: Readable) -> None:
    stream.close()
