"""`auto` against every fixed depth and against other rules: one engine, and one workload served again and again.

Exploring repetitions measure every setting, and choose the best fixed depth. Comparing ones measure `auto`, `off` and
that depth alone, so that nothing is compared by the luck by which it was chosen. All take turns by steps (`turns.py`).

A batch is measured while it is whole, from the last first token to the first end: so it has the number of streams that
is told, and the mix of them. With a prefix cache, prompts are read before, but for their last block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import geometric_mean, mean, median, stdev
from typing import Any, NamedTuple

from rich.progress import track
from rich.table import Table

from paceline.bench.baselines import BASELINES
from paceline.bench.console import console, num_streams, verdict
from paceline.bench.depth_names import AUTO, OFF
from paceline.bench.prompts import encode
from paceline.bench.ratio import median_ratio
from paceline.bench.setting import Setting
from paceline.bench.turns import Served, Stream, serve_batch
from paceline.core.params import SamplingParams
from paceline.core.speculation import SpeculationControl
from paceline.core.speculation_counts import SpeculationCounts
from paceline.engine import Engine

LEAST_OF_BEST = 0.97  # of the rate of a cell's best fixed depth
LEAST_OF_OFF = 0.98
LEAST_OF_SINGLE = 1.05  # of the best single fixed depth, over a sweep
MOST_POLICY = 0.02  # of the time
WIDEST = 0.02  # half of the interval of auto over the best fixed depth
# Two-sided 95 %, by degrees of freedom from 1; the last serves for more.
STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11,
              2.10, 2.09, 2.09)  # fmt: skip
FIRST_TOKENS = 4  # of a stream: enough to draft
PASSAGE, COPIES = 32, 4  # tokens, and times that they stand in the prompt of a stream that copies
MIXED = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.2))  # copying streams and wild ones, in turn


class Interval(NamedTuple):
    """A mean, and half the width of its 95 % interval; infinite for a single value."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        if len(values) < 2:
            return cls(mean(values), math.inf)
        student = STUDENT_95[min(len(values) - 1, len(STUDENT_95)) - 1]
        return cls(mean(values), student * stdev(values) / math.sqrt(len(values)))

    def __str__(self) -> str:
        return f"{self.mean:.3f} +- {self.half_width:.3f}"


@dataclass(frozen=True, slots=True)
class Sample:
    """A workload served once.

    Attributes:
        rate: tokens per second of decode alone.
        depth: drafts per verify step.
        control: share of the time that went into planning and booking.
        policy: share of the time that the policy took, a part of `control`; see `Served`.
    """

    rate: float
    depth: float
    control: float
    policy: float

    @classmethod
    def of(cls, served: Sequence[Served]) -> Sample:
        counts = SpeculationCounts()
        for batch in served:
            counts.add(batch.counts)
        seconds = sum(batch.seconds for batch in served)
        return cls(
            rate=sum(batch.tokens for batch in served) / seconds,
            depth=counts.drafted / counts.verify_steps,
            control=sum(batch.control_seconds for batch in served) / seconds,
            policy=sum(batch.policy_seconds for batch in served) / seconds,
        )


@dataclass(slots=True)
class Arm:
    """What was measured of one setting at one number of streams.

    Attributes:
        speculation: chooses depths, and keeps what it learned from one repetition to the next.
        explored, compared: by repetition of each kind.
    """

    setting: Setting
    speculation: SpeculationControl
    explored: list[Sample] = field(default_factory=list)
    compared: list[Sample] = field(default_factory=list)

    @classmethod
    def start(cls, setting: Setting, engine: Engine) -> Arm:
        return cls(setting, setting.control(engine))

    @property
    def rate(self) -> float:
        """Median over all repetitions."""
        return float(median(sample.rate for sample in self.explored + self.compared))

    @property
    def depth(self) -> float:
        return mean(sample.depth for sample in self.explored + self.compared)

    @property
    def control(self) -> float:
        """Median over all repetitions."""
        return float(median(sample.control for sample in self.explored + self.compared))

    @property
    def policy(self) -> float:
        """Median over all repetitions."""
        return float(median(sample.policy for sample in self.explored + self.compared))


