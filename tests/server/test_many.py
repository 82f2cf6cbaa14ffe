"""`GenerateMany`: each generation lives as it would on an RPC of its own, and they share messages."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2  # type: ignore[import-untyped]

from paceline.core.plan import TokenLogprobs
from paceline.engine import Delta, Stream
from paceline.errors import NotFound
from paceline.server import calls, many
from paceline.server.delivery import Delivery
from paceline.server.readers import watched
from paceline.server.watch import ReaderBounds
from paceline.sim import reference_output
from paceline.v1 import generation_pb2 as pb
from support.serving import MODEL, NUM_BLOCKS, PATIENCE, Serving, details_of, request, text_of
from support.serving import serving as serving_context

Call = grpc.aio.StreamStreamCall[pb.GenerateManyRequest, pb.GenerateManyResponse]


class Many:
    """A client's end of one RPC.

    Attributes:
        messages: that have been read.
        responses: of each key, in order.
        errors: of each key, in order.
    """

    def __init__(self, served: Serving, timeout: float | None = None, name: str | None = None) -> None:
        metadata = None if name is None else (("x-request-id", name),)
        self.call: Call = served.stub.GenerateMany(timeout=timeout, metadata=metadata)
        self.messages: list[pb.GenerateManyResponse] = []
        self.responses: defaultdict[int, list[pb.GenerateResponse]] = defaultdict(list)
        self.errors: defaultdict[int, list[pb.GenerationError]] = defaultdict(list)

    async def start(self, key: int, message: pb.GenerateRequest) -> None:
        await self.call.write(pb.GenerateManyRequest(key=key, start=message))

    async def cancel(self, key: int) -> None:
        await self.call.write(pb.GenerateManyRequest(key=key, cancel=pb.Cancel()))

    async def read(self) -> pb.GenerateManyResponse:
        """One message."""
        async with asyncio.timeout(PATIENCE):
            message = await self.call.read()
        assert isinstance(message, pb.GenerateManyResponse), "the stream has ended"
        self.messages.append(message)
        for keyed in message.responses:
            if keyed.HasField("error"):
                self.errors[keyed.key].append(keyed.error)
            else:
                self.responses[keyed.key].append(keyed.response)
        return message

    async def error_of(self, key: int) -> pb.GenerationError:
        """Read until there is one; it must be the only one."""
        while not self.errors[key]:
            await self.read()
        [error] = self.errors[key]
        return error

    async def finish(self) -> None:
        """Say that no request follows, and read to the end, which must be a good one."""
        await self.call.done_writing()
        async with asyncio.timeout(PATIENCE):
            while (message := await self.call.read()) is not grpc.aio.EOF:
                self.messages.append(message)
                for keyed in message.responses:
                    assert not keyed.HasField("error"), keyed
                    self.responses[keyed.key].append(keyed.response)
        assert await self.call.code() is grpc.StatusCode.OK

    async def failure(self) -> grpc.aio.AioRpcError:
        """The status of the RPC, which must be a bad one; whatever comes before it is skipped."""
        try:
            async with asyncio.timeout(PATIENCE):
                while await self.call.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("the RPC succeeded")

    def check(self, key: int, prompt: str, num_tokens: int) -> None:
        """The generation came whole, in order and once."""
        responses = self.responses[key]
        token_ids = [token_id for response in responses for token_id in response.token_ids]
        assert token_ids == reference_output(prompt.encode(), num_tokens)
        assert "".join(response.text for response in responses) == text_of(token_ids)
        assert [response.HasField("started") for response in responses] == [True] + [False] * (len(responses) - 1)
        assert [response.HasField("finished") for response in responses] == [False] * (len(responses) - 1) + [True]


@pytest.fixture(params=[0, 1], ids=["lag 0", "lag 1"])
async def lagging(request: pytest.FixtureRequest) -> AsyncIterator[Serving]:
    async with serving_context(lag=request.param) as made:
        yield made


# -- what it is for ---------------------------------------------------------------------------------------------------


async def test_every_generation_comes_whole(free: Serving) -> None:
    client = Many(free)
    for key in range(40):
        await client.start(key, request(f"prompt {key}", max_tokens=3 + 5 * key))
    await client.finish()
    for key in range(40):
        client.check(key, f"prompt {key}", 3 + 5 * key)
    await free.until(lambda: free.idle)
    assert len(free.server.live) == 0


async def test_one_message_carries_a_step_of_all(serving: Serving) -> None:
    client = Many(serving)
    for key in range(10):
        await client.start(key, request(f"prompt {key}", max_tokens=20))
    await serving.until(lambda: len(serving.scheduler.requests) == 10)
    serving.runner.allow(3)  # the first may have been planned before all were there
    while len(client.responses) < 10:
        await client.read()
    await serving.until(lambda: serving.runner.steps == 3)
    before = len(client.messages)
    serving.runner.allow(1)
    while not any(len(message.responses) == 10 for message in client.messages[before:]):
        await client.read()
    serving.runner.open()
    await client.finish()
    assert sum(len(message.responses) == 10 for message in client.messages) > 3
    for key in range(10):
        client.check(key, f"prompt {key}", 20)


async def test_first_response_starts(free: Serving) -> None:
    client = Many(free)
    await client.start(7, request("hello", request_id="mine", sampling=pb.SamplingParams(seed=3)))
    await client.start(8, request("hello"))
    await client.finish()
    assert client.responses[7][0].started == pb.Started(request_id="mine", model=MODEL, prompt_tokens=5, seed=3)
    assert client.responses[8][0].started.request_id.endswith("/2")


async def test_ids_are_named_after_the_rpc(free: Serving) -> None:
    call: Call = free.stub.GenerateMany(metadata=(("x-request-id", "gateway-1"),))
    await call.write(pb.GenerateManyRequest(key=5, start=request()))
    message = await call.read()
    assert isinstance(message, pb.GenerateManyResponse)
    assert message.responses[0].response.started.request_id == "gateway-1/1"
    call.cancel()
    await free.until(lambda: free.idle)


async def test_rpcs_of_one_trace(serving: Serving) -> None:
    """They have the same "x-request-id", and what they bring has ids of its own."""
    clients = [Many(serving, name="trace") for _ in range(2)]
    for count, client in enumerate(clients, start=1):
        await client.start(1, request("hello"))
        await serving.until(lambda count=count: serving.engine.num_live == count)  # type: ignore[misc]
    await clients[0].start(2, request("hello", request_id="trace/1-2"))
    assert (await clients[0].error_of(2)).reason == "DUPLICATE_REQUEST_ID"
    serving.runner.open()
    for client in clients:
        await client.finish()
    assert [client.responses[1][0].started.request_id for client in clients] == ["trace/1", "trace/1-2"]


async def test_a_key_may_be_used_again_after_its_end(free: Serving) -> None:
    client = Many(free)
    for text in ("first", "second", "third"):
        client.responses.clear()
        await client.start(1, request(text, max_tokens=9))
        while not (client.responses[1] and client.responses[1][-1].HasField("finished")):
            await client.read()
        client.check(1, text, 9)
    await client.finish()


async def test_choices(free: Serving) -> None:
    client = Many(free)
    await client.start(1, request("hello", max_tokens=30, n=3))
    await client.start(2, request("other", max_tokens=30))
    await client.finish()
    client.check(2, "other", 30)
    for choice in range(3):
        own = [response for response in client.responses[1] if response.choice == choice]
        token_ids = [token_id for response in own for token_id in response.token_ids]
        assert token_ids == reference_output(b"hello", 30)
        assert [response.HasField("finished") for response in own] == [False] * (len(own) - 1) + [True]


async def test_outputs_are_each_requests_own(free: Serving) -> None:
    client = Many(free)
    final = pb.OutputParams(final_only=True)
    await client.start(1, request("final", max_tokens=40, output=final))
    delayed = pb.OutputParams(max_chunk_delay=Duration(seconds=60))
    await client.start(2, request("held", max_tokens=40, output=delayed))
    quiet = request("quiet", max_tokens=10)
    quiet.output.content = pb.OUTPUT_CONTENT_TOKEN_IDS
    await client.start(3, quiet)
    await client.finish()
    assert len(client.responses[1]) == 1
    client.check(1, "final", 40)
    assert len(client.responses[2]) == 2
    client.check(2, "held", 40)
    assert {response.text for response in client.responses[3]} == {""}


async def test_logprobs_of_a_long_prompt(free: Serving) -> None:
    """They are written in another thread, between the others."""
    client = Many(free)
    await client.start(1, request("x" * 300, output=pb.OutputParams(prompt_logprobs=0, final_only=True)))
    for key in range(2, 12):
        await client.start(key, request(f"prompt {key}", max_tokens=40))
    await client.finish()
    assert len(client.responses[1]) == 1
    for key in range(2, 12):
        client.check(key, f"prompt {key}", 40)


# -- refusals and failures, in band -----------------------------------------------------------------------------------


async def test_errors_concern_their_own_generation(serving: Serving) -> None:
    client = Many(serving)
    await client.start(1, request("stays", max_tokens=30))
    await client.start(2, request(sampling=pb.SamplingParams(top_p=-1)))
    await client.start(3, request(model="other"))
    await client.start(4, request("x", speculation=pb.SpeculationParams(mode=pb.SPECULATION_MODE_DRAFT_MODEL)))
    error = await client.error_of(2)
    assert (error.code, error.reason) == (code_pb2.INVALID_ARGUMENT, "SAMPLING_PARAM_OUT_OF_RANGE")
    assert error.message.startswith("sampling.top_p = -1.0")
    assert not error.HasField("retry_after")
    assert (await client.error_of(3)).code == code_pb2.NOT_FOUND
    assert (await client.error_of(4)).code == code_pb2.FAILED_PRECONDITION
    serving.runner.open()
    await client.finish()
    client.check(1, "stays", 30)


async def test_a_request_id_that_is_live(serving: Serving) -> None:
    client = Many(serving)
    await client.start(1, request("first", request_id="same"))
    await client.start(2, request("second", request_id="same"))
    error = await client.error_of(2)
    assert (error.code, error.reason) == (code_pb2.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
    serving.runner.open()
    await client.finish()
    client.check(1, "first", 8)


async def test_a_full_queue_tells_when_to_come_again() -> None:
    async with serving_context(max_queued=1) as served:
        client = Many(served)
        await client.start(1, request("runs"))
        await served.until(lambda: len(served.scheduler.running) == 1)
        await client.start(2, request("waits"))
        await client.start(3, request("too many"))
        error = await client.error_of(3)
        assert error.code == code_pb2.UNAVAILABLE
        assert error.retry_after.ToMilliseconds() > 0
        served.runner.open()
        await client.finish()
        client.check(1, "runs", 8)
        client.check(2, "waits", 8)


async def test_too_many_on_one_stream(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "MAX_LIVE", 2)
    client = Many(serving)
    for key in range(5):
        await client.start(key, request(f"prompt {key}"))
    for key in (2, 3, 4):
        error = await client.error_of(key)
        assert error.code == code_pb2.RESOURCE_EXHAUSTED
        assert error.retry_after.ToSeconds() == 1
    serving.runner.open()
    await client.finish()
    client.check(1, "prompt 1", 8)


async def test_loading() -> None:
    async with serving_context(open_engine=False) as served:
        client = Many(served)
        await client.start(1, request())
        assert (await client.error_of(1)).reason == "MODEL_LOADING"
        served.server.open(served.engine)
        served.runner.open()
        await client.start(1, request())
        await client.call.done_writing()
        while not client.responses[1] or not client.responses[1][-1].HasField("finished"):
            await client.read()
        client.check(1, "hello", 8)


async def test_the_engine_dies(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    client = Many(serving)
    for key in range(3):
        await client.start(key, request(f"prompt {key}", max_tokens=50))
    await serving.until(lambda: len(serving.scheduler.requests) == 3)
    serving.runner.failure = RuntimeError("a secret")
    serving.runner.open()
    for key in range(3):
        error = await client.error_of(key)
        assert (error.code, error.reason) == (code_pb2.UNAVAILABLE, "ENGINE_LOST")
        assert "secret" not in error.message
    await client.start(3, request())
    assert (await client.error_of(3)).reason == "ENGINE_LOST"


async def test_bugs_are_logged_and_not_told(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = Many(serving)
    await client.start(1, request("stays"))
    await serving.until(lambda: len(serving.scheduler.requests) == 1)

    def broken(request: object) -> None:
        raise ValueError("a secret")

    monkeypatch.setattr(serving.engine.engine, "prepare", broken)
    await client.start(2, request(request_id="unlucky"))
    error = await client.error_of(2)
    assert error.code == code_pb2.INTERNAL
    assert "secret" not in error.message
    assert "unlucky" in error.message
    assert "a secret" in caplog.text
    serving.runner.open()
    await client.finish()
    client.check(1, "stays", 8)


# -- cancelling one ---------------------------------------------------------------------------------------------------


async def test_cancelling_one_frees_it_and_leaves_the_others(lagging: Serving) -> None:
    client = Many(lagging)
    await client.start(1, request("leaves", max_tokens=500))
    await client.start(2, request("stays", max_tokens=30))
    await lagging.until(lambda: len(lagging.scheduler.requests) == 2)
    lagging.runner.allow(4)
    await lagging.until(lambda: lagging.runner.steps == 4)
    await client.cancel(1)
    await lagging.until(lambda: len(lagging.scheduler.requests) == 1)
    assert lagging.runner.steps == 4, "freed without a step"
    assert (await client.error_of(1)).code == code_pb2.CANCELLED
    lagging.runner.open()
    await client.finish()
    client.check(2, "stays", 30)
    await lagging.until(lambda: lagging.idle)


async def test_a_cancelled_key_may_be_started_at_once(serving: Serving) -> None:
    client = Many(serving)
    await client.start(1, request("old", max_tokens=500))
    await serving.until(lambda: serving.scheduler.has_requests)
    await client.cancel(1)
    await client.start(1, request("new", max_tokens=9))
    await client.error_of(1)
    assert not client.responses[1]
    serving.runner.open()
    await client.finish()
    client.check(1, "new", 9)


async def test_cancelling_before_the_engine_has_it(serving: Serving) -> None:
    client = Many(serving)
    await client.start(1, request("x" * 1500 * 3, max_tokens=8))  # tokenised in another thread, and refused there
    await client.cancel(1)
    assert (await client.error_of(1)).code in (code_pb2.CANCELLED, code_pb2.INVALID_ARGUMENT)
    await client.finish()
    assert serving.idle


async def test_cancelling_nothing(free: Serving) -> None:
    client = Many(free)
    await client.cancel(9)
    await client.start(1, request("hello"))
    while not client.responses[1]:
        await client.read()
    await client.finish()
    client.check(1, "hello", 8)


async def test_an_operator_cancels_one(serving: Serving) -> None:
    client = Many(serving)
    await client.start(1, request("hello", request_id="unwanted", max_tokens=500))
    await client.start(2, request("stays"))
    await serving.until(lambda: len(serving.scheduler.requests) == 2)
    live = serving.server.live.get("unwanted", "")
    assert live is not None
    assert live.cancel(serving.engine)
    assert (await client.error_of(1)).code == code_pb2.CANCELLED
    serving.runner.open()
    await client.finish()
    client.check(2, "stays", 8)


# -- the RPC itself ---------------------------------------------------------------------------------------------------


async def test_a_key_that_is_live_ends_the_rpc(serving: Serving) -> None:
    client = Many(serving)
    await client.start(3, request("first", max_tokens=500))
    await serving.until(lambda: serving.scheduler.has_requests)
    await client.start(3, request("second"))
    error = await client.failure()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").startswith("key = 3: must be no key of a generation that is live")
    [violation] = details_of(error)["BadRequest"].field_violations  # type: ignore[attr-defined]
    assert violation.field == "key"
    await serving.until(lambda: serving.idle and len(serving.server.live) == 0)
    assert serving.engine.engine.usage.of("").outcomes == {"INVALID_ARGUMENT": 1}, "the first ended with the RPC"


@pytest.mark.parametrize("data", [b"\x08\x01", b"\xff\xff", b"\x08\x01\x12\x04\x22\x02\xff\xfe"])
async def test_a_message_that_is_none_ends_the_rpc(serving: Serving, data: bytes) -> None:
    raw = serving.channel.stream_stream("/paceline.v1.GenerationService/GenerateMany")
    call = raw()
    await call.write(pb.GenerateManyRequest(key=1, start=request(max_tokens=500)).SerializeToString())
    await serving.until(lambda: serving.scheduler.has_requests)
    await call.write(data)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await serving.until(lambda: serving.idle)


async def blocks_taken(served: Serving, number: int) -> None:
    """Some steps run and then no more; the generations hold blocks."""
    await served.until(lambda: len(served.scheduler.requests) == number)
    served.runner.allow(3)
    await served.until(lambda: served.runner.steps == 3)
    assert served.scheduler.kv.num_free_blocks < NUM_BLOCKS


async def test_cancelling_the_rpc_frees_all(lagging: Serving) -> None:
    client = Many(lagging)
    for key in range(5):
        await client.start(key, request(f"prompt {key}", max_tokens=500))
    await blocks_taken(lagging, 5)
    client.call.cancel()
    await lagging.until(lambda: lagging.idle)
    assert lagging.runner.steps == 3
    assert len(lagging.server.live) == 0


async def test_the_deadline_is_for_all(lagging: Serving) -> None:
    client = Many(lagging, timeout=2.0)  # long enough for three to be taken on a machine that stands still at times
    for key in range(3):
        await client.start(key, request(f"prompt {key}", max_tokens=500))
    await lagging.until(lambda: len(lagging.scheduler.requests) == 3)
    assert all(asked.scheduling.deadline is not None for asked in lagging.scheduler.requests.values())
    assert (await client.failure()).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await lagging.until(lambda: lagging.idle)


async def test_nothing_asked_nothing_said(serving: Serving) -> None:
    client = Many(serving)
    await client.finish()
    assert client.messages == []


async def test_shutting_down_waits_for_the_last(serving: Serving) -> None:
    client, idle = Many(serving), Many(serving)
    await client.start(1, request("hello", max_tokens=30))
    await idle.start(1, request(model="other"))
    await idle.error_of(1)
    await serving.until(lambda: serving.scheduler.has_requests)
    stopping = asyncio.create_task(serving.server.stop(PATIENCE))
    error = await idle.failure()
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
    await client.start(2, request("late"))
    assert (await client.error_of(2)).reason == "DRAINING"
    serving.runner.open()
    while not (client.responses[1] and client.responses[1][-1].HasField("finished")):
        await client.read()
    client.check(1, "hello", 30)
    assert (await client.failure()).code() is grpc.StatusCode.UNAVAILABLE
    await stopping


async def test_a_slow_reader_gets_everything_in_fewer_messages() -> None:
    """Every token is eight kilobytes of text: writes are blocked at once."""
    width = 8192
    options = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", 4 << 20)]
    async with serving_context(width=width) as served, grpc.aio.insecure_channel(served.address, options) as channel:
        call = channel.stream_stream(
            "/paceline.v1.GenerationService/GenerateMany",
            pb.GenerateManyRequest.SerializeToString,
            pb.GenerateManyResponse.FromString,
        )()
        for key in range(4):
            await call.write(pb.GenerateManyRequest(key=key, start=request(f"prompt {key}", max_tokens=300)))
        await call.done_writing()
        await served.until(lambda: len(served.scheduler.requests) == 4)
        served.runner.open()
        await served.until(lambda: served.idle)  # the engine is done with all, and has waited for nobody
        token_ids: defaultdict[int, list[int]] = defaultdict(list)
        num_messages = 0
        async for message in call:
            num_messages += 1
            for keyed in message.responses:
                token_ids[keyed.key] += keyed.response.token_ids
    assert token_ids == {key: reference_output(f"prompt {key}".encode(), 300) for key in range(4)}
    assert num_messages < served.runner.steps


async def test_cancelled_while_a_write_is_blocked() -> None:
    async with serving_context(width=8192) as served:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(served.address, options) as channel:
            call = channel.stream_stream("/paceline.v1.GenerationService/GenerateMany")()
            for key in range(3):
                start = request(f"prompt {key}", max_tokens=2000)
                await call.write(pb.GenerateManyRequest(key=key, start=start).SerializeToString())
            await served.until(lambda: len(served.scheduler.requests) == 3)
            served.runner.allow(100)
            await served.until(lambda: served.runner.steps == 100)
            call.cancel()
            await served.until(lambda: served.idle)
            assert served.runner.steps == 100


# -- without a network ------------------------------------------------------------------------------------------------


class Context:
    """Of an RPC whose client reads as the test allows it."""

    def __init__(self) -> None:
        self.reads = asyncio.Semaphore(0)
        self.messages: list[pb.GenerateManyResponse] = []

    async def send_initial_metadata(self, metadata: object) -> None: ...

    async def write(self, message: pb.GenerateManyResponse) -> None:
        await self.reads.acquire()
        self.messages.append(message)

    @property
    def responses(self) -> list[pb.KeyedResponse]:
        return [keyed for message in self.messages for keyed in message.responses]


@asynccontextmanager
async def serve(deliver: Any, requests: AsyncIterator[pb.GenerateManyRequest]) -> AsyncIterator[Context]:
    context = Context()
    token = calls._CURRENT.set(calls.Call("GenerateMany", "gateway"))
    async with watched(ReaderBounds()) as watch:
        served = asyncio.create_task(many.ManyGenerations(deliver, context, watch).serve(requests))  # type: ignore[arg-type]
        yield context
        context.reads = asyncio.Semaphore(1000)
        served.cancel()
        await asyncio.wait([served])
    calls._CURRENT.reset(token)


async def turns(number: int = 20) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_refusals_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stops reading; it goes on once the client has read."""
    monkeypatch.setattr(many, "MAX_LIVE", 3)
    taken: list[int] = []

    async def requests() -> AsyncIterator[pb.GenerateManyRequest]:
        for key in range(40):
            taken.append(key)
            yield pb.GenerateManyRequest(key=key, start=request())
            await asyncio.sleep(0)

    @asynccontextmanager
    async def refuse(message: pb.GenerateRequest, name: str) -> AsyncIterator[Delivery]:
        raise NotFound("not here")
        yield

    async with serve(refuse, requests()) as context:
        await turns(200)
        assert len(taken) < 12
        while len(context.responses) < 40:
            context.reads.release()
            await turns()
    assert [keyed.key for keyed in context.responses] == list(range(40))


async def test_what_takes_long_keeps_its_place() -> None:
    """The first response of all tells of the start, also where another thread writes it."""
    stream = Stream(0, 5, lambda request_id: None, num_choices=2)

    async def requests() -> AsyncIterator[pb.GenerateManyRequest]:
        yield pb.GenerateManyRequest(key=1, start=request())
        await asyncio.Event().wait()

    @asynccontextmanager
    async def deliver(message: pb.GenerateRequest, name: str) -> AsyncIterator[Delivery]:
        async with aclosing(stream):
            yield Delivery(stream, pb.Started(request_id=name), pb.OUTPUT_CONTENT_TEXT)

    told = (TokenLogprobs(-1.0, 1),) * 1000
    stream.put(Delta("a" * 1000, (1,) * 1000, 0, logprobs=told, choice=0))
    stream.put(Delta("b", (1,), 0, choice=1))
    async with serve(deliver, requests()) as context:
        context.reads.release()
        while not context.messages:  # noqa: ASYNC110, another thread writes
            await asyncio.sleep(0.001)
        [first, second] = context.responses
        assert first.response.started.request_id == "gateway/1"
        assert len(first.response.logprobs) == 1000
        assert (second.response.text, second.response.HasField("started")) == ("b", False)
