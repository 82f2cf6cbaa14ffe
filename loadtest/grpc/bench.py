"""What the wire costs: Paceline around a simulated engine, beside the least that grpc.aio can do.

    python loadtest/grpc/bench.py

Server and client are processes of their own. Paceline and the bare server take turns (A B A B).
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from http2 import Connection
from rich.console import Console
from rich.table import Table
from servers import STEP_SECONDS

from paceline.v1 import generation_pb2 as pb

HERE = Path(__file__).parent
SERVICE = "/paceline.v1.GenerationService/"
LIBC = ctypes.CDLL(None)
REQUEST = pb.GenerateRequest(prompt_text="hello", stop=pb.StopParams(max_tokens=8192, ignore_eos=True))
WARM_SECONDS = 2.0
STREAMS = 512
IDLE_STREAMS, IDLE_CONNECTIONS, IDLE_STEP_SECONDS = 5000, 10, 1.0
CANCELS, CANCEL_SECONDS = 150, 0.05
SIBLINGS, STOPPED, STOPPED_SECONDS, STOPPED_ROUNDS = 256, 16, 2.0, 8


class Server:
    """A server process."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command], cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._line())

    def report(self) -> dict[str, Any]:
        """What it counts itself; see the servers."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def cpu_seconds(self) -> float:
        """User and system time of all its threads, those that have ended included."""
        clock = ctypes.c_int()
        failed = LIBC.clock_getcpuclockid(self._process.pid, ctypes.byref(clock))
        assert not failed
        return time.clock_gettime(clock.value)

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError(f"the server ended with status {self._process.wait()}")
        return line


@contextmanager
def running(name: str, num_seqs: int = STREAMS, step_seconds: float = STEP_SECONDS) -> Iterator[Server]:
    command = ["server_bare.py"] if name == "bare" else ["server_paceline.py", str(num_seqs), str(step_seconds)]
    server = Server(*command)
    try:
        yield server
    finally:
        server.close()


@dataclass(frozen=True)
class Rate:
    """One run of many streams.

    Attributes:
        messages: that came, each second.
        tokens: that the server sent, each second: one in each message, or more where it merged them.
        cpu: microseconds of the server: for each message, with many on one stream for each token.
        engine: what planning and committing steps took, for each token.
        p99_gap: between two messages of a stream, in steps.
    """

    messages: float
    tokens: float
    cpu: float
    engine: float
    p99_gap: float


def measure_rate(server: Server, many: bool, seconds: float) -> Rate:
    connection = Connection("127.0.0.1", server.port, SERVICE + ("GenerateMany" if many else "Generate"))
    if many:
        starts = [pb.GenerateManyRequest(key=key, start=REQUEST).SerializeToString() for key in range(STREAMS)]
        connection.open(*starts, end=False)
    else:
        for _ in range(STREAMS):
            connection.open(REQUEST.SerializeToString())
    connection.read(WARM_SECONDS)
    connection.gaps.clear()
    before, messages = server.report(), connection.messages
    cpu, start = server.cpu_seconds(), time.monotonic()
    connection.read(seconds)
    cpu, elapsed = server.cpu_seconds() - cpu, time.monotonic() - start
    after, messages = server.report(), connection.messages - messages
    connection.close()
    if connection.ended:
        raise ConnectionError(f"{len(connection.ended)} streams ended early")
    tokens = after["tokens"] - before["tokens"]
    return Rate(
        messages / elapsed,
        tokens / elapsed,
        1e6 * cpu / (tokens if many else messages),
        1e6 * (after["engine_seconds"] - before["engine_seconds"]) / tokens,
        _p99(connection.gaps),
    )


def measure_idle() -> float:
    """Bytes for each of thousands of streams that get a token a second."""
    with running("paceline", IDLE_STREAMS + 100, IDLE_STEP_SECONDS) as server:
        connections = [Connection("127.0.0.1", server.port, SERVICE + "Generate") for _ in range(IDLE_CONNECTIONS)]
        # What the first streams of a connection bring along belongs to none of them.
        for connection in connections:
            for _ in range(10):
                connection.open(REQUEST.SerializeToString())
        read_until(connections, 10 * IDLE_CONNECTIONS)
        before = server.resident_bytes()
        for connection in connections:
            for _ in range(IDLE_STREAMS // IDLE_CONNECTIONS):
                connection.open(REQUEST.SerializeToString())
        read_until(connections, IDLE_STREAMS + 10 * IDLE_CONNECTIONS)
        after = server.resident_bytes()
        for connection in connections:
            connection.close()
    return (after - before) / IDLE_STREAMS


def read_until(connections: Sequence[Connection], streams: int) -> None:
    """Until so many streams have had a message."""
    end = time.monotonic() + 60.0
    while sum(len(connection.last) for connection in connections) < streams:
        if time.monotonic() > end:
            raise TimeoutError(f"{streams} streams have not all begun")
        for connection in connections:
            connection.read(0.02)


def measure_cancels(name: str) -> list[float]:
    """Seconds from the client's cancel until the engine's slot is free, or the bare server's handler has ended, while
    others stream; for each cancelled stream another begins.
    """
    chance = random.Random(7)
    with running(name, STREAMS + 64) as server:
        connection = Connection("127.0.0.1", server.port, SERVICE + "Generate")
        live = [connection.open(REQUEST.SerializeToString()) for _ in range(STREAMS)]
        connection.read(WARM_SECONDS)
        cancelled = []
        for _ in range(CANCELS):
            stream = chance.choice([stream for stream in live if stream in connection.last])
            live.remove(stream)
            cancelled.append(time.monotonic())
            connection.cancel(stream)
            live.append(connection.open(REQUEST.SerializeToString()))
            connection.read(CANCEL_SECONDS * (0.5 + chance.random()))
        connection.read(1.0)
        freed = server.report()["freed"]
        connection.close()
    if len(freed) != CANCELS:
        raise AssertionError(f"{CANCELS} streams were cancelled, and {len(freed)} freed")
    return [after - before for before, after in zip(cancelled, freed, strict=True)]


def measure_siblings() -> list[tuple[float, float]]:
    """The p99 gap of streams, in steps, alone and beside others that nobody reads, in turns. Those are blocked after
    some forty messages, and gone when their client turns out not to answer, after three seconds.
    """
    pairs = []
    with running("paceline", SIBLINGS + STOPPED) as server:
        siblings = Connection("127.0.0.1", server.port, SERVICE + "Generate")
        for _ in range(SIBLINGS):
            siblings.open(REQUEST.SerializeToString())
        siblings.read(WARM_SECONDS)
        for _ in range(STOPPED_ROUNDS):
            alone = _p99_gap(siblings)
            stopped = Connection("127.0.0.1", server.port, SERVICE + "Generate", window=1024)
            for _ in range(STOPPED):
                stopped.open(REQUEST.SerializeToString())
            siblings.read(1.0)  # until they are blocked
            pairs.append((alone, _p99_gap(siblings)))
            stopped.close()
            siblings.read(0.5)
        siblings.close()
    return pairs


def _p99_gap(connection: Connection) -> float:
    connection.gaps.clear()
    connection.read(STOPPED_SECONDS)
    return _p99(connection.gaps)


def _p99(gaps: Sequence[float]) -> float:
    """In steps."""
    return sorted(gaps)[int(0.99 * len(gaps))] / STEP_SECONDS


@dataclass(frozen=True)
class Row:
    """A line of the table; it holds if `value` is at most `bar`."""

    what: str
    bare: str
    ours: str
    engine: str
    value: float
    bar: float
    unit: str


def rows_of(
    streams: dict[str, list[Rate]],
    many: dict[str, list[Rate]],
    idle: float,
    cancels: dict[str, list[float]],
    siblings: Sequence[tuple[float, float]],
) -> list[Row]:
    rows = []
    for what, rates, bar in (
        (f"{STREAMS} streams, CPU per message", streams, 1.3),
        (f"GenerateMany of {STREAMS}, CPU per token", many, 3.0),
    ):
        ours, bare = rates["paceline"], rates["bare"]
        ratio = median(a.cpu / b.cpu for a, b in zip(ours, bare, strict=True))
        without = median((a.cpu - a.engine) / b.cpu for a, b in zip(ours, bare, strict=True))
        cells = (_range(rate.cpu for rate in bare), _range(rate.cpu for rate in ours))
        engine = _range(rate.engine for rate in ours)
        rows.append(Row(f"{what}, us", *cells, engine, ratio, bar, "x bare"))
        rows.append(Row("  without the scheduler's steps", "", "", "", without, bar, "x bare"))
    gaps = [rate.p99_gap for rate in streams["paceline"]]
    bare_gaps = _range((rate.p99_gap for rate in streams["bare"]), ".2f")
    rows.append(Row("  p99 gap between messages", bare_gaps, _range(gaps, ".2f"), "", median(gaps), 2.5, "steps"))
    rows.append(Row(f"{IDLE_STREAMS} idle streams", "", "", "", idle / 1000, 40.0, "KB each"))
    p95 = {name: 1e3 * sorted(found)[int(0.95 * len(found))] for name, found in cancels.items()}
    p50 = {name: f"p50 {1e3 * median(found):.1f}" for name, found in cancels.items()}
    what, bar = f"cancel to freed slot beside {STREAMS} streams, p95", 1e3 * STEP_SECONDS + 15.0
    rows.append(Row(what, f"{p50['bare']}, p95 {p95['bare']:.1f}", p50["paceline"], "", p95["paceline"], bar, "ms"))
    ratio = median(beside / alone for alone, beside in siblings)
    what = f"  p99 gap beside {STOPPED} that nobody reads, {SIBLINGS} streams"
    rows.append(Row(what, "", _range((beside for _, beside in siblings[:4]), ".2f"), "", ratio, 1.1, "x alone"))
    return rows


def _range(values: Iterable[float], form: str = ".1f") -> str:
    return " ".join(format(value, form) for value in values)


def print_table(rows: Sequence[Row], load: float) -> None:
    table = Table(title=f"on the wire; load average {load:.1f} before")
    for heading in ("what", "bare", "Paceline", "of it scheduler", "result", "bar", ""):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for row in rows:
        verdict = "holds" if row.value <= row.bar else "[bold]missed[/bold]"
        result, bar = f"{row.value:.2f} {row.unit}", f"<= {row.bar:g}"
        table.add_row(row.what, row.bare, row.ours, row.engine, result, bar, verdict)
    Console(width=150).print(table)


def _tell(what: str, rate: Rate) -> None:
    rates = f"{rate.messages:,.0f} messages/s, {rate.tokens:,.0f} tokens/s"
    print(f"{what}: {rates}, {rate.cpu:.1f} us, p99 gap {rate.p99_gap:.2f} steps", file=sys.stderr)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="of either server, in turns")] = 2,
    seconds: Annotated[float, typer.Option(min=1.0, help="that each run of many streams is measured")] = 6.0,
    output: Annotated[Path | None, typer.Option("--json", help="also write every measurement here")] = None,
) -> None:
    """Measure, and print a table with the bars."""
    load = os.getloadavg()[0]
    streams: dict[str, list[Rate]] = {"bare": [], "paceline": []}
    many: dict[str, list[Rate]] = {"bare": [], "paceline": []}
    for number in range(rounds):
        for name in streams:
            with running(name) as server:
                streams[name].append(measure_rate(server, False, seconds))
                many[name].append(measure_rate(server, True, seconds))
            _tell(f"round {number + 1}: {name}, streams", streams[name][-1])
            _tell(f"round {number + 1}: {name}, many", many[name][-1])
    cancels = {name: measure_cancels(name) for name in streams}
    idle, siblings = measure_idle(), measure_siblings()
    print_table(rows_of(streams, many, idle, cancels, siblings), load)
    if output is not None:
        rates = {
            kind: {name: [asdict(rate) for rate in found] for name, found in by_name.items()}
            for kind, by_name in (("streams", streams), ("many", many))
        }
        others = {"idle_bytes": idle, "cancel_seconds": cancels, "siblings": siblings, "load": load}
        output.write_text(json.dumps({**rates, **others}, indent=1))


if __name__ == "__main__":
    typer.run(main)
