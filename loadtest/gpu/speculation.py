"""Speculation with the widened pair, which agrees as the small one does at the cost of the large one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any

from drive import Window, serve
from rig import GREEDY, Rig

from paceline.bench.depth import workload
from paceline.bench.depth_names import AUTO, OFF
from paceline.bench.limits.work import streamed_bytes
from paceline.bench.ratio import median_ratio
from paceline.bench.setting import Setting, parse_settings, steered
from paceline.bench.turns import Stream
from paceline.core.method import Method
from paceline.core.speculation import SpeculationControl
from paceline.core.speculation_counts import SpeculationCounts

LEAST_OF_BEST, LEAST_OF_OFF = 0.95, 0.98  # of the rate of the best fixed depth, and without speculation


@dataclass(slots=True)
class Arm:
    """One setting of a comparison, and what it brought at one number of streams: the windows of each round."""

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


def speculation(rig: Rig) -> dict[str, Any]:
    """`auto` beside fixed depths, in turns within each round (A B A B), which serves the same streams to all."""
    return {"concurrencies": [_concurrency(rig, streams) for streams in rig.scale.concurrencies]}


def _concurrency(rig: Rig, streams: int) -> dict[str, Any]:
    arms = [
        Arm(setting, setting.control(rig.engine)) for setting in parse_settings(rig.scale.depths, Method.DRAFT_MODEL)
    ]
    batches = workload(rig.held_out(), streams, rig.scale.prompts, GREEDY)
    for arm in arms:  # unmeasured: shapes are met, and each learns what its drafts are worth
        _serve(rig, arm, batches[:1])
    for number in rig.rounds():
        first = number % len(arms)
        for arm in arms[first:] + arms[:first]:
            arm.rounds.append(_serve(rig, arm, batches))
    by_name = {arm.setting.name: arm for arm in arms}
    best = max((arm for arm in arms if arm.setting.is_fixed), key=lambda arm: median(arm.rates)).setting.name
    over = {name: median_ratio(by_name[AUTO].rates, arm.rates) for name, arm in by_name.items()}
    _print(rig, streams, arms, over)
    rig.say(
        f"auto / best fixed ({best}) = {over[best]:.3f} (target {LEAST_OF_BEST}), "
        f"auto / off = {over[OFF]:.3f} (target {LEAST_OF_OFF})"
    )
    result = {
        "streams": streams,
        "rounds": len(arms[0].rounds),
        "rates": {name: median(arm.rates) for name, arm in by_name.items()},
        "auto_over": over,
        "best_fixed": best,
    }
    return result | (_allowed(rig, by_name, over[OFF]) if streams == 1 else {})


def _serve(rig: Rig, arm: Arm, batches: Sequence[Sequence[Stream]]) -> list[Window]:
    with steered(rig.engine, arm.control):
        return [serve(rig.engine, batch, arm.setting.bounds, rig.scale.max_tokens) for batch in batches]


def _print(rig: Rig, streams: int, arms: Sequence[Arm], over: dict[str, float]) -> None:
    rows = []
    for arm in arms:
        counts, name = arm.counts, arm.setting.name
        emitted, drafted = counts.emitted / counts.verify_steps, counts.drafted / counts.verify_steps
        milliseconds = f"{1e3 * arm.step_seconds:.3f}", f"{1e3 * arm.draft_seconds:.3f}"
        rows.append(
            (name, f"{median(arm.rates):.1f}", f"{emitted:.2f}", f"{drafted:.2f}", *milliseconds, f"{over[name]:.3f}")
        )
    columns = "depth", "decode tok/s", "tokens / step", "mean depth", "step ms", "draft ms", "auto / it"
    rig.table(f"speculation, {streams} at once, {len(arms[0].rounds)} rounds", columns, rows)


def _allowed(rig: Rig, arms: dict[str, Arm], speedup: float) -> dict[str, Any]:
    """What acceptance and the price of a draft pass allow one stream, where verifying costs no more than a step without
    drafts: the best over k of (1 + S_1 + ... + S_k) / (1 + k c), S_j being how often position j is kept.
    """
    deepest = max((arm for arm in arms.values() if arm.setting.name.isdecimal()), key=lambda arm: int(arm.setting.name))
    depth, counts = int(deepest.setting.name), deepest.counts
    cost = deepest.draft_seconds / depth / arms[OFF].step_seconds
    kept = [steps / counts.draft_steps for steps in counts.accepted_by_position]
    gains = list(accumulate(kept, initial=1.0))
    allowed, best = max((gain / (1 + k * cost), k) for k, gain in enumerate(gains))
    share = speedup / allowed
    rig.say(
        f"a draft pass costs {cost:.3f} steps, positions are kept at {', '.join(f'{p:.2f}' for p in kept)}: "
        f"that allows {allowed:.3f} x off at depth {best}; auto has {share:.1%} of it"
    )
    return {"pass_cost": cost, "kept": kept, "allowed": allowed, "allowed_depth": best, "share_of_allowed": share}


def draft(rig: Rig) -> dict[str, Any]:
    """What one more pass of the draft model takes, against reading its weights: from steps of two depths."""
    shallow, deep = rig.scale.draft_depths
    settings = parse_settings(f"{AUTO},{OFF},{shallow},{deep}", Method.DRAFT_MODEL)[2:]
    arms = [Arm(setting, setting.control(rig.engine)) for setting in settings]
    batches = workload(rig.held_out(), 1, 1, GREEDY)
    for _ in rig.rounds(least=3):
        for arm in arms:
            arm.rounds.append(_serve(rig, arm, batches))
    low, high = (_full_draft_seconds(arm) for arm in arms)
    per_pass = (high - low) / (deep - shallow)
    bound = streamed_bytes(rig.configs[1], rig.itemsize) / rig.ceilings.bandwidth
    row = (
        str(shallow),
        str(deep),
        f"{1e3 * low:.3f}",
        f"{1e3 * high:.3f}",
        f"{1e3 * per_pass:.4f}",
        f"{1e3 * bound:.4f}",
    )
    columns = "from", "to", "draft ms", "draft ms", "a pass ms", "bound ms", "bound / pass"
    rig.table("draft passes, 1 stream", columns, [(*row, f"{bound / per_pass:.1%}")])
    return {"depths": [shallow, deep], "draft": [low, high], "pass": per_pass, "bound": bound}


def _full_draft_seconds(arm: Arm) -> float:
    """Median over the steps of measured rounds that had all of their drafts."""
    depth = int(arm.setting.name)
    steps = [step for windows in arm.rounds[1:] for window in windows for step in window.steps]
    return median(step.times.draft for step in steps if step.plan.work[0].num_drafts == depth)
