"""One generation: its RPC, read as a stream of deltas."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Protocol, Self

import grpc

from paceline.client.errors import RpcError, error_for, own_errors
from paceline.client.results import Completion, Delta, Finished, Started, read_delta, read_finished, read_started
from paceline.client.retry import Attempts
from paceline.errors import InvalidArgument
from paceline.v1 import generation_pb2 as pb


class GenerateCall(Protocol):
    """What a generation is read from: an RPC, or a part of one."""

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]: ...

    def cancel(self) -> object:
        """Does nothing once it has ended."""


class Reading:
    """What a generation has said so far; common to both clients.

    Attributes:
        started: what the server said first; None until then.
        finished_by_choice: how each choice ended, by its index, for those that did. Reading mutates both.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._used = False
        self.started: Started | None = None
        self.finished_by_choice: dict[int, Finished] = {}

    @property
    def finished(self) -> Finished | None:
        """How the generation ended: with several choices, the first of them. None until it did."""
        return self.finished_by_choice.get(0)

    def _use(self) -> None:
        if self._used:
            raise RuntimeError("a generation can be read only once")
        self._used = True

    def _take(self, response: pb.GenerateResponse) -> Delta | None:
        if response.HasField("started"):
            self.started = read_started(response.started)
        if response.HasField("finished"):
            self.finished_by_choice[response.choice] = read_finished(response.finished)
        return read_delta(response) if response.text or response.token_ids or response.logprobs else None

    def _name(self, error: RpcError) -> RpcError:
        """The error with the id that the server has told, which a broken connection's has not, and for which that of a
        whole stream has the stream's.
        """
        if self.started is not None:
            error.request_id = self.started.request_id or error.request_id
        return error

    def _check_end(self) -> None:
        """The stream is over: raise unless every choice has its end."""
        missing = [choice for choice in range(self._n) if choice not in self.finished_by_choice]
        if missing:
            text = f"the stream ended without a `finished` message for choice {missing[0]}"
            raise error_for(grpc.StatusCode.INTERNAL, text)

    def _check_single(self) -> None:
        if self._n > 1:
            raise InvalidArgument(
                "n", self._n, "1 here; complete_all and collect_all give a completion for each choice"
            )

    def _completions(self, deltas: Iterable[Delta]) -> list[Completion]:
        started = self.started
        if started is None:
            raise error_for(grpc.StatusCode.INTERNAL, "the stream had no `started` message")
        by_choice: defaultdict[int, list[Delta]] = defaultdict(list)
        for delta in deltas:
            by_choice[delta.choice].append(delta)
        return [_completion(by_choice[choice], started, self.finished_by_choice[choice]) for choice in range(self._n)]


class Generation(Reading):
    """The deltas of one generation, to be read once by one task. Those of its n choices come as they come, mixed.

    The RPC starts with the first delta asked for. Leaving the loop early, by `break`, by an exception or because the
    task was cancelled, cancels the RPC, and with it the work on the server; `aclose()` does so at any other moment.

        generation = client.generate("def add(a, b):", max_tokens=64)
        async for delta in generation:
            print(delta.text, end="")
        print(generation.finished.reason)

    Args:
        start: makes an RPC that may take so many seconds.
        begin: the attempts of this generation, counted from now.
        n: choices.
        call: the first attempt's, if it has been made.
    """

    def __init__(
        self,
        start: Callable[[float | None], GenerateCall],
        begin: Callable[[], Attempts],
        n: int = 1,
        call: GenerateCall | None = None,
    ) -> None:
        super().__init__(n)
        self._start = start
        self._begin = begin
        self._call = call
        self._closing = asyncio.Event()

    def __aiter__(self) -> AsyncGenerator[Delta, None]:
        # A generator of its own, which only the loop holds: a `break` drops it, and the event loop then closes it.
        self._use()
        return self._read()

    async def collect(self) -> Completion:
        """Read to the end.

        Raises:
            InvalidArgument: several choices (n > 1) are no single completion; nothing was sent.
            RpcError: the RPC failed.
        """
        self._check_single()
        [completion] = await self.collect_all()
        return completion

    async def collect_all(self) -> list[Completion]:
        """Read to the end: the completion of every choice, in the order of their indices.

        Raises:
            RpcError: the RPC failed.
        """
        return self._completions([delta async for delta in self])

    async def aclose(self) -> None:
        """Cancel the RPC unless it has ended; who still reads gets `Cancelled`. Nothing can be read afterwards."""
        self._used = True
        self._closing.set()
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _read(self) -> AsyncGenerator[Delta, None]:
        attempts = self._begin()
        while True:
            call = self._call = self._call or self._start(attempts.remaining())
            answered = False
            try:
                with own_errors():
                    async for response in call:
                        answered = True
                        delta = self._take(response)
                        if delta is not None:
                            yield delta
                break
            except RpcError as error:
                delay = None if answered else attempts.delay_after(error)
                if delay is None:
                    self._name(error)
                    raise
            finally:
                call.cancel()  # does nothing once the RPC has ended
            self._call = None
            await self._pause(delay)
        self._check_end()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return
        raise error_for(grpc.StatusCode.CANCELLED, "the generation was closed")


def _completion(deltas: list[Delta], started: Started, finished: Finished) -> Completion:
    return Completion(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        started=started,
        finished=finished,
        logprobs=tuple(token for delta in deltas for token in delta.logprobs),
    )
