"""What an RPC does around its writes: its headers come first, and it ends if its client falls too far behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from paceline.engine import interruptible
from paceline.headers import REQUEST_ID_KEY
from paceline.server.watch import ReaderBounds, Watch


async def send_headers(context: grpc.aio.ServicerContext[Any, Any], request_id: str) -> None:
    """Before the first message, and before its write is watched: headers wait for no reader. Where a write that is to
    send them, too, is cancelled, the library forgets that it has sent them; then it sends no status, and the client
    waits for ever.
    """
    await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))


@asynccontextmanager
async def watched(bounds: ReaderBounds) -> AsyncIterator[Watch]:
    """Watch the RPC of the running task. Raises ResourceExhausted, also out of a write that is blocked."""
    async with interruptible() as interrupt:
        watch = Watch(bounds, interrupt)
        try:
            yield watch
        finally:
            watch.close()
