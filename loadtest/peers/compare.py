"""Paceline and other engines on the same checkpoint and prompts, in turns (A B A B).

    python loadtest/peers/compare.py TARGET DRAFT --envs DIR

One worker process per engine, stopped (SIGSTOP) except in its turn. Every measurement runs the same streams twice, once
for their first token only: the difference is decode alone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from protocol import THREADS, Load
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from paceline_loadtest.prompts import load_prompts

HERE = Path(__file__).parent
OFF, AUTO = "off", "auto"
OURS = "paceline"
ANSWER_SECONDS = 1200.0  # vLLM compiles for minutes when it sees a model for the first time
QUIT_SECONDS = 10.0
WARM_TOKENS = 8


class WorkerFailed(Exception):
    """A worker ended, or said nothing for too long; the message has its last words."""


class Worker:
    """A worker process and its children, which run only while a request is answered."""

    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                process_group=0,  # for signals; and Linux ends a stopped group whose parent dies
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def ask(self, request: dict[str, Any], timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Raises WorkerFailed."""
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps(request), file=self._requests, flush=True)
        except BrokenPipeError:
            raise WorkerFailed(self._last_words()) from None
        if not select.select([self._answers], [], [], timeout)[0]:
            raise WorkerFailed(f"no answer in {timeout:.0f} s")
        line = self._answers.readline()
        if not line:
            raise WorkerFailed(self._last_words())
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the worker and whatever it started."""
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._requests.close()  # at which a worker ends
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(QUIT_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._answers.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"exit status {self._process.wait()}: {last}"


@dataclass
class Engine:
    """One engine and its worker process, if it runs.

    Attributes:
        speculating_streams: most streams of one run with speculation; None for no limit.
        description: name and version, once it has been loaded.
    """

    name: str
    command: Sequence[str | Path]
    log: Path
    depths: tuple[str, ...]
    speculating_streams: int | None = None
    description: str = ""
    _worker: Worker | None = None
    _loaded: Load | None = None

    def supports(self, depth: str, streams: int) -> bool:
        limit = self.speculating_streams
        return depth in self.depths and (depth == OFF or limit is None or streams <= limit)

    def run(self, load: Load, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the token ids of each stream. Raises WorkerFailed; the next run starts another worker."""
        try:
            if self._worker is None:
                self._worker = Worker(self.command, self.log)
            if self._loaded != load:
                self.description = self._worker.ask({"load": asdict(load)})["engine"]
                self._loaded = load
            answer = self._worker.ask({"run": {"prompts": prompts, "max_tokens": max_tokens}})
        except WorkerFailed:
            self.close()
            raise
        if [len(token_ids) for token_ids in answer["token_ids"]] != [max_tokens] * len(prompts):
            raise WorkerFailed(f"not {max_tokens} tokens for each of {len(prompts)} prompts")
        return answer["seconds"], answer["token_ids"]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = self._loaded = None


@dataclass(frozen=True)
class Sample:
    """One measurement of one cell: the same streams twice, once for their first token only.

    Attributes:
        prefill_seconds: the time with max_tokens 1.
        seconds: the whole run.
        token_ids: of the whole run, by stream.
    """

    prefill_seconds: float
    seconds: float
    token_ids: list[list[int]]

    @property
    def decode_rate(self) -> float:
        """Tokens per second of decode alone."""
        tokens = sum(map(len, self.token_ids)) - len(self.token_ids)
        return tokens / max(1e-9, self.seconds - self.prefill_seconds)

    @property
    def rate(self) -> float:
        """Tokens per second of the whole run."""
        return sum(map(len, self.token_ids)) / self.seconds


@dataclass
class Cell:
    """Every measurement of one engine at one depth and concurrency.

    Attributes:
        samples: one a round.
        error: why the engine failed here; it is not measured here again.
    """

    engine: str
    depth: str
    concurrency: int
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None

    def median(self, name: str) -> float:
        return float(median(getattr(sample, name) for sample in self.samples))


@dataclass(frozen=True)
class Ratio:
    """Ours over the best peer's decode rate; median of the ratios within each round."""

    concurrency: int
    speculation: str
    ours: Cell
    peer: Cell

    @property
    def value(self) -> float:
        pairs = zip(self.ours.samples, self.peer.samples, strict=True)
        return float(median(a.decode_rate / b.decode_rate for a, b in pairs))


