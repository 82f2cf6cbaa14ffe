"""Load that swings between few streams and many: how `auto` follows, against every fixed depth.

Settings take turns by steps, so that memory that becomes slower does so for all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from rich.table import Table

from paceline.bench.console import console, num_streams, verdict
from paceline.bench.depth_names import AUTO
from paceline.bench.setting import Setting
from paceline.bench.turns import Track, check_room
from paceline.core.params import SamplingParams, StopParams
from paceline.core.speculation import SpeculationControl
from paceline.engine import Engine, GenerationRequest

WARM_UP_SECONDS = 3.0
GOLDEN = 0.618034  # whose multiples are spread evenly over 0..1, however many there are
WINDOW = 0.5  # seconds over which a depth is averaged
STAY = 1.0  # seconds near its level, after which a depth counts as settled
NEAR_SHARE, NEAR_DRAFTS = 0.25, 0.5  # of the level, whichever allows more
LEAST_OF_BEST = 0.95  # of the best fixed depth of each phase
LONGEST_TO_SETTLE = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the engine.

    Attributes:
        began, ended: seconds from the phase's start.
        tokens: emitted.
        drafts, decodes: planned.
    """

    began: float
    ended: float
    tokens: int
    drafts: int
    decodes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """A time with a constant number of streams; at least one step."""

    streams: int
    steps: list[Step]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(step.tokens for step in self.steps) / self.steps[-1].ended

    @property
    def name(self) -> str:
        return num_streams(self.streams)

    def depth_by_second(self) -> list[float]:
        """Drafts per decode in the steps that began in each second."""
        second = np.array([int(step.began) for step in self.steps])
        drafts = np.bincount(second, [step.drafts for step in self.steps])
        decodes = np.bincount(second, [step.decodes for step in self.steps])
        return [float(depth) for depth in drafts / np.maximum(1, decodes)]

    def settled(self) -> tuple[float, float | None]:
        """The level of the depth, which is its median; and the seconds after which it came to stay near it, None if it
        never did: to the begin of a step, where its depth is chosen. That a step is long is not its depth's doing.
        """
        seconds, depths = self._sliding_depths()
        if not len(depths):
            return 0.0, None
        level = float(np.median(depths))
        near = np.abs(depths - level) <= max(NEAR_SHARE * level, NEAR_DRAFTS)
        since: float | None = None
        for at, is_near in zip(seconds.tolist(), near.tolist(), strict=True):
            if not is_near:
                since = None
            elif since is None:
                since = at
            elif at - since >= STAY:
                break
        return level, since

    def _sliding_depths(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Drafts per decode over the steps that began in the last `WINDOW` seconds: at the begin of every step with a
        decode in that window.
        """
        began = np.array([step.began for step in self.steps])
        totals = np.cumsum([(0, 0), *((step.drafts, step.decodes) for step in self.steps)], axis=0)
        first = np.searchsorted(began, began - WINDOW, side="right")
        drafts, decodes = (totals[1:] - totals[first]).T
        decoding = decodes > 0
        return began[decoding], drafts[decoding] / decodes[decoding]


class ClosedLoop:
    """A constant number of streams by one setting: one that ends is replaced at once; where there are too many, the
    newest go.

    Args:
        requests: as many as may be needed.

    Attributes:
        steps: of the phase.
    """

    def __init__(self, engine: Engine, control: SpeculationControl, requests: Iterator[GenerationRequest]) -> None:
        self._engine = engine
        self._track = Track(engine, control)
        self._requests = requests
        self._live: list[int] = []  # in order of arrival
        self.steps: list[Step] = []

    @property
    def seconds(self) -> float:
        """Seconds of all steps of the phase."""
        return self.steps[-1].ended if self.steps else 0.0

    def resize(self, streams: int) -> None:
        with self._track.taken():
            while len(self._live) > streams:
                self._engine.abort(self._live.pop())
            while len(self._live) < streams:
                self._live.append(self._engine.add(next(self._requests)))

    def step(self, streams: int) -> None:
        """One step with so many streams."""
        self.resize(streams)
        with self._track.taken():
            began = self._engine.clock()
            plan = self._engine.plan()
            assert plan is not None, "a stream is live"
            outputs = self._engine.finish(plan, self._engine.runner.execute(plan))
            seconds = self._engine.clock() - began
        finished = {output.request_id for output in outputs if output.finish is not None}
        self._live = [request_id for request_id in self._live if request_id not in finished]
        depths = [work.num_drafts for work in plan.work if work.samples and work.num_tokens == 1]
        tokens = sum(len(output.token_ids) for output in outputs)
        self.steps.append(Step(self.seconds, self.seconds + seconds, tokens, sum(depths), len(depths)))


def run_phase(loops: Sequence[ClosedLoop], streams: int, seconds: float) -> list[Phase]:
    """So many streams for that time, to the end of a step, by each; the next step is always of who had least of it."""
    for loop in loops:
        loop.steps = []
    while late := [loop for loop in loops if loop.seconds < seconds]:
        min(late, key=lambda loop: loop.seconds).step(streams)
    return [Phase(streams, loop.steps) for loop in loops]


@dataclass(frozen=True, slots=True)
class Ride:
    """One setting through all phases."""

    setting: Setting
    phases: list[Phase]

    def rate(self, streams: int | None = None) -> float:
        """Tokens per second of the phases with so many streams, or of all; phases count alike."""
        rates = [phase.rate for phase in self.phases if streams in (None, phase.streams)]
        return sum(rates) / len(rates)


def measure(
    engine: Engine,
    prompts: Sequence[str | tuple[int, ...]],
    settings: Sequence[Setting],
    sizes: Sequence[int],
    seconds: float,
    prompt_tokens: int,
    max_tokens: int,
    sampling: SamplingParams,
) -> list[Ride]:
    """Each setting through the same phases, after a short one that is not measured.

    Args:
        sizes: numbers of streams, by phase.
        prompt_tokens: to which prompts are cut.
        max_tokens: of the longest completion, the shortest has half of it. All those that a phase begins with would end
            at once, and whoever is ahead would read their successors' prompts while others still decode.

    Raises:
        InvalidArgument, FailedPrecondition: a setting that the engine refuses, or more than its KV pool has room for.
    """
    encoded = [engine.prepare(GenerationRequest(prompt)).prompt_token_ids[:prompt_tokens] for prompt in prompts]
    check_room(engine, [prompt_tokens] * max(sizes), len(settings), max_tokens)

    def loop(setting: Setting) -> ClosedLoop:
        requests = (
            GenerationRequest(prompt, sampling, _stop(max_tokens, number), setting.bounds)
            for number, prompt in enumerate(itertools.cycle(encoded))
        )
        return ClosedLoop(engine, setting.control(engine), requests)

    loops = [loop(setting) for setting in settings]
    try:
        run_phase(loops, max(sizes), min(WARM_UP_SECONDS, seconds))
        phases = [run_phase(loops, streams, seconds) for streams in track(sizes, description="measuring")]
    finally:
        for each in loops:
            each.resize(0)
    return [Ride(setting, list(mine)) for setting, mine in zip(settings, zip(*phases, strict=True), strict=True)]


def _stop(most: int, number: int) -> StopParams:
    """Where the stream of that number, from 0, ends."""
    return StopParams(max_tokens=max(1, round(most * (1.0 - number * GOLDEN % 1.0 / 2))), ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`auto` in one phase, against the fixed depth that was best in it."""

    phase: Phase
    best: str
    best_rate: float

    @property
    def ratio(self) -> float:
        return self.phase.rate / self.best_rate


def compare(rides: Sequence[Ride]) -> list[Comparison]:
    """Compare `auto` in each phase with the fixed depth that was best in it."""
    auto = next(ride for ride in rides if ride.setting.name == AUTO)
    fixed = [ride for ride in rides if ride.setting.is_fixed]
    comparisons = []
    for number, phase in enumerate(auto.phases):
        rates = {ride.setting.name: ride.phases[number].rate for ride in fixed}
        best = max(rates, key=lambda name: rates[name])
        comparisons.append(Comparison(phase, best, rates[best]))
    return comparisons


def share_of_best(comparisons: Sequence[Comparison]) -> float:
    """What `auto` emitted in all phases, over what the best fixed depth of each would have."""
    return sum(c.phase.rate for c in comparisons) / sum(c.best_rate for c in comparisons)


def missed(comparisons: Sequence[Comparison]) -> list[str]:
    """Each bound that is not kept, in words."""
    lines = []
    share = share_of_best(comparisons)
    if share < LEAST_OF_BEST:
        lines.append(f"auto emits {share:.3f} x the best fixed depth of each phase, below {LEAST_OF_BEST}")
    for number, comparison in enumerate(comparisons, 1):
        _, settled = comparison.phase.settled()
        if settled is None or settled > LONGEST_TO_SETTLE:
            when = "never" if settled is None else f"{settled:.1f} s"
            lines.append(
                f"phase {number}, {comparison.phase.name}: depth settled after {when}, not {LONGEST_TO_SETTLE} s"
            )
    return lines


def render(rides: Sequence[Ride], title: str) -> None:
    out = console()
    names = {phase.streams: phase.name for phase in rides[0].phases}
    table = Table(title=title)
    for column in ("depth", *(f"{name}, tok/s" for name in names.values()), "all, tok/s"):
        table.add_column(column, justify="right")
    for ride in rides:
        rates = [ride.rate(streams) for streams in names] + [ride.rate()]
        table.add_row(
            ride.setting.name, *(f"{rate:.1f}" for rate in rates), style="bold" if ride.setting.name == AUTO else None
        )
    out.print(table)
    for line in summary(compare(rides)):
        out.print(line, highlight=False)


def summary(comparisons: Sequence[Comparison]) -> list[str]:
    lines = []
    for number, comparison in enumerate(comparisons, 1):
        phase = comparison.phase
        level, settled = phase.settled()
        when = "never settled" if settled is None else f"settled after {settled:.1f} s"
        by_second = " ".join(f"{depth:.1f}" for depth in phase.depth_by_second())
        lines.append(
            f"phase {number}, {phase.name}: auto / best fixed ({comparison.best}) = {comparison.ratio:.3f}; "
            f"auto's median depth {level:.2f}, {when}; by second: {by_second}"
        )
    lines.append(f"auto / best fixed depth of each phase, in all: {share_of_best(comparisons):.3f}")
    return lines + verdict(missed(comparisons))


def to_json(rides: Sequence[Ride], settings: dict[str, Any]) -> dict[str, Any]:
    comparisons = compare(rides)
    return {
        "settings": settings,
        "depths": [
            {"depth": ride.setting.name, "phases": [_phase_to_json(phase) for phase in ride.phases]} for ride in rides
        ],
        "best_fixed": [comparison.best for comparison in comparisons],
        "auto_over_best_fixed": share_of_best(comparisons),
        "missed": missed(comparisons),
    }


def _phase_to_json(phase: Phase) -> dict[str, Any]:
    level, settled = phase.settled()
    return {
        "streams": phase.streams,
        "rate": phase.rate,
        "median_depth": level,
        "settled_seconds": settled,
        "depth_by_second": phase.depth_by_second(),
    }
