"""Async tests run on asyncio and on uvloop, and fail on a blocked loop, a leaked task or an unhandled error."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop
from blockbuster import blockbuster_ctx

# Triton's kernels run on the CPU where there is no GPU. Before they are imported.
if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests in several processes share the cores: what they compute is small. Before torch is imported, which reads it once.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

# Begun first, so that no process is left alone with one of them while all others have nothing more to do.
SLOWEST = (
    "e2e/test_sampled.py",
    "ops/test_instruction_sets.py",
    "e2e/test_device_runner.py",
    "ops/test_triton_compiles.py",
    "loadtest/test_random_load.py",
    "speculation/test_draft_model.py",
    "server/test_fuzz.py",
    "e2e/test_seeds.py",
)
LEAK_SECONDS = 2.0  # a task that ends within this, unasked, was only late


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """A test that needs only one: `@pytest.mark.asyncio(loop_factories=["uvloop"])`."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Where engines are built, quickly: tests of the scheduler alone import no torch."""
    if "paceline.wiring" in sys.modules:
        importlib.import_module("support.quick_start")


@pytest.fixture(autouse=True)
def _guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Costs synchronous tests nothing."""
    if request.node.get_closest_marker("asyncio") is None:
        yield
        return
    request.getfixturevalue("_clean_loop")
    # Only blocking calls made by our own code count.
    with blockbuster_ctx("paceline") as detector:
        # grpc joins its poller when the last of its objects is garbage, which may be found under any call of ours.
        detector.functions["threading.Lock.acquire"].can_block_in("threading.py", "join")
        # The blocking client, closed on a loop by a test, waits a moment for its poller to see that a call has ended.
        detector.functions["threading.Lock.acquire"].can_block_in("paceline/client/sync.py", "close")
        yield


@pytest_asyncio.fixture
async def _clean_loop() -> AsyncIterator[None]:
    """Set up before every other fixture, and so torn down after them."""
    errors: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: errors.append(context))
    loop.slow_callback_duration = math.inf  # else a machine that stood still is in what tests find logged
    yield
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        _, leaked = await asyncio.wait(tasks, timeout=LEAK_SECONDS)
        assert not leaked, f"leaked tasks: {leaked}"
    if "grpc" in sys.modules:  # not worth an import to tests that know nothing of it
        from support.completions import hand_out_completions

        await hand_out_completions()
    assert not errors, f"unhandled errors: {errors}"
