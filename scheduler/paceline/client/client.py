"""The connection to one server, on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Self, TypeVar, Unpack

import grpc
import grpc.aio

from paceline.client.admin import AsyncAdmin
from paceline.client.connection import CallOptions, ClientOptions, Connection, Metadata
from paceline.client.errors import RpcError, error_for, own_errors
from paceline.client.generation import GenerateCall, Generation
from paceline.client.health import HealthStatus, ask_health
from paceline.client.many import ManyGenerations
from paceline.client.models import Model, ask_model, ask_models, ask_text, ask_tokens
from paceline.client.question import Question
from paceline.client.request import GenerateOptions, Prompt, build_request
from paceline.client.results import Completion
from paceline.client.retry import Attempts, RetryPolicy
from paceline.options import check_names
from paceline.v1 import generation_pb2 as pb

T = TypeVar("T")

GENERATE: Final = "/paceline.v1.GenerationService/Generate"
GENERATE_MANY: Final = "/paceline.v1.GenerationService/GenerateMany"
NO_RETRIES: Final = RetryPolicy(max_retries=0)


class AsyncClient:
    """A client of one server, for use in one event loop.

    Connects with the first call and reconnects by itself. A call that the server could not take is made again, when the
    server asked for it, or after a short while if it could not be reached: up to `max_retries` times, within its
    timeout, and never once there was an answer. `admin.cancel` is made once.

    Args:
        target: "HOST:PORT", "unix:PATH", or another of gRPC's, such as "dns:///HOST:PORT".
        options: see `ClientOptions`.

    Attributes:
        admin: what is for those who operate the server.
    """

    def __init__(self, target: str, **options: Unpack[ClientOptions]) -> None:
        self._connection = Connection(target, **options)
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that the channel belongs to
        self._closed = False
        self.admin = AsyncAdmin(self._ask)

    def __repr__(self) -> str:
        return f"AsyncClient({self._connection.target!r})"

    # -- generation ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """The deltas of one generation; nothing is sent before they are read.

        Args:
            prompt: a text, token ids, or the turns of a chat.
            timeout: seconds above 0 that the generation may take, retries included, as the deadline of the RPC.
            traceparent: the span that the call belongs to (W3C trace context).
            options: see `GenerateOptions`.

        Raises:
            InvalidArgument: a value that a request cannot carry. What the server refuses is raised while reading,
                as an `RpcError` that is also the error of `paceline.errors` for its status.
        """
        return self.send(build_request(prompt, **options), timeout=timeout, traceparent=traceparent)

    async def complete(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 the deadline of the RPC, which the server has to know
        traceparent: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """`generate`, read to the end. For several choices (n > 1) there is `complete_all`."""
        return await self.generate(prompt, timeout=timeout, traceparent=traceparent, **options).collect()

    async def complete_all(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 the deadline of the RPC, as above
        traceparent: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """`generate`, read to the end: one completion for each of the `n` choices, in the order of their indices."""
        return await self.generate(prompt, timeout=timeout, traceparent=traceparent, **options).collect_all()

    def send(
        self, request: pb.GenerateRequest, *, timeout: float | None = None, traceparent: str | None = None
    ) -> Generation:
        """`generate` for a message made by hand, which may use all of the contract."""
        self._check_open()
        metadata = self._connection.generation_metadata(request, traceparent)
        begin = self._connection.retries.plan(timeout)

        def start(remaining: float | None) -> GenerateCall:
            method: grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse]
            method = self._connect().unary_stream(
                GENERATE,
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )
            return method(request, timeout=remaining, metadata=metadata)

        return Generation(start, begin, request.n or 1)

    def many(self, *, traceparent: str | None = None) -> ManyGenerations:
        """Many generations at once on one stream, for gateways: less work per token at both ends.

        async with client.many() as many:
            generation = await many.start("def add(a, b):", max_tokens=64)
            async for delta in generation:
                print(delta.text, end="")
        """
        self._check_open()
        metadata = self._connection.call_metadata(traceparent=traceparent)

        def open_stream(requests: Any) -> grpc.aio.StreamStreamCall[pb.GenerateManyRequest, pb.GenerateManyResponse]:
            method: grpc.aio.StreamStreamMultiCallable[pb.GenerateManyRequest, pb.GenerateManyResponse]
            method = self._connect().stream_stream(
                GENERATE_MANY,
                request_serializer=pb.GenerateManyRequest.SerializeToString,
                response_deserializer=pb.GenerateManyResponse.FromString,
            )
            return method(requests, metadata=metadata)

        return ManyGenerations(open_stream, self._connection.retries.begin)

    # -- models -------------------------------------------------------------------------------------------------------

    async def models(self, **options: Unpack[CallOptions]) -> tuple[Model, ...]:
        """Every model that the caller may use."""
        return await self._ask(ask_models(), **options)

    async def model(self, name: str = "", **options: Unpack[CallOptions]) -> Model:
        """The model of that name; without one, the server's only one. Raises `NotFound`."""
        return await self._ask(ask_model(name), **options)

    async def tokenize(self, prompt: Prompt, *, model: str = "", **options: Unpack[CallOptions]) -> tuple[int, ...]:
        """The tokens of a text or of the turns of a chat, as a generation would read them."""
        return await self._ask(ask_tokens(prompt, model), **options)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        include_special_tokens: bool = False,
        model: str = "",
        **options: Unpack[CallOptions],
    ) -> str:
        """The text of tokens, as a generation would show it."""
        return await self._ask(ask_text(token_ids, include_special_tokens, model), **options)

    async def health(
        self,
        service: str = "",
        *,
        timeout: float | None = 5.0,  # noqa: ASYNC109 the deadline of the RPC, as above
        wait_for_ready: bool = False,
    ) -> HealthStatus:
        """Ask the server (or one of its services) how it is. Never retried: the answer is about now.

        Args:
            service: full name of a service; empty asks about the whole server.
            timeout: seconds to wait for the answer.
            wait_for_ready: keep trying to connect until `timeout` instead of failing at once, for a server that starts.

        Raises:
            RpcError: `Unavailable` or `DeadlineExceeded` when nobody answers, `NotFound` for an unknown service.
        """
        metadata = self._connection.metadata
        return await self._answer(ask_health(service), NO_RETRIES.begin(timeout), metadata, wait_for_ready)

    # -- the connection -----------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close the connection; generations still being read end with `Cancelled`. May be called again."""
        self._closed = True
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _ask(self, question: Question[T], /, **options: Unpack[CallOptions]) -> T:
        check_names(options, CallOptions.__annotations__)
        metadata = self._connection.call_metadata(options.get("request_id"), options.get("traceparent"))
        retries = self._connection.retries if question.repeatable else NO_RETRIES
        return await self._answer(question, retries.begin(options.get("timeout")), metadata)

    async def _answer(
        self,
        question: Question[T],
        attempts: Attempts,
        metadata: Metadata,
        wait_for_ready: bool = False,
    ) -> T:
        self._check_open()
        while True:
            method = self._connect().unary_unary(
                question.method,
                request_serializer=type(question.request).SerializeToString,
                response_deserializer=question.answer.FromString,
            )
            try:
                with own_errors():
                    answer = await method(
                        question.request,
                        timeout=attempts.remaining(),
                        metadata=metadata,
                        wait_for_ready=wait_for_ready,
                    )
                return question.read(answer)
            except RpcError as error:
                delay = attempts.delay_after(error)
                if delay is None:
                    raise
            await asyncio.sleep(delay)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the client is closed")

    def _connect(self) -> grpc.aio.Channel:
        # Not in the constructor: a channel belongs to the event loop that runs when it is made.
        if self._closed:  # since the call was asked for
            raise error_for(grpc.StatusCode.CANCELLED, "the client was closed")
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            raise RuntimeError("the client is used in another event loop than before: make one in each")
        if self._channel is None:
            self._loop = loop
            target, options = self._connection.target, self._connection.channel_options
            if self._connection.credentials is None:
                self._channel = grpc.aio.insecure_channel(target, options=options)
            else:
                self._channel = grpc.aio.secure_channel(target, self._connection.credentials, options=options)
        return self._channel
