"""Throughput, as the table that a person reads and the JSON that a program does."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from paceline.bench.console import console
from paceline.bench.throughput import Cell

COLUMNS = (
    "streams", "depth", "prefill s", "decode tok/s", "x off", "run tok/s", "x off",
    "accept len", "mean depth", "draft %", "verify %", "sample %", "python %",
)  # fmt: skip


def render(cells: list[Cell], title: str) -> None:
    """Print one row per cell, with a rule between concurrencies."""
    table = Table(title=title)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for cell, following in zip(cells, [*cells[1:], None], strict=True):
        row = summary(cell)
        table.add_row(
            str(cell.concurrency),
            cell.depth,
            f"{row['prefill_seconds']:.3f}",
            _shown(row["decode_tokens_per_second"], 0),
            _shown(row["decode_ratio"]),
            f"{row['tokens_per_second']:.0f}",
            _shown(row["ratio"]),
            f"{row['acceptance_length']:.2f}",
            f"{row['mean_depth']:.2f}",
            *(f"{100 * row[name]:.0f}" for name in ("draft_share", "verify_share", "sample_share", "python_share")),
            end_section=following is not None and following.concurrency != cell.concurrency,
        )
    console().print(table)


def _shown(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def summary(cell: Cell) -> dict[str, Any]:
    shares = {name: cell.share(name) for name in ("draft", "verify", "sample")}
    return {
        "concurrency": cell.concurrency,
        "depth": cell.depth,
        "prefill_seconds": cell.median("prefill_seconds"),
        "decode_tokens_per_second": cell.median("decode_rate"),
        "decode_ratio": cell.ratio("decode_rate"),
        "tokens_per_second": cell.median("rate"),
        "ratio": cell.ratio("rate"),
        "acceptance_length": cell.acceptance_length,
        "mean_depth": cell.mean_depth,
        **{f"{name}_share": share for name, share in shares.items()},
        "python_share": max(0.0, 1.0 - sum(shares.values())),
    }


def to_json(cells: list[Cell], settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "settings": settings,
        "cells": [{**summary(cell), "samples": [asdict(sample) for sample in cell.samples]} for cell in cells],
    }
