"""Many generations on one stream, against a server that does what the prompts say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from fake_server import CANNED, SEVERAL
from paceline import errors
from paceline.client import AsyncClient, Completion, Generation, ManyGenerations, RpcError
from paceline.server import ServerSettings
from paceline.server import many as server_many
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc
from support.serving import PATIENCE, Serving
from support.serving import serving as serving_context

Context = grpc.aio.ServicerContext[pb.GenerateManyRequest, pb.GenerateManyResponse]


class FakeMany(generation_pb2_grpc.GenerationServiceServicer):
    """Does what the prompt says: "hang" sends a token and no more, "fail CODE [MS]" fails that generation, "busy CODE
    MS" does so the first time, "several" has two choices, "quit" ends the stream with UNAVAILABLE, "then hang" reads
    nothing more, all else is canned.

    Attributes:
        messages: everything that came, in order.
        metadata: of each stream.
        refuses: every stream, whatever is asked for.
    """

    def __init__(self) -> None:
        self.messages: list[pb.GenerateManyRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.address = ""
        self.refuses = False

    @property
    def streams(self) -> int:
        return len(self.metadata)

    def prompts(self) -> list[str]:
        return [message.start.prompt_text for message in self.messages if message.HasField("start")]

    def cancelled(self) -> list[int]:
        return [message.key for message in self.messages if message.HasField("cancel")]

    async def GenerateMany(self, requests: AsyncIterator[pb.GenerateManyRequest], context: Context) -> None:
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if self.refuses:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "not you")
        async for message in requests:
            self.messages.append(message)
            if not message.HasField("start"):
                continue
            answers: list[pb.KeyedResponse] = []
            match message.start.prompt_text.split():
                case ["hang"]:
                    answers = [pb.KeyedResponse(response=response) for response in CANNED[:2]]
                case ["fail", code, *retry_ms]:
                    answers = [failed(code, *retry_ms)]
                case ["busy", code, retry_ms] if self.prompts().count(message.start.prompt_text) == 1:
                    answers = [failed(code, retry_ms)]
                case ["several"]:
                    answers = [pb.KeyedResponse(response=response) for response in SEVERAL]
                case ["quit"]:
                    metadata = ("grpc-retry-pushback-ms", "-1"), ("x-request-id", "stream")
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "going away", metadata)
                case _:
                    answers = [pb.KeyedResponse(response=response) for response in CANNED]
            for answer in answers:
                answer.key = message.key
            await context.write(pb.GenerateManyResponse(responses=answers))
            if message.start.prompt_text == "then hang":
                await asyncio.Event().wait()


def failed(code: str, retry_ms: str = "") -> pb.KeyedResponse:
    error = pb.GenerationError(code=grpc.StatusCode[code].value[0], message=f"no [{code}] today")
    if retry_ms:
        error.retry_after.CopyFrom(Duration(nanos=int(retry_ms) * 1_000_000))
    return pb.KeyedResponse(error=error)


@asynccontextmanager
async def fake_many() -> AsyncIterator[FakeMany]:
    fake = FakeMany()
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server)  # type: ignore[no-untyped-call]
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(None)


@pytest.fixture
async def server() -> AsyncIterator[FakeMany]:
    async with fake_many() as fake:
        yield fake


@pytest.fixture
async def client(server: FakeMany) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address) as connected:
        yield connected


@pytest.fixture
async def many(client: AsyncClient) -> AsyncIterator[ManyGenerations]:
    async with client.many() as made:
        yield made


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_each_reads_its_own(many: ManyGenerations, server: FakeMany) -> None:
    hanging = await many.start("hang")
    generations = [await many.start(f"prompt {number}") for number in range(20)]
    completions = await asyncio.gather(*(generation.collect() for generation in generations))
    assert [completion.text for completion in completions] == ["abc"] * 20
    assert completions[0].finished.stop_string == "END"
    deltas = aiter(hanging)
    assert (await anext(deltas)).text == "a"
    assert server.streams == 1
    assert len({message.key for message in server.messages}) == 21


async def test_choices_end_one_by_one(many: ManyGenerations, server: FakeMany) -> None:
    generation = await many.start("several", n=2)
    first, second = await generation.collect_all()
    assert (first.text, second.text) == ("ab", "xy")
    await (await many.start("last")).collect()
    assert server.cancelled() == [], "what has ended is not cancelled"


async def test_a_start_is_sent_before_it_is_read(many: ManyGenerations, server: FakeMany) -> None:
    await many.start("never read")
    await until(lambda: server.prompts() == ["never read"])


async def test_one_failure_is_one_generations(many: ManyGenerations) -> None:
    good, bad = await many.start("good"), await many.start("fail INVALID_ARGUMENT")
    with pytest.raises(errors.InvalidArgument, match=r"no \[INVALID_ARGUMENT\] today"):
        await bad.collect()
    assert (await good.collect()).text == "abc"


async def test_a_failure_may_say_when_to_come_again(many: ManyGenerations, server: FakeMany) -> None:
    assert (await (await many.start("busy UNAVAILABLE 1")).collect()).text == "abc"
    assert (await (await many.start("busy RESOURCE_EXHAUSTED 1")).collect()).text == "abc"
    with pytest.raises(errors.ResourceExhausted):
        await (await many.start("fail RESOURCE_EXHAUSTED")).collect()
    assert server.prompts().count("fail RESOURCE_EXHAUSTED") == 1
    with pytest.raises(errors.Unavailable) as caught:
        await (await many.start("fail UNAVAILABLE 1")).collect()
    assert caught.value.retry_after == 0.001
    assert server.prompts().count("fail UNAVAILABLE 1") == 4


@pytest.mark.parametrize("how", ["break", "aclose", "before it is read"])
async def test_leaving_cancels_one(many: ManyGenerations, server: FakeMany, how: str) -> None:
    generation, other = await many.start("hang"), await many.start("other")
    if how == "break":
        async for _ in generation:
            break
    else:
        deltas = aiter(generation)
        if how == "aclose":
            await anext(deltas)
        await generation.aclose()
    await until(lambda: server.cancelled() == [1])
    assert (await other.collect()).text == "abc"


async def test_a_timeout_is_one_generations(many: ManyGenerations, server: FakeMany) -> None:
    generation, other = await many.start("hang", timeout=0.1), await many.start("hang")
    with pytest.raises(errors.DeadlineExceeded):
        await generation.collect()
    await until(lambda: server.cancelled() == [1])
    assert (await anext(aiter(other))).text == "a"


async def test_a_timeout_passes_where_nobody_reads(many: ManyGenerations, server: FakeMany) -> None:
    late, done = await many.start("hang", timeout=0.1), await many.start("hello", timeout=0.1)
    await until(lambda: server.cancelled() == [1])
    with pytest.raises(errors.DeadlineExceeded):
        await late.collect()
    assert (await done.collect()).text == "abc"  # what has come in time may be read later
    assert server.cancelled() == [1]


async def test_a_stream_that_breaks_is_opened_anew(client: AsyncClient, server: FakeMany) -> None:
    async with client.many() as many:
        live, last = await many.start("hang"), await many.start("quit")
        deltas = aiter(live)
        await anext(deltas)
        with pytest.raises(errors.Unavailable, match="going away"):
            await anext(deltas)
        with pytest.raises(errors.Unavailable, match="going away"):
            await last.collect()
        assert (await (await many.start("again")).collect()).text == "abc"
    assert server.streams == 2


async def test_what_ends_a_stream_is_told_of_each_generation_by_its_own_id(client: AsyncClient) -> None:
    async with client.many() as many:
        started, refused = await many.start("hang"), await many.start("quit")
        raised = []
        for generation in (started, refused):
            with pytest.raises(errors.Unavailable, match="going away") as error:
                await generation.collect()
            raised.append(error.value)
    assert [isinstance(error, RpcError) and error.request_id for error in raised] == ["r-1", "stream"]


async def test_writes_that_meet_the_end_of_the_stream_hide_no_status(client: AsyncClient, server: FakeMany) -> None:
    """gRPC would show its own failure for most of these streams."""
    server.refuses = True
    for _ in range(5):
        async with client.many() as many:
            for generation in [await many.start("hello") for _ in range(60)]:
                with pytest.raises(errors.Unauthenticated, match="not you"):
                    await generation.collect()


async def test_a_write_that_fails_before_there_is_a_status(server: FakeMany) -> None:
    class Fails:
        def __init__(self, call: Any) -> None:
            self.call = call

        def add_done_callback(self, callback: Callable[[Any], None]) -> None:
            self.call.add_done_callback(callback)

        async def __aiter__(self) -> AsyncIterator[pb.GenerateManyResponse]:
            self.call._cython_call.set_internal_error("as where sending fails")
            self.call.cancel()
            await self.call._raise_for_status()
            yield pb.GenerateManyResponse()

        def cancel(self) -> None:
            self.call.cancel()

    async with AsyncClient(server.address, max_retries=0) as client, client.many() as many:
        opened = many._open_stream
        many._open_stream = lambda requests: Fails(opened(requests))  # type: ignore[assignment,return-value]
        with pytest.raises(errors.Unavailable, match="on its way"):
            await (await many.start("hello")).collect()


async def test_nobody_listens() -> None:
    async with AsyncClient("127.0.0.1:1", max_retries=1) as client, client.many() as many:
        with pytest.raises(errors.Unavailable):
            await (await many.start("hello")).collect()


async def test_leaving_the_context_ends_who_waits_for_another_attempt(client: AsyncClient) -> None:
    async with client.many() as many:
        generation = await many.start("busy UNAVAILABLE 100")
        reading = asyncio.create_task(generation.collect())
        await asyncio.sleep(0.05)
    with pytest.raises(errors.Cancelled):
        await reading


async def test_leaving_the_context_ends_all(client: AsyncClient) -> None:
    async def read(generation: Generation) -> None:
        async for _ in generation:
            reading.set()

    reading = asyncio.Event()
    async with client.many() as many:
        task = asyncio.create_task(read(await many.start("hang")))
        await reading.wait()
    with pytest.raises(errors.Cancelled):
        await task
    with pytest.raises(RuntimeError, match="closed"):
        await many.start("hello")


@pytest.mark.parametrize(
    ("lives", "outcome"), [(False, grpc.StatusCode.OK), (True, grpc.StatusCode.CANCELLED)], ids=["nothing", "one"]
)
async def test_a_stream_ends_well_where_nothing_lives_on_it(
    serving: Serving, lives: bool, outcome: grpc.StatusCode
) -> None:
    """The server counts how RPCs end, and operators look for those that did not end well."""
    ended: list[grpc.StatusCode] = []
    serving.server.calls.observers.append(lambda call, code, seconds: ended.append(code))
    async with AsyncClient(serving.address) as client, client.many() as many:
        left = await many.start("left")
        await left.aclose()
        read = await many.start("read", max_tokens=4)
        serving.runner.open()
        await read.collect()
        if lives:
            serving.runner.close()
            await many.start("live")
    await serving.until(lambda: bool(ended))
    assert ended == [outcome]


async def test_a_server_that_does_not_end_the_stream_is_not_waited_for(
    server: FakeMany, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.client.many._LAST_WORD_SECONDS", 0.01)
    async with asyncio.timeout(PATIENCE), AsyncClient(server.address) as client, client.many() as many:
        await (await many.start("then hang")).collect()


async def test_closing_the_client_ends_all(server: FakeMany) -> None:
    client = AsyncClient(server.address)
    many = client.many(traceparent=f"00-{'1' * 32}-{'2' * 16}-01")
    generation = await many.start("hang")
    deltas = aiter(generation)
    await anext(deltas)
    await client.aclose()
    with pytest.raises(RpcError):
        await anext(deltas)
    await many.aclose()
    assert server.metadata[0]["traceparent"] == f"00-{'1' * 32}-{'2' * 16}-01"


async def test_against_the_server_itself(free: Serving) -> None:
    """Both ways of asking give the same."""
    async with AsyncClient(free.address) as client, client.many() as many:
        apart = [await client.complete(f"prompt {number}", max_tokens=8) for number in range(8)]
        generations = [await many.start(f"prompt {number}", max_tokens=8) for number in range(8)]
        together: list[Completion] = [await generation.collect() for generation in generations]
        with pytest.raises(errors.InvalidArgument):
            await (await many.start("")).collect()
    assert [made.token_ids for made in together] == [made.token_ids for made in apart]
    await free.until(lambda: free.idle)


async def test_a_message_that_is_far_too_large_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take a quarter of a second for every 4 MiB, in which nobody gets a token. Its key alone is read."""
    monkeypatch.setattr(server_many.ManyGenerations, "_act", lambda *_: pytest.fail("it was parsed"))
    async with serving_context(settings=ServerSettings(max_message_size=1000)) as served:
        async with AsyncClient(served.address) as client, client.many() as many:
            for size in (1020, 3500):
                said = rf"has {size // 1000}\d\d\d bytes, .* at most 1000"
                with pytest.raises(errors.ResourceExhausted, match=said) as caught:
                    await (await many.start("x" * size)).collect()
                assert caught.value.reason == errors.Reason.RESOURCE_EXHAUSTED
        await served.until(lambda: served.idle)


async def test_a_request_that_is_too_large_is_one_generations() -> None:
    async with serving_context(settings=ServerSettings(max_message_size=1000)) as served:
        async with AsyncClient(served.address) as client, client.many() as many:
            live = await many.start("live", max_tokens=8)
            with pytest.raises(errors.ResourceExhausted, match=r"at most 1000 \(--max-message-size\)") as caught:
                await (await many.start("x" * 1000)).collect()
            assert caught.value.reason == errors.Reason.RESOURCE_EXHAUSTED
            served.runner.open()
            assert len((await live.collect()).token_ids) == 8
            assert (await (await many.start("x" * 900, max_tokens=1)).collect()).token_ids
        await served.until(lambda: served.idle)
