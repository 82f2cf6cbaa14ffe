"""One request's mailbox between the step loop and whoever reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from paceline.engine.delta import Delta, join
from paceline.errors import PacelineError


class Stream:
    """A request's completions as they grow: iterate over their deltas.

    However slowly it is read, what waits of a choice comes as one delta: memory is bounded by the completions, and the
    step loop never waits. It ends exactly once: when every choice has had a delta whose `finish` is set, or by raising
    the error that it failed with, after everything that came before the error.

    Who stops reading aborts the request: `break`, cancellation, `aclose()`. Only `aclose()` does so before anything
    else runs, and also if reading never began, so use `async with contextlib.aclosing(stream)`; the others may take one
    turn of the event loop. One reader at a time; everything happens on the loop's thread.

    Attributes:
        request_id: the engine's id of the first completion.
        prompt_tokens: length of the prompt.
        cached_prompt_tokens: of these, those whose KV was there already; known with the first delta. The step loop sets
            it.
        num_choices: completions.
    """

    def __init__(
        self, request_id: int, prompt_tokens: int, on_abandon: Callable[[int], None], num_choices: int = 1
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.cached_prompt_tokens = 0
        self.num_choices = num_choices
        self._on_abandon = on_abandon
        self._ready = asyncio.Event()
        self._waiting: dict[int, list[Delta]] = {}  # by choice, longest waiting first
        self._num_tokens = [0] * num_choices  # of each choice so far
        self._num_open = num_choices  # choices that may still grow
        self._num_unread = num_choices  # choices whose end the reader has not seen
        self._error: PacelineError | None = None
        self._closed = False  # nobody reads any more

    # -- the engine's side --------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """The engine has nothing more to say; the reader may not have seen all of it."""
        return self._num_open == 0 or self._error is not None

    def put(self, delta: Delta) -> None:
        """Add a delta to what waits to be read."""
        assert not self.ended, f"request {self.request_id} goes on after its end"
        waiting = self._waiting.setdefault(delta.choice, [])
        ended = waiting and waiting[-1].finish is not None
        assert not ended, f"request {self.request_id}: choice {delta.choice} goes on after its end"
        assert delta.token_offset == self._num_tokens[delta.choice], (self.request_id, delta)
        waiting.append(delta)
        self._num_tokens[delta.choice] += len(delta.token_ids)
        self._num_open -= delta.finish is not None
        self._ready.set()

    def fail(self, error: PacelineError) -> None:
        """End the stream with an error. It has ended already: no effect."""
        if not self.ended:
            self._error = error
            self._ready.set()

    # -- the reader's side --------------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        try:
            while self._num_unread and not self._closed:
                await self._ready.wait()
                if not self._closed:
                    yield self._take()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Stop reading. A request that has not ended is aborted before this returns; more calls have no effect."""
        self._closed = True
        self._ready.set()
        if not self.ended:
            self._on_abandon(self.request_id)

    def _take(self) -> Delta:
        """Everything that waits of one choice, as one delta. Raises the error once nothing waits before it."""
        if not self._waiting:
            assert self._error is not None
            raise self._error
        choice = next(iter(self._waiting))
        delta = join(self._waiting.pop(choice))
        self._num_unread -= delta.finish is not None
        if not self._waiting and self._error is None:
            self._ready.clear()
        return delta
