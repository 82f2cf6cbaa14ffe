"""What becomes ready of many generations, as one message."""

from __future__ import annotations

import asyncio

from paceline.engine import Delta
from paceline.errors import PacelineError
from paceline.server.convert import write_error
from paceline.server.delivery import Delivery
from paceline.v1 import generation_pb2 as pb


class Keyed:
    """One generation of the RPC.

    Attributes:
        key: the client's.
        task: holds what the generation holds, until it is cancelled or `ended` is set.
        delivery: None until the engine has taken it.
        error: its last word, if it failed.
        ended: with the error that the stream ended with, if it did.
    """

    __slots__ = ("delivery", "ended", "error", "key", "task")

    def __init__(self, key: int) -> None:
        self.key = key
        self.task: asyncio.Task[None] | None = None
        self.delivery: Delivery | None = None
        self.error: PacelineError | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Batch:
    """A message in the making.

    Attributes:
        size: about how many bytes it has.
        large: what takes long to write, for another thread: `write_large`.
    """

    __slots__ = ("large", "message", "size")

    def __init__(self) -> None:
        self.message = pb.GenerateManyResponse()
        self.size = 0
        self.large: list[tuple[Delivery, Delta, pb.GenerateResponse]] = []

    def add(self, keyed: Keyed) -> bool:
        """Add what is ready of one generation. True if that was its last word."""
        delivery, responses = keyed.delivery, self.message.responses
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
                # Behind a large one in order, since only the first response of all tells of the start.
                if delivery.takes_long(delta) or (large and large[-1][0] is delivery):
                    large.append((delivery, delta, keyed_response.response))
                else:
                    delivery.write(delta, keyed_response.response)
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
