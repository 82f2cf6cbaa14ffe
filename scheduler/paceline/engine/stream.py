"""One request's mailbox between the step loop and whoever reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from paceline.core.plan import Finish
from paceline.core.request import RequestStats
from paceline.engine.delta import Delta
from paceline.errors import PacelineError


class Stream:
    """A completion as it grows: iterate over its deltas.

    However slowly it is read, it holds at most one delta, into which later ones are merged: memory is bounded by the
    completion, and the step loop never waits. It ends exactly once: with a delta whose `finish` is set, or by raising
    the error that it failed with, after everything that came before the error.

    Who stops reading aborts the request: `break`, cancellation, `aclose()`. Only `aclose()` does so before anything
    else runs, and also if reading never began, so use `async with contextlib.aclosing(stream)`; the others may take one
    turn of the event loop. One reader at a time; everything happens on the loop's thread.

    Attributes:
        request_id: the engine's id of the request.
        prompt_tokens: length of the prompt.
    """

    def __init__(self, request_id: int, prompt_tokens: int, on_abandon: Callable[[int], None]) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self._on_abandon = on_abandon
        self._ready = asyncio.Event()
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._token_offset = 0  # of the first token that waits
        self._finish: Finish | None = None
        self._stats: RequestStats | None = None
        self._error: PacelineError | None = None
        self._read = False  # the reader has seen the end, or will not look for it

    # -- the engine's side --------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """The engine has nothing more to say; the reader may not have seen all of it."""
        return self._finish is not None or self._error is not None

    def put(self, delta: Delta) -> None:
        """Merge a delta into what waits to be read."""
        assert not self.ended, f"request {self.request_id} goes on after its end"
        assert delta.token_offset == self._token_offset + len(self._token_ids), (self.request_id, delta)
        self._text.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._finish, self._stats = delta.finish, delta.stats
        self._ready.set()

    def fail(self, error: PacelineError) -> None:
        """End the stream with an error. It has ended already: no effect."""
        if not self.ended:
            self._error = error
            self._ready.set()

    # -- the reader's side --------------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        try:
            while not self._read:
                await self._ready.wait()
                if not self._read:
                    yield self._take()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Stop reading. A request that has not ended is aborted before this returns; more calls have no effect."""
        self._read = True
        self._ready.set()
        if not self.ended:
            self._on_abandon(self.request_id)

    def _take(self) -> Delta:
        """Everything that waits, as one delta. Raises the error once nothing waits before it."""
        if not self._text and self._error is not None:
            raise self._error
        delta = Delta("".join(self._text), tuple(self._token_ids), self._token_offset, self._finish, self._stats)
        self._token_offset += len(self._token_ids)
        self._text.clear()
        self._token_ids.clear()
        if self._error is None:
            self._ready.clear()
        self._read = self._finish is not None
        return delta