@dataclass(slots=True)
class Cell:
    """One number of streams: arms by the names of their settings."""

    streams: int
    arms: dict[str, Arm]

    @property
    def name(self) -> str:
        return num_streams(self.streams)

    @property
    def best(self) -> str:
        """The fixed depth with the best median in the exploring repetitions."""
        fixed = [name for name, arm in self.arms.items() if arm.setting.is_fixed]
        return max(fixed, key=lambda name: median(sample.rate for sample in self.arms[name].explored))

    def compared_ratios(self, name: str) -> list[float]:
        """`auto` over another setting, by comparing repetition."""
        pairs = zip(self.arms[AUTO].compared, self.arms[name].compared, strict=True)
        return [auto.rate / other.rate for auto, other in pairs]

    def compare(self, name: str) -> Interval:
        return Interval.of(self.compared_ratios(name))

    def explored_ratio(self, name: str) -> float:
        """`auto` over another setting, median over exploring repetitions."""
        auto, other = ([sample.rate for sample in self.arms[one].explored] for one in (AUTO, name))
        return median_ratio(auto, other)


def measure(
    engine: Engine,
    prompts: Sequence[str | tuple[int, ...]],
    sizes: Sequence[int],
    settings: Sequence[Setting],
    max_tokens: int,
    prompts_per_cell: int,
    explore: int,
    rounds: int,
    sampling: SamplingParams | None,
) -> Iterator[Cell]:
    """Serve each cell's workload `explore` times by every setting, then `rounds` times by those that are compared.

    Before that, unmeasured, its first batch by every setting, which warms up and teaches each what it may know of its
    drafters; and the first tokens of all batches, so that the prefix cache, if there is one, has their prompts as both
    models read them (the draft model, if a setting drafts by it).

    Args:
        sampling: of every stream, whose seeds count up from the one that it has, if any; None for streams of two kinds
            in turn: greedy ones whose prompt is a passage over and over, so that they go on copying, and ones at a high
            temperature.

    Yields:
        Cells, as soon as they are measured.

    Raises:
        InvalidArgument, FailedPrecondition: a setting that the engine refuses.
    """
    encoded = encode(engine, prompts)
    for size in sizes:
        cell = Cell(size, {setting.name: Arm.start(setting, engine) for setting in settings})
        measure_cell(engine, cell, workload(encoded, size, prompts_per_cell, sampling), max_tokens, explore, rounds)
        yield cell


def measure_cell(
    engine: Engine, cell: Cell, batches: Sequence[Sequence[Stream]], max_tokens: int, explore: int, rounds: int
) -> None:
    """Fill the arms of a cell. Arguments as in `measure`."""
    arms = list(cell.arms.values())
    serve(engine, batches[:1], arms, max_tokens)
    serve(engine, batches, arms, min(FIRST_TOKENS, max_tokens))
    for number in track(range(explore + rounds), description=f"measuring {cell.name}"):
        if number < explore:
            for arm, sample in serve(engine, batches, arms, max_tokens, number):
                arm.explored.append(sample)
        else:
            compared = [cell.arms[name] for name in dict.fromkeys((AUTO, OFF, cell.best))]
            for arm, sample in serve(engine, batches, compared, max_tokens, number):
                arm.compared.append(sample)


def workload(
    prompts: Sequence[tuple[int, ...]], streams: int, least: int, sampling: SamplingParams | None
) -> list[list[Stream]]:
    """Whole batches of that many streams, with at least `least` in all; prompts in turn. `sampling` as in `measure`."""
    chosen = itertools.islice(itertools.cycle(prompts), streams * math.ceil(least / streams))
    if sampling is None:
        all_streams = [
            (prompt if i % 2 else COPIES * prompt[:PASSAGE], MIXED[i % 2]) for i, prompt in enumerate(chosen)
        ]
    else:
        seed = sampling.seed
        all_streams = [
            (prompt, sampling if seed is None else replace(sampling, seed=seed + i)) for i, prompt in enumerate(chosen)
        ]
    return [all_streams[first : first + streams] for first in range(0, len(all_streams), streams)]


def serve(
    engine: Engine, batches: Sequence[Sequence[Stream]], arms: Sequence[Arm], max_tokens: int, first: int = 0
) -> list[tuple[Arm, Sample]]:
    """Serve batches one after the other, each by all arms in turn: arm `first`, modulo their number, leads in the first
    batch, and the next one in each later batch.
    """
    settings = [(arm.speculation, arm.setting.bounds) for arm in arms]
    served = [serve_batch(engine, batch, settings, max_tokens, number) for number, batch in enumerate(batches, first)]
    return [(arm, Sample.of(mine)) for arm, mine in zip(arms, zip(*served, strict=True), strict=True)]


def best_single(cells: Sequence[Cell]) -> tuple[str, float]:
    """The fixed depth that is best over the sweep, and `auto` over it: geometric mean, exploring repetitions."""
    ratios = {name: over_sweep(cells, name) for name, arm in cells[0].arms.items() if arm.setting.is_fixed}
    name = min(ratios, key=lambda name: ratios[name])
    return name, ratios[name]


