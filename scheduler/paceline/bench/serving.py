"""The same streams offline and over gRPC, in turns: what the event loop, gRPC and detokenisation cost a forward.

One engine and one forward thread for both. The client is another process on the same cores, as a load generator is.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import uvloop
from rich.progress import track
from rich.table import Table

from paceline.bench.console import console
from paceline.bench.prompts import encode
from paceline.bench.ratio import median_ratio
from paceline.bench.throughput import run
from paceline.client import AsyncClient
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.engine import IDLE_SECONDS, AsyncEngine, Engine, forward_worker
from paceline.server.app import GrpcServer

GREEDY = SamplingParams(temperature=0.0)
OFFLINE = "offline"
LAGS = {"served": 0, "served, lag 1": 1}
Prompts = Sequence[tuple[int, ...]]


@dataclass(slots=True)
class ServingTimes:
    """Seconds of whole runs by round, of each way to serve the streams."""

    streams: int
    depth: str
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in (OFFLINE, *LAGS)})

    def ratio(self, way: str) -> float:
        """Median over rounds of the time offline over the time served: 1 if serving costs nothing."""
        return median_ratio(self.seconds[OFFLINE], self.seconds[way])


def measure(
    build: Callable[[], Engine],
    prompts: Sequence[str | tuple[int, ...]],
    sizes: Sequence[int],
    depths: dict[str, SpeculationParams],
    max_tokens: int,
    rounds: int,
) -> list[ServingTimes]:
    """Whole runs of greedy streams that all begin together. `build` is called in the thread that runs forwards."""
    return uvloop.run(_measure(build, prompts, sizes, depths, max_tokens, rounds))


async def _measure(
    build: Callable[[], Engine],
    prompts: Sequence[str | tuple[int, ...]],
    sizes: Sequence[int],
    depths: dict[str, SpeculationParams],
    max_tokens: int,
    rounds: int,
) -> list[ServingTimes]:
    loop = asyncio.get_running_loop()
    # Before gRPC starts, whose threads do not like a fork.
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline.bench.serving", stdin=PIPE, stdout=PIPE
    )
    worker = forward_worker()
    engine = await loop.run_in_executor(worker, build)
    encoded = encode(engine, prompts)
    served = AsyncEngine(engine, worker=worker)
    served.start()
    server = GrpcServer()
    port = server.bind("127.0.0.1", 0)
    await server.start()
    server.open(served)
    assert client.stdin is not None
    client.stdin.write(f"127.0.0.1:{port}\n".encode())
    measured = [ServingTimes(size, name) for size in sizes for name in depths]
    try:
        for number in track(range(-1, rounds), description="measuring"):
            for times in measured:
                streams = [encoded[i % len(encoded)] for i in range(times.streams)]
                for way, seconds in times.seconds.items():
                    bounds = depths[times.depth]
                    if way == OFFLINE:
                        taken = await _offline(worker, engine, streams, max_tokens, bounds)
                    else:
                        served.lag = LAGS[way]
                        taken = await _over_grpc(client, streams, max_tokens, bounds)
                    if number >= 0:
                        seconds.append(taken)
    finally:
        client.terminate()
        await client.wait()
        await server.stop(0)
    return measured


async def _offline(
    worker: ThreadPoolExecutor, engine: Engine, prompts: Prompts, max_tokens: int, bounds: SpeculationParams
) -> float:
    await asyncio.sleep(IDLE_SECONDS + 0.2)  # the server checks its books, then touches the engine no more
    loop = asyncio.get_running_loop()
    seconds, _ = await loop.run_in_executor(worker, run, engine, prompts, max_tokens, bounds, GREEDY)
    return seconds


async def _over_grpc(
    client: asyncio.subprocess.Process, prompts: Prompts, max_tokens: int, bounds: SpeculationParams
) -> float:
    assert client.stdin is not None
    assert client.stdout is not None
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    if bounds.method is Method.NONE:
        options["speculation"] = "off"
    else:
        options |= {"min_draft_tokens": bounds.min_depth, "max_draft_tokens": bounds.max_depth}
    request = {"prompts": list(prompts), "options": options}
    client.stdin.write(json.dumps(request).encode() + b"\n")
    return float(await client.stdout.readline())


def render(measured: list[ServingTimes], title: str) -> None:
    table = Table(title=title)
    for name in ("streams", "depth", OFFLINE + " s", *(f"{way}, x {OFFLINE}" for way in LAGS)):
        table.add_column(name, justify="right")
    for times in measured:
        ratios = (f"{times.ratio(way):.3f}" for way in LAGS)
        table.add_row(str(times.streams), times.depth, f"{median(times.seconds[OFFLINE]):.2f}", *ratios)
    console().print(table)


# -- the client's process ----------------------------------------------------------------------------------------------


async def _answer() -> None:
    """Run each request from stdin, one JSON object a line behind that of the address, and print the seconds it took."""
    async with AsyncClient(sys.stdin.readline().strip()) as client:
        for line in iter(sys.stdin.readline, ""):
            request = json.loads(line)
            began = time.perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for prompt in request["prompts"]:
                    tasks.create_task(_complete(client, prompt, request["options"]))
            print(time.perf_counter() - began, flush=True)


async def _complete(client: AsyncClient, prompt: list[int], options: dict[str, Any]) -> None:
    async for _ in client.generate(prompt, **options):
        pass


if __name__ == "__main__":
    uvloop.run(_answer())
