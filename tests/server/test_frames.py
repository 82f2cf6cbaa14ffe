"""Bytes that are no HTTP/2, or no gRPC: whoever sends them hurts its own connection, and nobody else's."""

from __future__ import annotations

import asyncio
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.sim import reference_output
from support.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GENERATE,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call,
    call_headers,
    frame,
    hpack,
    prefixed,
    raw_connection,
)
from support.serving import PATIENCE, Serving, request

MESSAGE = request("from a raw socket", max_tokens=4).SerializeToString()
BEGIN = PREFACE + frame(SETTINGS, 0, 0)


def headers(stream: int = 1, flags: int = END_HEADERS, **changes: str) -> bytes:
    return frame(HEADERS, flags, stream, hpack(call_headers(**changes)))


def data(payload: bytes, flags: int = END_STREAM, stream: int = 1) -> bytes:
    return frame(DATA, flags, stream, payload)


def setting(number: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", number, value))


# Before or instead of HTTP/2.
NOT_HTTP2 = {
    "nothing": b"",
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "zeros": bytes(100_000),
    "half a preface": PREFACE[:11],
    "another preface": PREFACE.replace(b"2.0", b"3.0"),
    "no settings": PREFACE + headers() + data(prefixed(MESSAGE)),
}
# Behind preface and settings.
WRONG_FRAMES = {
    "longer than allowed": frame(DATA, 0, 1, bytes(100), length=(1 << 24) - 1),
    "cut in its header": frame(HEADERS, END_HEADERS, 1)[:5],
    "cut in its payload": frame(HEADERS, END_HEADERS, 1, bytes(3), length=300),
    "of a kind that there is not": frame(0x7F, 0xFF, 1, bytes(50)),
    "DATA on stream 0": frame(DATA, 0, 0, b"x"),
    "DATA on an idle stream": frame(DATA, 0, 7, b"x"),
    "HEADERS on stream 0": headers(0),
    "HEADERS on an even stream": headers(2),
    "HEADERS on a stream that is done": call(MESSAGE) + headers(),
    "streams in the wrong order": headers(9) + headers(3),
    "HPACK that is none": frame(HEADERS, END_HEADERS, 1, b"\xff" * 200),
    "HPACK of an entry that there is not": frame(HEADERS, END_HEADERS, 1, b"\xfe"),
    "HPACK cut": frame(HEADERS, END_HEADERS, 1, hpack(call_headers())[:-7]),
    "HPACK of a table that is too large": frame(HEADERS, END_HEADERS, 1, b"\x3f\xff\xff\xff\xff\x0f"),
    "HPACK with Huffman that is none": frame(HEADERS, END_HEADERS, 1, b"\0\x81\xff\x84\xff\xff\xff\xff"),
    "padding longer than the frame": frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff" + hpack(call_headers())),
    "a stream that depends on itself": frame(
        HEADERS, END_HEADERS | HAS_PRIORITY, 1, struct.pack(">IB", 1, 9) + hpack(call_headers())
    ),
    "headers without an end, then DATA": headers(flags=0) + data(prefixed(MESSAGE)),
    "CONTINUATION of nothing": frame(CONTINUATION, END_HEADERS, 1, hpack(call_headers())),
    "CONTINUATION without an end": headers(flags=0) + frame(CONTINUATION, 0, 1, b"") * 20_000,
    "headers that are too large": headers(flags=0) + frame(CONTINUATION, 0, 1, hpack({"x-a": "a" * 120}) * 100) * 40,
    "RST_STREAM of an idle stream": frame(RST_STREAM, 0, 5, bytes(4)),
    "RST_STREAM that is too short": headers() + frame(RST_STREAM, 0, 1, bytes(3)),
    "SETTINGS of five bytes": frame(SETTINGS, 0, 0, bytes(5)),
    "SETTINGS on a stream": frame(SETTINGS, 0, 1),
    "SETTINGS that nobody asked for an ACK of": frame(SETTINGS, ACK, 0) * 100,
    "SETTINGS: a window that is too large": setting(4, 2**31),
    "SETTINGS: no window": setting(4, 0) + call(MESSAGE),
    "SETTINGS: frames that are too small": setting(5, 1),
    "SETTINGS: no table for HPACK": setting(1, 0) + call(MESSAGE),
    "SETTINGS: push, neither on nor off": setting(2, 7),
    "many SETTINGS": setting(3, 1) * 5_000,
    "PING of seven bytes": frame(PING, 0, 0, bytes(7)),
    "PING on a stream": frame(PING, 0, 1, bytes(8)),
    "many PINGs": frame(PING, 0, 0, bytes(8)) * 5_000,
    "GOAWAY, and on": frame(GOAWAY, 0, 0, bytes(8)) + call(MESSAGE),
    "GOAWAY cut": frame(GOAWAY, 0, 0, bytes(3)),
    "WINDOW_UPDATE by 0": frame(WINDOW_UPDATE, 0, 0, bytes(4)),
    "WINDOW_UPDATE beyond the largest": frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff") * 3,
    "WINDOW_UPDATE of three bytes": frame(WINDOW_UPDATE, 0, 0, bytes(3)),
    "PUSH_PROMISE by a client": frame(PUSH_PROMISE, END_HEADERS, 1, struct.pack(">I", 2) + hpack(call_headers())),
    "PRIORITY of four bytes": frame(PRIORITY, 0, 1, bytes(4)),
    "many streams, opened and reset": b"".join(
        headers(stream) + frame(RST_STREAM, 0, stream, struct.pack(">I", 8)) for stream in range(1, 4_001, 2)
    ),
    "many calls, opened and reset": b"".join(
        call(MESSAGE, stream) + frame(RST_STREAM, 0, stream, struct.pack(">I", 8)) for stream in range(1, 2_001, 2)
    ),
}
# Good HTTP/2, and no gRPC.
WRONG_CALLS = {
    "no message": headers(flags=END_HEADERS | END_STREAM),
    "half a message": headers() + data(prefixed(MESSAGE)[:-3]),
    "half a prefix": headers() + data(prefixed(MESSAGE)[:3]),
    "two messages": headers() + data(prefixed(MESSAGE) * 2),
    "a message that is said to be huge": headers() + data(prefixed(MESSAGE, length=2**32 - 1)),
    "compressed, nobody knows how": headers() + data(prefixed(MESSAGE, compressed=1)),
    "compressed, as it is not": headers(grpc_encoding="gzip") + data(prefixed(MESSAGE, compressed=1)),
    "an encoding that there is not": headers(grpc_encoding="zeta") + data(prefixed(MESSAGE, compressed=1)),
    "flags that there are not": headers() + data(prefixed(MESSAGE, compressed=200)),
    "another content type": headers(content_type="text/html") + data(prefixed(MESSAGE)),
    "no content type": headers(content_type="") + data(prefixed(MESSAGE)),
    "GET": frame(HEADERS, END_HEADERS | END_STREAM, 1, hpack(call_headers() | {":method": "GET"})),
    "no path": frame(HEADERS, END_HEADERS, 1, hpack({":method": "POST", ":scheme": "http"})),
    "a path that is none": headers(path="Generate") + data(prefixed(MESSAGE)),
    "no te": headers(te="") + data(prefixed(MESSAGE)),
    "a timeout that is none": headers(grpc_timeout="soon") + data(prefixed(MESSAGE)),
    "a timeout below 0": headers(grpc_timeout="-1S") + data(prefixed(MESSAGE)),
    "no time at all": headers(grpc_timeout="0n") + data(prefixed(MESSAGE)),
    "a name in capitals": frame(HEADERS, END_HEADERS, 1, hpack(call_headers() | {"X-Loud": "1"})),
    "binary metadata that is none": headers(x_bin="%%%") + data(prefixed(MESSAGE)),
    "a request id that is none": headers(x_request_id="two words") + data(prefixed(MESSAGE)),
    "trailers from a client": headers() + data(prefixed(MESSAGE), flags=0) + headers(flags=END_HEADERS | END_STREAM),
    "no end": headers() + data(prefixed(MESSAGE), flags=0),
}
ALL = (
    NOT_HTTP2
    | {f"frame: {name}": BEGIN + sent for name, sent in WRONG_FRAMES.items()}
    | {f"call: {name}": BEGIN + sent for name, sent in WRONG_CALLS.items()}
)


class Bystanders:
    """A stream that is under way on another connection, and a server that must be as good as new afterwards."""

    def __init__(self, served: Serving) -> None:
        self.served = served
        self.responses = aiter(served.stub.Generate(request("bystander", max_tokens=60)))
        self.token_ids: list[int] = []

    async def begin(self) -> None:
        self.served.runner.allow(2)
        self.token_ids += (await anext(self.responses)).token_ids

    async def check(self) -> None:
        served = self.served
        served.runner.open()
        async for response in self.responses:
            self.token_ids += response.token_ids
        assert self.token_ids == reference_output(b"bystander", 60)
        async with raw_connection(served.address) as connection:
            await connection.send(BEGIN + call(MESSAGE))
            received = b""
            while b"grpc-status" not in received:  # in the trailers, which gRPC sends as plain literals
                more = await connection.reader.read(1 << 16)
                assert more, "a new connection is served no more"
                received += more
        await served.until(lambda: served.idle)
        assert served.engine.healthy


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("name", ALL)
async def test_nobody_else_is_hurt(serving: Serving, name: str) -> None:
    others = Bystanders(serving)
    await others.begin()
    async with raw_connection(serving.address) as connection:
        await connection.send(ALL[name])
        await others.check()


@pytest.mark.parametrize("ending", ["closed", "reset"])
async def test_connections_that_end_in_the_middle(serving: Serving, ending: str) -> None:
    """After every so many bytes of a call."""
    others = Bystanders(serving)
    await others.begin()
    whole = BEGIN + call(MESSAGE)
    for size in range(0, len(whole), 7):
        async with raw_connection(serving.address) as connection:
            await connection.send(whole[:size])
            if ending == "reset":
                connection.reset()
    await others.check()


async def test_windows_do_not_grow(serving: Serving) -> None:
    """What is sent before anybody reads lies in memory, for each of thousands of streams."""
    kind, initial_window, data = 3, 4, b""
    async with raw_connection(serving.address) as connection, asyncio.timeout(PATIENCE):
        await connection.send(BEGIN)
        while len(data) < 9 or len(data) < 9 + int.from_bytes(data[:3]):
            data += await connection.reader.read(1 << 16)
    assert data[kind] == SETTINGS
    settings = dict(struct.iter_unpack(">HI", data[9 : 9 + int.from_bytes(data[:3])]))
    assert settings.get(initial_window, 65535) <= 65535


FRAMES = st.builds(
    frame,
    st.one_of(st.integers(0, 10), st.integers(0, 255)),
    st.integers(0, 255),
    st.sampled_from([0, 1, 1, 1, 2, 3, 5, 2**31 - 1, 2**32 - 1]),
    st.one_of(
        st.binary(max_size=64),
        st.just(hpack(call_headers())),
        st.just(prefixed(MESSAGE)),
        st.builds(lambda cut: hpack(call_headers())[cut:], st.integers(0, 200)),
    ),
    st.one_of(st.none(), st.none(), st.none(), st.integers(0, 2**24 - 1)),
)


@pytest.mark.asyncio(loop_factories=["uvloop"])
@settings(max_examples=300, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(frames=st.lists(FRAMES, min_size=1, max_size=12))
async def test_frames_at_random(free: Serving, frames: list[bytes]) -> None:
    async with raw_connection(free.address) as connection:
        await connection.send(BEGIN + b"".join(frames))
        await asyncio.sleep(0)
    responses = [response async for response in free.stub.Generate(request("still there"))]
    token_ids = [token_id for response in responses for token_id in response.token_ids]
    assert token_ids == reference_output(b"still there", 8)


def test_the_path_is_the_contracts() -> None:
    from paceline.server import SERVICE_NAME

    assert f"/{SERVICE_NAME}/Generate" == GENERATE
