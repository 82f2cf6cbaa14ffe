"""How a server says it is."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from grpc_health.v1 import health_pb2

from paceline.client.question import Question
from paceline.client.request import build_named


class HealthStatus(StrEnum):
    """What a server says about itself."""

    UNKNOWN = "unknown"
    SERVING = "serving"
    NOT_SERVING = "not_serving"


_STATUSES: Final = {
    health_pb2.HealthCheckResponse.SERVING: HealthStatus.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING: HealthStatus.NOT_SERVING,
}


def ask_health(service: str) -> Question[HealthStatus]:
    """Ask for the health of a service by its full name; "" is the whole server."""
    return Question(
        "/grpc.health.v1.Health/Check",
        build_named(health_pb2.HealthCheckRequest(), service=service),
        health_pb2.HealthCheckResponse,
        lambda answer: _STATUSES.get(answer.status, HealthStatus.UNKNOWN),
    )
