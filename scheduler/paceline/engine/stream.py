"""One request's mailbox between the step loop and whoever reads it."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from paceline.engine.delta import Delta, Output, PromptLogprobs, join
from paceline.engine.reading import close, read_all
from paceline.engine.turns import Reader, Sleeper, Turns
from paceline.errors import PacelineError


class Choice:
    """What waits of one of a stream's completions.

    Attributes:
        first: that nobody has taken.
        later: that came after it, and will be taken with it, if something did.
        is_due: all that waits may be taken.
        num_tokens: so far, those that were taken included.
    """

    __slots__ = ("first", "is_due", "later", "num_tokens")

    def __init__(self) -> None:
        self.first: Delta | None = None
        self.later: list[Delta] | None = None
        self.is_due = False
        self.num_tokens = 0

    def put(self, delta: Delta) -> None:
        assert delta.token_offset == self.num_tokens, (self.num_tokens, delta)
        if self.first is None:
            self.first = delta
        else:
            newest = self.later[-1] if self.later else self.first
            assert newest.finish is None, f"choice {delta.choice} goes on after its end: {delta}"
            if self.later is None:
                self.later = []
            self.later.append(delta)
        self.num_tokens += len(delta.token_ids)

    def take(self) -> Delta:
        """All that waits, as one delta."""
        delta = self.first
        assert delta is not None
        if self.later is not None:
            delta, self.later = join([delta, *self.later]), None
        self.first = None
        self.is_due = False
        return delta


class Stream:
    """A request's completions as they grow: iterate over their deltas.

    However slowly it is read, what waits of a choice comes as one delta: memory is bounded by the completions, and the
    step loop never waits. It ends exactly once: when every choice has had a delta whose `finish` is set, or by raising
    the error that it failed with, after everything that came before the error.

    Who stops reading aborts the request: `break`, cancellation, `aclose()`. Only `aclose()` does so before anything
    else runs, and also if reading never began, so use `async with contextlib.aclosing(stream)`; the others may take one
    turn of the event loop. One reader at a time; everything happens on the loop's thread.

    A reader iterates, or takes what there is by `take`; until there is more it awaits `wait`, or is woken by `listen`.

    Args:
        on_abandon: told of the request that nobody reads any more.
        turns: with whose readers this one's shares the event loop; None: it is woken at once.
        first_leads: what comes of other choices waits for something of the first, which brings what is told of all: the
            prompt's logprobs. Others may be earlier, since they compute less of the prompt.

    Attributes:
        request_id: the engine's id of the first completion.
        prompt_tokens: length of the prompt.
        cached_prompt_tokens: of these, those whose KV was there already; known with the first delta. The step loop sets
            it.
        prompt_logprobs: if the request asked for them, known with the first delta that can be taken; the first choice's
            has them too.
        num_choices: completions.
        backlog: tokens that nobody has taken.
    """

    __slots__ = (
        "_choices",
        "_closed",
        "_due",
        "_early",
        "_error",
        "_hold",
        "_most_backlog",
        "_num_open",
        "_num_unread",
        "_on_abandon",
        "_on_backlog",
        "_reader",
        "_sleeper",
        "_timer",
        "_waits_for_first",
        "backlog",
        "cached_prompt_tokens",
        "num_choices",
        "prompt_logprobs",
        "prompt_tokens",
        "request_id",
    )

    def __init__(
        self,
        request_id: int,
        prompt_tokens: int,
        on_abandon: Callable[[int], None],
        num_choices: int = 1,
        turns: Turns | None = None,
        first_leads: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.cached_prompt_tokens = 0
        self.prompt_logprobs: PromptLogprobs = ()
        self.num_choices = num_choices
        self.backlog = 0
        self._on_abandon = on_abandon
        self._choices = tuple([Choice() for _ in range(num_choices)])
        self._due: tuple[Choice, ...] = ()  # longest due first
        self._waits_for_first = first_leads  # nothing of the first choice has come
        self._early: tuple[Choice, ...] = ()  # that would be due, but for that
        self._num_open = num_choices  # choices that may still grow
        self._num_unread = num_choices  # choices whose end the reader has not seen
        self._error: PacelineError | None = None
        self._closed = False  # nobody reads any more
        self._hold = 0.0
        self._timer: asyncio.TimerHandle | None = None  # runs while something is held
        self._sleeper = Sleeper(turns)
        self._reader: Reader = self._sleeper
        self._most_backlog = sys.maxsize
        self._on_backlog: Callable[[], None] | None = None

    # -- the engine's side --------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """The engine has nothing more to say; the reader may not have seen all of it."""
        return self._num_open == 0 or self._error is not None

    @property
    def num_tokens(self) -> int:
        """Completion tokens so far, of all choices."""
        return sum([choice.num_tokens for choice in self._choices])

    def put(self, delta: Delta) -> None:
        """Add a delta to what waits to be read."""
        assert not self.ended, f"request {self.request_id} goes on after its end"
        choice = self._choices[delta.choice]
        choice.put(delta)
        if delta.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish is not None:
            self._num_open -= 1
        self.backlog += len(delta.token_ids)
        if self._hold and not self._ends_hold(delta):
            if self._timer is None and self._hold < math.inf:
                self._timer = asyncio.get_running_loop().call_later(self._hold, self._release)
        else:
            self._make_due(choice)
            self._reader.wake()
        if self._waits_for_first and delta.choice == 0:
            self._let_others_go()
        if self.backlog > self._most_backlog and self._on_backlog is not None:
            self._on_backlog()

    def fail(self, error: PacelineError) -> None:
        """End the stream with an error. It has ended already: no effect."""
        if self.ended:
            return
        self._error = error
        self._let_others_go()
        if self._hold < math.inf:
            self._release()
        else:
            self._reader.wake()

    def _ends_hold(self, delta: Delta) -> bool:
        """Nobody is kept waiting for a choice's first tokens, nor for its end."""
        return delta.finish is not None or (delta.token_offset == 0 and self._hold < math.inf)

    def _release(self) -> None:
        """Everything that waits is due, at once: choice by choice."""
        self._stop_timer()
        for choice in self._choices:
            if choice.first is not None:
                self._make_due(choice)
        self._reader.wake()

    def _make_due(self, choice: Choice) -> None:
        if choice.is_due:
            return
        choice.is_due = True
        if self._waits_for_first and choice is not self._choices[0]:
            self._early += (choice,)
        else:
            self._due += (choice,)

    def _let_others_go(self) -> None:
        """Nothing waits for the first choice any more."""
        self._waits_for_first = False
        if self._early:
            self._due += self._early
            self._early = ()
            self._reader.wake()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the reader's side --------------------------------------------------------------------------------------------

    def hold(self, seconds: float) -> None:
        """From now on, what comes may wait so long for more to go with it; `math.inf`: until its choice ends, and if
        the request fails before, it is dropped. A choice's end waits for nothing, nor do its first tokens, except where
        everything waits for the end.
        """
        assert not self._anything_waits, "something has come already"
        self._hold = seconds

    @property
    def holds(self) -> bool:
        """What comes may wait for more to go with it."""
        return self._hold > 0.0

    def listen(self, reader: Reader) -> None:
        """Have `reader` woken, from now on, whenever `take` may have more to give or to raise."""
        self._reader = reader
        if self._due or self._error is not None:
            reader.wake()

    def limit_backlog(self, tokens: int, callback: Callable[[], None]) -> None:
        """Have `callback` called by every `put` that leaves more than so many tokens behind. It must not raise."""
        self._most_backlog, self._on_backlog = tokens, callback

    def __aiter__(self) -> AsyncGenerator[Delta, None]:
        return read_all(self)

    def wait(self) -> asyncio.Future[None]:
        """Done once `take` may have more to give or to raise."""
        return self._sleeper.sleep()

    def take(self) -> Delta | None:
        """All that is due of one choice, as one delta; None if nothing is. Raises the stream's error once nothing is
        due before it.
        """
        if self._closed:
            return None
        if not self._due:
            if self._error is not None:
                raise self._error
            return None
        delta = self._due[0].take()
        self._due = self._due[1:]
        self.backlog -= len(delta.token_ids)
        if delta.finish is not None:
            self._num_unread -= 1
        if self._timer is not None and not self._anything_waits:
            self._stop_timer()
        return delta

    @property
    def _anything_waits(self) -> bool:
        return any([choice.first is not None for choice in self._choices])

    @property
    def exhausted(self) -> bool:
        """The reader has seen the end of every choice, or has closed the stream."""
        return self._num_unread == 0 or self._closed

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Stop reading. A request that has not ended is aborted before this returns; more calls have no effect."""
        return close(self)

    def close(self) -> None:
        """The same, without an event loop's ways."""
        self._closed = True
        self._stop_timer()
        self._reader = self._sleeper
        self._sleeper.leave()
        if not self.ended:
            self._on_abandon(self.request_id)


def publish(outputs: Sequence[Output], streams: dict[int, Stream]) -> None:
    """Put what a step has brought into the streams.

    Args:
        streams: by the id of each live completion; one that has ended leaves it.
    """
    for output in outputs:
        stream = streams[output.request_id]
        if output.choice == 0:
            stream.cached_prompt_tokens = output.cached_prompt_tokens
        stream.put(output)
        if output.finish is not None:
            del streams[output.request_id]
