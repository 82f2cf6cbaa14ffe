"""The end of a wait, from outside and with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

from paceline.errors import PacelineError

# Ends what the block waits for with this error. Only the first counts, and none may come when the block has been left.
Interrupt: TypeAlias = Callable[[PacelineError], None]


@asynccontextmanager
async def interruptible() -> AsyncIterator[Interrupt]:
    """A block that others may interrupt: it raises the error that they give, wherever it waits.

    To the task it is an error like any other, and no cancellation: a handler that ends with one of those without its
    client's doing leaves the client without a status.
    """
    reason: PacelineError | None = None

    def interrupt(error: PacelineError) -> None:
        nonlocal reason
        if reason is None:
            reason = error
            timeout.reschedule(0.0)

    try:
        async with asyncio.timeout(None) as timeout:
            yield interrupt
    except TimeoutError:
        if timeout.expired() and reason is not None:
            raise reason from None
        raise
