"""The connection to one server."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import TracebackType
from typing import Final, Self, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from paceline.client.errors import from_grpc
from paceline.client.generation import GenerateCall, Generation
from paceline.client.request import GenerateOptions, Prompt, build_request
from paceline.client.results import Completion
from paceline.v1 import generation_pb2 as pb

_MIB: Final = 1024 * 1024
_CHANNEL_OPTIONS: Final = (
    # A response with the logprobs of a long prompt is large; a request is bounded by the server.
    ("grpc.max_receive_message_length", 64 * _MIB),
    ("grpc.max_send_message_length", 64 * _MIB),
    # While a stream is open, a peer that stopped answering is noticed within 30 seconds. The keepalive timeout alone
    # does not notice a stopped process; the ping timeout does.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)
_GENERATE: Final = "/paceline.v1.GenerationService/Generate"
_HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"


class HealthStatus(StrEnum):
    """What a server says about itself."""

    UNKNOWN = "unknown"
    SERVING = "serving"
    NOT_SERVING = "not_serving"


class AsyncClient:
    """A client of one server, for use in one event loop.

    Connects with the first call and reconnects by itself; it never repeats a request by itself.

    Args:
        target: "HOST:PORT", or any other gRPC target.
        credentials: for TLS; without it the connection is plaintext.
        metadata: sent with every call, such as an authorization; keys in lower case.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._target = target
        self._credentials = credentials
        self._metadata = tuple((metadata or {}).items())
        self._channel: grpc.aio.Channel | None = None
        self._closed = False

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """The deltas of one generation; nothing is sent before they are read.

        Args:
            prompt: a text, token ids, or the turns of a chat.
            timeout: seconds the generation may take, as the deadline of the RPC.
            options: see `GenerateOptions`.

        Raises:
            InvalidArgument: a value that a request cannot carry. What the server refuses is raised while reading,
                as an `RpcError` that is also the error of `paceline.errors` for its status.
        """
        return self.send(build_request(prompt, **options), timeout=timeout)

    async def complete(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 the deadline of the RPC, which the server has to know
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """`generate`, read to the end. For several choices (n > 1) there is `complete_all`."""
        return await self.generate(prompt, timeout=timeout, **options).collect()

    async def complete_all(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 the deadline of the RPC, as above
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """`generate`, read to the end: one completion for each of the `n` choices, in the order of their indices."""
        return await self.generate(prompt, timeout=timeout, **options).collect_all()

    def send(self, request: pb.GenerateRequest, *, timeout: float | None = None) -> Generation:
        """`generate` for a message made by hand, which may use all of the contract."""

        def start() -> GenerateCall:
            method: grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse]
            method = self._connect().unary_stream(
                _GENERATE,
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )
            return method(request, timeout=timeout, metadata=self._metadata)

        return Generation(start, request.n or 1)

    async def health(
        self,
        service: str = "",
        *,
        timeout: float | None = 5.0,  # noqa: ASYNC109 the deadline of the RPC, as above
        wait_for_ready: bool = False,
    ) -> HealthStatus:
        """Ask the server (or one of its services) how it is.

        Args:
            service: full name of a service; empty asks about the whole server.
            timeout: seconds to wait for the answer.
            wait_for_ready: keep trying to connect until `timeout` instead of failing at once, for a server that starts.

        Raises:
            RpcError: `Unavailable` or `DeadlineExceeded` when nobody answers, `NotFound` for an unknown service.
        """
        check = self._connect().unary_unary(
            _HEALTH_CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = await check(request, timeout=timeout, metadata=self._metadata, wait_for_ready=wait_for_ready)
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error) from error
        match response.status:
            case health_pb2.HealthCheckResponse.SERVING:
                return HealthStatus.SERVING
            case health_pb2.HealthCheckResponse.NOT_SERVING:
                return HealthStatus.NOT_SERVING
        return HealthStatus.UNKNOWN

    async def aclose(self) -> None:
        """Close the connection; generations still being read end with `Cancelled`. May be called again."""
        self._closed = True
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _connect(self) -> grpc.aio.Channel:
        # Not in the constructor: a channel belongs to the event loop that runs when it is made.
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._channel is None:
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self._target, options=_CHANNEL_OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(self._target, self._credentials, options=_CHANNEL_OPTIONS)
        return self._channel
