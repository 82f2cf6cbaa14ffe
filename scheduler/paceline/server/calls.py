"""What every RPC goes through, whatever it asks for: an id, a caller, and a status of ours at its end."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from paceline.errors import InvalidArgument, PacelineError, PermissionDenied
from paceline.server.status import REQUEST_ID_KEY, abort

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = Any  # a grpc.RpcMethodHandler, which is a named tuple in fact and not in its types

TRACEPARENT_KEY: Final = "traceparent"
# Of requests and tenants. No blanks: they would not survive the trip through HTTP headers at either end of an id.
NAME: Final = re.compile(r"[!-~]{1,128}")
# https://www.w3.org/TR/trace-context/#traceparent-header
TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, as its credential says.

    Attributes:
        name: for logs; never a secret.
        tenant: whose requests it makes; None: it may name any tenant.
        is_admin: AdminService is open to it.
    """

    name: str = "anybody"
    tenant: str | None = None
    is_admin: bool = False

    def tenant_of(self, named: str) -> str:
        """Whose a request is that names this tenant, or none (""). Raises PermissionDenied."""
        if self.tenant is None or named == self.tenant:
            return named
        if named:
            raise PermissionDenied(f"scheduling.tenant = {named[:80]!r}: this credential is tenant {self.tenant!r}'s")
        return self.tenant


class Gate(Protocol):
    """Knows who may call what."""

    def admit(self, method: str, context: Context) -> Caller:
        """Who calls `method`, such as "/paceline.v1.GenerationService/Generate".

        Raises:
            Unauthenticated: no credential, or none that is known.
            PermissionDenied: the method is not for the caller.
        """
        ...


class OpenGate:
    """Everybody may do everything: for a server that only its own machine reaches."""

    def admit(self, method: str, context: Context) -> Caller:
        return Caller(is_admin=True)


@dataclass(slots=True)
class Call:
    """One RPC.

    Attributes:
        method: full name, with a slash in front.
        request_id: the client's, from the metadata "x-request-id" or its message; made up if it gave none.
        traceparent: as the client sent it, if it is one (W3C trace context); else "".
        caller: known once the RPC has been admitted.
    """

    method: str
    request_id: str
    traceparent: str = ""
    caller: Caller = Caller()


# Called at the end of every RPC with its status and how many seconds it took.
Observer: TypeAlias = Callable[[Call, grpc.StatusCode, float], None]

_CURRENT: ContextVar[Call] = ContextVar("paceline_call")


def current_call() -> Call:
    """The RPC that the running task serves."""
    return _CURRENT.get()


class Calls(grpc.aio.ServerInterceptor):
    """Around every handler: handlers raise errors of `paceline.errors`, and clients see statuses; what is no such error
    is logged, and the client learns nothing of it.

    An RPC that ends early is no error. It shows as CancelledError while a handler waits, and as grpc.aio.InternalError
    while it is blocked in a write, or as GeneratorExit in a generator; whatever a handler holds it must free in
    `finally` or by `with`.

    Args:
        gate: decides before anything of the request is looked at.
        observers: see `Observer`; they must not raise.
    """

    def __init__(self, gate: Gate, observers: Sequence[Observer] = ()) -> None:
        self.gate = gate
        self.observers = list(observers)
        self._wrapped: dict[str, Handler] = {}

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
            self._wrapped[method] = self._wrap(method, handler)
        return self._wrapped[method]

    def _wrap(self, method: str, handler: Handler) -> Handler:
        kind = "_".join(
            "stream" if many else "unary" for many in (handler.request_streaming, handler.response_streaming)
        )
        behaviour = getattr(handler, kind)
        parse = None if handler.request_deserializer is None else _parser(handler.request_deserializer)

        async def respond(request: Any, context: Context) -> Any:
            with self._call(method, context) as call:
                try:
                    call.caller = self.gate.admit(method, context)
                    asked = _whole(request) if handler.request_streaming else _checked(request)
                    answer = behaviour(asked, context)
                    if not hasattr(answer, "__aiter__"):
                        return await answer
                    async with aclosing(answer):
                        async for response in answer:
                            await context.write(response)
                except PacelineError as error:
                    await abort(context, error, call.request_id)
                except grpc.aio.AbortError:
                    raise
                except grpc.aio.InternalError:
                    logger.debug("request %s: the client went away during a write", call.request_id)
                except Exception:
                    logger.exception("request %s failed", call.request_id)
                    # Fixed text: what went wrong in here is none of the client's business.
                    text = f"internal error; the server's log has it under request {call.request_id}"
                    await context.abort(grpc.StatusCode.INTERNAL, text, ((REQUEST_ID_KEY, call.request_id),))

        return handler._replace(request_deserializer=parse, **{kind: respond})

    @contextmanager
    def _call(self, method: str, context: Context) -> Iterator[Call]:
        """The RPC while it is served; its end is told to the observers, however it ends."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        call = Call(method, _named(metadata) or uuid.uuid4().hex, _traceparent(metadata))
        start = time.perf_counter()
        code = grpc.StatusCode.CANCELLED  # unless it gets further
        token = _CURRENT.set(call)
        try:
            yield call
            code = grpc.StatusCode.OK
        except grpc.aio.AbortError:
            code = _status_code(context.code())
            raise
        finally:
            _CURRENT.reset(token)
            for observe in self.observers:
                observe(call, code, time.perf_counter() - start)


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


def _parser(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Messages of which bytes that are none become an error to be raised later: one raised in here would reach the
    client as UNKNOWN, with the library's words in it.
    """

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            kind = getattr(getattr(parse, "__self__", None), "__name__", "protobuf")
            return InvalidArgument("request", f"{len(data)} bytes", f"a {kind} message whose strings are UTF-8")

    return read


def _checked(request: Any) -> Any:
    if isinstance(request, InvalidArgument):
        raise request
    return request


async def _whole(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)
