"""`output.max_chunk_delay`: tokens wait for others to go with them, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from paceline.sim import reference_output
from paceline.v1 import generation_pb2 as pb
from support.serving import Serving, request, text_of

OFF = pb.SpeculationParams(mode=pb.SPECULATION_MODE_OFF)  # one token a step
LONG = Duration(seconds=60)
SHORT = Duration(nanos=20_000_000)

Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


def delayed(delay: Duration, max_tokens: int = 40, **fields: object) -> pb.GenerateRequest:
    return request("hello", max_tokens, output=pb.OutputParams(max_chunk_delay=delay), speculation=OFF, **fields)


async def test_only_the_first_tokens_and_the_end_do_not_wait(serving: Serving) -> None:
    call: Call = serving.stub.Generate(delayed(LONG))
    serving.runner.allow(1)
    first = await call.read()
    assert isinstance(first, pb.GenerateResponse)
    assert list(first.token_ids) == reference_output(b"hello", 1)
    serving.runner.allow(20)
    await serving.until(lambda: serving.runner.steps == 21)
    reading = asyncio.ensure_future(call.read())
    other: Call = serving.stub.Generate(request("other", 1))  # by the time that this has come, the other would have too
    await serving.until(lambda: len(serving.scheduler.requests) == 2)
    serving.runner.allow(2)  # the first may have been planned before it was there
    assert await other.read()
    assert not reading.done()
    serving.runner.open()
    rest = await reading
    assert isinstance(rest, pb.GenerateResponse)
    assert list(rest.token_ids) == reference_output(b"hello", 40)[1:]
    assert rest.text == text_of(rest.token_ids)
    assert (rest.token_offset, rest.HasField("finished")) == (1, True)
    assert await call.read() is grpc.aio.EOF


async def test_what_is_held_comes_in_the_end_though_no_step_follows(serving: Serving) -> None:
    call: Call = serving.stub.Generate(delayed(SHORT))
    serving.runner.allow(5)
    token_ids: list[int] = []
    while len(token_ids) < 5:
        response = await call.read()
        assert isinstance(response, pb.GenerateResponse)
        token_ids += response.token_ids
    assert serving.runner.steps == 5
    assert token_ids == reference_output(b"hello", 5)
    call.cancel()
    await serving.until(lambda: serving.idle)


async def test_every_choice_starts_and_ends_at_once(free: Serving) -> None:
    call: Call = free.stub.Generate(delayed(LONG, n=3))
    responses = [response async for response in call]
    for choice in range(3):
        first, last = [response for response in responses if response.choice == choice]
        assert first.token_offset == 0
        assert last.HasField("finished")
        assert [*first.token_ids, *last.token_ids] == reference_output(b"hello", 40)


async def test_none_is_every_step(free: Serving) -> None:
    for output in (pb.OutputParams(max_chunk_delay=Duration()), pb.OutputParams()):
        call: Call = free.stub.Generate(request("hello", 20, output=output, speculation=OFF))
        token_ids = [token_id for response in [r async for r in call] for token_id in response.token_ids]
        assert token_ids == reference_output(b"hello", 20)


async def test_one_message_at_the_end_wins(free: Serving) -> None:
    message = delayed(SHORT)
    message.output.final_only = True
    responses = [response async for response in free.stub.Generate(message)]
    assert len(responses) == 1


@pytest.mark.parametrize("delay", [LONG, SHORT])
async def test_leaving_while_tokens_are_held(serving: Serving, delay: Duration) -> None:
    call: Call = serving.stub.Generate(delayed(delay, max_tokens=500))
    serving.runner.allow(10)
    await call.read()
    await serving.until(lambda: serving.runner.steps == 10)
    call.cancel()
    await serving.until(lambda: serving.idle)
    assert serving.runner.steps == 10


async def test_what_came_before_an_error_is_told(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    call: Call = serving.stub.Generate(delayed(LONG, max_tokens=500))
    serving.runner.allow(10)
    await call.read()
    await serving.until(lambda: serving.runner.steps == 10)
    serving.runner.failure = RuntimeError("broken")
    serving.runner.open()
    rest = await call.read()
    assert isinstance(rest, pb.GenerateResponse)
    assert list(rest.token_ids) == reference_output(b"hello", 10)[1:]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
