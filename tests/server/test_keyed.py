"""Whose turn it is in the next message of a `GenerateMany`."""

from __future__ import annotations

import asyncio

import pytest

from paceline.engine import Delta, Stream
from paceline.errors import Cancelled
from paceline.server.delivery import Delivery
from paceline.server.keyed import FULL, Batch, Keyed, Ready
from paceline.v1 import generation_pb2 as pb


@pytest.fixture
async def ready() -> Ready:
    return Ready(asyncio.Event())


def generation(key: int, ready: Ready) -> tuple[Keyed, Stream]:
    keyed, stream = Keyed(key, ready), Stream(key, 5, lambda request_id: None)
    keyed.delivery = Delivery(stream, pb.Started(), pb.OUTPUT_CONTENT_TEXT)
    stream.listen(keyed)
    return keyed, stream


def collect(ready: Ready) -> tuple[list[int], list[int]]:
    """The keys of the next message, and of the generations that end with it."""
    batch = Batch()
    ended = [keyed.key for keyed in ready.collect(batch)]
    return [response.key for response in batch.message.responses], ended


async def test_what_does_not_fit_goes_first_in_the_next_message(ready: Ready) -> None:
    streams = [generation(key, ready)[1] for key in range(4)]
    for stream in streams[:3]:
        stream.put(Delta("x" * FULL, (1,), 0))
    assert collect(ready) == ([0], [])
    streams[3].put(Delta("x" * FULL, (1,), 0))
    streams[0].put(Delta("y", (2,), 1))
    streams[1].put(Delta("y", (2,), 1))  # told again: still there once
    assert [collect(ready)[0] for _ in range(4)] == [[1], [2], [3], [0]]
    assert len(ready) == 0


async def test_the_writer_is_woken_by_the_first_that_has_something() -> None:
    wake = asyncio.Event()
    ready = Ready(wake)
    first, second = (generation(key, ready)[1] for key in range(2))
    first.put(Delta("a", (1,), 0))
    assert wake.is_set()
    wake.clear()
    second.put(Delta("a", (1,), 0))
    assert not wake.is_set()
    assert collect(ready) == ([0, 1], [])
    second.put(Delta("b", (2,), 1))
    assert wake.is_set()


async def test_one_that_fails_before_it_has_begun(ready: Ready) -> None:
    keyed = Keyed(7, ready)
    keyed.error = Cancelled("the client has cancelled the generation")
    keyed.wake()
    keyed.wake()
    assert collect(ready) == ([7], [7])
    assert collect(ready) == ([], [])


async def test_nothing_follows_a_last_word(ready: Ready) -> None:
    """The engine may come upon the stream once more before it is closed: its key may be another's by then."""
    keyed, stream = generation(7, ready)
    keyed.error = Cancelled("the client has cancelled the generation")
    keyed.wake()
    assert collect(ready) == ([7], [7])
    stream.put(Delta("a", (1,), 0))
    keyed.wake()
    assert keyed.is_over
    assert collect(ready) == ([], [])
