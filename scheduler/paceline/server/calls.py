"""What every RPC goes through, whatever it asks for: an id, a caller, and a status of ours at its end."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from paceline.engine import AsyncEngine
from paceline.errors import (
    InvalidArgument,
    PacelineError,
    PermissionDenied,
    Reason,
    ResourceExhausted,
    Unavailable,
    brief,
)
from paceline.headers import NAME, REQUEST_ID_KEY, TRACEPARENT, TRACEPARENT_KEY
from paceline.server.status import abort

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = Any  # a grpc.RpcMethodHandler, which is a named tuple in fact and not in its types
Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

# Seconds. The client's clock runs out before ours, by the time that its request took to come.
DEADLINE_SLACK: Final = 0.25
ENVELOPE: Final = 16  # bytes that a message of a stream has besides the request in it

logger = logging.getLogger(__name__)


def _all_models(tenant: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, as its credential says.

    Attributes:
        name: for logs; never a secret.
        tenant: whose requests it makes; None: it may name any tenant.
        is_admin: AdminService is open to it.
        models_of: the models that a tenant may use, None standing for all.
    """

    name: str = "anybody"
    tenant: str | None = None
    is_admin: bool = False
    models_of: Callable[[str], Collection[str] | None] = _all_models

    def tenant_of(self, named: str) -> str:
        """Whose a request is that names this tenant, or none (""). Raises PermissionDenied."""
        if self.tenant is None or named == self.tenant:
            return named
        if named:
            raise PermissionDenied(f"scheduling.tenant = {brief(named)}: this credential is of tenant {self.tenant!r}")
        return self.tenant

    def may_use(self, model: str, tenant: str) -> bool:
        """Whether requests of the tenant may use the model."""
        models = self.models_of(tenant)
        return models is None or model in models

    def check_model(self, model: str, tenant: str) -> None:
        """Raises PermissionDenied: not for the tenant."""
        if not self.may_use(model, tenant):
            raise PermissionDenied(f"model {brief(model)} is not for tenant {brief(tenant)}")


class Gate(Protocol):
    """Knows who may call what."""

    def admit(self, method: str, context: Context) -> Caller:
        """Who calls `method`, such as "/paceline.v1.GenerationService/Generate".

        Raises:
            Unauthenticated: no credential, or none that is known.
            PermissionDenied: the method is not for the caller.
        """
        ...

    def is_stranger(self, method: str, metadata: Metadata) -> bool:
        """Nobody is known by what the call has sent first, nor can be by a certificate: it will not be admitted."""
        ...


class OpenGate:
    """Everybody may do everything: for a server that only its own machine reaches."""

    def admit(self, method: str, context: Context) -> Caller:
        return Caller(is_admin=True)

    def is_stranger(self, method: str, metadata: Metadata) -> bool:
        return False


def _cancelled() -> grpc.StatusCode:
    return grpc.StatusCode.CANCELLED


@dataclass(slots=True)
class Call:
    """One RPC.

    Attributes:
        method: full name, with a slash in front.
        request_id: the client's, from its message or the metadata "x-request-id"; made up if it gave none. Metadata
            may name several calls of a trace alike; generations that live at once are told apart by a number behind.
        traceparent: as the client sent it, if it is one (W3C trace context); else "".
        admit: asks the gate, which may have another answer later: who calls, or an error.
        early_end: what the client sees, asked where the RPC is left before it has come to its end.
        caller: known once the RPC has been admitted.
        tenant: whose generation it is; known once that has been accepted.
        tokens: completion tokens of its generations that have ended; None without any.
    """

    method: str
    request_id: str
    traceparent: str = ""
    admit: Callable[[], Caller] = Caller
    early_end: Callable[[], grpc.StatusCode] = _cancelled
    caller: Caller = Caller()
    tenant: str = ""
    tokens: int | None = None


# Called at the end of every RPC with its status and how many seconds it took.
Observer: TypeAlias = Callable[[Call, grpc.StatusCode, float], None]

