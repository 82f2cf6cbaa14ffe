"""Who is awake: so many at a time, in order, and nobody for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing

from paceline.core.plan import Finish, FinishReason
from paceline.engine import Delta, Stream
from paceline.engine.turns import LEAST_ROOM, MOST_AWAKE, ROUND_SECONDS, Sleeper, Turns

NUM_READERS = 3 * MOST_AWAKE


def asleep(turns: Turns, count: int = NUM_READERS) -> tuple[list[Sleeper], list[asyncio.Future[None]]]:
    readers = [Sleeper(turns) for _ in range(count)]
    return readers, [reader.sleep() for reader in readers]


def awake(sleeps: Iterable[asyncio.Future[None]]) -> list[int]:
    return [index for index, sleep in enumerate(sleeps) if sleep.done()]


async def test_so_many_are_awake_at_a_time_and_the_others_follow_in_order() -> None:
    readers, sleeps = asleep(Turns())
    for reader in readers:
        reader.wake()
    assert awake(sleeps) == list(range(MOST_AWAKE))
    for back in range(NUM_READERS - MOST_AWAKE):
        readers[back].sleep()
        woken = MOST_AWAKE + (back + 1) // LEAST_ROOM * LEAST_ROOM
        assert awake(sleeps) == list(range(woken))
    assert awake(sleeps) == list(range(NUM_READERS))


async def test_few_are_woken_at_once() -> None:
    readers, sleeps = asleep(Turns(), 3)
    for index in (2, 0):
        readers[index].wake()
    assert awake(sleeps) == [0, 2]


async def test_who_waits_for_a_turn_asks_once() -> None:
    readers, sleeps = asleep(Turns(), MOST_AWAKE + LEAST_ROOM)
    for reader in (*readers, *readers):
        reader.wake()
    for reader in readers[:LEAST_ROOM]:
        reader.leave()
    assert len(awake(sleeps)) == MOST_AWAKE + LEAST_ROOM
    again = readers[-1].sleep()
    for reader in readers[LEAST_ROOM : 2 * LEAST_ROOM]:
        reader.leave()
    assert not again.done()


async def test_who_is_awake_counts_until_the_end_of_the_next_round() -> None:
    turns = Turns()
    readers, sleeps = asleep(turns)
    for reader in readers:
        reader.wake()
    turns._next_round()
    assert len(awake(sleeps)) == MOST_AWAKE
    for reader in readers[:LEAST_ROOM]:
        reader.leave()
    assert len(awake(sleeps)) == MOST_AWAKE + LEAST_ROOM
    turns._next_round()
    assert len(awake(sleeps)) == 2 * MOST_AWAKE
    turns.check_invariants()


async def test_who_is_slow_takes_no_turn_until_it_is_quick() -> None:
    turns = Turns()
    readers, sleeps = asleep(turns)
    slow = readers[0]
    slow.wake()
    slow.woken -= 2 * ROUND_SECONDS
    sleep = slow.sleep()
    assert slow.is_slow
    for reader in readers[1:]:
        reader.wake()
    for seconds in (*LEAST_ROOM * [2 * ROUND_SECONDS], -1.0):  # that it took; the test itself takes some
        slow.wake()
        assert sleep.done()
        slow.woken -= seconds
        sleep = slow.sleep()
        assert slow.is_slow == (seconds > 0.0)
        assert awake(sleeps) == list(range(1 + MOST_AWAKE))  # nobody has less room for it, nor more behind it
    turns.check_invariants()


async def test_who_gives_up_waiting_takes_no_turn() -> None:
    readers, sleeps = asleep(Turns())
    for reader in readers:
        reader.wake()
    for sleep in sleeps[MOST_AWAKE : MOST_AWAKE + 5]:
        sleep.cancel()
    for reader in readers[:LEAST_ROOM]:
        reader.leave()
    assert awake(sleeps) == list(range(MOST_AWAKE + 5 + LEAST_ROOM))  # five of them cancelled


async def test_who_leaves_twice_is_counted_once() -> None:
    readers, sleeps = asleep(Turns())
    for reader in readers:
        reader.wake()
    for _ in range(NUM_READERS):
        readers[0].leave()
    assert awake(sleeps) == list(range(MOST_AWAKE))


async def test_a_stream_that_is_closed_gives_its_turn_back() -> None:
    """Or its place in the queue."""
    turns = Turns()
    streams = [Stream(index, 1, lambda request_id: None, 1, turns) for index in range(NUM_READERS)]
    waits = [stream.wait() for stream in streams]
    for stream in streams:
        stream.put(Delta("x", (1,), 0))
    assert awake(waits) == list(range(MOST_AWAKE))
    streams[MOST_AWAKE].close()
    for stream in streams[:LEAST_ROOM]:
        stream.close()
    assert awake(waits) == list(range(MOST_AWAKE + 1 + LEAST_ROOM))
    turns.check_invariants()


async def test_who_is_kept_awake_is_counted_no_more_and_its_return_changes_nothing() -> None:
    readers, sleeps = asleep(Turns())
    for reader in readers:
        reader.wake()
    async with asyncio.timeout(125 * ROUND_SECONDS):
        await asyncio.wait(sleeps[: 2 * MOST_AWAKE])
    for reader in readers[:MOST_AWAKE]:
        reader.leave()  # nobody waits for these any more
    assert awake(sleeps) == list(range(2 * MOST_AWAKE))
    for reader in readers[MOST_AWAKE : MOST_AWAKE + LEAST_ROOM]:
        reader.leave()
    assert awake(sleeps) == list(range(2 * MOST_AWAKE + LEAST_ROOM))


async def test_streams_whose_readers_stand_still_hold_up_nobody() -> None:
    """More of them than may be awake."""
    turns, still = Turns(), asyncio.Event()
    streams = [Stream(index, 1, lambda request_id: None, 1, turns) for index in range(NUM_READERS)]
    read: list[int] = []
    all_read = asyncio.Event()

    async def consume(stream: Stream) -> None:
        async with aclosing(stream):
            async for delta in stream:
                if stream.request_id < 2 * MOST_AWAKE:
                    await still.wait()
                else:
                    read.append(stream.request_id)
                    if len(read) % MOST_AWAKE == 0:
                        all_read.set()
                if delta.finish is not None:
                    return

    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(consume(stream))
        await asyncio.sleep(0)
        for token in range(3):
            last = token == 2
            for stream in streams:
                stream.put(Delta("x", (token,), token, Finish(FinishReason.MAX_TOKENS) if last else None))
            async with asyncio.timeout(125 * ROUND_SECONDS):
                await all_read.wait()
            all_read.clear()
        assert sorted(read) == sorted(3 * list(range(2 * MOST_AWAKE, NUM_READERS)))
        still.set()
