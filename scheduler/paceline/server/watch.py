"""How far behind a client may fall before its RPC ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from paceline.engine import Interrupt, Stream
from paceline.errors import Reason, ResourceExhausted


@dataclass(frozen=True, slots=True)
class ReaderBounds:
    """What is sent lies in buffers first, those of both ends and of the network between. Once they are full, a write
    takes as long as the client does.

    Attributes:
        seconds: that one message may take to be written.
        tokens: of one completion that may wait for the message before them.
    """

    seconds: float = 30.0
    tokens: int = 4096


class Watch:
    """Of one RPC, whose task tells when it begins and ends to write.

    Attributes:
        error: why the RPC has to end; None while its client keeps up.
    """

    __slots__ = ("_began", "_interrupt", "_loop", "_timer", "bounds", "error")

    def __init__(self, bounds: ReaderBounds, interrupt: Interrupt) -> None:
        self.bounds = bounds
        self.error: ResourceExhausted | None = None
        self._interrupt = interrupt
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None  # to write a message, on the loop's clock
        # One timer for all messages: setting one for each would cost a tenth of what a message costs.
        self._timer = self._loop.call_later(bounds.seconds, self._look)

    def begin(self) -> None:
        """A write begins."""
        self._began = self._loop.time()

    def end(self) -> None:
        """It has come to its end."""
        self._began = None

    def watch(self, stream: Stream) -> None:
        """Bound what waits of `stream`, too; unless it holds back what it has, which is not the client's fault."""
        if not stream.holds:
            stream.limit_backlog(self.bounds.tokens * stream.num_choices, self._too_far_behind)

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left = self.bounds.seconds
        if self._began is not None:
            left -= self._loop.time() - self._began
        if left <= 0.0:
            self._evict(f"nothing was read for {self.bounds.seconds:g} seconds")
        else:
            self._timer = self._loop.call_later(left, self._look)

    def _too_far_behind(self) -> None:
        if self._began is not None:  # else it does not wait for the client
            self._evict(f"more than {self.bounds.tokens} tokens wait to be read")

    def _evict(self, reason: str) -> None:
        if self.error is None:
            self.error = ResourceExhausted(f"the client reads too slowly: {reason}", reason=Reason.SLOW_CONSUMER)
            self._interrupt(self.error)
