"""What a failed RPC raises: the errors of `paceline.errors`, with the status that came over the wire.

A caller catches what the server meant (`except Unavailable`), or any failed RPC (`except RpcError`):

    PacelineError
    +- RpcError                          any other status: INTERNAL, UNAUTHENTICATED, UNIMPLEMENTED ...
       +- RpcInvalidArgument             and InvalidArgument
       +- RpcNotFound                    and NotFound
       +- RpcAlreadyExists               and AlreadyExists
       +- RpcFailedPrecondition          and FailedPrecondition
       +- RpcResourceExhausted           and ResourceExhausted
       +- RpcUnavailable                 and Unavailable
       +- RpcDeadlineExceeded            and DeadlineExceeded
       +- RpcCancelled                   and Cancelled
"""

from __future__ import annotations

from typing import Final

import grpc
import grpc.aio

from paceline.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PacelineError,
    ResourceExhausted,
    Unavailable,
)

_PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"


class RpcError(PacelineError):
    """An RPC that ended with a status other than OK.

    Args:
        code: the status code.
        message: the status message, as the server wrote it.
        retry_after: seconds after which the server would like a retry; -1: it wants none; None: it did not say.
    """

    def __init__(self, code: grpc.StatusCode, message: str, retry_after: float | None = None) -> None:
        # Not super(): next in line may be an error of the tree whose constructor wants other things (InvalidArgument).
        Exception.__init__(self, code, message, retry_after)
        self.code = code
        self.message = message
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class RpcInvalidArgument(RpcError, InvalidArgument):
    """INVALID_ARGUMENT. The message names field, value and allowed range; `field` and `allowed` stay empty."""

    field = ""
    allowed = ""


class RpcNotFound(RpcError, NotFound):
    """NOT_FOUND."""


class RpcAlreadyExists(RpcError, AlreadyExists):
    """ALREADY_EXISTS."""


class RpcFailedPrecondition(RpcError, FailedPrecondition):
    """FAILED_PRECONDITION."""


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
    grpc.StatusCode.RESOURCE_EXHAUSTED: RpcResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: RpcUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: RpcDeadlineExceeded,
    grpc.StatusCode.CANCELLED: RpcCancelled,
}


def error_for(code: grpc.StatusCode, message: str, retry_after: float | None = None) -> RpcError:
    """The error that stands for a status, unraised; `retry_after` in seconds as in `RpcError`."""
    return _ERROR_BY_CODE.get(code, RpcError)(code, message, retry_after)


def from_grpc(error: grpc.aio.AioRpcError) -> RpcError:
    """The error that stands for a failed RPC, unraised."""
    return error_for(error.code(), error.details() or "", _retry_after(error))


def _retry_after(error: grpc.aio.AioRpcError) -> float | None:
    for key, value in error.trailing_metadata() or ():
        if key == _PUSHBACK_KEY:
            # gRPC gives a number whatever was sent: what it could not read is the most negative one.
            milliseconds = int(value)
            return milliseconds / 1000 if milliseconds >= 0 else -1.0
    return None
