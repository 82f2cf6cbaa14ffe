"""`auto` against every fixed depth and against other rules: one engine, and one workload served again and again.

Exploring repetitions measure every setting, and choose the best fixed depth. Comparing ones measure `auto`, `off` and
that depth alone, so that nothing is compared by the luck by which it was chosen. All take turns by batches, and every
batch begins with another (A B C, B C A, C A B).

A batch is measured while it is whole, from the last first token to the first end: so it has the number of streams that
is told, and the mix of them. With a prefix cache, prompts are read before, but for their last block.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from statistics import geometric_mean, mean, median, stdev
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import patch

from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.bench import trim
from paceline.bench.report import FILE_WIDTH
from paceline.bench.throughput import AUTO, OFF
from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.baselines import BASELINES
from paceline.core.depth_policy import DepthPolicy
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.core.speculation_counts import SpeculationCounts
from paceline.engine import Engine, GenerationRequest
from paceline.errors import InvalidArgument

LEAST_OF_BEST = 0.97  # of the rate of a cell's best fixed depth
LEAST_OF_OFF = 0.98
LEAST_OF_SINGLE = 1.05  # of the best single fixed depth, over a sweep
MOST_CONTROL = 0.02  # of the time
WIDEST = 0.02  # half of the interval of auto over the best fixed depth
# Two-sided 95 %, by degrees of freedom from 1; the last serves for more.
STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11,
              2.10, 2.09, 2.09)  # fmt: skip
FIRST_TOKENS = 4  # of a stream: enough to draft
PASSAGE, COPIES = 32, 4  # tokens, and times that they stand in the prompt of a stream that copies
MIXED = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.2))  # copying streams and wild ones, in turn

Stream: TypeAlias = tuple[tuple[int, ...], SamplingParams]  # a prompt, and how it is sampled


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to choose depths: bounds of every request, and the policy if it is not the engine's own."""

    name: str
    bounds: SpeculationParams
    make_policy: Callable[[Engine], DepthPolicy] | None = None

    @property
    def is_fixed(self) -> bool:
        return self.name == OFF or self.name.isdecimal()


def parse_method(text: str) -> Method | None:
    """draft_model or ngram; auto is None. Raises InvalidArgument."""
    methods = {AUTO: None, Method.DRAFT_MODEL.value: Method.DRAFT_MODEL, Method.NGRAM.value: Method.NGRAM}
    if text not in methods:
        raise InvalidArgument("method", text, ", ".join(methods))
    return methods[text]


def default_method(draft: str) -> Method:
    """Who drafts at a fixed depth if nobody says: the draft model, if there is one."""
    return Method.NGRAM if draft in ("none", "ngram") else Method.DRAFT_MODEL


def parse_settings(text: str, fixed: Method | None, auto: Method | None = None) -> list[Setting]:
    """auto, off and other fixed depths, and names of baselines.

    Args:
        fixed, auto: who drafts at fixed depths and for baselines, and for auto; None lets the server choose.

    Raises:
        InvalidArgument: an unknown name, or auto and off are not both among them.
    """
    settings = {}
    for name in (part.strip() for part in text.split(",")):
        if name in (OFF, "0"):
            settings[OFF] = Setting(OFF, SpeculationParams(Method.NONE), _another)
        elif name.isdecimal():
            bounds = SpeculationParams(fixed, min_depth=int(name), max_depth=int(name))
            settings[name] = Setting(name, bounds, _another)
        elif name == AUTO:
            settings[name] = Setting(name, SpeculationParams(auto))
        elif name in BASELINES:
            settings[name] = Setting(name, SpeculationParams(fixed), _rule(name))
        elif name == trim.NAME:
            settings[name] = Setting(name, SpeculationParams(fixed), _full_depth)
        else:
            raise InvalidArgument("depth", name, f"off, auto, a number, or one of {', '.join([*BASELINES, trim.NAME])}")
    if not {AUTO, OFF} <= settings.keys():
        raise InvalidArgument("depth", text, "a list with auto and off in it: one is compared with the other")
    return list(settings.values())


def _rule(name: str) -> Callable[[Engine], DepthPolicy]:
    return lambda engine: BASELINES[name]()


def _another(engine: Engine) -> DepthPolicy:
    """One like the engine's own, which must not take what fixed depths earn for its own price of time."""
    costs = engine.scheduler.speculation.costs
    if costs is None:
        return engine.scheduler.speculation.policy
    return AdaptiveDepth(costs, max_depth=engine.scheduler.config.max_depth)


def _full_depth(engine: Engine) -> DepthPolicy:
    """Raises InvalidArgument for an engine that has no prices."""
    costs = engine.scheduler.speculation.costs
    if costs is None:
        raise InvalidArgument("depth", trim.NAME, "a rule that needs no prices, as the engine has none")
    return trim.FullDepth(costs, engine.scheduler.config.max_depth)


