"""The gRPC server from its port to its end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Final

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.engine import AsyncEngine, Engine, forward_worker
from paceline.errors import EngineDead, PacelineError
from paceline.server.calls import Calls, Gate, OpenGate
from paceline.server.generation import SERVICE_NAME, GenerationService
from paceline.server.health import Health
from paceline.server.live import LiveGenerations
from paceline.v1 import generation_pb2_grpc

logger = logging.getLogger(__name__)

OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # A second server on the same port is a mistake; by default it would take a share of the connections in silence.
    ("grpc.so_reuseport", 0),
    # Admission is the scheduler's. The default of 1000 drops a burst's streams at random, as CANCELLED.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
    ("grpc.max_concurrent_streams", 4096),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_metadata_size", 16 << 10),
    # A peer that hangs is noticed only with both timeouts: keep-alive alone does not do it.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # So that load balancers get to move clients; streams in flight may end on the old connection.
    ("grpc.max_connection_age_ms", 30 * 60_000),
)
# What handlers get, in seconds, to send their last message once the engine has nothing more to say.
FLUSH_SECONDS: Final = 2.0
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class GrpcServer:
    """Generation, health and reflection on one port. To be made on the event loop that runs it.

    Answers from `start` on; generates from `open` on, and health says so.

    Args:
        gate: who may call what; by default everybody everything.

    Attributes:
        live: the generations that have not ended.
    """

    def __init__(self, gate: Gate | None = None) -> None:
        self._engine: AsyncEngine | None = None
        self.live = LiveGenerations()
        self._service = GenerationService(self.live)
        self._health = Health([SERVICE_NAME])
        self._calls = Calls(gate or OpenGate())
        self._server = grpc.aio.server(interceptors=[self._calls], options=OPTIONS)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._service, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def bind(self, host: str, port: int) -> int:
        """Take the port and return it; 0 takes a free one.

        Raises:
            PacelineError: the address cannot be had.
        """
        address = join_address(host, port)
        try:
            return self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise PacelineError(f"cannot listen on {address}: in use, not allowed, or not this machine's") from error

    async def start(self) -> None:
        """Answer: health with NOT_SERVING, generation with UNAVAILABLE."""
        await self._server.start()

    def open(self, engine: AsyncEngine) -> None:
        """Serve `engine`, which has started. Stops being healthy when it dies."""
        self._engine = engine
        engine.on_death.append(lambda error: self._health.set_serving(False))
        self._service.open(engine)
        self._health.set_serving(engine.healthy)

    async def stop(self, grace: float) -> None:
        """Turn unhealthy, let live requests end for `grace` seconds, then end everything, the engine too."""
        self._health.set_serving(False)
        clock = asyncio.get_running_loop().time
        deadline = clock() + grace
        if self._engine is not None:
            await self._engine.drain(grace)
        self._health.close()
        # What is left of the grace belongs to readers who have not caught up; without any, this returns at once.
        await self._server.stop(max(FLUSH_SECONDS, deadline - clock()))
        if self._engine is not None:
            await self._engine.stop()


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def run_server(build: Callable[[], Engine], host: str, port: int, grace: float) -> None:
    """Serve until SIGTERM or SIGINT, then stop gracefully.

    A second signal kills, and so does one that comes before there is anything to stop.

    Args:
        build: makes the engine, ready to serve; called in the forward's thread, once the port is taken.
        grace: seconds that live requests get to end.

    Raises:
        EngineDead: the engine failed while serving.
        PacelineError: the port cannot be had, or whatever `build` raises.
    """
    _let_signals_kill()
    uvloop.run(_serve(build, host, port, grace))


async def _serve(build: Callable[[], Engine], host: str, port: int, grace: float) -> None:
    server = GrpcServer()
    port = server.bind(host, port)
    await server.start()
    worker = forward_worker()
    try:
        engine = AsyncEngine(await asyncio.get_running_loop().run_in_executor(worker, build), worker=worker)
    except BaseException:
        worker.shutdown(wait=False)
        await server.stop(0)
        raise
    engine.start()
    end: asyncio.Future[EngineDead | None] = asyncio.get_running_loop().create_future()
    engine.on_death.append(lambda error: _resolve(end, error))
    server.open(engine)
    _on_stop_signal(lambda: _resolve(end, None))
    print(f"serving on {join_address(host, port)}", flush=True)
    death = await end
    logger.info("stopping; live requests have %g s to end", grace)
    await server.stop(grace)
    if death is not None:
        raise death


def _resolve(end: asyncio.Future[EngineDead | None], death: EngineDead | None) -> None:
    if not end.done():
        end.set_result(death)


def _let_signals_kill() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _on_stop_signal(callback: Callable[[], None]) -> None:
    """Call back on the first of the stop signals; the one after it kills."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
        _let_signals_kill()
        callback()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
