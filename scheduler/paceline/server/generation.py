"""`paceline.v1.GenerationService`: one RPC, one stream of the engine."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Final, TypeAlias

import grpc

from paceline.engine import AsyncEngine, Delta, Stream
from paceline.engine.delta import PromptLogprobs, join
from paceline.errors import NotFound, Unavailable
from paceline.server.calls import current_call
from paceline.server.convert import read_request, read_request_id, write_delta, write_logprobs
from paceline.server.live import LiveGenerations
from paceline.server.status import REQUEST_ID_KEY
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name

Context: TypeAlias = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
ManyContext: TypeAlias = grpc.aio.ServicerContext[pb.GenerateManyRequest, pb.GenerateManyResponse]

# Logprobs of more tokens than this are written in another thread: about a millisecond's worth.
MANY_TOKENS: Final = 256


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Answers UNAVAILABLE until `open` gives it an engine. Errors are raised: `Calls` makes statuses of them."""

    def __init__(self, live: LiveGenerations) -> None:
        self._engine: AsyncEngine | None = None
        self._live = live

    def open(self, engine: AsyncEngine) -> None:
        """From now on, serve `engine`."""
        self._engine = engine

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """One prompt, one stream of deltas."""
        call = current_call()
        call.request_id = request_id = read_request_id(request) or call.request_id
        if self._engine is None:
            raise Unavailable("the model is still loading")
        served = self._engine.engine.model_name
        if request.model not in ("", served):
            # Cut short, because a status travels in headers, which have a limit.
            raise NotFound(f"model {request.model[:80]!r} is not served here; this server has {served!r}")
        engine = self._engine.engine
        wanted = read_request(request, engine.default_sampling, _deadline(context, engine.clock()))
        tenant = call.caller.tenant_of(wanted.scheduling.tenant)
        if tenant != wanted.scheduling.tenant:
            wanted = replace(wanted, scheduling=replace(wanted.scheduling, tenant=tenant))
        with self._live.claim(request_id, tenant) as live:
            async with aclosing(await self._engine.submit(wanted)) as stream:
                live.stream = stream
                started = pb.Started(
                    request_id=request_id,
                    model=served,
                    prompt_tokens=stream.prompt_tokens,
                    seed=wanted.sampling.seed,
                )
                await _respond(stream, started, request.output, context)

    async def GenerateMany(self, requests: AsyncIterator[pb.GenerateManyRequest], context: ManyContext) -> None:
        """Not there yet."""
        text = "GenerateMany is not implemented by this server yet: use one Generate call for each prompt"
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)


def _deadline(context: Context, now: float) -> float | None:
    """When the RPC ends, if it has a deadline."""
    left = context.time_remaining()
    return None if left is None else now + left


async def _respond(stream: Stream, started: pb.Started, output: pb.OutputParams, context: Context) -> None:
    """Write the stream's deltas as they come; nothing is written before the first, so that rejects can be retried."""
    begun = False
    async for delta in _whole(stream) if output.final_only else stream:
        if delta.prompt_logprobs:
            assert not begun, "prompt logprobs came after the first message"
            started.prompt_logprobs.extend(await asyncio.to_thread(write_logprobs, delta.prompt_logprobs))
        if len(delta.logprobs) > MANY_TOKENS:
            response = await asyncio.to_thread(write_delta, delta, output.content)
        else:
            response = write_delta(delta, output.content)
        if not (response.text or response.token_ids or response.logprobs or delta.finish):
            continue
        if not begun:
            await context.send_initial_metadata(((REQUEST_ID_KEY, started.request_id),))
            started.cached_prompt_tokens = stream.cached_prompt_tokens
            response.started.CopyFrom(started)
            begun = True
        await context.write(response)


async def _whole(stream: AsyncIterable[Delta]) -> AsyncIterator[Delta]:
    """The deltas of each choice as one, when it ends. Prompt logprobs go with the first choice that ends."""
    parts: defaultdict[int, list[Delta]] = defaultdict(list)
    prompt_logprobs: PromptLogprobs = ()
    async for delta in stream:
        prompt_logprobs = prompt_logprobs or delta.prompt_logprobs
        parts[delta.choice].append(delta)
        if delta.finish is not None:
            yield replace(join(parts.pop(delta.choice)), prompt_logprobs=prompt_logprobs)
            prompt_logprobs = ()