@contextmanager
def chosen_by(engine: Engine, policy: DepthPolicy | None) -> Iterator[None]:
    """Meanwhile that policy chooses depths; None leaves it to the engine's own."""
    control = engine.scheduler.speculation
    own = control.policy
    control.policy = own if policy is None else policy
    trimmed = trim.trimming(engine, policy) if isinstance(policy, trim.FullDepth) else nullcontext()
    try:
        with trimmed:
            yield
    finally:
        control.policy = own


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


class Served(NamedTuple):
    """A batch while it was whole: from the last first token to the first end.

    Attributes:
        control_seconds: of `seconds`, those for choosing depths and learning from what came of it.
        counts: what speculation brought, from the start of each stream.
    """

    tokens: int
    seconds: float
    control_seconds: float
    counts: SpeculationCounts


@dataclass(frozen=True, slots=True)
class Sample:
    """A workload served once.

    Attributes:
        rate: tokens per second of decode alone.
        depth: drafts per verify step.
        control: share of the time that went into planning and booking, choosing depths and learning among the rest.
    """

    rate: float
    depth: float
    control: float

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
        )


@dataclass(slots=True)
class Run:
    """What was measured of one setting at one number of streams.

    Attributes:
        policy: keeps what it learned from one repetition to the next, as the engine's own does.
        explored, compared: by repetition of each kind.
    """

    setting: Setting
    policy: DepthPolicy | None
    explored: list[Sample] = field(default_factory=list)
    compared: list[Sample] = field(default_factory=list)

    @classmethod
    def start(cls, setting: Setting, engine: Engine) -> Run:
        return cls(setting, None if setting.make_policy is None else setting.make_policy(engine))

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


@dataclass(slots=True)
class Cell:
    """One number of streams: runs by the names of their settings."""

    streams: int
    runs: dict[str, Run]

    @property
    def name(self) -> str:
        return f"{self.streams} stream{'s' if self.streams > 1 else ''}"

    @property
    def best(self) -> str:
        """The fixed depth with the best median in the exploring repetitions."""
        fixed = [name for name, run in self.runs.items() if run.setting.is_fixed]
        return max(fixed, key=lambda name: median(sample.rate for sample in self.runs[name].explored))

    def compared_ratios(self, name: str) -> list[float]:
        """`auto` over another setting, by comparing repetition."""
        return _ratios(self.runs[AUTO].compared, self.runs[name].compared)

    def compare(self, name: str) -> Interval:
        return Interval.of(self.compared_ratios(name))

    def explored_ratio(self, name: str) -> float:
        """`auto` over another setting, median over exploring repetitions."""
        return float(median(_ratios(self.runs[AUTO].explored, self.runs[name].explored)))


