"""A real gRPC server around a real engine, and a client of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from paceline.client import AsyncClient
from paceline.engine import AsyncEngine
from paceline.server import GrpcServer
from paceline.wiring import EngineSettings, build_engine

PATIENCE = 60.0  # seconds after which a test that waits has failed; nothing is asserted about time


class ModelServing:
    """What a test may look at.

    Attributes:
        client: connected to the server.
        engine: behind it.
    """

    def __init__(self, client: AsyncClient, engine: AsyncEngine) -> None:
        self.client = client
        self.engine = engine
        self._num_blocks = engine.engine.scheduler.kv.num_free_blocks

    async def until_idle(self) -> None:
        """Wait until no request is live and every block is free."""
        scheduler = self.engine.engine.scheduler
        async with asyncio.timeout(PATIENCE):
            while scheduler.has_requests or scheduler.kv.num_free_blocks < self._num_blocks:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        self.engine.engine.check_invariants()


@asynccontextmanager
async def model_serving(model: str, **settings: Any) -> AsyncIterator[ModelServing]:
    """A server that runs; `settings` are further fields of `EngineSettings`."""
    wanted = EngineSettings(model=model, **{"dtype": "float32", "kv_cache_memory": 4 << 20, **settings})
    engine = AsyncEngine(await asyncio.to_thread(build_engine, wanted))
    server = GrpcServer()
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    engine.start()
    server.open(engine)
    try:
        async with AsyncClient(address) as client:
            yield ModelServing(client, engine)
    finally:
        await server.stop(0)
