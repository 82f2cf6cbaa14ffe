"""Many generations on one stream: one message carries what a step of the engine brought for all of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from copy import copy
from typing import Any, Final, Self, TypeAlias, Unpack

import grpc
import grpc.aio

from paceline.client.errors import RpcError, error_for, from_grpc, own_errors
from paceline.client.generation import GenerateCall, Generation
from paceline.client.request import GenerateOptions, Prompt, build_request
from paceline.client.results import seconds
from paceline.client.retry import Attempts
from paceline.v1 import generation_pb2 as pb

ManyCall: TypeAlias = grpc.aio.StreamStreamCall[pb.GenerateManyRequest, pb.GenerateManyResponse]
OpenStream: TypeAlias = Callable[[AsyncIterator[pb.GenerateManyRequest]], ManyCall]

_LAST_WORD_SECONDS: Final = 2.0  # that the server has to end a stream on which nothing lives
_CORE_FAILED: Final = "Internal error from Core"  # what gRPC's asyncio API says of a write that failed
_CODES: Final[dict[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}


class ManyGenerations:
    """The stream and what runs on it. Leaving the context ends it, and with it every generation that is still live.

    Opens with the first generation. When it breaks, its generations fail as RPCs would, and the next one opens it anew.

    Args:
        open_stream: makes the RPC.
        begin: the attempts of a generation that may take so many seconds.
    """

    def __init__(self, open_stream: OpenStream, begin: Callable[[float | None], Attempts]) -> None:
        self._open_stream = open_stream
        self._begin = begin
        self._keys = itertools.count(1)
        self._stream: _Stream | None = None
        self._closed = False

    async def start(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 of the generation, not of its start
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Start a generation at once; its deltas wait until they are read.

        Args:
            timeout: seconds from now; kept by the client, since only the whole stream has a deadline.
            options: see `GenerateOptions`.

        Raises:
            InvalidArgument: a value that a request cannot carry. What the server refuses is raised while reading.
        """
        return await self.send(build_request(prompt, **options), timeout=timeout)

    async def send(
        self,
        request: pb.GenerateRequest,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 as above
    ) -> Generation:
        """`start` for a message made by hand."""
        if self._closed:
            raise RuntimeError("the stream is closed")
        attempts = self._begin(timeout)
        call = self._start(request, attempts.remaining())
        await asyncio.sleep(0)  # whoever starts many in a row lets them go out meanwhile
        return Generation(lambda remaining: self._start(request, remaining), lambda: attempts, request.n or 1, call)

    async def aclose(self) -> None:
        """End the stream; who still reads gets `Cancelled`. May be called again."""
        self._closed = True
        if self._stream is not None:
            await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def _start(self, request: pb.GenerateRequest, remaining: float | None) -> GenerateCall:
        if self._closed:  # since the generation was asked for
            raise error_for(grpc.StatusCode.CANCELLED, "the stream was closed")
        if self._stream is None or self._stream.ended:
            self._stream = _Stream(self._open_stream)
        return self._stream.start(next(self._keys) % 2**32, request, remaining)