def _ratios(samples: Sequence[Sample], others: Sequence[Sample]) -> list[float]:
    return [mine.rate / its.rate for mine, its in zip(samples, others, strict=True)]


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

    Before that, unmeasured, its first batch by every setting, which warms up and teaches the engine what it is allowed
    to know of its drafters; and the first tokens of all batches, so that the prefix cache, if there is one, has their
    prompts as both models read them (the draft model, if a setting drafts by it).

    Args:
        sampling: of every stream, whose seeds count up from the one that it has, if any; None for streams of two kinds
            in turn: greedy ones whose prompt is a passage over and over, so that they go on copying, and ones at a high
            temperature.

    Yields:
        Cells, as soon as they are measured.

    Raises:
        InvalidArgument, FailedPrecondition: a setting that the engine refuses.
    """
    encoded = [engine.prepare(GenerationRequest(prompt)).prompt_token_ids for prompt in prompts]
    for size in sizes:
        cell = Cell(size, {setting.name: Run.start(setting, engine) for setting in settings})
        measure_cell(engine, cell, workload(encoded, size, prompts_per_cell, sampling), max_tokens, explore, rounds)
        yield cell


def measure_cell(
    engine: Engine, cell: Cell, batches: Sequence[Sequence[Stream]], max_tokens: int, explore: int, rounds: int
) -> None:
    """Fill the runs of a cell. Arguments as in `measure`."""
    runs = list(cell.runs.values())
    serve(engine, batches[:1], runs, max_tokens)
    serve(engine, batches, runs, min(FIRST_TOKENS, max_tokens))
    for number in track(range(explore + rounds), description=f"measuring {cell.name}"):
        if number < explore:
            for run, sample in serve(engine, batches, runs, max_tokens, number):
                run.explored.append(sample)
        else:
            compared = [cell.runs[name] for name in dict.fromkeys((AUTO, OFF, cell.best))]
            for run, sample in serve(engine, batches, compared, max_tokens, number):
                run.compared.append(sample)


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
    engine: Engine, batches: Sequence[Sequence[Stream]], runs: Sequence[Run], max_tokens: int, first: int = 0
) -> list[tuple[Run, Sample]]:
    """Serve batches one after the other, each by all runs before the next: a machine that slows down meets them all.

    The first batch begins with run `first`, modulo their number, each later one with the next run: A B B A with two.
    """
    served: list[list[Served]] = [[] for _ in runs]
    for number, batch in enumerate(batches, first):
        for turn in range(len(runs)):
            index = (number + turn) % len(runs)
            with chosen_by(engine, runs[index].policy):
                served[index].append(serve_batch(engine, batch, runs[index].setting.bounds, max_tokens))
    return [(run, Sample.of(mine)) for run, mine in zip(runs, served, strict=True)]


def serve_batch(engine: Engine, batch: Sequence[Stream], bounds: SpeculationParams, max_tokens: int) -> Served:
    stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
    ids = [engine.add(GenerationRequest(prompt, sampling, stop, bounds)) for prompt, sampling in batch]
    requests = [engine.scheduler.requests[request_id] for request_id in ids]
    silent, whole = set(ids), True
    tokens, began = 0, time.perf_counter()
    with stopwatch(engine) as watch:
        while silent or whole:
            outputs = engine.step()
            if silent:
                silent -= {output.request_id for output in outputs}
                began, watch.seconds = time.perf_counter(), 0.0
            else:
                tokens += sum(len(output.token_ids) for output in outputs)
            whole = all(output.finish is None for output in outputs)
        seconds = time.perf_counter() - began
    counts = SpeculationCounts()
    for request in requests:
        engine.abort(request.request_id)
        counts.add(request.counts)
    return Served(tokens, seconds, watch.seconds, counts)


@dataclass(slots=True)
class Watch:
    seconds: float = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return call


@contextmanager
def stopwatch(engine: Engine) -> Iterator[Watch]:
    """Adds up what planning and booking take, control of speculation among the rest, which may be compiled."""
    watch = Watch()
    with patch.multiple(engine, plan=watch.timed(engine.plan), finish=watch.timed(engine.finish)):
        yield watch


def best_single(cells: Sequence[Cell]) -> tuple[str, float]:
    """The fixed depth that is best over the sweep, and `auto` over it: geometric mean, exploring repetitions."""
    ratios = {name: over_sweep(cells, name) for name, run in cells[0].runs.items() if run.setting.is_fixed}
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
        if cell.runs[AUTO].control > MOST_CONTROL:
            lines.append(
                f"{cell.name}: planning and booking take {cell.runs[AUTO].control:.1%}, over {MOST_CONTROL:.0%}"
            )
        if off.mean < LEAST_OF_OFF:
            lines.append(f"{cell.name}: auto is {off} x off, below {LEAST_OF_OFF}")
    name, ratio = best_single(cells)
    if len(cells) > 1 and ratio < LEAST_OF_SINGLE:
        lines.append(f"sweep: auto is {ratio:.3f} x the best single fixed depth ({name}), below {LEAST_OF_SINGLE}")
    return lines


def render(cells: Sequence[Cell], title: str) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    table = Table(title=title)
    for column in ("streams", "depth", "decode tok/s", "mean depth", "auto / it"):
        table.add_column(column, justify="right")
    for cell in cells:
        for name, run in cell.runs.items():
            row = f"{run.rate:.1f}", f"{run.depth:.2f}", _over(cell, name)
            table.add_row(str(cell.streams), name, *row, style="bold" if name == AUTO else None)
        table.add_section()
    console.print(table)
    for line in summary(cells):
        console.print(line, highlight=False)


def _over(cell: Cell, name: str) -> str:
    """With its interval, if the setting was compared."""
    if name == AUTO:
        return ""
    return str(cell.compare(name)) if cell.runs[name].compared else f"{cell.explored_ratio(name):.3f}"


def describe(cell: Cell) -> str:
    return (
        f"{cell.name}: auto drafts {cell.runs[AUTO].depth:.2f}; "
        f"auto / best fixed ({cell.best}) = {cell.compare(cell.best)}, auto / off = {cell.compare(OFF)}; "
        f"planning and booking take {cell.runs[AUTO].control:.1%}"
    )


def summary(cells: Sequence[Cell]) -> list[str]:
    """`auto` over the best fixed depth and over off in each cell, over the others in the sweep, and missed bounds."""
    lines = [describe(cell) for cell in cells]
    name, ratio = best_single(cells)
    lines.append(f"sweep, geometric mean: auto / best single fixed ({name}) = {ratio:.3f}")
    for name in cells[0].runs:
        if name in BASELINES and name != OFF:
            lines.append(f"sweep, geometric mean: auto / {name} = {over_sweep(cells, name):.3f}")
    return lines + ([f"MISSED: {line}" for line in missed(cells)] or ["every bound is kept"])


def to_json(cells: Sequence[Cell], settings: dict[str, Any]) -> dict[str, Any]:
    name, ratio = best_single(cells)
    return {
        "settings": settings,
        "cells": [_cell_to_json(cell) for cell in cells],
        "sweep": {
            "best_single": name,
            "auto_over_best_single": ratio,
            "auto_over": {other: over_sweep(cells, other) for other in cells[0].runs if other != AUTO},
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
                "decode_rate": run.rate,
                "mean_depth": run.depth,
                "control": run.control,
                "explored": [asdict(sample) for sample in run.explored],
                "compared": [asdict(sample) for sample in run.compared],
            }
            for name, run in cell.runs.items()
        ],
    }
