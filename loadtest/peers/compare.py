"""Paceline and other engines on the same checkpoint and prompts, in turns (A B A B).

    python loadtest/peers/compare.py TARGET DRAFT --envs DIR

One worker process per engine, stopped (SIGSTOP) except in its turn. Every measurement runs the same streams twice, once
for their first token only: the difference is decode alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from cells import Cell, Sample
from engines import AUTO, OFF, Engine, find_engines
from protocol import THREADS, Load
from report import as_json, print_tables
from rich.console import Console
from tokenizers import Tokenizer
from worker import WorkerFailed

from paceline.bench.console import num_streams
from paceline_loadtest.prompts import load_prompts

WARM_TOKENS = 8


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
    if seconds <= prefill_seconds:
        raise WorkerFailed(f"no time is left for decode: {seconds:.3f} s, first tokens {prefill_seconds:.3f} s")
    return Sample(prefill_seconds, seconds, token_ids)


def _report_turn(number: int, cell: Cell) -> None:
    result = cell.error or f"{cell.samples[-1].decode_rate:.1f} tok/s"
    print(
        f"round {number + 1}: {cell.engine}, depth {cell.depth}, {num_streams(cell.concurrency)}: {result}",
        file=sys.stderr,
    )


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