_CURRENT: ContextVar[Call] = ContextVar("paceline_call")


def current_call() -> Call:
    """The RPC that the running task serves."""
    return _CURRENT.get()


def find_call() -> Call | None:
    """The same; None where no RPC is served."""
    return _CURRENT.get(None)


def internal_error(request_id: str) -> PacelineError:
    """What a client is told of the error that is being handled; the log has it whole."""
    logger.exception("request %s failed", request_id)
    # Fixed text: what went wrong in here is none of the client's business.
    return PacelineError(f"internal error; the server's log has it under request {request_id}")


def loaded(engine: AsyncEngine | None) -> AsyncEngine:
    """The engine, of which there is none while the model loads: raises Unavailable."""
    if engine is None:
        raise Unavailable("the model is still loading", reason=Reason.MODEL_LOADING)
    return engine


def check_size(num_bytes: int, most: int) -> None:
    """Raises ResourceExhausted: a request of so many bytes is larger than it may be."""
    if num_bytes > most:
        raise _too_large(num_bytes, most)


def _too_large(num_bytes: int, most: int) -> ResourceExhausted:
    text = f"the request has {num_bytes} bytes, and this server takes at most {most} (--max-message-size)"
    return ResourceExhausted(text)


@dataclass(frozen=True, slots=True)
class Oversized:
    """A message of a stream that nobody has parsed: it is larger than it may be, as `error` says."""

    data: bytes
    error: ResourceExhausted


