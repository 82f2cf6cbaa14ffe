"""A thousand clients come and go at random, in every way that there is, and leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from paceline.engine.stream import Stream
from paceline.server.calls import Call
from paceline.sim import reference_output
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc
from support.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, call_headers, frame, hpack, prefixed, raw_connection
from support.serving import Serving, request

CLIENTS: Final = 1000
AT_ONCE: Final = 20
LONG: Final = 1500  # tokens: who leaves does so long before the end
DESCRIPTORS: Final = Path("/proc/self/fd")


class Client:
    """One of many, with a way to leave that is drawn for it.

    Args:
        number: makes its request id, and all that is random about it.
    """

    def __init__(self, served: Serving, number: int) -> None:
        self.served = served
        self.random = random.Random(number)
        self.request_id = f"client-{number}"
        self.text = f"client {number}"
        self.message = request(self.text, LONG, request_id=self.request_id, n=self.random.choice([1, 1, 1, 3]))
        self.message.output.content = pb.OUTPUT_CONTENT_TOKEN_IDS

    async def run(self) -> str:
        """Come, and go. Says which way it went."""
        ways: list[Callable[[], Awaitable[None]]] = [
            self.reads, self.cancels, self.cancels_at_once, self.has_no_time, self.hangs_up, self.dies,
        ]  # fmt: skip
        way = self.random.choice(ways)
        await way()
        return way.__name__

    async def reads(self) -> None:
        self.message.stop.max_tokens = self.random.randrange(1, 200)
        self.message.output.final_only = self.random.random() < 0.3
        token_ids = [
            token_id
            async for response in self.served.stub.Generate(self.message)
            if response.choice == 0
            for token_id in response.token_ids
        ]
        assert token_ids == reference_output(self.text.encode(), self.message.stop.max_tokens)

    async def cancels(self) -> None:
        call = self.served.stub.Generate(self.message)
        await self.read_some(call)
        call.cancel()

    async def cancels_at_once(self) -> None:
        self.message.output.final_only = self.random.random() < 0.3
        call = self.served.stub.Generate(self.message)
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)
        call.cancel()

    async def has_no_time(self) -> None:
        call = self.served.stub.Generate(self.message, timeout=self.random.uniform(0.0, 0.05))
        with suppress(grpc.aio.AioRpcError):
            await self.read_some(call, most=1000)
        call.cancel()
        assert await call.code() in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)

    async def hangs_up(self) -> None:
        """With all that it has on that channel."""
        async with grpc.aio.insecure_channel(
            self.served.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as own:
            stub = generation_pb2_grpc.GenerationServiceStub(own)
            call = stub.Generate(self.message)
            other = stub.Generate(request("the other one", LONG, request_id=f"{self.request_id}-too"))
            await self.read_some(call)
            await self.read_some(other)

    async def dies(self) -> None:
        """As a process does that is killed."""
        sent = frame(HEADERS, END_HEADERS, 1, hpack(call_headers()))
        sent += frame(DATA, END_STREAM, 1, prefixed(self.message.SerializeToString()))
        async with raw_connection(self.served.address) as connection:
            await connection.begin()
            await connection.send(sent)
            for _ in range(self.random.randrange(4)):
                await connection.reader.read(1 << 12)
            connection.reset()

    async def read_some(self, call: grpc.aio.UnaryStreamCall[Any, Any], most: int = 8) -> None:
        for _ in range(self.random.randrange(most)):
            if await call.read() is grpc.aio.EOF:
                return


class Ends:
    """Counts how often each RPC has ended, and keeps the streams of the engine."""

    def __init__(self, served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.begun: list[Stream] = []
        self.long: list[Stream] = []  # of these, those that nobody reads to the end
        served.server.calls.observers.append(self.observe)
        submit = served.engine.submit

        async def kept(wanted: Any) -> Stream:
            stream = await submit(wanted)
            self.begun.append(stream)
            if wanted.stop.max_tokens == LONG:
                self.long.append(stream)
            return stream

        monkeypatch.setattr(served.engine, "submit", kept)

    def observe(self, call: Call, code: grpc.StatusCode, seconds: float) -> None:
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED), code
        self.calls[call.request_id] += 1


def num_descriptors() -> int:
    gc.collect()  # channels that were closed keep their sockets until then, and that is the clients' side
    return len(os.listdir(DESCRIPTORS)) if DESCRIPTORS.exists() else 0


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("seed", [1])
async def test_a_thousand_that_leave_at_random(free: Serving, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(free, monkeypatch)
    for number in range(AT_ONCE):  # whatever is opened once and kept, is open now
        await Client(free, number).run()
    await free.until(lambda: free.idle and not len(free.server.live))
    before = num_descriptors()
    tasks = len(asyncio.all_tasks())

    turn = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> str:
        async with turn:
            return await Client(free, number).run()

    numbers = range(seed * CLIENTS, (seed + 1) * CLIENTS)
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(number)) for number in numbers]
    ways = Counter(task.result() for task in running)
    assert len(ways) == 6
    assert min(ways.values()) > CLIENTS / 12

    free.runner.close()  # so that nothing that was forgotten ends by itself
    await free.until(lambda: free.idle and not len(free.server.live))
    assert free.engine.num_live == 0
    free.engine.engine.check_invariants()
    await free.until(lambda: len(asyncio.all_tasks()) <= tasks)
    await free.until(lambda: num_descriptors() <= before)
    assert set(ends.calls.values()) == {1}
    assert len(ends.calls) > CLIENTS / 2, "the others left before the server had heard of them"
    assert len(ends.begun) > CLIENTS / 2
    assert all(stream.ended for stream in ends.begun)
    assert not [stream for stream in ends.long if stream.num_tokens >= LONG], "nobody read so much"
    assert len({stream.request_id for stream in ends.begun}) == len(ends.begun)
    free.runner.open()
    await Client(free, 0).reads()
