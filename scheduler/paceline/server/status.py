"""Errors as gRPC statuses: one table, and the details that ride along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Never

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from paceline import errors

DOMAIN: Final = "paceline"
REQUEST_ID_KEY: Final = "x-request-id"
PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
NEVER: Final = -1


@dataclass(frozen=True, slots=True)
class StatusRule:
    """How a class of errors is told to a client.

    Attributes:
        reason: stable name for programs.
        retry_ms: when a retry is worth it, in milliseconds; NEVER; or None where the code says it all. Not 0, on which
            some clients hang.
    """

    code: grpc.StatusCode
    reason: str
    retry_ms: int | None = None


STATUS_RULES: Final[dict[type[errors.PacelineError], StatusRule]] = {
    errors.InvalidArgument: StatusRule(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    errors.NotFound: StatusRule(grpc.StatusCode.NOT_FOUND, "NOT_FOUND"),
    errors.AlreadyExists: StatusRule(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
    errors.FailedPrecondition: StatusRule(grpc.StatusCode.FAILED_PRECONDITION, "FEATURE_NOT_ENABLED"),
    errors.Unauthenticated: StatusRule(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    errors.PermissionDenied: StatusRule(grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
    errors.ResourceExhausted: StatusRule(grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED", NEVER),
    errors.Unavailable: StatusRule(grpc.StatusCode.UNAVAILABLE, "TRY_AGAIN", 500),
    errors.DeadlineExceeded: StatusRule(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    errors.Cancelled: StatusRule(grpc.StatusCode.CANCELLED, "CANCELLED"),
    errors.ModelLoadError: StatusRule(grpc.StatusCode.INTERNAL, "MODEL_LOAD_ERROR"),
    errors.EngineDead: StatusRule(grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST", 5000),
    errors.PacelineError: StatusRule(grpc.StatusCode.INTERNAL, "INTERNAL"),
}


def rule_for(error: errors.PacelineError) -> StatusRule:
    """The rule of the error's class, or of the nearest class above it that has one."""
    return next(STATUS_RULES[kind] for kind in type(error).__mro__ if kind in STATUS_RULES)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.PacelineError, request_id: str) -> Never:
    """End the RPC with the status of `error`. Returns by raising, as `context.abort` does."""
    rule = rule_for(error)
    status = status_pb2.Status(code=rule.code.value[0], message=str(error))
    for detail in _details(error, rule, request_id):
        status.details.add().Pack(detail)
    metadata = [*rpc_status.to_status(status).trailing_metadata, (REQUEST_ID_KEY, request_id)]
    retry_ms = _retry_ms(error, rule)
    if retry_ms is not None:
        metadata.append((PUSHBACK_KEY, str(retry_ms)))
    await context.abort(rule.code, str(error), tuple(metadata))


def _retry_ms(error: errors.PacelineError, rule: StatusRule) -> int | None:
    """As the error itself tells, or else as its rule does."""
    retry_after: float | None = getattr(error, "retry_after", None)
    return rule.retry_ms if retry_after is None else max(1, round(1000 * retry_after))


def _details(error: errors.PacelineError, rule: StatusRule, request_id: str) -> list[Message]:
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=rule.reason, domain=DOMAIN, metadata={"request_id": request_id})
    ]
    if isinstance(error, errors.InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    retry_ms = _retry_ms(error, rule)
    if retry_ms is not None and retry_ms > 0:
        delay = Duration()
        delay.FromMilliseconds(retry_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details
