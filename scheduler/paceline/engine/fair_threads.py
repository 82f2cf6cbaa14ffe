"""What would take the event loop too long, in its other threads: tenant after tenant, whoever has how much of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TypeVar, TypeVarTuple

from paceline.cores import usable_cores

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

# One for each core, and one that is kept. The event loop's threads are four more than the cores, of this process or of
# the machine, and 32 at most: some are left for what is to be sent.
PLACES = min(usable_cores(), 28) + 1


class FairThreads:
    """Calls that wait for a thread get one in turns, one call of each tenant and around: a flood of them keeps no
    other tenant waiting for longer than one of its calls takes; nor do its slow calls, since the last free place is
    for tenants that have none. To be used on the event loop's thread.

    Args:
        places: calls that run at once.
    """

    def __init__(self, places: int = PLACES) -> None:
        self._free = places
        self._taken: Counter[str] = Counter()  # by tenant, places; no tenant without one
        # By tenant, those whose turn comes first in front; no tenant without a call.
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}

    async def run(self, tenant: str, function: Callable[[*Arguments], T], *args: *Arguments) -> T:
        """What the call returns, or raises. Where this is cancelled, a call that runs goes on, and keeps its place."""
        await self._turn(tenant)
        in_context = partial(copy_context().run, function, *args)  # so that logs name the RPC
        try:
            call = asyncio.get_running_loop().run_in_executor(None, in_context)
        except BaseException:  # the system has no more threads
            self._leave(tenant)
            raise
        call.add_done_callback(partial(self._ended, tenant))
        return await asyncio.shield(call)

    def _ended(self, tenant: str, call: asyncio.Future[T]) -> None:
        if not call.cancelled():
            call.exception()  # whoever waited for it may be gone: then it is nobody's
        self._leave(tenant)

    async def _turn(self, tenant: str) -> None:
        """Take a place, once there is one for the tenant."""
        if self._may_take(tenant):
            self._take(tenant)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, {})[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._drop(tenant, turn)
            else:  # the place has just been given to it
                self._leave(tenant)
            raise

    def _may_take(self, tenant: str) -> bool:
        return self._free > 1 or (self._free == 1 and tenant not in self._taken)

    def _take(self, tenant: str) -> None:
        self._free -= 1
        self._taken[tenant] += 1

    def _leave(self, tenant: str) -> None:
        """Give a place back, and to whoever is next."""
        self._free += 1
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        while (next_one := next(filter(self._may_take, self._waiting), None)) is not None:
            turns = self._waiting[next_one]
            turn = next(iter(turns))
            self._drop(next_one, turn)
            if next_one in self._waiting:  # behind all others
                self._waiting[next_one] = self._waiting.pop(next_one)
            if not turn.done():
                self._take(next_one)
                turn.set_result(None)

    def _drop(self, tenant: str, turn: asyncio.Future[None]) -> None:
        """It waits no more. Not in there: no effect."""
        turns = self._waiting.get(tenant, {})
        turns.pop(turn, None)
        if not turns:
            self._waiting.pop(tenant, None)
