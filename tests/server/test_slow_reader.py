"""A client that does not read loses its stream, and nobody else anything.

Clients are processes, stopped by a signal: nothing of theirs answers, neither the program nor its library. Every token
is eight kilobytes of text, so that the buffers on the way are soon full.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import pytest

from paceline.engine import Delta, Stream
from paceline.errors import ResourceExhausted
from paceline.server.readers import watched
from paceline.server.watch import ReaderBounds
from paceline.sim import reference_output
from paceline.v1 import generation_pb2 as pb
from support.serving import PATIENCE, Serving, details_of, failure, request
from support.serving import serving as serving_context

Call: TypeAlias = Any

WIDTH = 8192
AGE = ReaderBounds(seconds=0.3, tokens=1 << 30)
BACKLOG = ReaderBounds(seconds=PATIENCE, tokens=30)

# Asks, says so, and reads on and on; the last line is the status.
GENERATE = """
import sys, grpc
from paceline.v1 import generation_pb2 as pb, generation_pb2_grpc
options = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
stub = generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(sys.argv[1], options))
request = pb.GenerateRequest(prompt_text="slow", stop=pb.StopParams(max_tokens=1900, ignore_eos=True))
call = stub.Generate(request)
try:
    for response in call:
        print("token", flush=True)
except grpc.RpcError as error:
    print(error.code().name, error.details(), flush=True)
"""
MANY = GENERATE.replace(
    "call = stub.Generate(request)",
    "call = stub.GenerateMany(iter([pb.GenerateManyRequest(key=key, start=request) for key in range(3)]))",
)


@pytest.fixture(params=[AGE, BACKLOG], ids=["age", "backlog"])
async def bounded(request: pytest.FixtureRequest) -> AsyncIterator[Serving]:
    async with serving_context(width=WIDTH, bounds=request.param) as made:
        yield made


class Client:
    """A process that reads a stream until it is stopped."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            return (await self.process.stdout.readline()).decode().strip()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    async def last_words(self) -> str:
        """Go on, to the end."""
        self.process.send_signal(signal.SIGCONT)
        lines = [await self.line()]
        while lines[-1] == "token":
            lines.append(await self.line())
        return lines[-1]


@asynccontextmanager
async def reading(served: Serving, script: str) -> AsyncIterator[Client]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, served.address, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Client(process)
    finally:
        process.kill()
        await process.wait()


async def sibling_gets_everything(served: Serving) -> None:
    """It is served to its end while the other is stuck, step by step: it reads what a step has brought before the next
    one, so that it is never behind itself.
    """
    others = len(served.scheduler.requests)
    call = served.stub.Generate(request("sibling", max_tokens=100))
    await served.until(lambda: len(served.scheduler.requests) > others)
    served.runner.allow(1)  # it may be planned already, without this one
    responses = []
    while not (responses and responses[-1].HasField("finished")):
        served.runner.allow(1)
        responses.append(await call.read())
    assert [t for response in responses for t in response.token_ids] == reference_output(b"sibling", 100)
    offsets = itertools.accumulate((len(response.token_ids) for response in responses[:-1]), initial=0)
    assert [response.token_offset for response in responses] == list(offsets)


@pytest.mark.parametrize(("script", "generations"), [(GENERATE, 1), (MANY, 3)], ids=["Generate", "GenerateMany"])
async def test_a_stopped_client_is_evicted(bounded: Serving, script: str, generations: int) -> None:
    async with reading(bounded, script) as client:
        await bounded.until(lambda: len(bounded.scheduler.requests) == generations)
        bounded.runner.allow(3)
        assert await client.line() == "token"
        client.stop()
        await sibling_gets_everything(bounded)
        bounded.runner.allow(200)  # of 1900
        await bounded.until(lambda: bounded.idle and len(bounded.server.live) == 0)
        assert bounded.runner.steps < 310, "it was not done: it was evicted"
        last = await client.last_words()
        assert last.startswith("RESOURCE_EXHAUSTED the client reads too slowly: ")
    await sibling_gets_everything(bounded)


def codes_of(served: Serving) -> list[grpc.StatusCode]:
    """Those of RPCs that end from now on, as logs and metrics are told."""
    codes: list[grpc.StatusCode] = []
    served.server.calls.observers.append(lambda call, code, seconds: codes.append(code))
    return codes