class Calls(grpc.aio.ServerInterceptor):
    """Around every handler: handlers raise errors of `paceline.errors`, and clients see statuses; what is no such error
    is logged, and the client learns nothing of it.

    An RPC that ends early is no error. It shows as CancelledError while a handler waits, and as grpc.aio.InternalError
    while it is blocked in a write, or as GeneratorExit in a generator; whatever a handler holds it must free in
    `finally` or by `with`.

    Args:
        gate: decides before anything of the request is looked at.
        max_message_bytes: of a request.
        observers: see `Observer`; they must not raise.
        outliving: methods whose stream of requests outlives one that is too large: they get it as `Oversized`, and the
            others to within an envelope.
    """

    def __init__(
        self,
        gate: Gate,
        max_message_bytes: int,
        observers: Sequence[Observer] = (),
        outliving: Collection[str] = (),
    ) -> None:
        self.gate = gate
        self.observers = list(observers)
        self._max_message_bytes = max_message_bytes
        self._outliving = outliving
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}  # by method, also for strangers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:  # nobody knows the method: the library says so
                return handler
            self._wrapped[method] = self._wrap(method, handler), self._wrap_unread(method, handler)
        # The library receives a single request, whatever its size, before it calls a handler: not those of strangers.
        is_stranger = self.gate.is_stranger(method, handler_call_details.invocation_metadata or ())
        return self._wrapped[method][is_stranger]

    def _wrap(self, method: str, handler: Handler) -> Handler:
        kind = "_".join(
            "stream" if many else "unary" for many in (handler.request_streaming, handler.response_streaming)
        )
        behaviour = getattr(handler, kind)
        # Not the library's to call: it would parse what nobody has been admitted for, and tell the client its errors.
        parse = parser(handler.request_deserializer)
        read = partial(self._read_unless_oversized if method in self._outliving else self._read, parse)

        async def respond(request: Any, context: Context) -> Any:
            with self._call(method, context) as call:
                try:
                    call.caller = call.admit()
                    asked = _each(read, context) if handler.request_streaming else read(request)
                    answer = behaviour(asked, context)
                    if not hasattr(answer, "__aiter__"):
                        return await answer
                    async with aclosing(answer):
                        async for response in answer:
                            await context.write(response)
                except PacelineError as error:
                    await abort(context, error, call.request_id)
                except (grpc.aio.AbortError, grpc.aio.InternalError):  # ended, by us or by the client
                    raise
                except Exception:
                    await abort(context, internal_error(call.request_id), call.request_id)

        return handler._replace(request_deserializer=None, **{kind: respond})

    def _wrap_unread(self, method: str, handler: Handler) -> Handler:
        """Refuses a call of which nothing is received: as if it were a stream, which nobody reads."""
        one = "stream" if handler.response_streaming else "unary"

        async def refuse(requests: object, context: Context) -> Any:
            with self._call(method, context) as call:
                try:
                    call.admit()
                    raise Unavailable("credentials have changed meanwhile; call again")
                except PacelineError as error:
                    await abort(context, error, call.request_id)

        return handler._replace(request_streaming=True, request_deserializer=None, **{f"stream_{one}": refuse})

    def _read(self, parse: Callable[[bytes], Any], data: bytes) -> Any:
        check_size(len(data), self._max_message_bytes)
        return parse(data)

    def _read_unless_oversized(self, parse: Callable[[bytes], Any], data: bytes) -> Any:
        fits = len(data) <= self._max_message_bytes + ENVELOPE
        return parse(data) if fits else Oversized(data, _too_large(len(data), self._max_message_bytes))

    @contextmanager
    def _call(self, method: str, context: Context) -> Iterator[Call]:
        """The RPC while it is served; its end is told to the observers, however it ends."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        admit = partial(self.gate.admit, method, context)
        early_end = partial(_early_end, context)
        call = Call(method, _named(metadata) or uuid.uuid4().hex, _traceparent(metadata), admit, early_end)
        told = call.request_id
        context.set_trailing_metadata(((REQUEST_ID_KEY, told),))
        start = time.perf_counter()
        code = None
        token = _CURRENT.set(call)
        try:
            yield call
            code = grpc.StatusCode.OK
            if call.request_id != told:  # the handler has found another in the message
                context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
        except grpc.aio.AbortError:
            code = _status_code(context.code())
            raise
        except grpc.aio.InternalError:
            if context.code() is not None:  # it ended for a reason of ours
                code = _status_code(context.code())
            logger.debug("request %s: the client went away during a write", call.request_id)
        finally:
            _CURRENT.reset(token)
            for observe in self.observers:
                observe(call, code or call.early_end(), time.perf_counter() - start)


def _early_end(context: Context) -> grpc.StatusCode:
    """What the client sees of an RPC that did not come to its end."""
    left = context.time_remaining()
    if left is not None and left < DEADLINE_SLACK:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED


def _named(metadata: Mapping[str, str]) -> str:
    """The client's id for the call, or "" if it is none."""
    name = metadata.get(REQUEST_ID_KEY, "")
    return name if NAME.fullmatch(name) else ""


def _traceparent(metadata: Mapping[str, str]) -> str:
    value = metadata.get(TRACEPARENT_KEY, "")
    return value if TRACEPARENT.fullmatch(value) else ""


def _status_code(code: Any) -> grpc.StatusCode:
    """grpc keeps what `abort` was given, sometimes as a number."""
    if isinstance(code, grpc.StatusCode):
        return code
    return next((known for known in grpc.StatusCode if known.value[0] == code), grpc.StatusCode.UNKNOWN)


def parser(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """The same, raising InvalidArgument for bytes that are no such message."""

    def read(data: bytes) -> Any:
        if parse is None:
            return data
        try:
            return parse(data)
        except DecodeError:
            kind = getattr(getattr(parse, "__self__", None), "__name__", "protobuf")
            allowed = f"a {kind} message whose strings are UTF-8"
            raise InvalidArgument("request", f"{len(data)} bytes", allowed, reason=Reason.MALFORMED_REQUEST) from None

    return read


async def _each(read: Callable[[bytes], Any], context: Context) -> AsyncIterator[Any]:
    # Not from the iterator that the library made: one that was left half read ended the process now and then, when it
    # was closed behind its call (grpcio 1.85).
    while (data := await context.read()) is not grpc.aio.EOF:
        yield read(data)
