"""The generations that have not ended, by the ids that clients know them by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
import grpc.aio

from paceline.engine import AsyncEngine, Stream
from paceline.errors import AlreadyExists, Cancelled, PacelineError
from paceline.server.calls import find_call
from paceline.server.status import rule_for


@dataclass(slots=True)
class LiveGeneration:
    """Attributes:
    since: when it came, on the monotonic clock.
    stream: None until the engine has taken it.
    """

    request_id: str
    tenant: str
    since: float = field(default_factory=time.monotonic)
    stream: Stream | None = None
    _cancelled: bool = False

    def attach(self, stream: Stream) -> None:
        """The engine has taken it. Raises Cancelled if it has been cancelled on its way there."""
        self.stream = stream
        if self._cancelled:
            raise Cancelled("the request was aborted")

    def cancel(self, engine: AsyncEngine) -> bool:
        """End it with Cancelled, whoever waits for it. False if it has ended and only its reader is behind."""
        self._cancelled = True
        return self.stream is None or engine.abort(self.stream.request_id)


# Told of a generation that has ended, and with which status.
EndObserver: TypeAlias = Callable[[LiveGeneration, grpc.StatusCode], None]


class LiveGenerations:
    """Who claims an id holds it until it leaves.

    Attributes:
        on_end: called at the one end of every generation; they must not raise. Append to it.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, LiveGeneration] = {}
        self.on_end: list[EndObserver] = []

    @contextmanager
    def claim(self, request_id: str, tenant: str) -> Iterator[LiveGeneration]:
        """Hold the id while the generation lives; how the block is left is how it ends. Raises AlreadyExists if another
        holds it.
        """
        if request_id in self._by_id:
            raise AlreadyExists(f"request_id {request_id!r} belongs to a request that is still running")
        live = self._by_id[request_id] = LiveGeneration(request_id, tenant)
        call = find_call()
        if call is not None:
            call.tenant = tenant
        code = grpc.StatusCode.OK
        try:
            yield live
        except BaseException as error:
            code = _code_of(error)
            raise
        finally:
            del self._by_id[request_id]
            if call is not None:
                call.tokens = (call.tokens or 0) + (live.stream.num_tokens if live.stream else 0)
            for observe in self.on_end:
                observe(live, code)

    def get(self, request_id: str) -> LiveGeneration | None:
        return self._by_id.get(request_id)

    def __iter__(self) -> Iterator[LiveGeneration]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)


def _code_of(error: BaseException) -> grpc.StatusCode:
    """The status that `Calls` makes of it."""
    if isinstance(error, PacelineError):
        return rule_for(error).code
    # The last is how a client that went away during a write shows.
    gone = (asyncio.CancelledError, GeneratorExit, grpc.aio.InternalError)
    return grpc.StatusCode.CANCELLED if isinstance(error, gone) else grpc.StatusCode.INTERNAL
