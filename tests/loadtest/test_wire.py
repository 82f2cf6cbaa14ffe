"""The benchmark of the wire: its client counts what comes, and both servers answer it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Scripts beside each other, not a package.
sys.path.insert(0, str(Path(__file__).parents[2] / "loadtest" / "grpc"))

import bench
import http2
from http2 import DATA, END_STREAM, HEADERS, Connection, frame, message


class Silent(Connection):
    """Without a server."""

    def __init__(self) -> None:
        self.last: dict[int, float] = {}
        self.gaps: list[float] = []
        self.messages = self.octets = 0
        self.ended: dict[int, bytes] = {}
        self._unread = b""
        self._parts: dict[int, bytes] = {}

    def feed(self, data: bytes, now: float) -> None:
        self._take(self._unread + data, now)


def test_messages_are_counted_however_they_are_cut() -> None:
    a, b, c = message(b"a" * 20), message(b"b" * 300), message(b"")
    # Stream 1: one a frame; stream 3: two in a frame; stream 5: one in three frames, and another behind it.
    data = frame(DATA, 0, 1, a) + frame(DATA, 0, 3, a + c) + frame(DATA, 0, 5, b[:3]) + frame(DATA, 0, 5, b[3:90])
    data += frame(DATA, 0, 5, b[90:] + a) + frame(HEADERS, END_STREAM, 5, b"words")
    for size in (1, 7, 64, len(data)):
        connection = Silent()
        for number, start in enumerate(range(0, len(data), size)):
            connection.feed(data[start : start + size], float(number))
        assert connection.messages == 5
        assert connection.octets == len(a + a + c + b + a)
        assert connection.last.keys() == {1, 3, 5}
        assert connection.ended == {5: b"words"}
        assert (connection._unread, connection._parts) == (b"", {})


def test_gaps_are_of_each_stream() -> None:
    connection = Silent()
    for now, stream in ((1.0, 1), (1.5, 3), (2.0, 1), (4.5, 3)):
        connection.feed(frame(DATA, 0, stream, message(b"x")), now)
    assert connection.gaps == [1.0, 3.0]


def test_names_and_values_go_as_they_are() -> None:
    assert http2.header_block([(b"te", b"trailers")]) == b"\x00\x02te\x08trailers"


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", ["bare", "paceline"])
def test_both_servers_answer(name: str, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "STREAMS", 4)
    monkeypatch.setattr(bench, "WARM_SECONDS", 0.3)
    with bench.running(name) as server:
        rate = bench.measure_rate(server, many, 0.5)
    assert rate.messages > 0
    assert rate.tokens > 0
    assert rate.cpu > 0
    assert (rate.engine > 0) is (name == "paceline")
