"""What every RPC goes through, by itself: handlers of every kind, in real calls, and what observers are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from paceline.errors import NotFound, PermissionDenied
from paceline.server.calls import Call, Caller, Calls, Context, OpenGate, current_call
from support.serving import PATIENCE, details_of

SERVICE = "test.Service"
KINDS = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}
STYLES = [*KINDS, "unary_stream generator", "stream_stream generator"]
MANY = 1 << 20  # messages that no client reads
MAX_MESSAGE_BYTES = 1000


class Handlers:
    """Does what the request says. A stream of requests is joined to one text.

    Attributes:
        ended: set when a handler is left, however.
        entered: set when it begins.
    """

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.ended = asyncio.Event()

    async def act(self, text: str, context: Context) -> str:
        self.entered.set()
        match text:
            case "refuse":
                raise NotFound("there is no such thing")
            case "abort":
                await context.abort(grpc.StatusCode.DATA_LOSS, "gone")
            case "break":
                raise ValueError("a secret of the machine")
            case "hang":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.ended.set()
            case "lost":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    raise grpc.aio.InternalError("what a write ends with, if it is the first to notice") from None
            case "who":
                await asyncio.sleep(0.01)
                return current_call().request_id
            case "rename":
                current_call().request_id = "renamed"
        return text.upper()

    async def unary_unary(self, request: StringValue, context: Context) -> StringValue:
        return StringValue(value=await self.act(request.value, context))

    async def stream_unary(self, requests: AsyncIterator[StringValue], context: Context) -> StringValue:
        return StringValue(value=await self.act("".join([one.value async for one in requests]), context))

    async def unary_stream(self, request: StringValue, context: Context) -> None:
        try:
            for letter in await self.act(request.value, context):
                await context.write(StringValue(value=letter))
            if request.value == "flood":
                for _ in range(MANY):
                    await context.write(StringValue(value="x" * 1000))
        finally:
            self.ended.set()

    async def stream_stream(self, requests: AsyncIterator[StringValue], context: Context) -> None:
        await self.unary_stream(StringValue(value="".join([one.value async for one in requests])), context)

    async def unary_stream_generator(self, request: StringValue, context: Context) -> AsyncIterator[StringValue]:
        try:
            for letter in await self.act(request.value, context):
                yield StringValue(value=letter)
            if request.value == "flood":
                for _ in range(MANY):
                    yield StringValue(value="x" * 1000)
        finally:
            self.ended.set()

    async def stream_stream_generator(
        self, requests: AsyncIterator[StringValue], context: Context
    ) -> AsyncIterator[StringValue]:
        text = "".join([one.value async for one in requests])
        async for response in self.unary_stream_generator(StringValue(value=text), context):
            yield response


class Served:
    """A server of `Handlers`, a channel, and what the observer was told."""

    def __init__(self, gate: Any) -> None:
        self.handlers = Handlers()
        self.seen: list[tuple[Call, grpc.StatusCode]] = []
        calls = Calls(gate, MAX_MESSAGE_BYTES, [self.observe])
        self.server = grpc.aio.server(interceptors=[calls])
        handlers = {
            style.replace(" ", "_"): KINDS[style.split()[0]](
                getattr(self.handlers, style.replace(" ", "_")), StringValue.FromString, StringValue.SerializeToString
            )
            for style in STYLES
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.channel = grpc.aio.insecure_channel(self.address)

    def observe(self, call: Call, code: grpc.StatusCode, seconds: float) -> None:
        assert seconds >= 0.0
        self.seen.append((call, code))

    def call(
        self,
        style: str,
        text: str,
        serialize: Callable[[Any], bytes] = StringValue.SerializeToString,
        channel: Any = None,
        **how: Any,
    ) -> Any:
        """A call of that kind; a stream of requests has one for each letter."""
        kind = style.split()[0]
        method = getattr(channel or self.channel, kind)(
            f"/{SERVICE}/{style.replace(' ', '_')}",
            request_serializer=serialize,
            response_deserializer=StringValue.FromString,
        )
        if kind.startswith("stream"):
            return method(iter([StringValue(value=letter) for letter in text]), **how)
        return method(StringValue(value=text), **how)

    async def text_of(self, call: Any) -> str:
        if hasattr(call, "__aiter__"):
            return "".join([one.value async for one in call])
        return str((await call).value)

    async def failure(self, call: Any) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.text_of(call)
        return caught.value

    async def refusal(self, style: str, serialize: Callable[[Any], bytes]) -> Any:
        """What a call fails with whose requests nobody reads, by the blocking client.

        The other one, where a write meets the refusal on its way, puts the failure of the write in place of the status
        that came (https://github.com/grpc/grpc/issues/36066).
        """

        def ask() -> Any:
            with grpc.insecure_channel(self.address) as channel, pytest.raises(grpc.RpcError) as caught:
                list(self.call(style, "x", serialize, channel, timeout=PATIENCE))
            return caught.value

        return await asyncio.to_thread(ask)

    async def told(self, count: int = 1) -> list[grpc.StatusCode]:
        """The codes that the observer was told, once there are so many, or more than should be."""
        async with asyncio.timeout(PATIENCE):
            while len(self.seen) < count:  # noqa: ASYNC110, observers are plain calls
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        return [code for _, code in self.seen]


@asynccontextmanager
async def serving(gate: Any = None) -> AsyncIterator[Served]:
    served = Served(gate or OpenGate())
    await served.server.start()
    try:
        yield served
    finally:
        await served.channel.close()
        await served.server.stop(0)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as made:
        yield made


def id_of(metadata: Any) -> str:
    [found] = [value for key, value in metadata if key == "x-request-id"]
    return str(found)


@pytest.mark.parametrize("style", STYLES)
async def test_ok(served: Served, style: str) -> None:
    call = served.call(style, "hello", metadata=(("x-request-id", "mine"),))
    assert await served.text_of(call) == "HELLO"
    assert id_of(await call.trailing_metadata()) == "mine"
    assert await served.told() == [grpc.StatusCode.OK]
    assert served.seen[0][0].request_id == "mine"
    assert served.seen[0][0].method == f"/{SERVICE}/{style.replace(' ', '_')}"


@pytest.mark.parametrize("style", STYLES)
async def test_an_id_from_the_message(served: Served, style: str) -> None:
    call = served.call(style, "rename")
    assert await served.text_of(call) == "RENAME"
    assert id_of(await call.trailing_metadata()) == "renamed"
    assert served.seen[0][0].request_id == "renamed"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("refuse", grpc.StatusCode.NOT_FOUND, "there is no such thing"),
        ("abort", grpc.StatusCode.DATA_LOSS, "gone"),
        ("break", grpc.StatusCode.INTERNAL, "internal error; the server's log has it under request mine"),
    ],
)
async def test_errors(
    served: Served, style: str, text: str, code: grpc.StatusCode, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = await served.failure(served.call(style, text, metadata=(("x-request-id", "mine"),)))
    assert (error.code(), error.details()) == (code, said)
    assert id_of(error.trailing_metadata()) == "mine"
    if text != "abort":
        assert details_of(error)["ErrorInfo"].metadata["request_id"] == "mine"  # type: ignore[attr-defined]
    assert await served.told() == [code]
    assert ("a secret of the machine" in caplog.text) == (text == "break")


@pytest.mark.parametrize("style", STYLES)
async def test_cancelled_while_it_waits(served: Served, style: str) -> None:
    call = served.call(style, "hang")
    await served.handlers.entered.wait()
    call.cancel()
    await served.handlers.ended.wait()
    assert await served.told() == [grpc.StatusCode.CANCELLED]


@pytest.mark.parametrize("style", [style for style in STYLES if "_stream" in style])
async def test_cancelled_while_it_is_blocked_in_a_write(
    served: Served, style: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    call = served.call(style, "flood")
    await call.read()
    await served.handlers.entered.wait()
    await asyncio.sleep(0.2)  # the windows fill
    call.cancel()
    await served.handlers.ended.wait()
    assert await served.told() == [grpc.StatusCode.CANCELLED]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("style", [style for style in STYLES if "_stream" in style])
async def test_the_library_notices_that_the_client_is_gone(
    served: Served, style: str, caplog: pytest.LogCaptureFixture
) -> None:
    call = served.call(style, "lost")
    await served.handlers.entered.wait()
    call.cancel()
    assert await served.told() == [grpc.StatusCode.CANCELLED]
    assert caplog.records == []


@pytest.mark.parametrize("style", STYLES)
async def test_deadline(served: Served, style: str) -> None:
    error = await served.failure(served.call(style, "hang", timeout=1.0))  # which leaves a busy machine time to begin
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await served.handlers.ended.wait()
    assert await served.told() == [grpc.StatusCode.DEADLINE_EXCEEDED]


@pytest.mark.parametrize("style", STYLES)
async def test_cancelled_long_before_the_deadline(served: Served, style: str) -> None:
    call = served.call(style, "hang", timeout=PATIENCE)
    await served.handlers.entered.wait()
    call.cancel()
    assert await served.told() == [grpc.StatusCode.CANCELLED]


@pytest.mark.parametrize("style", STYLES)
async def test_bytes_that_are_no_message(served: Served, style: str) -> None:
    error = await served.failure(served.call(style, "x", lambda message: b"\xff\xff"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "request = '2 bytes': must be a StringValue message whose strings are UTF-8"
    assert await served.told() == [grpc.StatusCode.INVALID_ARGUMENT]


async def test_the_server_stops(served: Served) -> None:
    call = served.call("unary_stream", "hang")
    await served.handlers.entered.wait()
    await served.server.stop(0)
    assert (await served.failure(call)).code() is grpc.StatusCode.UNAVAILABLE
    assert await served.told() == [grpc.StatusCode.CANCELLED]


class ClosedGate(OpenGate):
    def admit(self, method: str, context: Context) -> Caller:
        raise PermissionDenied("nobody")


@pytest.mark.parametrize("style", STYLES)
async def test_nothing_is_read_for_who_is_not_admitted(style: str) -> None:
    """Not even parsed: these bytes would be INVALID_ARGUMENT."""
    async with serving(ClosedGate()) as served:
        error = await served.refusal(style, lambda message: b"\xff\xff")
        assert (error.code(), error.details()) == (grpc.StatusCode.PERMISSION_DENIED, "nobody")
        assert await served.told() == [grpc.StatusCode.PERMISSION_DENIED]
        assert not served.handlers.entered.is_set()


async def test_each_has_its_own_call(served: Served) -> None:
    ids = [f"id-{index}" for index in range(60)]
    styles = STYLES * 10
    calls = [
        served.call(style, "who", metadata=(("x-request-id", name),)) for style, name in zip(styles, ids, strict=True)
    ]
    assert await asyncio.gather(*map(served.text_of, calls)) == ids
    assert await served.told(60) == [grpc.StatusCode.OK] * 60
    assert sorted(call.request_id for call, _ in served.seen) == sorted(ids)
