"""One generation: its RPC, read as a stream of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Self, TypeAlias

import grpc
import grpc.aio

from paceline.client.errors import error_for, from_grpc
from paceline.client.results import Completion, Delta, Finished, Started, read_finished, read_started
from paceline.v1 import generation_pb2 as pb

GenerateCall: TypeAlias = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class Generation:
    """The deltas of one generation, to be read once by one task.

    The RPC starts with the first delta asked for. Leaving the loop early, by `break`, by an exception or because the
    task was cancelled, cancels the RPC, and with it the work on the server; `aclose()` does so at any other moment.

        generation = client.generate("def add(a, b):", max_tokens=64)
        async for delta in generation:
            print(delta.text, end="")
        print(generation.finished.reason)

    Attributes:
        started: what the server said first; None until then.
        finished: how the generation ended; None until it did. Reading mutates both.
    """

    def __init__(self, start: Callable[[], GenerateCall]) -> None:
        self._start = start
        self._call: GenerateCall | None = None
        self._used = False
        self.started: Started | None = None
        self.finished: Finished | None = None

    def __aiter__(self) -> AsyncGenerator[Delta, None]:
        # A generator of its own, which only the loop holds: a `break` drops it, and the event loop then closes it.
        if self._used:
            raise RuntimeError("a generation can be read only once")
        self._used = True
        return self._read()

    async def collect(self) -> Completion:
        """Read to the end.

        Raises:
            RpcError: the RPC failed.
        """
        texts: list[str] = []
        token_ids: list[int] = []
        async for delta in self:
            texts.append(delta.text)
            token_ids.extend(delta.token_ids)
        if self.started is None or self.finished is None:
            raise error_for(grpc.StatusCode.INTERNAL, "the stream had no `started` message")
        return Completion("".join(texts), tuple(token_ids), self.started, self.finished)

    async def aclose(self) -> None:
        """Cancel the RPC unless it has ended; who still reads gets `Cancelled`. Nothing can be read afterwards."""
        self._used = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _read(self) -> AsyncGenerator[Delta, None]:
        call = self._call = self._start()
        try:
            async for response in call:
                if response.HasField("started"):
                    self.started = read_started(response.started)
                if response.HasField("finished"):
                    self.finished = read_finished(response.finished)
                if response.text or response.token_ids:
                    yield Delta(response.text, tuple(response.token_ids), response.token_offset)
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error) from error
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            # The call was cancelled under the reader, who was not: to it, this is an error like any other.
            raise error_for(grpc.StatusCode.CANCELLED, "the generation or its client was closed") from None
        finally:
            call.cancel()  # does nothing once the RPC has ended
        if self.finished is None:
            raise error_for(grpc.StatusCode.INTERNAL, "the stream ended without a `finished` message")


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
