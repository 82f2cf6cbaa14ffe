"""The gRPC server from its port to its end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.config_file import TenantsFile
from paceline.engine import AsyncEngine, Engine, forward_worker
from paceline.errors import EngineDead, PacelineError
from paceline.garbage import collect_rarely
from paceline.server.admin_service import ADMIN_SERVICE, AdminService
from paceline.server.auth import KeyGate
from paceline.server.calls import Calls, Gate, OpenGate
from paceline.server.generation import GENERATE_MANY, SERVICE_NAME, GenerationService
from paceline.server.health import Health
from paceline.server.live import LiveGenerations
from paceline.server.logs import log_access
from paceline.server.metrics import Metrics
from paceline.server.metrics_endpoint import MetricsEndpoint
from paceline.server.model_service import MODEL_SERVICE, ModelService
from paceline.server.settings import ServerSettings
from paceline.server.tenants import ServedTenants
from paceline.server.tls import TlsFiles
from paceline.server.watch import ReaderBounds
from paceline.v1 import admin_pb2_grpc, generation_pb2_grpc, model_pb2_grpc

logger = logging.getLogger(__name__)

OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # A second server on the same port is a mistake; by default it would take a share of the connections in silence.
    ("grpc.so_reuseport", 0),
    # Admission is the scheduler's. The default of 1000 drops a burst's streams at random, as CANCELLED.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
    # A burst of a thousand more would be refused by the transport, which cannot say when to come again.
    ("grpc.max_concurrent_streams", 8192),
    # Both: above the first alone, gRPC would refuse by chance, up to a quarter more.
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    # The window of a stream would grow to hundreds of megabytes, for whoever keeps sending, and what nobody reads lies
    # in memory. A message that is read has a window of its size.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # So that load balancers get to move clients; streams in flight may end on the old connection.
    ("grpc.max_connection_age_ms", 30 * 60_000),
)
# What health and reflection tell of, besides themselves.
SERVICES: Final = (SERVICE_NAME, MODEL_SERVICE, ADMIN_SERVICE)
HEALTH_NAME: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
# What handlers get, in seconds, to send their last message once the engine has nothing more to say.
FLUSH_SECONDS: Final = 2.0
# A message of up to so many times --max-message-size is refused by us, and alone: others on its stream live on. What is
# larger the library refuses, unread, and with it the RPC.
MESSAGE_FACTOR: Final = 4
MOST_BYTES: Final = (1 << 31) - 1  # that the library lets be said
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class GrpcServer:
    """All services on one port, and metrics on another. To be made on the event loop that runs it.

    Health and reflection answer from `start` on; all others say that the model is loading, until `open`.

    Args:
        gate: who may call what; by default everybody everything.
        settings: which services there are, and what a connection may do.
        bounds: of what may wait for a client to read it.

    Attributes:
        calls: what every RPC goes through.
        live: the generations that have not ended.
        metrics_port: where metrics are served, once it has started; None: nowhere.
    """

    def __init__(
        self,
        gate: Gate | None = None,
        settings: ServerSettings | None = None,
        bounds: ReaderBounds = ReaderBounds(),
    ) -> None:
        settings = settings or ServerSettings()
        self._engine: AsyncEngine | None = None
        self.live = LiveGenerations()
        self._drains: set[asyncio.Task[tuple[int, int]]] = set()
        self.metrics_port: int | None = None
        self._service = GenerationService(self.live, bounds, settings.max_message_size)
        self._models = ModelService()
        self._admin = AdminService(self.live, self.drain)
        self._health = Health(SERVICES)
        self.calls = Calls(gate or OpenGate(), settings.max_message_size, [log_access], outliving={GENERATE_MANY})
        self._metrics = Metrics()
        self._endpoint = MetricsEndpoint(self._metrics.render)
        self._metrics_address = (settings.metrics_host, settings.metrics_port)
        self._server = grpc.aio.server(interceptors=[self.calls], options=_options(settings))
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._service, self._server)  # type: ignore[no-untyped-call]
        model_pb2_grpc.add_ModelServiceServicer_to_server(self._models, self._server)  # type: ignore[no-untyped-call]
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, self._server)  # type: ignore[no-untyped-call]
        names = [*SERVICES]
        if settings.health:
            names.append(HEALTH_NAME)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if settings.reflection:
            names.append(reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)

    def bind(self, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
        """Take the port and return it; 0 takes a free one.

        Args:
            credentials: for TLS; without any, plaintext.

        Raises:
            PacelineError: the address cannot be had.
        """
        address = join_address(host, port)
        try:
            if credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise PacelineError(f"cannot listen on {address}: in use, not allowed, or not this machine's") from error

    async def start(self) -> None:
        """Answer: health with NOT_SERVING, generation with UNAVAILABLE. Raises PacelineError: no port for metrics."""
        host, port = self._metrics_address
        if port is not None:
            self.calls.observers.append(self._metrics.observe_rpc)
            self.metrics_port = await self._endpoint.start(host, port)
            logger.info("metrics on http://%s/metrics", join_address(host, self.metrics_port))
        await self._server.start()

    def open(self, engine: AsyncEngine) -> None:
        """Serve `engine`, which has started. Stops being healthy when it dies."""
        self._engine = engine
        engine.on_death.append(lambda error: self._health.set_serving(False))
        self._service.open(engine)
        self._models.open(engine)
        self._admin.open(engine)
        if self.metrics_port is not None:
            self._metrics.open(engine)
        self.live.on_end.append(lambda live, code: engine.engine.usage.of(live.tenant).outcomes.update([code.name]))
        self._health.set_serving(engine.healthy)

    async def drain(self, grace: float | None) -> tuple[int, int]:
        """Turn unhealthy and refuse new requests; live ones have `grace` seconds to end, or for ever.

        Returns:
            How many ended by themselves, and how many were failed.
        """
        assert self._engine is not None, "nothing is served yet"
        self._health.set_serving(False)
        self._service.close()
        # Whoever waits for it may leave: those that live have their grace all the same, and no more.
        draining = asyncio.create_task(self._engine.drain(grace))
        self._drains.add(draining)
        draining.add_done_callback(self._drains.discard)
        return await asyncio.shield(draining)

    async def stop(self, grace: float) -> None:
        """Turn unhealthy, let live requests end for `grace` seconds, then end everything, the engine too."""
        self._health.set_serving(False)
        self._service.close()
        clock = asyncio.get_running_loop().time
        deadline = clock() + grace
        if self._engine is not None:
            await self._engine.drain(grace)
        self._health.close()
        # What is left of the grace belongs to readers who have not caught up, not to streams that never end.
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline - FLUSH_SECONDS):
                await self._service.wait_ended()
        await self._server.stop(FLUSH_SECONDS)
        if self._engine is not None:
            await self._engine.stop()
        await self._endpoint.stop()
        self._metrics.close()


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def run_server(build: Callable[[TenantsFile], Engine], settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT, then stop gracefully. SIGHUP reads the tenants file and the TLS files again.

    A second signal kills, and so does one that comes before there is anything to stop.

    Args:
        build: makes the engine, ready to serve, with what the tenants file grants; called in the forward's thread,
            once the port is taken.

    Raises:
        EngineDead: the engine failed while serving.
        PacelineError: a setting is not allowed, the port cannot be had, or whatever `build` raises.
    """
    _let_signals_kill()
    uvloop.run(_serve(build, settings))


