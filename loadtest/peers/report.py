"""The tables a person reads, and the JSON a program does."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from cells import Cell, fastest, ratios, same_text
from engines import AUTO, OFF, OURS, Engine
from protocol import THREADS
from rich.console import Console
from rich.table import Table

from paceline.bench.console import num_streams


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
    table = Table(title=num_streams(concurrency))
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
