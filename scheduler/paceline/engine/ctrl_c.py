"""Ctrl-C, kept out of what it would leave half done."""

from __future__ import annotations

import signal
from threading import current_thread, main_thread
from types import FrameType
from typing import Self


class CtrlC:
    """A context in which Ctrl-C waits for `release` while it is on `hold`. A second one does not wait.

    Python interrupts the main thread alone, and by the handler of SIGINT, if that is one of Python's: elsewhere nothing
    is held. The handler is exchanged once, since that is a system call, and steps are short.
    """

    def __init__(self) -> None:
        handler = signal.getsignal(signal.SIGINT) if current_thread() is main_thread() else None
        self._handler = handler if callable(handler) else None
        self._on_hold = False
        self._came = False

    def __enter__(self) -> Self:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        self.release()  # whatever else is raised: nobody presses it twice to be heard once

    def hold(self) -> None:
        """From now on one waits."""
        self._on_hold = True

    def release(self) -> None:
        """Let it come that has come: by default it raises KeyboardInterrupt."""
        self._on_hold = False
        if self._came:
            self._came = False
            assert self._handler is not None
            self._handler(signal.SIGINT, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._on_hold and not self._came:
            self._came = True
            return
        assert self._handler is not None
        self._handler(number, frame)
