"""`grpc.health.v1` for the server and its services, which share one status."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.errors import NotFound, brief

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class Health(health_pb2_grpc.HealthServicer):
    """Not serving until told otherwise.

    Ours, because grpcio's forgets every watcher of a service as soon as one of them leaves.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset({"", *services})
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Change the status and tell every watcher."""
        self._serving = serving
        self._wake()

    def close(self) -> None:
        """End every watch, so that no watcher holds up a graceful stop."""
        self._closed = True
        self._wake()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            # Cut short: whoever asks needs no credential, and headers have a limit.
            name = request.service[:80]
            raise NotFound(f"no service {brief(request.service)} here", kind="service", name=name)
        return self._response(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        last = None
        while True:
            changed = self._changed  # before the status is read, so that no change is missed
            response = self._response(request.service)
            if response != last:
                await context.write(response)
                last = response
            if self._closed:
                return
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _response(self, service: str) -> health_pb2.HealthCheckResponse:
        kinds = health_pb2.HealthCheckResponse
        if service not in self._services:
            return kinds(status=kinds.SERVICE_UNKNOWN)
        return kinds(status=kinds.SERVING if self._serving else kinds.NOT_SERVING)
