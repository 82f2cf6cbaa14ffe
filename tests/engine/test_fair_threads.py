"""Calls in other threads, tenant after tenant."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from paceline.engine.fair_threads import FairThreads


class Gate:
    """Calls that say that they run, and wait there until they may go on."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self._begun = threading.Event()
        self._open = threading.Event()

    def call(self, name: str) -> str:
        self.ran.append(name)
        self._begun.set()
        assert self._open.wait(60)
        return name

    async def wait_begun(self) -> None:
        """Until the first call runs."""
        assert await asyncio.to_thread(self._begun.wait, 60)

    def open(self) -> None:
        self._open.set()


async def turns_of_the_loop() -> None:
    """So many that whoever can go on has done so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_tenants_take_turns() -> None:
    threads, gate = FairThreads(1), Gate()
    asked = [("flood", f"flood {i}") for i in range(4)] + [("calm", "calm 0"), ("calm", "calm 1"), ("late", "late 0")]
    tasks = []
    for tenant, name in asked:
        tasks.append(asyncio.create_task(threads.run(tenant, gate.call, name)))
        await turns_of_the_loop()
    gate.open()
    assert await asyncio.gather(*tasks) == [name for _, name in asked]
    assert gate.ran == ["flood 0", "flood 1", "calm 0", "late 0", "flood 2", "calm 1", "flood 3"]
    assert await threads.run("calm", gate.call, "again") == "again"


async def test_the_last_place_is_for_who_has_none() -> None:
    threads, slow, quick = FairThreads(3), Gate(), Gate()
    quick.open()
    flood = [asyncio.create_task(threads.run("flood", slow.call, f"flood {i}")) for i in range(4)]
    await slow.wait_begun()
    await turns_of_the_loop()
    for i in range(3):
        assert await threads.run("calm", quick.call, f"calm {i}") == f"calm {i}"
    slow.open()
    await asyncio.gather(*flood)
    assert len(slow.ran) == 4
    assert (threads._free, threads._taken) == (3, {})


async def test_a_call_may_raise() -> None:
    threads = FairThreads(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="invalid literal"):
            await threads.run("", int, "no number")


async def test_who_is_cancelled_leaves_no_place_taken_and_no_call_behind() -> None:
    threads, gate = FairThreads(1), Gate()
    runs = asyncio.create_task(threads.run("a", gate.call, "runs"))
    await gate.wait_begun()
    waits = [asyncio.create_task(threads.run(tenant, gate.call, f"waits {tenant}")) for tenant in "aabc"]
    await turns_of_the_loop()
    for task in (runs, waits[0], waits[2]):
        task.cancel()
    await turns_of_the_loop()
    assert gate.ran == ["runs"]  # the thread is busy, whoever still waits for it
    gate.open()
    assert await waits[1] == "waits a"
    assert await waits[3] == "waits c"
    assert gate.ran == ["runs", "waits a", "waits c"]
    assert await threads.run("a", gate.call, "again") == "again"


async def test_what_nobody_waits_for_any_more_may_fail() -> None:
    """Quietly: it is no error of the server's."""
    threads, gate, told = FairThreads(1), Gate(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    def fail() -> None:
        gate.call("fails")
        raise ValueError

    task = asyncio.create_task(threads.run("a", fail))
    await gate.wait_begun()
    task.cancel()
    await turns_of_the_loop()
    gate.open()
    assert await threads.run("a", gate.call, "again") == "again"
    del task
    gc.collect()
    assert not told


class NoThreads(ThreadPoolExecutor):
    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        raise RuntimeError("can't start new thread")


async def test_without_a_thread_no_place_is_lost() -> None:
    threads, loop = FairThreads(1), asyncio.get_running_loop()
    loop.set_default_executor(NoThreads())
    with pytest.raises(RuntimeError, match="can't start new thread"):
        await threads.run("a", int, "1")
    loop.set_default_executor(ThreadPoolExecutor())
    assert await threads.run("a", int, "1") == 1


async def test_who_is_cancelled_as_the_turn_comes_hands_it_on() -> None:
    threads, gate = FairThreads(1), Gate()
    gate.open()
    await threads._turn("a")
    left, next_one = (asyncio.create_task(threads.run("a", gate.call, name)) for name in ("left", "next"))
    await turns_of_the_loop()
    threads._leave("a")
    left.cancel()
    assert await next_one == "next"
    assert left.cancelled()
    assert gate.ran == ["next"]
    assert await threads.run("a", gate.call, "again") == "again"
