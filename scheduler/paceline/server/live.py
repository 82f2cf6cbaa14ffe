"""The generations that have not ended, by the ids that clients know them by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import grpc
import grpc.aio

from paceline.engine import AsyncEngine, Interrupt, Stream
from paceline.errors import AlreadyExists, Cancelled, InvalidArgument, PacelineError
from paceline.server.calls import Call, find_call
from paceline.server.status import rule_for

MOST_NAMED: Final = 3  # tenants of the same id, in an error


@dataclass(slots=True)
class LiveGeneration:
    """Attributes:
    since: when it came, on the monotonic clock.
    stream: None until the engine has taken it.
    interrupt: ends what it waits for on its way there.
    cancelled: somebody has ended it; what is left of its call keeps nobody from its id.
    """

    request_id: str
    tenant: str
    since: float = field(default_factory=time.monotonic)
    stream: Stream | None = None
    interrupt: Interrupt | None = None
    cancelled: bool = False
    _namesakes: int = 1

    def attach(self, stream: Stream) -> None:
        """The engine has taken it. Raises Cancelled if it has been cancelled at the last moment before."""
        self.stream = stream
        if self.cancelled:
            raise Cancelled("the request was aborted")

    def cancel(self, engine: AsyncEngine) -> bool:
        """End it with Cancelled, whoever waits for it. False if it has ended and only its reader is behind."""
        lived = self.stream is None or engine.abort(self.stream.request_id)
        if self.stream is None and self.interrupt is not None:
            self.interrupt(Cancelled("the request was aborted"))
        self.cancelled = self.cancelled or lived
        return lived

    def name_another(self) -> str:
        """A new id, for one more that came by this one: with the number behind it that it has among them."""
        self._namesakes += 1
        return f"{self.request_id}-{self._namesakes}"


# Told of a generation that has ended, and with which status.
EndObserver: TypeAlias = Callable[[LiveGeneration, grpc.StatusCode], None]


class LiveGenerations:
    """Who claims an id holds it until it leaves or is cancelled. Ids are a tenant's own: others may use the same, and
    learn nothing.

    Attributes:
        on_end: called at the one end of every generation; they must not raise. Append to it.
    """

    def __init__(self) -> None:
        self._live: dict[tuple[str, str], LiveGeneration] = {}  # by tenant and id
        self.on_end: list[EndObserver] = []

    @contextmanager
    def claim(self, request_id: str, tenant: str, *, rename: bool = False) -> Iterator[LiveGeneration]:
        """Hold the id while the generation lives; how the block is left is how it ends.

        Args:
            rename: where another of the tenant holds the id, take it with a number behind.

        Raises:
            AlreadyExists: another of the tenant holds it.
        """
        holder = self._holder(request_id, tenant)
        if holder is not None:
            if not rename:
                raise AlreadyExists(f"request_id {request_id!r} belongs to a request that is still running")
            while self._holder(request_id, tenant) is not None:
                request_id = holder.name_another()
        live = self._live[tenant, request_id] = LiveGeneration(request_id, tenant)
        call = find_call()
        if call is not None:
            call.tenant = tenant
        code = grpc.StatusCode.OK
        try:
            yield live
        except BaseException as error:
            code = code_of(error, call)
            raise
        finally:
            if self.get(request_id, tenant) is live:  # else it was cancelled, and another has the id
                del self._live[tenant, request_id]
            if call is not None:
                call.tokens = (call.tokens or 0) + (live.stream.num_tokens if live.stream else 0)
            for observe in self.on_end:
                observe(live, code)

    def get(self, request_id: str, tenant: str) -> LiveGeneration | None:
        return self._live.get((tenant, request_id))

    def _holder(self, request_id: str, tenant: str) -> LiveGeneration | None:
        live = self.get(request_id, tenant)
        return None if live is None or live.cancelled else live

    def find(self, request_id: str) -> LiveGeneration | None:
        """Of whichever tenant has one. Raises InvalidArgument: several have."""
        found = [live for live in self if live.request_id == request_id]
        if len(found) > 1:
            names = ", ".join(repr(live.tenant) for live in found[:MOST_NAMED])
            raise InvalidArgument("tenant", "", f"named where several have a request of that id, as {names} do")
        return found[0] if found else None

    def __iter__(self) -> Iterator[LiveGeneration]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)


def code_of(error: BaseException, call: Call | None) -> grpc.StatusCode:
    """The status that `Calls` makes of it, on the RPC that it happened on."""
    if isinstance(error, PacelineError):
        return rule_for(error).code
    # The last is how a client that went away during a write shows.
    gone = (asyncio.CancelledError, GeneratorExit, grpc.aio.InternalError)
    if isinstance(error, gone):
        return call.early_end() if call is not None else grpc.StatusCode.CANCELLED
    return grpc.StatusCode.INTERNAL
