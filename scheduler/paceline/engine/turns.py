"""Whose turn it is to be woken, among the readers of streams."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

# The end of each write comes to the event loop through a socket of grpc.aio's, which has room for some 270 bytes; when
# it is full, the loop is told of one event a turn, and whatever else there is to tell stands behind all of them. With
# fewer awake a message costs more: with 64 a tenth.
MOST_AWAKE: Final = 128
LEAST_ROOM: Final = 16  # before somebody is woken again: so many share a turn of the event loop
ROUND_SECONDS: Final = 0.02  # who is awake for longer is slow


class Turns:
    """A step brings a token for each of hundreds of streams. If all of their readers wrote it at once, whatever else
    the event loop is told then, the cancel of one, would stand in a queue behind the ends of all those writes. So only
    so many readers are awake at a time; the others take what has come meanwhile along, those first that have waited
    longest.

    A reader whose client takes its time delays nobody else. While somebody waits there are rounds, and who was woken in
    one is counted until the next has ended, at most. And who was slow is woken at once and not counted, until it is
    found to be quick.
    """

    __slots__ = ("_awake", "_awake_before", "_round", "_timer", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[Sleeper] = deque()
        self._round = 1
        self._awake = 0  # still, that were woken in this round
        self._awake_before = 0  # still, that were woken in the one before it
        self._timer: asyncio.TimerHandle | None = None  # of the round, while somebody waits

    def begin(self, reader: Sleeper) -> None:
        """Wake it when its turn comes."""
        if reader.is_slow:
            reader.wake_now(self._round, time.monotonic())
            return
        self._waiting.append(reader)
        self._wake()

    def end(self, reader: Sleeper) -> None:
        """It sleeps again, or has left."""
        was_slow, reader.is_slow = reader.is_slow, time.monotonic() - reader.woken > ROUND_SECONDS
        if was_slow:
            return
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
        now = time.monotonic()
        while self._waiting and self._room > 0:
            if self._waiting.popleft().wake_now(self._round, now):
                self._awake += 1
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ROUND_SECONDS, self._next_round)

    def _next_round(self) -> None:
        self._timer = None
        self._round += 1
        self._awake, self._awake_before = 0, self._awake
        self._wake()

    def check_invariants(self) -> None:
        assert self._awake >= 0 <= self._awake_before
        assert self._room >= 0
        assert not self._waiting or (self._room < LEAST_ROOM and self._timer is not None), "somebody waits for nobody"


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
        round, woken: in which `Turns` woke it, 0 while it sleeps; and when.
        is_slow: so `Turns` found it last.
    """

    __slots__ = ("_asks", "_sleep", "_turns", "is_slow", "round", "woken")

    def __init__(self, turns: Turns | None) -> None:
        self.round = 0
        self.woken = 0.0
        self.is_slow = False
        self._turns = turns
        self._sleep: asyncio.Future[None] | None = None
        self._asks = False

    def sleep(self) -> asyncio.Future[None]:
        """Done when it is to wake up."""
        self._end_turn()
        self._sleep = asyncio.get_running_loop().create_future()
        return self._sleep

    def leave(self) -> None:
        """It reads no more."""
        self._end_turn()
        self.wake_now()

    def _end_turn(self) -> None:
        if self.round:
            assert self._turns is not None
            self._turns.end(self)
            self.round = 0

    def wake(self) -> None:
        if self._turns is None:
            self.wake_now()
        elif not self._asks and self._sleep is not None and not self._sleep.done():
            self._asks = True
            self._turns.begin(self)

    def wake_now(self, round: int = 0, now: float = 0.0) -> bool:
        """False if it does not sleep.

        Args:
            round, now: in which its turn begins, and when; 0: it is none.
        """
        self._asks = False
        if self._sleep is None or self._sleep.done():
            return False
        self.round, self.woken = round, now
        self._sleep.set_result(None)
        return True
