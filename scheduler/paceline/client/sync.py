"""The connection to one server, for programs without an event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypeVar, Unpack

import grpc

from paceline.client.admin import Admin
from paceline.client.client import GENERATE, NO_RETRIES
from paceline.client.connection import CallOptions, ClientOptions, Connection, Metadata
from paceline.client.errors import RpcError, error_for, from_grpc
from paceline.client.generation import Reading
from paceline.client.health import HealthStatus, ask_health
from paceline.client.models import Model, ask_model, ask_models, ask_text, ask_tokens
from paceline.client.question import Question
from paceline.client.request import GenerateOptions, Prompt, build_request
from paceline.client.results import Completion, Delta
from paceline.client.retry import Attempts
from paceline.options import check_names
from paceline.v1 import generation_pb2 as pb

T = TypeVar("T")


class SyncCall(Protocol):
    """A streaming RPC of gRPC's own blocking kind."""

    def __iter__(self) -> Iterator[pb.GenerateResponse]: ...

    def cancel(self) -> object: ...


class SyncGeneration(Reading):
    """As `Generation`, but blocking: the deltas of one generation, to be read once by one thread.

    The RPC starts with the first delta asked for. Leaving the loop early, by `break` or by an exception,
    KeyboardInterrupt among them, cancels the RPC, and with it the work on the server; `close()` does so at any other
    moment, from any thread.

        generation = client.generate("def add(a, b):", max_tokens=64)
        for delta in generation:
            print(delta.text, end="")
        print(generation.finished.reason)

    Args:
        start: makes an RPC that may take so many seconds.
        begin: the attempts of this generation, counted from now.
        n: choices.
    """

    def __init__(self, start: Callable[[float | None], SyncCall], begin: Callable[[], Attempts], n: int = 1) -> None:
        super().__init__(n)
        self._start = start
        self._begin = begin
        self._call: SyncCall | None = None
        self._closing = threading.Event()

    def __iter__(self) -> Generator[Delta, None, None]:
        # A generator of its own, which only the loop holds: a `break` drops it, which closes it.
        self._use()
        return self._read()

    def collect(self) -> Completion:
        """Read to the end. Raises `RpcError`, and `InvalidArgument` for several choices (n > 1)."""
        self._check_single()
        [completion] = self.collect_all()
        return completion

    def collect_all(self) -> list[Completion]:
        """Read to the end: the completion of every choice, in the order of their indices. Raises `RpcError`."""
        return self._completions(list(self))

    def close(self) -> None:
        """Cancel the RPC unless it has ended; who still reads gets `Cancelled`. Nothing can be read afterwards."""
        self._used = True
        self._closing.set()
        if self._call is not None:
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self) -> Generator[Delta, None, None]:
        attempts = self._begin()
        while True:
            call = self._call = self._start(attempts.remaining())
            if self._closing.is_set():  # between the two
                call.cancel()
            answered = False
            try:
                for response in call:
                    answered = True
                    delta = self._take(response)
                    if delta is not None:
                        yield delta
                break
            except grpc.RpcError as error:
                failure = from_grpc(error)
                delay = None if answered else attempts.delay_after(failure)
                if delay is None:
                    raise self._name(failure) from error
            finally:
                call.cancel()  # does nothing once the RPC has ended
            if self._closing.wait(delay):
                raise error_for(grpc.StatusCode.CANCELLED, "the generation was closed")
        self._check_end()


