"""Thousands of RPCs at once: each gets an answer of ours, and those that find no room are told when to come again."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import pytest

from support.serving import Serving, request
from support.serving import serving as serving_context

OPENS = 5000  # with its defaults, the library drops most of these


async def outcome(served: Serving, number: int) -> str:
    try:
        async for _ in served.stub.Generate(request(f"prompt {number}", max_tokens=1)):
            pass
    except grpc.aio.AioRpcError as error:
        told = dict(error.trailing_metadata() or ())
        return f"{error.code().name}, {'with' if int(told.get('grpc-retry-pushback-ms', 0)) > 0 else 'no'} pushback"
    return "OK"


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_nobody_is_dropped() -> None:
    asyncio.get_running_loop().set_debug(False)  # it notes where each of the tasks and futures was made
    async with serving_context(max_queued=500) as served:
        calls = [asyncio.create_task(outcome(served, number)) for number in range(OPENS)]
        await served.until(lambda: any(call.done() for call in calls))  # refused
        served.runner.open()
        outcomes = Counter(await asyncio.gather(*calls))
        await served.until(lambda: served.idle)
    assert outcomes.keys() == {"OK", "UNAVAILABLE, with pushback"}
    assert outcomes["OK"] >= 500
