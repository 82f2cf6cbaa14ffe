"""The mailbox: merging, one end, and nobody waits for a slow reader."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from paceline.core.params import Method
from paceline.core.plan import Finish, FinishReason
from paceline.core.request import RequestStats
from paceline.engine import Delta, Stream
from paceline.errors import Cancelled, EngineDead

FINISH = Finish(FinishReason.MAX_TOKENS)
STATS = RequestStats(3, 5, Method.NONE, 4, 0, 0, 0, (), 1.0, 0, 0.0, 0.0, 0.0)


def make_stream() -> tuple[Stream, list[int]]:
    abandoned: list[int] = []
    return Stream(7, 3, abandoned.append), abandoned


async def test_what_waits_is_merged_into_one_delta() -> None:
    stream, abandoned = make_stream()
    for index in range(4):
        stream.put(Delta(f"{index}", (index,), index))
    reader = aiter(stream)
    assert await anext(reader) == Delta("0123", (0, 1, 2, 3), 0)
    stream.put(Delta("4", (4, 5), 4))
    stream.put(Delta("5", (), 6, FINISH, STATS))
    assert await anext(reader) == Delta("45", (4, 5), 4, FINISH, STATS)
    assert [delta async for delta in reader] == []
    assert abandoned == []


async def test_a_slow_reader_costs_one_message_however_late_it_comes() -> None:
    stream, _ = make_stream()
    for index in range(1000):
        stream.put(Delta("x", (index,), index))
    stream.put(Delta("", (1000,), 1000, FINISH, STATS))
    deltas = [delta async for delta in stream]
    assert len(deltas) == 1
    assert deltas[0].token_ids == tuple(range(1001))
    assert deltas[0].text == "x" * 1000


async def test_a_waiting_reader_gets_each_delta() -> None:
    stream, _ = make_stream()
    deltas: list[Delta] = []

    async def read() -> None:
        async for delta in stream:
            deltas.append(delta)

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        for index in range(3):
            stream.put(Delta("x", (index,), index, *((FINISH, STATS) if index == 2 else ())))
            for _ in range(3):
                await asyncio.sleep(0)
    assert [delta.token_ids for delta in deltas] == [(0,), (1,), (2,)]


async def test_an_error_comes_once_behind_what_came_before_it() -> None:
    stream, abandoned = make_stream()
    stream.put(Delta("a", (1,), 0))
    stream.fail(EngineDead("dead"))
    stream.fail(Cancelled("too late to matter"))
    reader = aiter(stream)
    assert (await anext(reader)).text == "a"
    with pytest.raises(EngineDead):
        await anext(reader)
    assert [delta async for delta in stream] == []
    assert abandoned == []


async def test_a_finished_stream_does_not_fail() -> None:
    stream, _ = make_stream()
    stream.put(Delta("a", (1,), 0, FINISH, STATS))
    stream.fail(EngineDead("dead"))
    assert [delta.finish async for delta in stream] == [FINISH]


async def test_nothing_comes_after_the_end() -> None:
    stream, _ = make_stream()
    stream.put(Delta("a", (1,), 0, FINISH, STATS))
    with pytest.raises(AssertionError):
        stream.put(Delta("b", (2,), 1))


@pytest.mark.parametrize("reads", [False, True])
async def test_a_gap_is_noticed(reads: bool) -> None:
    stream, _ = make_stream()
    stream.put(Delta("a", (1,), 0))
    reader = aiter(stream)
    if reads:
        await anext(reader)
    with pytest.raises(AssertionError):
        stream.put(Delta("b", (3,), 2))


async def test_closing_aborts_once() -> None:
    stream, abandoned = make_stream()
    async with aclosing(stream):
        stream.put(Delta("a", (1,), 0))
        async for _ in stream:
            break
    assert abandoned[:1] == [7]
    assert [delta async for delta in stream] == []


async def test_leaving_the_loop_aborts_within_a_turn_of_the_event_loop() -> None:
    stream, abandoned = make_stream()
    stream.put(Delta("a", (1,), 0))
    async for _ in stream:
        break
    for _ in range(3):
        await asyncio.sleep(0)
    assert abandoned == [7]


async def test_cancelling_the_reader_aborts() -> None:
    stream, abandoned = make_stream()

    async def read() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert abandoned == [7]


async def test_closing_wakes_a_waiting_reader() -> None:
    stream, _ = make_stream()

    async def read() -> list[Delta]:
        return [delta async for delta in stream]

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    await stream.aclose()
    assert await task == []