class Client:
    """As `AsyncClient`, but blocking; may be used by several threads at once. There is no `many`: threads are for few.

    Not to be used in a process that was forked after it had connected.

    Args:
        target: "HOST:PORT", "unix:PATH", or another of gRPC's, such as "dns:///HOST:PORT".
        options: see `ClientOptions`.

    Attributes:
        admin: what is for those who operate the server.
    """

    def __init__(self, target: str, **options: Unpack[ClientOptions]) -> None:
        self._connection = Connection(target, **options)
        self._lock = threading.Lock()  # of the two below
        self._channel: grpc.Channel | None = None
        self._closing = threading.Event()
        self.admin = Admin(self._ask)

    def __repr__(self) -> str:
        return f"Client({self._connection.target!r})"

    # -- generation ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> SyncGeneration:
        """The deltas of one generation; nothing is sent before they are read. See `AsyncClient.generate`."""
        return self.send(build_request(prompt, **options), timeout=timeout, traceparent=traceparent)

    def complete(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """`generate`, read to the end. For several choices (n > 1) there is `complete_all`."""
        return self.generate(prompt, timeout=timeout, traceparent=traceparent, **options).collect()

    def complete_all(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """`generate`, read to the end: one completion for each of the `n` choices, in the order of their indices."""
        return self.generate(prompt, timeout=timeout, traceparent=traceparent, **options).collect_all()

    def send(
        self, request: pb.GenerateRequest, *, timeout: float | None = None, traceparent: str | None = None
    ) -> SyncGeneration:
        """`generate` for a message made by hand, which may use all of the contract."""
        self._check_open()
        metadata = self._connection.generation_metadata(request, traceparent)
        begin = self._connection.retries.plan(timeout)

        def start(remaining: float | None) -> Any:
            with self._on_channel() as channel:
                method = channel.unary_stream(
                    GENERATE,
                    request_serializer=pb.GenerateRequest.SerializeToString,
                    response_deserializer=pb.GenerateResponse.FromString,
                )
                return method(request, timeout=remaining, metadata=metadata)

        return SyncGeneration(start, begin, request.n or 1)

    # -- models -------------------------------------------------------------------------------------------------------

    def models(self, **options: Unpack[CallOptions]) -> tuple[Model, ...]:
        """Every model that the caller may use."""
        return self._ask(ask_models(), **options)

    def model(self, name: str = "", **options: Unpack[CallOptions]) -> Model:
        """The model of that name; without one, the server's only one. Raises `NotFound`."""
        return self._ask(ask_model(name), **options)

    def tokenize(self, prompt: Prompt, *, model: str = "", **options: Unpack[CallOptions]) -> tuple[int, ...]:
        """The tokens of a text or of the turns of a chat, as a generation would read them."""
        return self._ask(ask_tokens(prompt, model), **options)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        include_special_tokens: bool = False,
        model: str = "",
        **options: Unpack[CallOptions],
    ) -> str:
        """The text of tokens, as a generation would show it."""
        return self._ask(ask_text(token_ids, include_special_tokens, model), **options)

    def health(self, service: str = "", *, timeout: float | None = 5.0, wait_for_ready: bool = False) -> HealthStatus:
        """Ask the server (or one of its services) how it is. See `AsyncClient.health`."""
        metadata = self._connection.metadata
        return self._answer(ask_health(service), NO_RETRIES.begin(timeout), metadata, wait_for_ready)

    # -- the connection -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connection; whoever still reads gets `Cancelled`. May be called again, from any thread."""
        with self._lock:
            self._closing.set()
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, question: Question[T], /, **options: Unpack[CallOptions]) -> T:
        check_names(options, CallOptions.__annotations__)
        metadata = self._connection.call_metadata(options.get("request_id"), options.get("traceparent"))
        retries = self._connection.retries if question.repeatable else NO_RETRIES
        return self._answer(question, retries.begin(options.get("timeout")), metadata)

    def _answer(self, question: Question[T], attempts: Attempts, metadata: Metadata, wait_for_ready: bool = False) -> T:
        self._check_open()
        while True:
            try:
                with self._on_channel() as channel:
                    method = channel.unary_unary(
                        question.method,
                        request_serializer=type(question.request).SerializeToString,
                        response_deserializer=question.answer.FromString,
                    )
                    answer = method(
                        question.request,
                        timeout=attempts.remaining(),
                        metadata=metadata,
                        wait_for_ready=wait_for_ready,
                    )
                return question.read(answer)
            except grpc.RpcError as error:
                failure = from_grpc(error)
                delay = attempts.delay_after(failure)
                if delay is None:
                    raise failure from error
            self._closing.wait(delay)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise RuntimeError("the client is closed")

    @contextmanager
    def _on_channel(self) -> Generator[grpc.Channel, None, None]:
        """For a call to begin. Another thread may close the client meanwhile, for which gRPC has only ValueError."""
        try:
            yield self._connect()
        except ValueError as error:
            if not self._closing.is_set():
                raise
            raise _closed() from error

    def _connect(self) -> grpc.Channel:
        with self._lock:
            if self._closing.is_set():  # since the call was asked for
                raise _closed()
            if self._channel is None:
                target, options = self._connection.target, self._connection.channel_options
                if self._connection.credentials is None:
                    self._channel = grpc.insecure_channel(target, options=options)
                else:
                    self._channel = grpc.secure_channel(target, self._connection.credentials, options=options)
            return self._channel


def _closed() -> RpcError:
    return error_for(grpc.StatusCode.CANCELLED, "the client was closed")
