"""An HTTP/2 client that does as little as it can: it opens gRPC streams and counts the messages that come.

A client on grpc.aio costs as much as the server that it measures, on the same two cores. This one takes a few
microseconds a message: windows are opened wide at the start, and messages are told apart by their lengths alone.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
INITIAL_WINDOW_SIZE, CANCEL = 4, 8
WINDOW: Final = 1 << 30
FRAME: Final = struct.Struct(">HBBBI")  # length in two parts, kind, flags, stream
MESSAGE: Final = struct.Struct(">BI")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return FRAME.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def message(data: bytes) -> bytes:
    """A message with gRPC's prefix."""
    return MESSAGE.pack(0, len(data)) + data


def header_block(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """HPACK without its tables and codes: every name and value is shorter than 127 bytes and is sent as it is."""
    return b"".join(b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields)


class Connection:
    """One connection; one thread.

    Args:
        window: octets that the server may send on a stream before this side asks for more, which it never does.

    Attributes:
        opened: streams so far; the ids are 1, 3, 5, ...
        last: stream -> when its last message came, in seconds of `time.monotonic()`.
        gaps: seconds between two messages of a stream, since `gaps` was last emptied.
        messages, octets: of gRPC, whole ones, since the start.
        ended: streams that the server has ended; with its last words where they are refused.
    """

    def __init__(self, host: str, port: int, path: str, window: int = WINDOW) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fields = (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", f"{host}:{port}".encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
        self._headers = header_block(fields)
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        self.socket.sendall(
            PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW))
        )
        self.opened = 0
        self.last: dict[int, float] = {}
        self.gaps: list[float] = []
        self.messages = 0
        self.octets = 0
        self.ended: dict[int, bytes] = {}
        self._unread = b""
        self._parts: dict[int, bytes] = {}  # stream -> the beginning of a message

    # -- to the server ------------------------------------------------------------------------------------------------

    def open(self, *messages: bytes, end: bool = True) -> int:
        """A stream with these messages from the client, which may be all of them. Returns its id."""
        stream = 2 * self.opened + 1
        self.opened += 1
        head = frame(HEADERS, END_HEADERS, stream, self._headers)
        body = [frame(DATA, 0, stream, message(data)) for data in messages]
        if end:
            body.append(frame(DATA, END_STREAM, stream))
        self.socket.sendall(head + b"".join(body))
        return stream

    def cancel(self, stream: int) -> None:
        self.socket.sendall(frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))

    def close(self) -> None:
        self.socket.close()

    # -- from the server ----------------------------------------------------------------------------------------------

    def read(self, seconds: float) -> None:
        """Whatever comes within so many seconds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                data = self.socket.recv(1 << 18)
            except TimeoutError:
                return
            if not data:
                raise ConnectionError("the server has closed the connection")
            self._take(self._unread + data if self._unread else data, time.monotonic())

    def _take(self, data: bytes, now: float) -> None:
        """The frames in `data`; what is left of it waits for the rest of its frame."""
        at, size, unpack = 0, len(data), FRAME.unpack_from
        last, gaps = self.last, self.gaps
        while at + 9 <= size:
            high, low, kind, flags, stream = unpack(data, at)
            length = high << 8 | low
            end = at + 9 + length
            if end > size:
                break
            if kind == DATA:
                count = self._count(stream, data, at + 9, end)
                if count:
                    self.messages += count
                    before = last.get(stream)
                    if before is not None:
                        gaps.append(now - before)
                    last[stream] = now
            else:
                self._answer(kind, flags, data[at + 9 : end])
            if (kind <= HEADERS and flags & END_STREAM) or kind == RST_STREAM:
                self.ended[stream] = data[at + 9 : end]
            at = end
        self._unread = data[at:]

    def _count(self, stream: int, data: bytes, start: int, end: int) -> int:
        """Messages that end in `data[start:end]`."""
        self.octets += end - start
        whole = end - start >= 5 and MESSAGE.unpack_from(data, start)[1] == end - start - 5
        if whole and stream not in self._parts:  # nearly always
            return 1
        part = self._parts.pop(stream, b"") + data[start:end]
        at = count = 0
        while at + 5 <= len(part):
            after = at + 5 + MESSAGE.unpack_from(part, at)[1]
            if after > len(part):
                break
            at, count = after, count + 1
        if at < len(part):
            self._parts[stream] = part[at:]
        return count

    def _answer(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self.socket.sendall(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.socket.sendall(frame(PING, ACK, 0, payload))
        elif kind == GOAWAY:
            raise ConnectionError(f"the server goes away: {payload!r}")