async def _serve(build: Callable[[TenantsFile], Engine], settings: ServerSettings) -> None:
    gate = KeyGate()
    tenants = ServedTenants(settings.tenants, gate)
    settings.check_exposure(gate.is_open)
    tls = _tls(settings)
    server = GrpcServer(gate, settings)
    port = server.bind(settings.host, settings.port, None if tls is None else tls.credentials())
    await server.start()
    hangup = _on_hangup(settings)
    worker = forward_worker()
    try:
        built = await asyncio.get_running_loop().run_in_executor(worker, build, tenants.file)
        engine = AsyncEngine(built, worker=worker)
        tenants.open(engine)
    except BaseException:
        worker.shutdown(wait=False)
        await server.stop(0)
        raise
    collect_rarely()
    engine.start()
    end: asyncio.Future[EngineDead | None] = asyncio.get_running_loop().create_future()
    engine.on_death.append(lambda error: _resolve(end, error))
    server.open(engine)
    _on_stop_signal(lambda: _resolve(end, None))
    print(f"serving on {join_address(settings.host, port)}", flush=True)
    async with _reloading(hangup, tenants, tls):
        death = await end
    logger.info("stopping; live requests have %g s to end", settings.grace)
    await server.stop(settings.grace)
    if death is not None:
        raise death


def _tls(settings: ServerSettings) -> TlsFiles | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return TlsFiles(settings.tls_cert, settings.tls_key, settings.client_ca)


def _options(settings: ServerSettings) -> list[tuple[str, int]]:
    silence = round(settings.keepalive * 1000)
    return [
        *OPTIONS,
        ("grpc.max_receive_message_length", min(MESSAGE_FACTOR * settings.max_message_size, MOST_BYTES)),
        # A peer that hangs is noticed only with both timeouts: keep-alive alone does not do it.
        ("grpc.keepalive_time_ms", silence),
        ("grpc.keepalive_timeout_ms", silence // 2),
        ("grpc.http2.ping_timeout_ms", silence // 2),
    ]


def _on_hangup(settings: ServerSettings) -> asyncio.Event:
    """Set by SIGHUP, which goes on to kill a server that has nothing to read again: its terminal has been closed."""
    hangup = asyncio.Event()
    if settings.tenants is not None or settings.tls_cert is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
    return hangup


@asynccontextmanager
async def _reloading(hangup: asyncio.Event, tenants: ServedTenants, tls: TlsFiles | None) -> AsyncIterator[None]:
    """Read files again, at each hang-up; one that came before is not forgotten."""

    async def reload() -> None:
        while True:
            await hangup.wait()
            hangup.clear()
            try:
                await tenants.reload()
                if tls is not None:
                    await asyncio.to_thread(tls.reload)
            except Exception:
                logger.exception("reading files again failed; the next hang-up tries once more")

    task = asyncio.create_task(reload(), name="paceline-reload")
    try:
        yield
    finally:
        task.cancel()


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
