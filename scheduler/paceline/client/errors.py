"""What a failed RPC raises: the errors of `paceline.errors`, with the status that came over the wire.

A caller catches what the server meant (`except Unavailable`), or any failed RPC (`except RpcError`):

    PacelineError
    +- RpcError                          any other status: INTERNAL, UNIMPLEMENTED, ABORTED ...
       +- RpcInvalidArgument             and InvalidArgument
       +- RpcNotFound                    and NotFound
       +- RpcAlreadyExists               and AlreadyExists
       +- RpcFailedPrecondition          and FailedPrecondition
       +- RpcUnauthenticated             and Unauthenticated
       +- RpcPermissionDenied            and PermissionDenied
       +- RpcResourceExhausted           and ResourceExhausted
       +- RpcUnavailable                 and Unavailable
       +- RpcDeadlineExceeded            and DeadlineExceeded
       +- RpcCancelled                   and Cancelled
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from paceline.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PacelineError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from paceline.headers import PUSHBACK_KEY, REQUEST_ID_KEY

_DETAILS_KEY: Final = "grpc-status-details-bin"


class RpcError(PacelineError):
    """An RPC that ended with a status other than OK.

    Args:
        code: the status code.
        message: the status message, as the server wrote it.
        retry_after: seconds after which the server would like a retry; -1: it wants none; None: it did not say.

    Attributes:
        reason: why, by a stable name, if the server gave one: see `paceline.errors.Reason`.
        request_id: under which the server's logs have it, if it said so.
    """

    def __init__(self, code: grpc.StatusCode, message: str, retry_after: float | None = None) -> None:
        # Not super(): next in line may be an error of the tree whose constructor wants other things (InvalidArgument).
        Exception.__init__(self, code, message, retry_after)
        self.code = code
        self.message = message
        self.retry_after = retry_after
        self.reason = ""
        self.request_id = ""

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class RpcInvalidArgument(RpcError, InvalidArgument):
    """INVALID_ARGUMENT. The message names field, value and allowed range, so that `allowed` stays empty."""

    field = ""
    allowed = ""


class RpcNotFound(RpcError, NotFound):
    """NOT_FOUND."""


class RpcAlreadyExists(RpcError, AlreadyExists):
    """ALREADY_EXISTS."""


class RpcFailedPrecondition(RpcError, FailedPrecondition):
    """FAILED_PRECONDITION."""


class RpcUnauthenticated(RpcError, Unauthenticated):
    """UNAUTHENTICATED: no API key or certificate, or none that the server knows."""


class RpcPermissionDenied(RpcError, PermissionDenied):
    """PERMISSION_DENIED."""


class RpcResourceExhausted(RpcError, ResourceExhausted):
    """RESOURCE_EXHAUSTED."""


class RpcUnavailable(RpcError, Unavailable):
    """UNAVAILABLE: also what an unreachable server gives."""


class RpcDeadlineExceeded(RpcError, DeadlineExceeded):
    """DEADLINE_EXCEEDED: the `timeout` of the call ran out or would, as the server estimates; or another bound."""


class RpcCancelled(RpcError, Cancelled):
    """CANCELLED, by the server or by closing the generation or the client while it was read."""


_ERROR_BY_CODE: Final[dict[grpc.StatusCode, type[RpcError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: RpcInvalidArgument,
    grpc.StatusCode.NOT_FOUND: RpcNotFound,
    grpc.StatusCode.ALREADY_EXISTS: RpcAlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: RpcFailedPrecondition,
    grpc.StatusCode.UNAUTHENTICATED: RpcUnauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: RpcPermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: RpcResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: RpcUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: RpcDeadlineExceeded,
    grpc.StatusCode.CANCELLED: RpcCancelled,
}


def error_for(code: grpc.StatusCode, message: str, retry_after: float | None = None) -> RpcError:
    """The error that stands for a status, unraised; `retry_after` in seconds as in `RpcError`."""
    return _ERROR_BY_CODE.get(code, RpcError)(code, message, retry_after)


def from_grpc(error: grpc.RpcError) -> RpcError:
    """The error that stands for a failed RPC, unraised."""
    call = cast("Any", error)  # its class promises nothing, but whatever gRPC raises has the status
    made = error_for(call.code(), call.details() or "")
    for key, value in call.trailing_metadata() or ():
        if key == PUSHBACK_KEY:
            # gRPC gives a number whatever was sent: what it could not read is the most negative one.
            milliseconds = int(value)
            made.retry_after = milliseconds / 1000 if milliseconds >= 0 else -1.0
        elif key == REQUEST_ID_KEY:
            made.request_id = value
        elif key == _DETAILS_KEY:
            _add_details(made, value)
    return made


def _add_details(error: RpcError, packed: bytes) -> None:
    try:
        details = status_pb2.Status.FromString(packed).details
    except DecodeError:  # a proxy's, perhaps; the status stands without it
        return
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in details:
        if detail.Unpack(info):
            error.reason = info.reason
        elif detail.Unpack(request) and isinstance(error, RpcInvalidArgument) and request.field_violations:
            error.field = request.field_violations[0].field


@contextmanager
def own_errors() -> Iterator[None]:
    """Around the use of an RPC on an event loop: what gRPC raises becomes what this library raises."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_grpc(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # The RPC was cancelled under the task, which was not: to it, this is an error like any other.
        raise error_for(grpc.StatusCode.CANCELLED, "the generation or its client was closed") from None
