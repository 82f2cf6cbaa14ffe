"""Speculation with the widened pair, which agrees as the small one does at the cost of the large one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any

from common import GREEDY, Bench
from drive import Window, serve

from paceline.bench.depth import workload
from paceline.bench.limits.work import streamed_bytes
from paceline.bench.setting import Setting, parse_settings, steered
from paceline.bench.throughput import AUTO, OFF
from paceline.bench.turns import Stream
from paceline.core.method import Method
from paceline.core.speculation import SpeculationControl
from paceline.core.speculation_counts import SpeculationCounts


@dataclass(slots=True)
class Run:
    """What one setting brought at one number of streams; `rounds` has the windows of each."""

    setting: Setting
    control: SpeculationControl
    rounds: list[list[Window]] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens per second, by round."""
        return [sum(w.tokens for w in windows) / sum(w.seconds for w in windows) for windows in self.rounds]

    @property
    def windows(self) -> list[Window]:
        return [window for windows in self.rounds for window in windows]

    @property
    def counts(self) -> SpeculationCounts:
        counts = SpeculationCounts()
        for window in self.windows:
            counts.add(window.counts)
        return counts

    @property
    def step_seconds(self) -> float:
        return sum(w.seconds for w in self.windows) / sum(len(w.steps) for w in self.windows)

    @property
    def draft_seconds(self) -> float:
        """Per step."""
        drafts = [step.times.draft for window in self.windows for step in window.steps]
        return sum(drafts) / len(drafts)


def speculation(bench: Bench) -> dict[str, Any]:
    """`auto` beside fixed depths, in turns within each round (A B A B), which serves the same streams to all."""
    return {"concurrencies": [_concurrency(bench, streams) for streams in bench.scale.concurrencies]}


def _concurrency(bench: Bench, streams: int) -> dict[str, Any]:
    runs = [
        Run(setting, setting.control(bench.engine))
        for setting in parse_settings(bench.scale.depths, Method.DRAFT_MODEL)
    ]
    batches = workload(bench.held_out(), streams, bench.scale.prompts, GREEDY)
    for run in runs:  # unmeasured: shapes are met, and each learns what its drafts are worth
        _serve(bench, run, batches[:1])
    for number in bench.rounds():
        first = number % len(runs)
        for run in runs[first:] + runs[:first]:
            run.rounds.append(_serve(bench, run, batches))
    by_name = {run.setting.name: run for run in runs}
    best = max((run for run in runs if run.setting.is_fixed), key=lambda run: median(run.rates)).setting.name
    over = {name: _ratio(by_name[AUTO], run) for name, run in by_name.items()}
    _print(bench, streams, runs, over)
    bench.say(
        f"auto / best fixed ({best}) = {over[best]:.3f} (target 0.95), auto / off = {over[OFF]:.3f} (target 0.98)"
    )
    result = {
        "streams": streams,
        "rounds": len(runs[0].rounds),
        "rates": {name: median(run.rates) for name, run in by_name.items()},
        "auto_over": over,
        "best_fixed": best,
    }
    return result | (_allowed(bench, by_name, over[OFF]) if streams == 1 else {})


def _serve(bench: Bench, run: Run, batches: Sequence[Sequence[Stream]]) -> list[Window]:
    with steered(bench.engine, run.control):
        return [serve(bench.engine, batch, run.setting.bounds, bench.scale.max_tokens) for batch in batches]


def _ratio(run: Run, other: Run) -> float:
    """Median of the ratios within each round."""
    return median(mine / its for mine, its in zip(run.rates, other.rates, strict=True))


def _print(bench: Bench, streams: int, runs: Sequence[Run], over: dict[str, float]) -> None:
    rows = []
    for run in runs:
        counts, name = run.counts, run.setting.name
        emitted, drafted = counts.emitted / counts.verify_steps, counts.drafted / counts.verify_steps
        milliseconds = f"{1e3 * run.step_seconds:.3f}", f"{1e3 * run.draft_seconds:.3f}"
        rows.append(
            (name, f"{median(run.rates):.1f}", f"{emitted:.2f}", f"{drafted:.2f}", *milliseconds, f"{over[name]:.3f}")
        )
    columns = "depth", "decode tok/s", "tokens / step", "mean depth", "step ms", "draft ms", "auto / it"
    bench.table(f"speculation, {streams} at once, {len(runs[0].rounds)} rounds", columns, rows)


def _allowed(bench: Bench, runs: dict[str, Run], speedup: float) -> dict[str, Any]:
    """What acceptance and the price of a draft pass allow one stream, where verifying costs no more than a step without
    drafts: the best over k of (1 + S_1 + ... + S_k) / (1 + k c), S_j being how often position j is kept.
    """
    deepest = max((run for run in runs.values() if run.setting.name.isdecimal()), key=lambda run: int(run.setting.name))
    depth, counts = int(deepest.setting.name), deepest.counts
    cost = deepest.draft_seconds / depth / runs[OFF].step_seconds
    kept = [steps / counts.draft_steps for steps in counts.accepted_by_position]
    gains = list(accumulate(kept, initial=1.0))
    allowed, best = max((gain / (1 + k * cost), k) for k, gain in enumerate(gains))
    share = speedup / allowed
    bench.say(
        f"a draft pass costs {cost:.3f} steps, positions are kept at {', '.join(f'{p:.2f}' for p in kept)}: "
        f"that allows {allowed:.3f} x off at depth {best}; auto has {share:.1%} of it"
    )
    return {"pass_cost": cost, "kept": kept, "allowed": allowed, "allowed_depth": best, "share_of_allowed": share}


def draft(bench: Bench) -> dict[str, Any]:
    """What one more pass of the draft model takes, against reading its weights: from steps of two depths."""
    shallow, deep = bench.scale.draft_depths
    settings = parse_settings(f"{AUTO},{OFF},{shallow},{deep}", Method.DRAFT_MODEL)[2:]
    runs = [Run(setting, setting.control(bench.engine)) for setting in settings]
    batches = workload(bench.held_out(), 1, 1, GREEDY)
    for _ in bench.rounds(least=3):
        for run in runs:
            run.rounds.append(_serve(bench, run, batches))
    low, high = (_full_draft_seconds(run) for run in runs)
    per_pass = (high - low) / (deep - shallow)
    bound = streamed_bytes(bench.configs[1], bench.itemsize) / bench.ceilings.bandwidth
    row = (
        str(shallow),
        str(deep),
        f"{1e3 * low:.3f}",
        f"{1e3 * high:.3f}",
        f"{1e3 * per_pass:.4f}",
        f"{1e3 * bound:.4f}",
    )
    columns = "from", "to", "draft ms", "draft ms", "a pass ms", "bound ms", "bound / pass"
    bench.table("draft passes, 1 stream", columns, [(*row, f"{bound / per_pass:.1%}")])
    return {"depths": [shallow, deep], "draft": [low, high], "pass": per_pass, "bound": bound}


def _full_draft_seconds(run: Run) -> float:
    """Median over the steps of measured rounds that had all of their drafts."""
    depth = int(run.setting.name)
    steps = [step for windows in run.rounds[1:] for window in windows for step in window.steps]
    return median(step.times.draft for step in steps if step.plan.work[0].num_drafts == depth)
