"""What becomes ready of many generations, as one message."""

from __future__ import annotations

import asyncio
from typing import Final

from paceline.engine import Delta
from paceline.engine.turns import Reader
from paceline.errors import PacelineError
from paceline.server.convert import write_error
from paceline.server.delivery import Delivery
from paceline.v1 import generation_pb2 as pb

# A message is sent once it has about so many bytes: clients take 4 MiB, and what is behind gets its turn.
FULL: Final = 1 << 19


class Keyed(Reader):
    """One generation of the RPC.

    Attributes:
        key: the client's.
        task: holds what the generation holds, until it is cancelled or `ended` is set.
        delivery: None until the engine has taken it.
        error: its last word, if it failed.
        ended: with the error that the stream ended with, if it did.
        is_ready: it has something to tell, and waits in `Ready` for its turn.
        is_over: its last word has been collected. A stream may still wake it, as one does that is closed.
    """

    __slots__ = ("_ready", "delivery", "ended", "error", "is_over", "is_ready", "key", "task")

    def __init__(self, key: int, ready: Ready) -> None:
        self.key = key
        self.task: asyncio.Task[None] | None = None
        self.delivery: Delivery | None = None
        self.error: PacelineError | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_ready = False
        self.is_over = False
        self._ready = ready

    def wake(self) -> None:
        """It has something to tell: a delta, or an error."""
        if not (self.is_ready or self.is_over):
            self.is_ready = True
            self._ready.add(self)


class Ready:
    """The generations of an RPC that have something to tell, longest first.

    Args:
        wake: set when there are some, after there were none.
    """

    __slots__ = ("_generations", "_wake")

    def __init__(self, wake: asyncio.Event) -> None:
        self._generations: list[Keyed] = []
        self._wake = wake

    def __len__(self) -> int:
        return len(self._generations)

    def add(self, keyed: Keyed) -> None:
        if not self._generations:  # else the writer has been told
            self._wake.set()
        self._generations.append(keyed)

    def collect(self, batch: Batch) -> list[Keyed]:
        """Put what is ready into a message, or as much of it as fits. Returns the generations that end with it."""
        ended = []
        generations, self._generations = self._generations, []
        for index, keyed in enumerate(generations):
            if batch.size >= FULL:
                self._generations[:0] = generations[index:]
                break
            keyed.is_ready = False
            if batch.add(keyed):
                keyed.is_over = True
                ended.append(keyed)
        return ended


class Batch:
    """A message in the making.

    Attributes:
        size: about how many bytes it has.
        large: what takes long to write, for another thread: `write_large`.
    """

    __slots__ = ("_responses", "large", "message", "size")

    def __init__(self) -> None:
        self.message = pb.GenerateManyResponse()
        self.size = 0
        self.large: list[tuple[Delivery, Delta, pb.GenerateResponse]] = []
        self._responses = self.message.responses

    def add(self, keyed: Keyed) -> bool:
        """Add what is ready of one generation. True if that was its last word."""
        delivery, responses = keyed.delivery, self._responses
        if keyed.error is not None:
            responses.add(key=keyed.key, error=write_error(keyed.error))
            self.size += len(str(keyed.error))
            return True
        assert delivery is not None
        stream, large = delivery.stream, self.large
        try:
            while (delta := stream.take()) is not None:
                if not delivery.concerns(delta):
                    continue
                self.size += _size(delta)
                keyed_response = responses.add()
                keyed_response.key = keyed.key
                response = keyed_response.response
                # Behind a large one in order, since only the first response of all tells of the start.
                if delivery.takes_long(delta) or (large and large[-1][0] is delivery):
                    large.append((delivery, delta, response))
                else:
                    delivery.write(delta, response)
        except PacelineError as error:
            # On the generation's way out it becomes the last word.
            keyed.ended.set_exception(error)
            return False
        return stream.exhausted

    def write_large(self) -> None:
        """Complete the message."""
        for delivery, delta, response in self.large:
            delivery.write(delta, response)


def _size(delta: Delta) -> int:
    """About as many bytes as its message has."""
    size = len(delta.text) + 3 * len(delta.token_ids) + 10
    if delta.logprobs:
        size += len(delta.logprobs) * (16 + 8 * len(delta.logprobs[0].top_token_ids))
    return size
