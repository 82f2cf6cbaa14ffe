"""Whose turn it is to be woken, among the readers of streams."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

# The end of each write reaches the event loop by a byte in a socket of grpc.aio's, which has room for some 270; when it
# is full, the loop is told of one event a turn. With fewer awake a message costs more: with 64 a tenth.
MOST_AWAKE: Final = 128
LEAST_ROOM: Final = 16  # before somebody is woken again: so many share a turn of the event loop
TURN_SECONDS: Final = 0.05


class Turns:
    """A step brings a token for each of hundreds of streams. If all of their readers wrote it at once, whatever else
    the event loop is told then, the cancel of one, would stand in a queue behind the ends of all those writes. So only
    so many readers are awake at a time; the others take what has come meanwhile along, those first that have waited
    longest. A reader that is kept awake, by a client that does not read for one, is soon counted no more.
    """

    __slots__ = ("_awake", "_awake_before", "_round", "_timer", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[Sleeper] = deque()
        self._round = 1
        self._awake = 0  # since this round
        self._awake_before = 0  # since the one before it
        self._timer: asyncio.TimerHandle | None = None  # of the round, while somebody waits

    def ask(self, reader: Sleeper) -> None:
        """Wake it when its turn comes."""
        self._waiting.append(reader)
        self._wake()

    def end(self, reader: Sleeper) -> None:
        """It sleeps again, or has left."""
        if reader.round == self._round:
            self._awake -= 1
        elif reader.round == self._round - 1:
            self._awake_before -= 1
        if self._waiting and self._room >= LEAST_ROOM:
            self._wake()

    @property
    def _room(self) -> int:
        return MOST_AWAKE - self._awake - self._awake_before

    def _wake(self) -> None:
        while self._waiting and self._room > 0:
            reader = self._waiting.popleft()
            if reader.wake_now():
                reader.round = self._round
                self._awake += 1
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TURN_SECONDS, self._next_round)

    def _next_round(self) -> None:
        self._timer = None
        self._round += 1
        self._awake, self._awake_before = 0, self._awake
        self._wake()


class Reader:
    """Somebody who reads a stream."""

    __slots__ = ()

    def wake(self) -> None:
        """There is something to read. Must not raise."""
        raise NotImplementedError


class Sleeper(Reader):
    """Sleeps until there is something to read, and it is its turn.

    Args:
        turns: None: it is woken at once.

    Attributes:
        round: in which `Turns` woke it; 0 while it sleeps.
    """

    __slots__ = ("_asks", "_sleep", "_turns", "round")

    def __init__(self, turns: Turns | None) -> None:
        self.round = 0
        self._turns = turns
        self._sleep: asyncio.Future[None] | None = None
        self._asks = False

    def sleep(self) -> asyncio.Future[None]:
        """Done when it is to wake up."""
        self.leave()
        self._sleep = asyncio.get_running_loop().create_future()
        return self._sleep

    def leave(self) -> None:
        """It reads no more, for now."""
        if self.round:
            assert self._turns is not None
            self._turns.end(self)
            self.round = 0

    def wake(self) -> None:
        if self._turns is None:
            self.wake_now()
        elif not self._asks and self._sleep is not None and not self._sleep.done():
            self._asks = True
            self._turns.ask(self)

    def wake_now(self) -> bool:
        """False if it does not sleep."""
        self._asks = False
        if self._sleep is None or self._sleep.done():
            return False
        self._sleep.set_result(None)
        return True
