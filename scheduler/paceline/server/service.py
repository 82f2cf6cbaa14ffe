"""`paceline.v1.GenerationService`: one RPC, one stream of the engine."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from paceline.engine import AsyncEngine, Delta, Stream
from paceline.engine.delta import PromptLogprobs, join
from paceline.errors import AlreadyExists, InvalidArgument, NotFound, PacelineError, Unavailable
from paceline.server.convert import read_request, read_request_id, write_delta, write_logprobs
from paceline.server.status import REQUEST_ID_KEY, abort
from paceline.v1 import generation_pb2 as pb

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name

# What comes in: a message, or why the bytes were none.
Request: TypeAlias = pb.GenerateRequest | InvalidArgument
Context: TypeAlias = grpc.aio.ServicerContext[Request, pb.GenerateResponse]
ManyContext: TypeAlias = grpc.aio.ServicerContext[pb.GenerateManyRequest, pb.GenerateManyResponse]

# Logprobs of more tokens than this are written in another thread: about a millisecond's worth.
MANY_TOKENS: Final = 256

logger = logging.getLogger(__name__)


class GenerationService:
    """Answers UNAVAILABLE until `open` gives it an engine.

    An RPC that ends early is no error here. It shows as CancelledError while the handler waits for tokens, and as
    grpc.aio.InternalError while it is blocked in a write; either way, leaving the `with` blocks frees what the request
    holds.
    """

    def __init__(self) -> None:
        self._engine: AsyncEngine | None = None
        self._live: set[str] = set()

    def open(self, engine: AsyncEngine) -> None:
        """From now on, serve `engine`."""
        self._engine = engine

    def handler(self) -> grpc.GenericRpcHandler:
        """The service's methods, for a grpc.aio server.

        Made by hand, because the generated registration lets a message that cannot be parsed end as UNKNOWN.
        """
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self.generate,
                    request_deserializer=_parse,
                    response_serializer=pb.GenerateResponse.SerializeToString,
                ),
                "GenerateMany": grpc.stream_stream_rpc_method_handler(
                    self.generate_many,
                    request_deserializer=None,  # the answer is the same for any bytes
                    response_serializer=pb.GenerateManyResponse.SerializeToString,
                ),
            },
        )

    async def generate(self, request: Request, context: Context) -> None:
        """One prompt, one stream of deltas. Every error ends the RPC with a status of ours."""
        request_id = uuid.uuid4().hex
        try:
            if isinstance(request, InvalidArgument):
                raise request
            request_id = read_request_id(request) or request_id
            await self._generate(request, request_id, context)
        except PacelineError as error:
            await abort(context, error, request_id)
        except grpc.aio.InternalError:
            logger.debug("request %s: the client went away during a write", request_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            # Fixed text: what went wrong in here is none of the client's business.
            text = f"internal error; the server's log has it under request {request_id}"
            await context.abort(grpc.StatusCode.INTERNAL, text, ((REQUEST_ID_KEY, request_id),))

    async def generate_many(self, requests: AsyncIterator[bytes], context: ManyContext) -> None:
        """Not there yet."""
        text = "GenerateMany is not implemented by this server yet: use one Generate call for each prompt"
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

    async def _generate(self, message: pb.GenerateRequest, request_id: str, context: Context) -> None:
        if self._engine is None:
            raise Unavailable("the model is still loading")
        served = self._engine.engine.model_name
        if message.model not in ("", served):
            # Cut short, because a status travels in headers, which have a limit.
            raise NotFound(f"model {message.model[:80]!r} is not served here; this server has {served!r}")
        engine = self._engine.engine
        request = read_request(message, engine.default_sampling, _deadline(context, engine.clock()))
        with self._claim(request_id):
            async with aclosing(await self._engine.submit(request)) as stream:
                started = pb.Started(
                    request_id=request_id,
                    model=served,
                    prompt_tokens=stream.prompt_tokens,
                    seed=request.sampling.seed,
                )
                await _respond(stream, started, message.output, context)

    @contextmanager
    def _claim(self, request_id: str) -> Iterator[None]:
        """Hold the id while the request lives. Raises AlreadyExists if another holds it."""
        if request_id in self._live:
            raise AlreadyExists(f"request_id {request_id!r} belongs to a request that is still running")
        self._live.add(request_id)
        try:
            yield
        finally:
            self._live.discard(request_id)


def _deadline(context: Context, now: float) -> float | None:
    """When the RPC ends, if it has a deadline."""
    left = context.time_remaining()
    return None if left is None else now + left


def _parse(data: bytes) -> Request:
    try:
        return pb.GenerateRequest.FromString(data)
    except DecodeError:
        # Returned and raised later: an exception here would reach the client as UNKNOWN, with our words in it.
        return InvalidArgument("request", f"{len(data)} bytes", "a GenerateRequest message whose strings are UTF-8")


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
