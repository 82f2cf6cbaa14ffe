"""`paceline.v1.GenerationService`: streams of the engine, one on an RPC or many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, Final, TypeAlias

import grpc

from paceline.engine import AsyncEngine, interruptible
from paceline.errors import Reason, Unavailable
from paceline.server.calls import Oversized, check_size, current_call, loaded
from paceline.server.convert import check_model, read_hold, read_request, read_request_id
from paceline.server.delivery import Delivery
from paceline.server.live import LiveGenerations
from paceline.server.many import ManyGenerations
from paceline.server.readers import send_headers, watched
from paceline.server.watch import ReaderBounds
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
GENERATE_MANY: Final = f"/{SERVICE_NAME}/GenerateMany"

Context: TypeAlias = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
ManyContext: TypeAlias = grpc.aio.ServicerContext[pb.GenerateManyRequest, pb.GenerateManyResponse]


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Answers UNAVAILABLE until `open` gives it an engine. Errors are raised: `Calls` makes statuses of them.

    Args:
        bounds: of what may wait for a client to read it.
        max_message_bytes: of each request on a stream of many.
    """

    def __init__(self, live: LiveGenerations, bounds: ReaderBounds, max_message_bytes: int) -> None:
        self._engine: AsyncEngine | None = None
        self._live = live
        self._bounds = bounds
        self._max_message_bytes = max_message_bytes
        self._many: set[ManyGenerations] = set()
        self._closing = False
        self._num_open = 0  # RPCs whose clients have not been told yet how they ended
        self._none_open = asyncio.Event()
        self._none_open.set()

    def open(self, engine: AsyncEngine) -> None:
        """From now on, serve `engine`."""
        self._engine = engine

    def close(self) -> None:
        """Streams for many generations, which would never end by themselves, end with the last that lives on them."""
        self._closing = True
        for many in self._many:
            many.close()

    async def wait_ended(self) -> None:
        """Until no RPC is open: every client has read what there was, or has been given up."""
        await self._none_open.wait()

    def _count(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """The RPC is open until the library is done with it, which is after its handler has returned."""
        self._num_open += 1
        self._none_open.clear()
        # The library's stubs want an instance of a class of theirs.
        context.add_done_callback(self._uncount)  # type: ignore[arg-type]

    def _uncount(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._none_open.set()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """One prompt, one stream of deltas. Nothing is written before the first, so that rejects can be retried."""
        self._count(context)
        call = current_call()
        call.request_id = read_request_id(request) or call.request_id
        async with self._deliver(request, call.request_id, context) as delivery, watched(self._bounds) as watch:
            call.request_id = delivery.request_id
            stream, begun = delivery.stream, False
            watch.watch(stream)
            while not stream.exhausted:  # not `async for`, which has a coroutine for each delta
                delta = stream.take()
                if delta is None:
                    await stream.wait()
                    continue
                if not delivery.concerns(delta):
                    continue
                response = pb.GenerateResponse()
                if delivery.takes_long(delta):
                    await asyncio.to_thread(delivery.write, delta, response)
                else:
                    delivery.write(delta, response)
                if not begun:
                    await send_headers(context, call.request_id)
                    begun = True
                watch.begin()
                await context.write(response)
                watch.end()

    async def GenerateMany(
        self, requests: AsyncIterator[pb.GenerateManyRequest | Oversized], context: ManyContext
    ) -> None:
        """Many prompts, one stream of messages."""
        self._count(context)
        if self._closing:
            raise Unavailable("the server is shutting down", reason=Reason.DRAINING)

        def deliver(request: pb.GenerateRequest, name: str) -> AbstractAsyncContextManager[Delivery]:
            check_size(request.ByteSize(), self._max_message_bytes)
            return self._deliver(request, name, context)

        async with watched(self._bounds) as watch:
            many = ManyGenerations(deliver, context, watch)
            self._many.add(many)
            try:
                await many.serve(requests)
            finally:
                self._many.remove(many)

    @asynccontextmanager
    async def _deliver(
        self, request: pb.GenerateRequest, name: str, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Delivery]:
        """A generation while it lives; leaving the block ends it.

        Args:
            name: what it is called where its own message does not say; with a number behind if that is taken.

        Raises:
            PacelineError: it is refused; or why the block was left.
        """
        chosen = read_request_id(request)
        serving = loaded(self._engine)
        engine, caller = serving.engine, current_call().caller
        check_model(request.model, engine.model_name)
        wanted = read_request(request, engine.default_sampling, _deadline(context, engine.clock()))
        hold = read_hold(request.output)
        tenant = caller.tenant_of(wanted.scheduling.tenant)
        caller.check_model(engine.model_name, tenant)
        wanted = replace(wanted, scheduling=replace(wanted.scheduling, tenant=tenant))
        with self._live.claim(chosen or name, tenant, rename=not chosen) as live:
            async with interruptible() as live.interrupt:
                submitted = await serving.submit(wanted)
            async with aclosing(submitted) as stream:
                live.attach(stream)
                stream.hold(hold)
                started = pb.Started(
                    request_id=live.request_id,
                    model=engine.model_name,
                    prompt_tokens=stream.prompt_tokens,
                    seed=wanted.sampling.seed,
                )
                yield Delivery(stream, started, request.output.content)


def _deadline(context: grpc.aio.ServicerContext[Any, Any], now: float) -> float | None:
    """When the RPC ends, if it has a deadline."""
    left = context.time_remaining()
    return None if left is None else now + left