class _Stream:
    """One RPC: sends what waits in a queue, and hands what comes to the lane that it is for."""

    def __init__(self, open_stream: OpenStream) -> None:
        self._lanes: dict[int, _Lane] = {}
        self._requests: asyncio.Queue[pb.GenerateManyRequest | None] = asyncio.Queue()
        self._status: RpcError | None = None  # as it came
        self._call = open_stream(self._outgoing())
        self._call.add_done_callback(self._remember)
        self._reader = asyncio.create_task(self._read(), name="paceline-many")
        self.ended = False

    def start(self, key: int, request: pb.GenerateRequest, timeout: float | None) -> _Lane:
        lane = self._lanes[key] = _Lane(request.n or 1, timeout, lambda: self._drop(key))
        self._requests.put_nowait(pb.GenerateManyRequest(key=key, start=request))
        return lane

    async def aclose(self) -> None:
        try:
            if not self._lanes:
                self._requests.put_nowait(None)  # the end of what there is to say, to which the server has a status
                await asyncio.wait([self._reader], timeout=_LAST_WORD_SECONDS)
        finally:
            self._call.cancel()  # does nothing once the RPC has ended
        await asyncio.wait([self._reader])

    def _drop(self, key: int) -> None:
        """Nobody reads the lane any more."""
        if self._lanes.pop(key, None) is not None and not self.ended:
            self._requests.put_nowait(pb.GenerateManyRequest(key=key, cancel=pb.Cancel()))

    async def _outgoing(self) -> AsyncIterator[pb.GenerateManyRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def _read(self) -> None:
        error = error_for(grpc.StatusCode.UNAVAILABLE, "the server ended the stream")
        try:
            with own_errors():
                async for message in self._call:
                    for keyed in message.responses:
                        self._hand_out(keyed)
        except RpcError as failure:
            error = self._unhidden(failure)
        finally:
            self.ended = True
            self._requests.put_nowait(None)  # the RPC's own reader of requests ends, too
            for lane in self._lanes.values():
                lane.put(copy(error))  # each is raised in a task of its own, and gets its own id
            self._lanes.clear()

    def _remember(self, call: ManyCall) -> None:
        """Called by gRPC as soon as it has the status, which none of these has to be waited for."""
        code, details, metadata = (_returned(part) for part in (call.code(), call.details(), call.trailing_metadata()))
        if code is not grpc.StatusCode.OK:
            self._status = from_grpc(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details))

    def _unhidden(self, failure: RpcError) -> RpcError:
        """Where a write meets the end of the stream on its way, gRPC puts its own failure in place of the status."""
        if not _is_of_a_write(failure):
            return failure
        if self._status is not None and not _is_of_a_write(self._status):
            return self._status
        return error_for(grpc.StatusCode.UNAVAILABLE, "the stream ended while a request was on its way")

    def _hand_out(self, keyed: pb.KeyedResponse) -> None:
        lane = self._lanes.get(keyed.key)
        if lane is None:  # left meanwhile
            return
        lane.put(_read_error(keyed.error) if keyed.HasField("error") else keyed.response)
        if lane.complete:
            del self._lanes[keyed.key]


class _Lane:
    """One generation's part of the stream.

    Attributes:
        complete: everything has come, or the generation failed; it may not have been read.
    """

    def __init__(self, n: int, timeout: float | None, on_leave: Callable[[], None]) -> None:
        self._open_choices = n
        self._on_leave = on_leave
        self._timer = None if timeout is None else asyncio.get_running_loop().call_later(timeout, self._expire)
        self._waiting: asyncio.Queue[pb.GenerateResponse | RpcError] = asyncio.Queue()
        self.complete = False

    def put(self, item: pb.GenerateResponse | RpcError) -> None:
        self._waiting.put_nowait(item)
        if isinstance(item, RpcError):
            self.complete = True
        elif item.HasField("finished"):
            self._open_choices -= 1
            self.complete = self._open_choices == 0
        if self.complete and self._timer is not None:
            self._timer.cancel()

    def cancel(self) -> None:
        """Leave; does nothing once it is complete."""
        self._leave(error_for(grpc.StatusCode.CANCELLED, "the generation was closed"))

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        while not (self.complete and self._waiting.empty()):
            item = await self._waiting.get()
            if isinstance(item, RpcError):
                raise item
            yield item

    def _expire(self) -> None:
        self._leave(error_for(grpc.StatusCode.DEADLINE_EXCEEDED, "it took longer than its timeout"))

    def _leave(self, error: RpcError) -> None:
        if not self.complete:
            self.put(error)
            self._on_leave()


def _is_of_a_write(failure: RpcError) -> bool:
    return failure.code is grpc.StatusCode.INTERNAL and failure.message == _CORE_FAILED


def _returned(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


def _read_error(message: pb.GenerationError) -> RpcError:
    code = _CODES.get(message.code, grpc.StatusCode.UNKNOWN)
    retry_after = seconds(message.retry_after) if message.HasField("retry_after") else None
    error = error_for(code, message.message, retry_after)
    error.reason = message.reason
    return error