def measure(
    engines: Sequence[Engine],
    prompts: Sequence[list[int]],
    concurrencies: Sequence[int],
    depths: Sequence[str],
    max_tokens: int,
    rounds: int,
    target: Path,
    draft: Path,
) -> Iterator[list[Cell]]:
    """Yields all cells after each round. Within a round engines take turns at the same depth, streams and prompts."""
    cells = {
        (depth, streams, engine.name): Cell(engine.name, depth, streams)
        for depth in depths
        for streams in concurrencies
        for engine in engines
        if engine.supports(depth, streams)
    }
    by_name = {engine.name: engine for engine in engines}
    length = max(map(len, prompts)) + max_tokens
    for number in range(rounds):
        for cell in cells.values():
            if cell.error is not None:
                continue
            load = Load(str(target), str(draft), _depth(cell.depth), max(concurrencies), length)
            first = number * cell.concurrency
            streams = [prompts[(first + i) % len(prompts)] for i in range(cell.concurrency)]
            try:
                cell.samples.append(_measure_once(by_name[cell.engine], load, streams, max_tokens))
            except WorkerFailed as error:
                cell.error = str(error)
            _report_turn(number, cell)
        yield list(cells.values())


def _depth(name: str) -> int | None:
    return {OFF: 0, AUTO: None}[name] if name in (OFF, AUTO) else int(name)


def _measure_once(engine: Engine, load: Load, prompts: list[list[int]], max_tokens: int) -> Sample:
    # What a library sets up at the first sight of a shape is not measured.
    engine.run(load, prompts, min(WARM_TOKENS, max_tokens))
    prefill_seconds, _ = engine.run(load, prompts, 1)
    seconds, token_ids = engine.run(load, prompts, max_tokens)
    return Sample(prefill_seconds, seconds, token_ids)


def _report_turn(number: int, cell: Cell) -> None:
    result = cell.error or f"{cell.samples[-1].decode_rate:.1f} tok/s"
    print(
        f"round {number + 1}: {cell.engine}, depth {cell.depth}, {cell.concurrency} streams: {result}", file=sys.stderr
    )


def same_text(cells: Sequence[Cell], cell: Cell) -> tuple[int, int]:
    """How many of the cell's streams have all tokens of the first engine's with speculation off, and of how many."""
    reference = next(
        (c for c in cells if (c.depth, c.concurrency) == (OFF, cell.concurrency) and c.error is None), cell
    )
    pairs = [
        pair
        for sample, expected in zip(cell.samples, reference.samples, strict=True)
        for pair in zip(sample.token_ids, expected.token_ids, strict=True)
    ]
    return sum(a == b for a, b in pairs), len(pairs)


def ratios(cells: Sequence[Cell]) -> list[Ratio]:
    """For each concurrency: speculation off on both sides; each side at its best depth; and our own choice of depth,
    if it was measured, beside the peers' best.
    """
    found = []
    for concurrency in sorted({cell.concurrency for cell in cells}):
        done = [cell for cell in cells if cell.concurrency == concurrency and cell.error is None]
        ours = [cell for cell in done if cell.engine == OURS]
        peers = [cell for cell in done if cell.engine != OURS]
        for name, ours_there, peers_there in (
            (OFF, [c for c in ours if c.depth == OFF], [c for c in peers if c.depth == OFF]),
            ("best", ours, peers),
            (AUTO, [c for c in ours if c.depth == AUTO], peers),
        ):
            if ours_there and peers_there:
                found.append(Ratio(concurrency, name, fastest(ours_there), fastest(peers_there)))
    return found


def fastest(cells: Sequence[Cell]) -> Cell:
    return max(cells, key=lambda cell: cell.median("decode_rate"))


def read_bandwidth() -> float:
    """Bytes per second at which all threads together read memory; the best of five sums over 1 GiB."""
    torch.set_num_threads(THREADS)
    values = torch.ones(2**27, dtype=torch.int64)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - began)
    return values.nbytes / min(seconds)


def print_tables(console: Console, cells: Sequence[Cell], bandwidths: Sequence[float]) -> None:
    console.print(f"memory read bandwidth: {median(bandwidths) / 1e9:.1f} GB/s, {THREADS} threads")
    for concurrency in sorted({cell.concurrency for cell in cells}):
        console.print(_cells_table(cells, concurrency))
    table = Table("streams", "speculation", "ours", "best peer", "ratio", title="decode, ours / best peer")
    for ratio in ratios(cells):
        peer = f"{ratio.peer.engine}, {ratio.peer.depth}"
        table.add_row(str(ratio.concurrency), ratio.speculation, ratio.ours.depth, peer, f"{ratio.value:.2f}")
    console.print(table)