def over_sweep(cells: Sequence[Cell], name: str) -> float:
    """`auto` over a setting: geometric mean over all numbers of streams, exploring repetitions."""
    return geometric_mean(cell.explored_ratio(name) for cell in cells)


def missed(cells: Sequence[Cell]) -> list[str]:
    """Each bound that is not kept, in words."""
    lines = []
    for cell in cells:
        best, off = cell.compare(cell.best), cell.compare(OFF)
        if best.mean < LEAST_OF_BEST:
            lines.append(f"{cell.name}: auto is {best} x the best fixed depth ({cell.best}), below {LEAST_OF_BEST}")
        if best.half_width > WIDEST:
            lines.append(f"{cell.name}: auto over the best fixed depth is known to {best.half_width:.3f}, not {WIDEST}")
        if (policy := cell.arms[AUTO].policy) > MOST_POLICY:
            lines.append(f"{cell.name}: the policy takes {policy:.1%}, over {MOST_POLICY:.0%}")
        if off.mean < LEAST_OF_OFF:
            lines.append(f"{cell.name}: auto is {off} x off, below {LEAST_OF_OFF}")
    name, ratio = best_single(cells)
    if len(cells) > 1 and ratio < LEAST_OF_SINGLE:
        lines.append(f"sweep: auto is {ratio:.3f} x the best single fixed depth ({name}), below {LEAST_OF_SINGLE}")
    return lines


def render(cells: Sequence[Cell], title: str) -> None:
    out = console()
    table = Table(title=title)
    for column in ("streams", "depth", "decode tok/s", "mean depth", "auto / it"):
        table.add_column(column, justify="right")
    for cell in cells:
        for name, arm in cell.arms.items():
            row = f"{arm.rate:.1f}", f"{arm.depth:.2f}", _over(cell, name)
            table.add_row(str(cell.streams), name, *row, style="bold" if name == AUTO else None)
        table.add_section()
    out.print(table)
    for line in summary(cells):
        out.print(line, highlight=False)


def _over(cell: Cell, name: str) -> str:
    """What `auto` is over a setting, with the interval if that was compared."""
    if name == AUTO:
        return ""
    return str(cell.compare(name)) if cell.arms[name].compared else f"{cell.explored_ratio(name):.3f}"


def describe(cell: Cell) -> str:
    return (
        f"{cell.name}: auto drafts {cell.arms[AUTO].depth:.2f}; "
        f"auto / best fixed ({cell.best}) = {cell.compare(cell.best)}, auto / off = {cell.compare(OFF)}; "
        f"the policy takes {cell.arms[AUTO].policy:.1%}, all planning and booking {cell.arms[AUTO].control:.1%}"
    )


def summary(cells: Sequence[Cell]) -> list[str]:
    """`auto` over the best fixed depth and over off in each cell, over the others in the sweep, and missed bounds."""
    lines = [describe(cell) for cell in cells]
    name, ratio = best_single(cells)
    lines.append(f"sweep, geometric mean: auto / best single fixed ({name}) = {ratio:.3f}")
    for name in cells[0].arms:
        if name in BASELINES and name != OFF:
            lines.append(f"sweep, geometric mean: auto / {name} = {over_sweep(cells, name):.3f}")
    return lines + verdict(missed(cells))


def to_json(cells: Sequence[Cell], settings: dict[str, Any]) -> dict[str, Any]:
    name, ratio = best_single(cells)
    return {
        "settings": settings,
        "cells": [_cell_to_json(cell) for cell in cells],
        "sweep": {
            "best_single": name,
            "auto_over_best_single": ratio,
            "auto_over": {other: over_sweep(cells, other) for other in cells[0].arms if other != AUTO},
        },
        "missed": missed(cells),
    }


def _cell_to_json(cell: Cell) -> dict[str, Any]:
    return {
        "streams": cell.streams,
        "best_fixed": cell.best,
        "auto_over_best_fixed": {**cell.compare(cell.best)._asdict(), "ratios": cell.compared_ratios(cell.best)},
        "auto_over_off": {**cell.compare(OFF)._asdict(), "ratios": cell.compared_ratios(OFF)},
        "depths": [
            {
                "depth": name,
                "decode_rate": arm.rate,
                "mean_depth": arm.depth,
                "control": arm.control,
                "policy": arm.policy,
                "explored": [asdict(sample) for sample in arm.explored],
                "compared": [asdict(sample) for sample in arm.compared],
            }
            for name, arm in cell.arms.items()
        ],
    }
