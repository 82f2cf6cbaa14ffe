"""`auto` against every fixed depth and against other rules: the same engine, the same prompts, in turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, stdev
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.bench.throughput import AUTO, OFF, run
from paceline.core.baselines import BASELINES
from paceline.core.depth import DepthPolicy
from paceline.core.params import Method, SamplingParams, SpeculationParams
from paceline.engine import Engine, GenerationRequest
from paceline.errors import InvalidArgument

MIXED = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.2))  # copying streams and wild ones, in turn
STUDENT_95 = (12.7, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # two-sided, by degrees of freedom from 1


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to choose depths: bounds of every request, and the policy if it is not the engine's own."""

    name: str
    bounds: SpeculationParams
    make_policy: Callable[[], DepthPolicy] | None = None

    @property
    def is_fixed(self) -> bool:
        return self.name == OFF or self.name.isdecimal()


def parse_settings(text: str, method: Method | None) -> list[Setting]:
    """off, auto, depths, and names of baselines, which draft by `method`; None lets the server choose it, as for auto.

    Raises InvalidArgument.
    """
    settings = []
    for name in (part.strip() for part in text.split(",")):
        if name in (OFF, "0"):
            settings.append(Setting(OFF, SpeculationParams(method=Method.NONE)))
        elif name.isdecimal():
            settings.append(Setting(name, SpeculationParams(method, min_depth=int(name), max_depth=int(name))))
        elif name == AUTO:
            settings.append(Setting(name, SpeculationParams()))
        elif name in BASELINES:
            settings.append(Setting(name, SpeculationParams(method), BASELINES[name]))
        else:
            raise InvalidArgument("depth", name, f"off, auto, a number, or one of {', '.join(BASELINES)}")
    return settings


@dataclass(slots=True)
class Cell:
    """Decode rates by round, in tokens per second, of one setting at one number of streams."""

    streams: int
    setting: Setting
    rates: list[float] = field(default_factory=list)
    depths: list[float] = field(default_factory=list)  # drafts per verify step

    def best_over(self, others: Sequence[Cell]) -> tuple[Cell, float, float]:
        """The other that is best in the odd rounds, and this one over it in the even ones: mean ratio, and half the
        width of its 95 % interval.
        """
        best = max(others, key=lambda cell: median(cell.rates[1::2]))
        ratios = [mine / its for mine, its in zip(self.rates[0::2], best.rates[0::2], strict=True)]
        half = STUDENT_95[len(ratios) - 2] * stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.inf
        return best, mean(ratios), half


def measure(
    engine: Engine,
    prompts: Sequence[str | tuple[int, ...]],
    sizes: Sequence[int],
    settings: Sequence[Setting],
    max_tokens: int,
    rounds: int,
    sampling: SamplingParams | None,
) -> list[Cell]:
    """Settings in turn within a round, with the same prompts; other prompts each round. A round before the first is not
    counted: it warms up, and teaches the engine what it is allowed to know of its drafters.

    Args:
        sampling: of every stream; None for streams of two kinds in turn: greedy ones whose prompt stands twice, so
            that they tend to copy, and ones at a high temperature.
    """
    encoded = [engine.prepare(GenerationRequest(prompt)).prompt_token_ids for prompt in prompts]
    cells = [Cell(size, setting) for size in sizes for setting in settings]
    control = engine.scheduler.speculation
    own = control.policy
    turns = [(number, cell) for size in sizes for number in range(-1, rounds) for cell in cells if cell.streams == size]
    for number, cell in track(turns, description="measuring"):
        first = max(0, number) * cell.streams
        streams = [encoded[(first + i) % len(encoded)] for i in range(cell.streams)]
        if sampling is None:
            streams = [prompt if i % 2 else 2 * prompt for i, prompt in enumerate(streams)]
        setting = cell.setting
        control.policy = own if setting.make_policy is None else setting.make_policy()
        samplings = MIXED if sampling is None else sampling
        prefill, _ = run(engine, streams, 1, setting.bounds, samplings)
        seconds, stats = run(engine, streams, max_tokens, setting.bounds, samplings)
        control.policy = own
        if number >= 0:
            tokens = sum(s.completion_tokens for s in stats) - len(streams)
            cell.rates.append(tokens / max(1e-9, seconds - prefill))
            cell.depths.append(sum(s.drafted_tokens for s in stats) / max(1, sum(s.verify_steps for s in stats)))
    return cells


def render(cells: Sequence[Cell], title: str) -> None:
    console = Console()
    table = Table(title=title)
    for name in ("streams", "depth", "decode tok/s", "x off", "mean depth"):
        table.add_column(name, justify="right")
    for size in dict.fromkeys(cell.streams for cell in cells):
        own = [cell for cell in cells if cell.streams == size]
        off = next((cell for cell in own if cell.setting.name == OFF), None)
        for cell in own:
            over = "" if off is None else f"{_ratio(cell, off):.2f}"
            row = (cell.setting.name, f"{median(cell.rates):.1f}", over, f"{mean(cell.depths):.2f}")
            table.add_row(str(size), *row, style="bold" if cell.setting.name == AUTO else None)
        table.add_section()
    console.print(table)
    for line in summary(cells):
        console.print(line, highlight=False)


def summary(cells: Sequence[Cell]) -> list[str]:
    """`auto` over the best fixed depth of each cell, and over the best single one of all."""
    lines = []
    for auto in (cell for cell in cells if cell.setting.name == AUTO):
        fixed = [cell for cell in cells if cell.streams == auto.streams and cell.setting.is_fixed]
        if fixed and len(auto.rates) > 1:
            best, ratio, half = auto.best_over(fixed)
            lines.append(f"{auto.streams} streams: auto / best fixed ({best.setting.name}) = {ratio:.3f} +- {half:.3f}")
    autos = {cell.streams: cell for cell in cells if cell.setting.name == AUTO}
    for name in dict.fromkeys(cell.setting.name for cell in cells if cell.setting.name != AUTO):
        others = [cell for cell in cells if cell.setting.name == name]
        if autos:
            logs = [math.log(_ratio(autos[other.streams], other)) for other in others]
            lines.append(f"auto / {name}, geometric mean over all streams: {math.exp(mean(logs)):.3f}")
    return lines


def _ratio(cell: Cell, other: Cell) -> float:
    """Median over rounds."""
    return float(median(mine / its for mine, its in zip(cell.rates, other.rates, strict=True)))


def to_json(cells: Sequence[Cell], settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "settings": settings,
        "cells": [
            {"streams": c.streams, "depth": c.setting.name, "decode_rates": c.rates, "mean_depths": c.depths}
            for c in cells
        ],
        "summary": summary(cells),
    }