def _cells_table(cells: Sequence[Cell], concurrency: int) -> Table:
    """The cells of one concurrency; in bold, each engine's best depth of 1 or more."""
    table = Table(title=f"{concurrency} streams")
    for heading in ("engine", "depth", "decode tok/s", "prefill s", "whole tok/s", "same text"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    shown = sorted((cell for cell in cells if cell.concurrency == concurrency), key=lambda cell: cell.engine != OURS)
    for engine in dict.fromkeys(cell.engine for cell in shown):
        rows = [cell for cell in shown if cell.engine == engine]
        fixed = [cell for cell in rows if cell.error is None and cell.depth not in (OFF, AUTO)]
        best = fastest(fixed) if fixed else None
        for cell in rows:
            if cell.error is not None:
                table.add_row(engine, cell.depth, "failed")
                continue
            same, streams = same_text(cells, cell)
            table.add_row(
                engine,
                cell.depth,
                f"{cell.median('decode_rate'):.1f}",
                f"{cell.median('prefill_seconds'):.2f}",
                f"{cell.median('rate'):.1f}",
                f"{same}/{streams}",
                style="bold" if cell is best else None,
            )
        table.add_section()
    return table


def as_json(engines: Sequence[Engine], cells: Sequence[Cell], bandwidths: Sequence[float]) -> dict[str, Any]:
    """All of it but the text."""
    return {
        "threads": THREADS,
        "bytes_per_second": list(bandwidths),
        "engines": {engine.name: engine.description for engine in engines},
        "cells": [
            {
                "engine": cell.engine,
                "depth": cell.depth,
                "concurrency": cell.concurrency,
                "error": cell.error,
                "prefill_seconds": [sample.prefill_seconds for sample in cell.samples],
                "seconds": [sample.seconds for sample in cell.samples],
                "decode_rate": [sample.decode_rate for sample in cell.samples],
                "same_text": None if cell.error else same_text(cells, cell),
            }
            for cell in cells
        ],
        "ratios": [
            {
                "concurrency": ratio.concurrency,
                "speculation": ratio.speculation,
                "ours": ratio.ours.depth,
                "peer": ratio.peer.engine,
                "peer_depth": ratio.peer.depth,
                "ratio": ratio.value,
            }
            for ratio in ratios(cells)
        ],
    }


def find_engines(names: Sequence[str], envs: Path, logs: Path, depths: Sequence[str]) -> tuple[list[Engine], list[str]]:
    """Those that are set up, and the names of those that are not."""
    fixed = tuple(depth for depth in depths if depth != AUTO)
    engines, missing = [], []
    for name in names:
        python = Path(sys.executable) if name == OURS else envs / name / "bin" / "python"
        if not python.exists():
            missing.append(name)
            continue
        engines.append(
            Engine(
                name,
                [python, HERE / f"worker_{name}.py"],
                logs / f"{name}.log",
                tuple(depths) if name == OURS else fixed,
                speculating_streams=1 if name == "transformers" else None,
            )
        )
    return engines, missing


def load_token_ids(target: Path, path: Path | None, shortest: int, longest: int) -> list[list[int]]:
    """Prompts of `shortest` to `longest` tokens."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    encoded = [tokenizer.encode(p).ids if isinstance(p, str) else list(p) for p in load_prompts(path)]
    return [token_ids for token_ids in encoded if shortest <= len(token_ids) <= longest]


def main(
    target: Path,
    draft: Path,
    envs: Annotated[Path, typer.Option(help="where setup.sh made the environments")],
    engines: Annotated[str, typer.Option()] = "paceline,openvino,llamacpp,vllm,transformers",
    concurrency: Annotated[str, typer.Option()] = "1,4,16",
    depths: Annotated[str, typer.Option(help="off, auto (ours only) and fixed depths")] = "off,1,3,5,auto",
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines; by default the demo's held-out prompts")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="also write every measurement here, each round")] = None,
) -> None:
    """Measure, and print the tables. Each engine's stderr goes to ENVS/logs."""
    console = Console()
    logs = envs / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    found, missing = find_engines(engines.split(","), envs, logs, depths.split(","))
    for name in missing:
        console.print(f"{name} is not set up in {envs}: skipped")
    token_ids = load_token_ids(target, prompts, 64, 384)
    sizes = [int(size) for size in concurrency.split(",")]
    bandwidths = [read_bandwidth()]
    cells: list[Cell] = []
    try:
        for cells in measure(found, token_ids, sizes, depths.split(","), max_tokens, rounds, target, draft):
            bandwidths.append(read_bandwidth())
            if output is not None:
                output.write_text(json.dumps(as_json(found, cells, bandwidths), indent=1) + "\n", encoding="utf-8")
    finally:
        for engine in found:
            engine.close()
    for engine in found:
        console.print(f"{engine.name}: {engine.description}")
    print_tables(console, cells, bandwidths)


if __name__ == "__main__":
    typer.run(main)
