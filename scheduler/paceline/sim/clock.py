"""Time that passes when told to."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the simulation began. Calling it reads it, as with `time.monotonic`."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, seconds
        self._now += seconds
