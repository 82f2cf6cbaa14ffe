"""Whoever goes away, in whatever way, holds no blocks afterwards.

The runner is stopped while the client leaves. So a request that is gone before the runner moves again was freed without
waiting for so much as one step.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator

import grpc
import pytest

from paceline.server import SERVICE_NAME
from paceline.sim import reference_output
from paceline.v1 import generation_pb2 as pb
from support.serving import NUM_BLOCKS, Serving, failure, request, text_of
from support.serving import serving as serving_context

CLIENT = """
import sys, grpc
from paceline.v1 import generation_pb2 as pb, generation_pb2_grpc
stub = generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(sys.argv[1]))
call = stub.Generate(pb.GenerateRequest(prompt_text="killed", stop=pb.StopParams(max_tokens=500, ignore_eos=True)))
for response in call:
    print("token", flush=True)
"""

GENERATE = f"/{SERVICE_NAME}/Generate"


@pytest.fixture(params=[0, 1], ids=["lag 0", "lag 1"])
async def lagging(request: pytest.FixtureRequest) -> AsyncIterator[Serving]:
    async with serving_context(lag=request.param) as made:
        yield made


async def freed_without_a_step(served: Serving) -> None:
    """Waits until nothing is left, while the runner stands still."""
    steps = served.runner.steps
    await served.until(lambda: served.idle)
    assert served.runner.steps == steps
    await still_serves(served)


async def still_serves(served: Serving) -> None:
    served.runner.open()
    responses = [response async for response in served.stub.Generate(request("next"))]
    token_ids = [token_id for response in responses for token_id in response.token_ids]
    assert token_ids == reference_output(b"next", 8)
    await served.until(lambda: served.idle)


async def blocks_taken(served: Serving) -> None:
    """Some steps run and then no more; a request holds blocks."""
    served.runner.allow(3)
    await served.until(lambda: served.runner.steps == 3)
    assert served.scheduler.kv.num_free_blocks < NUM_BLOCKS


async def test_cancelled_while_streaming(lagging: Serving) -> None:
    call = lagging.stub.Generate(request(max_tokens=500))
    lagging.runner.allow(3)
    await call.read()
    await lagging.until(lambda: lagging.runner.steps == 3)
    assert call.cancel()
    await freed_without_a_step(lagging)


async def test_cancelled_with_several_choices(lagging: Serving) -> None:
    call = lagging.stub.Generate(request(max_tokens=500, n=4))
    lagging.runner.allow(6)
    await lagging.until(lambda: lagging.runner.steps == 6)
    assert len(lagging.scheduler.running) == 4
    await call.read()
    assert call.cancel()
    await freed_without_a_step(lagging)


async def test_cancelled_before_the_first_token(lagging: Serving) -> None:
    call = lagging.stub.Generate(request(max_tokens=500))
    await lagging.until(lambda: lagging.scheduler.kv.num_free_blocks < NUM_BLOCKS)
    assert call.cancel()
    await freed_without_a_step(lagging)


async def test_cancelled_while_it_waits_for_its_turn(lagging: Serving) -> None:
    first = lagging.stub.Generate(request("first"))
    await lagging.until(lambda: lagging.scheduler.kv.num_free_blocks < NUM_BLOCKS)
    calls = [lagging.stub.Generate(request(f"other {index}")) for index in range(5)]
    await lagging.until(lambda: len(lagging.scheduler.requests) == 6)
    for call in calls:
        assert call.cancel()
    await lagging.until(lambda: len(lagging.scheduler.requests) == 1)
    lagging.runner.open()
    assert [response async for response in first]


async def test_cancelled_with_one_message_at_the_end(lagging: Serving) -> None:
    call = lagging.stub.Generate(request(max_tokens=500, output=pb.OutputParams(final_only=True)))
    reading = asyncio.ensure_future(call.read())
    await blocks_taken(lagging)
    assert call.cancel()
    await freed_without_a_step(lagging)
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_channel_closed(lagging: Serving) -> None:
    async with grpc.aio.insecure_channel(lagging.address) as channel:
        call = channel.unary_stream(GENERATE)(request(max_tokens=500).SerializeToString())
        lagging.runner.allow(3)
        await call.read()
        await lagging.until(lambda: lagging.runner.steps == 3)
    await freed_without_a_step(lagging)


async def test_deadline_expires(lagging: Serving) -> None:
    call = lagging.stub.Generate(request(max_tokens=500), timeout=0.3)
    error = await failure(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await freed_without_a_step(lagging)


async def test_client_process_is_killed(lagging: Serving) -> None:
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, lagging.address, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    lagging.runner.allow(3)
    assert await client.stdout.readline() == b"token\n"
    await lagging.until(lambda: lagging.runner.steps == 3)
    assert lagging.scheduler.kv.num_free_blocks < NUM_BLOCKS
    client.kill()
    await client.wait()
    await freed_without_a_step(lagging)


# Every token is eight kilobytes of text, and without probes gRPC takes 64 KiB for a client that reads nothing.
WIDTH = 8192
OPTIONS = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]


@pytest.fixture
async def wordy() -> AsyncIterator[Serving]:
    async with serving_context(width=WIDTH) as made:
        yield made


async def test_cancelled_while_a_write_is_blocked(wordy: Serving, caplog: pytest.LogCaptureFixture) -> None:
    async with grpc.aio.insecure_channel(wordy.address, options=OPTIONS) as channel:
        call = channel.unary_stream(GENERATE)(request(max_tokens=2000).SerializeToString())
        wordy.runner.allow(300)
        await wordy.until(lambda: wordy.runner.steps == 300)
        assert wordy.scheduler.has_requests
        assert call.cancel()
        await freed_without_a_step(wordy)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_slow_reader_gets_everything_in_fewer_messages(wordy: Serving) -> None:
    async with grpc.aio.insecure_channel(wordy.address, options=OPTIONS) as channel:
        parse = pb.GenerateResponse.FromString
        call = channel.unary_stream(GENERATE, response_deserializer=parse)(request(max_tokens=1200).SerializeToString())
        await wordy.until(lambda: wordy.scheduler.has_requests)
        wordy.runner.open()
        await wordy.until(lambda: wordy.idle)  # the engine is done with it, and has waited for nobody
        responses = [response async for response in call]
    token_ids = [token_id for response in responses for token_id in response.token_ids]
    assert token_ids == reference_output(b"hello", 1200)
    assert sum(len(response.text) for response in responses) == len(text_of(token_ids)) * WIDTH
    # A step brings three tokens at most: what came while a write was blocked went out together.
    assert max(len(response.token_ids) for response in responses) > 3
    assert len(responses) < wordy.runner.steps


async def test_many_leave_at_once(lagging: Serving) -> None:
    calls = [lagging.stub.Generate(request(f"prompt {index}", max_tokens=500)) for index in range(40)]
    stays = lagging.stub.Generate(request("stays", max_tokens=30))
    await lagging.until(lambda: len(lagging.scheduler.requests) == 41)
    lagging.runner.allow(4)
    await lagging.until(lambda: lagging.runner.steps == 4)
    for call in calls:
        assert call.cancel()
    await lagging.until(lambda: len(lagging.scheduler.requests) == 1)
    assert lagging.runner.steps == 4
    lagging.scheduler.check_invariants()
    lagging.runner.open()
    responses = [response async for response in stays]
    assert [t for response in responses for t in response.token_ids] == reference_output(b"stays", 30)
