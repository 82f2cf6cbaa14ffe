"""HTTP/2 by hand: frames as bytes, right or wrong, over a plain socket. No more of it than the tests need."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x4, 0x8, 0x20
ACK: Final = 0x1

GENERATE: Final = "/paceline.v1.GenerationService/Generate"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", length: int | None = None) -> bytes:
    """Args:
    length: what the header says, if not the truth.
    """
    told = len(payload) if length is None else length
    return struct.pack(">I", told)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def hpack(fields: Mapping[str, str]) -> bytes:
    """Literals without indexing and without Huffman (RFC 7541, 6.2.2), of fewer than 127 bytes each."""
    block = b""
    for name, value in fields.items():
        assert len(name) < 127, name
        assert len(value) < 127, value
        block += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return block


def call_headers(path: str = GENERATE, **changes: str) -> dict[str, str]:
    """The request headers of an RPC; `changes` have underscores for hyphens, and "" to leave one out."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    fields |= {name.replace("_", "-"): value for name, value in changes.items()}
    return {name: value for name, value in fields.items() if value}


def call(message: bytes, stream: int = 1) -> bytes:
    """A whole request of Generate."""
    return frame(HEADERS, END_HEADERS, stream, hpack(call_headers())) + frame(
        DATA, END_STREAM, stream, prefixed(message)
    )


def prefixed(message: bytes, compressed: int = 0, length: int | None = None) -> bytes:
    """A message as gRPC puts it into DATA frames."""
    return struct.pack(">BI", compressed, len(message) if length is None else length) + message


class RawConnection:
    """What is received is kept until somebody asks for it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """The other side may have closed the connection already."""
        with suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def begin(self) -> None:
        """Preface and settings, and the server's."""
        await self.send(PREFACE + frame(SETTINGS, 0, 0))
        await self.reader.readexactly(9)

    async def until_closed(self) -> None:
        """By the other side."""
        with suppress(ConnectionError):
            while await self.reader.read(1 << 16):
                pass

    def reset(self) -> None:
        """Close at once, as if the process had died: a RST instead of a FIN."""
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()


@asynccontextmanager
async def raw_connection(address: str) -> AsyncIterator[RawConnection]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield RawConnection(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
