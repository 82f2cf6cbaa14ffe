"""One generation: its RPC, read as a stream of deltas."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Self, TypeAlias

import grpc
import grpc.aio

from paceline.client.errors import error_for, from_grpc
from paceline.client.results import Completion, Delta, Finished, Started, read_delta, read_finished, read_started
from paceline.errors import InvalidArgument
from paceline.v1 import generation_pb2 as pb

GenerateCall: TypeAlias = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class Generation:
    """The deltas of one generation, to be read once by one task. Those of its n choices come as they come, mixed.

    The RPC starts with the first delta asked for. Leaving the loop early, by `break`, by an exception or because the
    task was cancelled, cancels the RPC, and with it the work on the server; `aclose()` does so at any other moment.

        generation = client.generate("def add(a, b):", max_tokens=64)
        async for delta in generation:
            print(delta.text, end="")
        print(generation.finished.reason)

    Attributes:
        started: what the server said first; None until then.
        finished_by_choice: how each choice ended, by its index, for those that did. Reading mutates both.
    """

    def __init__(self, start: Callable[[], GenerateCall], n: int = 1) -> None:
        self._start = start
        self._n = n
        self._call: GenerateCall | None = None
        self._used = False
        self.started: Started | None = None
        self.finished_by_choice: dict[int, Finished] = {}

    @property
    def finished(self) -> Finished | None:
        """How the generation ended: with several choices, the first of them. None until it did."""
        return self.finished_by_choice.get(0)

    def __aiter__(self) -> AsyncGenerator[Delta, None]:
        # A generator of its own, which only the loop holds: a `break` drops it, and the event loop then closes it.
        if self._used:
            raise RuntimeError("a generation can be read only once")
        self._used = True
        return self._read()

    async def collect(self) -> Completion:
        """Read to the end.

        Raises:
            InvalidArgument: several choices (n > 1) are no single completion; nothing was sent.
            RpcError: the RPC failed.
        """
        if self._n > 1:
            raise InvalidArgument(
                "n", self._n, "1 here; complete_all and collect_all give a completion for each choice"
            )
        [completion] = await self.collect_all()
        return completion

    async def collect_all(self) -> list[Completion]:
        """Read to the end: the completion of every choice, in the order of their indices.

        Raises:
            RpcError: the RPC failed.
        """
        deltas: defaultdict[int, list[Delta]] = defaultdict(list)
        async for delta in self:
            deltas[delta.choice].append(delta)
        started = self.started
        if started is None:
            raise error_for(grpc.StatusCode.INTERNAL, "the stream had no `started` message")
        return [_completion(deltas[choice], started, self.finished_by_choice[choice]) for choice in range(self._n)]

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
                    self.finished_by_choice[response.choice] = read_finished(response.finished)
                if response.text or response.token_ids or response.logprobs:
                    yield read_delta(response)
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error) from error
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            # The call was cancelled under the reader, who was not: to it, this is an error like any other.
            raise error_for(grpc.StatusCode.CANCELLED, "the generation or its client was closed") from None
        finally:
            call.cancel()  # does nothing once the RPC has ended
        missing = [choice for choice in range(self._n) if choice not in self.finished_by_choice]
        if missing:
            text = f"the stream ended without a `finished` message for choice {missing[0]}"
            raise error_for(grpc.StatusCode.INTERNAL, text)


def _completion(deltas: list[Delta], started: Started, finished: Finished) -> Completion:
    return Completion(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        started=started,
        finished=finished,
        logprobs=tuple(token for delta in deltas for token in delta.logprobs),
    )


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
