"""Errors as gRPC statuses: one table, and the details that ride along. For clients: docs/errors.md."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final, Never

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from paceline import errors
from paceline.errors import Reason
from paceline.headers import PUSHBACK_KEY, REQUEST_ID_KEY

DOMAIN: Final = "paceline"
NEVER: Final = -1
# For a status behind messages that a client does not read.
UNREAD_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class StatusRule:
    """How a client is told that something went wrong.

    Attributes:
        retry_ms: when a retry is worth it, in milliseconds, unless the error tells; NEVER; or None where the code says
            it all. Not 0, on which some clients hang.
    """

    code: grpc.StatusCode
    retry_ms: int | None = None


STATUS_RULES: Final[dict[str, StatusRule]] = {
    Reason.INVALID_FIELD: StatusRule(grpc.StatusCode.INVALID_ARGUMENT),
    Reason.SAMPLING_PARAM_OUT_OF_RANGE: StatusRule(grpc.StatusCode.INVALID_ARGUMENT),
    Reason.INVALID_TOKEN_ID: StatusRule(grpc.StatusCode.INVALID_ARGUMENT),
    # Not OUT_OF_RANGE, which would say that it may pass one day.
    Reason.PROMPT_TOO_LONG: StatusRule(grpc.StatusCode.INVALID_ARGUMENT),
    Reason.TOO_MANY_STOP_STRINGS: StatusRule(grpc.StatusCode.INVALID_ARGUMENT),
    Reason.MALFORMED_REQUEST: StatusRule(grpc.StatusCode.INVALID_ARGUMENT),
    Reason.NOT_FOUND: StatusRule(grpc.StatusCode.NOT_FOUND),
    Reason.DUPLICATE_REQUEST_ID: StatusRule(grpc.StatusCode.ALREADY_EXISTS),
    Reason.FEATURE_NOT_ENABLED: StatusRule(grpc.StatusCode.FAILED_PRECONDITION),
    Reason.UNAUTHENTICATED: StatusRule(grpc.StatusCode.UNAUTHENTICATED),
    Reason.PERMISSION_DENIED: StatusRule(grpc.StatusCode.PERMISSION_DENIED),
    Reason.TENANT_QUOTA_EXCEEDED: StatusRule(grpc.StatusCode.RESOURCE_EXHAUSTED, NEVER),
    Reason.EXCEEDS_KV_CACHE: StatusRule(grpc.StatusCode.RESOURCE_EXHAUSTED, NEVER),
    Reason.SLOW_CONSUMER: StatusRule(grpc.StatusCode.RESOURCE_EXHAUSTED, NEVER),
    Reason.RESOURCE_EXHAUSTED: StatusRule(grpc.StatusCode.RESOURCE_EXHAUSTED, NEVER),
    Reason.MODEL_LOADING: StatusRule(grpc.StatusCode.UNAVAILABLE, 500),
    Reason.QUEUE_FULL: StatusRule(grpc.StatusCode.UNAVAILABLE, 500),
    Reason.QUEUE_TIMEOUT: StatusRule(grpc.StatusCode.UNAVAILABLE, 500),
    Reason.DRAINING: StatusRule(grpc.StatusCode.UNAVAILABLE, 500),
    Reason.ENGINE_LOST: StatusRule(grpc.StatusCode.UNAVAILABLE, 5000),
    Reason.UNAVAILABLE: StatusRule(grpc.StatusCode.UNAVAILABLE, 500),
    Reason.DEADLINE_EXCEEDED: StatusRule(grpc.StatusCode.DEADLINE_EXCEEDED),
    Reason.CANCELLED: StatusRule(grpc.StatusCode.CANCELLED),
    Reason.NOT_FINITE: StatusRule(grpc.StatusCode.INTERNAL),
    Reason.INTERNAL: StatusRule(grpc.StatusCode.INTERNAL),
}


def rule_for(error: errors.PacelineError) -> StatusRule:
    """The rule of the error's reason."""
    return STATUS_RULES[error.reason]


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.PacelineError, request_id: str) -> Never:
    """End the RPC with the status of `error`. Returns by raising, as `context.abort` does.

    A status waits for what is unread before it. With a client that reads too slowly, the RPC does not: it ends within
    `UNREAD_SECONDS`, and the library keeps the status until the client has come to it, or has left.
    """
    rule = rule_for(error)
    status = status_pb2.Status(code=rule.code.value[0], message=str(error))
    for detail in _details(error, request_id):
        status.details.add().Pack(detail)
    metadata = [*rpc_status.to_status(status).trailing_metadata, (REQUEST_ID_KEY, request_id)]
    pushback = retry_ms(error)
    if pushback is not None:
        metadata.append((PUSHBACK_KEY, str(pushback)))
    try:
        async with asyncio.timeout(UNREAD_SECONDS if error.reason == Reason.SLOW_CONSUMER else None):
            await context.abort(rule.code, str(error), tuple(metadata))
    except TimeoutError:
        await context.write(b"")  # writes nothing, but raises the one error that the library takes from here on
    raise AssertionError("the RPC has been aborted")


def retry_ms(error: errors.PacelineError) -> int | None:
    """As the error itself tells, or else as its rule does."""
    retry_after: float | None = getattr(error, "retry_after", None)
    return rule_for(error).retry_ms if retry_after is None else max(1, round(1000 * retry_after))


def _details(error: errors.PacelineError, request_id: str) -> list[Message]:
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata={"request_id": request_id})
    ]
    if isinstance(error, errors.InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.QuotaExceeded):
        details.append(error_details_pb2.QuotaFailure(violations=[_quota_violation(error)]))
    if isinstance(error, errors.NotFound) and error.name:
        text = str(error)
        details.append(
            error_details_pb2.ResourceInfo(resource_type=error.kind, resource_name=error.name, description=text)
        )
    pushback = retry_ms(error)
    if pushback is not None and pushback > 0:
        delay = Duration()
        delay.FromMilliseconds(pushback)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def _quota_violation(error: errors.QuotaExceeded) -> Message:
    violation: Message = error_details_pb2.QuotaFailure.Violation(
        subject=f"tenant:{error.tenant}", description=str(error), quota_id=error.limit, quota_value=error.granted
    )
    return violation