@asynccontextmanager
async def unread(served: Serving, method: str) -> AsyncIterator[Call]:
    """A call that has begun, on a connection that lives: only nobody reads."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(served.address, options) as channel:
        path = f"/paceline.v1.GenerationService/{method}"
        if method == "Generate":
            call = channel.unary_stream(path)(request(max_tokens=1900).SerializeToString())
        else:
            call = channel.stream_stream(path)()
            await call.write(pb.GenerateManyRequest(start=request(max_tokens=1900)).SerializeToString())
        await served.until(lambda: len(served.scheduler.requests) > 0)
        served.runner.allow(300)
        yield call


@pytest.mark.parametrize("method", ["Generate", "GenerateMany"])
async def test_the_rpc_ends_though_nobody_reads(bounded: Serving, method: str) -> None:
    """The status waits behind what is unread, and nobody for the status."""
    codes = codes_of(bounded)
    async with unread(bounded, method) as call:
        await bounded.until(lambda: len(codes) > 0)
        error = await failure(call)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(error)["ErrorInfo"].reason == "SLOW_CONSUMER"  # type: ignore[attr-defined]
    assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert bounded.engine.engine.usage.of("").outcomes == {"RESOURCE_EXHAUSTED": 1}, "as its generation did"


@pytest.mark.parametrize(("script", "generations"), [(GENERATE, 1), (MANY, 3)], ids=["Generate", "GenerateMany"])
async def test_an_eviction_counts_whatever_becomes_of_the_client(
    bounded: Serving, script: str, generations: int
) -> None:
    codes = codes_of(bounded)
    async with reading(bounded, script) as client:
        await bounded.until(lambda: len(bounded.scheduler.requests) == generations)
        bounded.runner.allow(3)
        assert await client.line() == "token"
        client.stop()
        bounded.runner.allow(200)
        await bounded.until(lambda: len(codes) > 0)  # its connection is given up, soon
    assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED]


async def test_the_reason_is_told_to_programs(bounded: Serving) -> None:
    async with grpc.aio.insecure_channel(bounded.address, [("grpc.http2.bdp_probe", 0)]) as channel:
        call = channel.unary_stream(
            "/paceline.v1.GenerationService/Generate", response_deserializer=pb.GenerateResponse.FromString
        )(request(max_tokens=1900).SerializeToString())
        bounded.runner.allow(300)
        await bounded.until(lambda: bounded.runner.steps > 0 and bounded.idle)
        error = await failure(call)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(error)["ErrorInfo"].reason == "SLOW_CONSUMER"  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["Generate", "GenerateMany"])
async def test_evicted_in_the_first_write(method: str) -> None:
    """Headers are on their way before it, else the status would never be."""
    whole = request(max_tokens=100, output=pb.OutputParams(final_only=True))
    options = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
    async with (
        serving_context(width=WIDTH, bounds=AGE) as served,
        grpc.aio.insecure_channel(served.address, options) as channel,
    ):
        path = f"/paceline.v1.GenerationService/{method}"
        if method == "Generate":
            call = channel.unary_stream(path)(whole.SerializeToString())
        else:
            call = channel.stream_stream(path)()
            final = pb.OutputParams(final_only=True)
            for key, start in enumerate((whole, request(max_tokens=1900, output=final))):
                await call.write(pb.GenerateManyRequest(key=key, start=start).SerializeToString())
            await served.until(lambda: len(served.scheduler.requests) == 2)
        served.runner.allow(200)
        await served.until(lambda: served.runner.steps > 0 and served.idle and len(served.server.live) == 0)
        async with asyncio.timeout(PATIENCE):
            error = await failure(call)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_waiting_for_the_engine_is_not_slow() -> None:
    """What takes long is the steps: nobody is behind."""
    async with serving_context(bounds=ReaderBounds(seconds=0.05, tokens=100)) as served:
        call = served.stub.Generate(request(max_tokens=30))
        for _ in range(3):
            await asyncio.sleep(0.1)
            served.runner.allow(2)
            assert await call.read()
        served.runner.open()
        assert (await call.read()) is not grpc.aio.EOF
        call.cancel()
        await served.until(lambda: served.idle)


@pytest.mark.parametrize("output", [pb.OutputParams(final_only=True), pb.OutputParams(max_chunk_delay={"seconds": 9})])
async def test_tokens_that_are_held_are_not_behind(output: pb.OutputParams) -> None:
    async with serving_context(bounds=ReaderBounds(seconds=PATIENCE, tokens=1)) as served:
        served.runner.open()
        calls = [served.stub.Generate(request(max_tokens=60 + 20 * i, output=output, n=4)) for i in range(4)]
        for index, call in enumerate(calls):
            token_ids = [t for response in [r async for r in call] for t in response.token_ids]
            assert len(token_ids) == 4 * (60 + 20 * index)


async def test_a_reader_that_is_only_slow_keeps_its_stream() -> None:
    bounds = ReaderBounds(seconds=PATIENCE, tokens=1 << 30)
    options = [("grpc.http2.bdp_probe", 0)]
    async with (
        serving_context(width=WIDTH, bounds=bounds) as served,
        grpc.aio.insecure_channel(served.address, options) as channel,
    ):
        call = channel.unary_stream(
            "/paceline.v1.GenerationService/Generate", response_deserializer=pb.GenerateResponse.FromString
        )(request(max_tokens=300).SerializeToString())
        await served.until(lambda: served.scheduler.has_requests)
        served.runner.open()
        await served.until(lambda: served.idle)
        token_ids = [t for response in [r async for r in call] for t in response.token_ids]
    assert token_ids == reference_output(b"hello", 300)


async def test_a_backlog_counts_while_a_write_waits() -> None:
    """Else it is the server that has not come to it yet."""
    stream = Stream(0, 5, lambda request_id: None)
    async with watched(ReaderBounds(seconds=PATIENCE, tokens=3)) as watch:
        watch.watch(stream)
        stream.put(Delta("x" * 9, (1,) * 9, 0))
        await asyncio.sleep(0.01)
        stream.take()
        watch.begin()
        stream.put(Delta("x" * 3, (1,) * 3, 9))
        await asyncio.sleep(0.01)
        watch.end()

    async def too_far() -> None:
        async with watched(ReaderBounds(seconds=PATIENCE, tokens=3)) as watch:
            watch.watch(stream)
            watch.begin()
            stream.put(Delta("x", (1,), 12))
            await asyncio.sleep(PATIENCE)

    with pytest.raises(ResourceExhausted, match="more than 3 tokens wait to be read"):
        await too_far()
