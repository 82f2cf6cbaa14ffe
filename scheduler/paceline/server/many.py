"""Many generations on one RPC: each message carries what became ready for all of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeAlias

import grpc
from google.protobuf.wrappers_pb2 import UInt32Value

from paceline.errors import Cancelled, InvalidArgument, PacelineError, Reason, ResourceExhausted, Unavailable
from paceline.server.calls import Oversized, current_call, internal_error, parser
from paceline.server.delivery import Delivery
from paceline.server.keyed import Batch, Keyed, Ready
from paceline.server.live import code_of
from paceline.server.readers import send_headers
from paceline.server.watch import Watch
from paceline.v1 import generation_pb2 as pb

# The generation that a message asks for, by the name that it gets if the message has none.
Deliver: TypeAlias = Callable[[pb.GenerateRequest, str], AbstractAsyncContextManager[Delivery]]

MAX_LIVE: Final = 4096  # generations on one RPC

# Reads the key of a GenerateManyRequest, and passes over what it may ask for: the first field of both.
_key_reader: Final = parser(UInt32Value.FromString)

logger = logging.getLogger(__name__)


class ManyGenerations:
    """The generations of one RPC. One task reads what the client sends, one task holds each generation, and the RPC's
    own task writes: it collects whatever the engine has put into the streams meanwhile, so while a write is blocked,
    what waits is merged there, and memory is bounded by the completions.

    Args:
        deliver: runs a generation.
        context: of the RPC.
        watch: of the RPC's task.
    """

    def __init__(
        self,
        deliver: Deliver,
        context: grpc.aio.ServicerContext[pb.GenerateManyRequest, pb.GenerateManyResponse],
        watch: Watch,
    ) -> None:
        self._deliver = deliver
        self._context = context
        self._watch = watch
        self._name = current_call().request_id
        self._numbers = itertools.count(1)
        self._live: dict[int, Keyed] = {}  # by key: their last response has not been collected
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()  # for the writer
        self._ready = Ready(self._wake)
        self._has_room = asyncio.Event()  # for the reader
        self._closing = False

    def close(self) -> None:
        """The server shuts down: the RPC ends once nothing lives on it."""
        self._closing = True
        self._wake.set()

    async def serve(self, requests: AsyncIterator[pb.GenerateManyRequest | Oversized]) -> None:
        """Until the client has sent its last request and every generation has ended. Leaving early ends them all.

        Raises:
            InvalidArgument: a request that is none, or whose key is taken.
            Unavailable: the server shuts down, and nothing lives any more.
        """
        reader = asyncio.create_task(self._read(requests))
        reader.add_done_callback(lambda task: self._wake.set())
        try:
            await self._write(reader)
        except BaseException as error:
            # What ends the RPC ends all that lives on it. An eviction shows only as a cancellation here.
            call = current_call()
            code = code_of(self._watch.error or error, call)
            call.early_end = lambda: code
            raise
        finally:
            tasks = [reader, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterator[pb.GenerateManyRequest | Oversized]) -> None:
        async for request in requests:
            if isinstance(request, Oversized):
                self._refuse(_key_reader(request.data).value, request.error)
            else:
                self._act(request)
            while len(self._ready) > MAX_LIVE:  # more refusals than it reads
                self._has_room.clear()
                await self._has_room.wait()

    def _act(self, request: pb.GenerateManyRequest) -> None:
        match request.WhichOneof("action"):
            case "start":
                self._start(request.key, request.start)
            case "cancel":
                self._cancel(request.key)
            case _:
                raise InvalidArgument("action", None, "start or cancel")

    def _check_free(self, key: int) -> None:
        if key in self._live:
            raise InvalidArgument("key", key, "no key of a generation that is live on this stream")

    def _refuse(self, key: int, error: PacelineError) -> None:
        """It does not come to life, but its client is told why."""
        self._check_free(key)
        self._fail(Keyed(key, self._ready), error)

    def _start(self, key: int, request: pb.GenerateRequest) -> None:
        self._check_free(key)
        if len(self._live) >= MAX_LIVE:
            text = f"{MAX_LIVE} generations are live on this stream, and no more may be"
            self._refuse(key, ResourceExhausted(text, retry_after=1.0))
            return
        name = f"{self._name}/{next(self._numbers)}"
        keyed = self._live[key] = Keyed(key, self._ready)
        keyed.task = asyncio.create_task(self._generate(keyed, request, name))
        self._tasks.add(keyed.task)
        keyed.task.add_done_callback(self._tasks.discard)

    def _cancel(self, key: int) -> None:
        """It may have ended just now: then its last word is on its way, and there is nothing to do."""
        keyed = self._live.pop(key, None)
        if keyed is not None:
            assert keyed.task is not None
            keyed.task.cancel()
            self._fail(keyed, Cancelled("the client has cancelled the generation"))

    async def _generate(self, keyed: Keyed, request: pb.GenerateRequest, name: str) -> None:
        """Hold a generation while it lives."""
        call = current_call()
        try:
            call.caller = call.admit()  # its key may have been taken out since the last one
            async with self._deliver(request, name) as delivery:
                keyed.delivery = delivery
                self._watch.watch(delivery.stream)
                delivery.stream.listen(keyed)
                await keyed.ended
        except PacelineError as error:
            self._fail(keyed, error)
        except Exception:
            self._fail(keyed, internal_error(request.request_id or name))

    # -- responses ----------------------------------------------------------------------------------------------------

    def _fail(self, keyed: Keyed, error: PacelineError) -> None:
        keyed.error = error
        keyed.wake()

    async def _write(self, reader: asyncio.Task[None]) -> None:
        begun = False
        while True:
            self._wake.clear()
            if reader.done():
                reader.result()  # raises what was wrong with a request
            if self._ready:
                message = await self._collect()
                self._has_room.set()
                if message.responses:
                    if not begun:
                        await send_headers(self._context, self._name)
                        begun = True
                    self._watch.begin()
                    await self._context.write(message)
                    self._watch.end()
                continue
            if not self._live:
                if reader.done():
                    return
                if self._closing:
                    raise Unavailable("the server is shutting down", reason=Reason.DRAINING)
            await self._wake.wait()

    async def _collect(self) -> pb.GenerateManyResponse:
        """A message with what is ready, or as much of it as fits."""
        batch = Batch()
        for keyed in self._ready.collect(batch):
            self._leave(keyed)
        if batch.large:
            await asyncio.to_thread(batch.write_large)
        return batch.message

    def _leave(self, keyed: Keyed) -> None:
        """Its last response has been collected: the key is free."""
        if self._live.get(keyed.key) is keyed:
            del self._live[keyed.key]
        if not keyed.ended.done():
            keyed.ended.set_result(None)
