"""Measures what steps cost on this machine, by taking some of every kind.

Sequences are made up and nothing is computed before them: where their context should lie is whatever the KV memory
holds, which costs as much to read as anything else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from paceline.core.config import SchedulerConfig
from paceline.core.cost_model import CostModel
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SequenceParams, Verification
from paceline.core.plan import Admission, SequenceWork, StepPlan, StepResult, StepRunner
from paceline.engine.profile_fit import Sample, fit
from paceline.engine.profile_shapes import Shape, shapes_to_measure

MIN_ROUNDS, MAX_ROUNDS = 3, 15  # the first measures each shape twice, the others once, or short ones alone
LONGEST_STEP = 0.06  # of the time for all; what would take longer is extrapolated
SHORT_STEPS = 2.0  # times the shortest: in those, drafts are a large share, and every per cent counts
UNDISTURBED = 0.1  # the quantile of what a shape took in all rounds that counts
GREEDY = SequenceParams(SamplingParams(temperature=0.0), verification=Verification.GREEDY)


def profile(
    runner: StepRunner,
    config: SchedulerConfig,
    *,
    draft: bool,
    first_rows: int = 1,
    seconds: float = 16.0,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float],
) -> CostModel:
    """A cost model of the steps that `runner` executes, which holds no sequence of it afterwards. The KV memory is
    overwritten.

    Args:
        draft: the runner has a draft model.
        first_rows: that each sequence has in its first pass; where they are several, what it reads besides is read in a
            forward of its own.
        seconds: that it may take. Shapes that do not fit in are interpolated, but one of every kind is measured.
        progress: is told after each round how many are done, and of how many at most; all are, in the end.
        clock: now, in seconds.
    """
    tell = progress or (lambda done, rounds: None)
    bench = _Bench(runner, config, clock, seconds, first_rows)
    for shape, needed in shapes_to_measure(config, draft, first_rows):
        bench.begin(shape, needed)
    # In rounds: while something else disturbs the machine, it disturbs all shapes alike.
    for done in range(1, MAX_ROUNDS):
        tell(done, MAX_ROUNDS)
        if not bench.measure_again(MAX_ROUNDS - done):
            break
    tell(MAX_ROUNDS, MAX_ROUNDS)
    bench.release()
    return fit(bench.samples(), config, first_rows)


class _Bench:
    """Executes shapes and keeps what they took."""

    def __init__(
        self, runner: StepRunner, config: SchedulerConfig, clock: Callable[[], float], seconds: float, first_rows: int
    ) -> None:
        self._runner = runner
        self._first_rows = first_rows
        self._config = config
        self._clock = clock
        self._end = clock() + seconds
        self._longest = LONGEST_STEP * seconds
        self._num_steps = 0
        self._admitted: tuple[int, ...] = ()
        self._results: dict[Shape, list[StepResult]] = {}

    def begin(self, shape: Shape, needed: bool) -> None:
        """The first round of a shape, unless it is not needed and takes too long or leaves no time for later rounds."""
        expected = self._expected(shape)
        rounds = 2 * expected + (MIN_ROUNDS - 1) * self._seconds([*self._short_shapes(), shape])
        if not needed and (expected > self._longest or self._clock() + rounds > self._end):
            return
        # The first may pay for what is set up once. If it does not, it is as good as any.
        self._results[shape] = [self._execute(shape), self._execute(shape)]

    def measure_again(self, left: int) -> bool:
        """One more round of the `left` that there may be, if there is time for it."""
        time_left = self._end - self._clock()
        shapes = list(self._results)
        if left * self._seconds(shapes) > time_left:
            shapes = self._short_shapes()
            if self._seconds(shapes) > time_left:
                return False
        # By size: a step finds in the caches what a step like it has left there, as in serving.
        for shape in sorted(shapes, key=lambda shape: (shape.method, shape.rows)):
            self._results[shape].append(self._execute(shape))
        return True

    def samples(self) -> list[Sample]:
        return [
            Sample(
                shape,
                shape.sequences * shape.tokens + sum(sequence.num_drafted for sequence in results[0].sequences),
                _least([result.times.total - result.times.draft for result in results]),
                _least([result.times.draft for result in results]),
            )
            for shape, results in self._results.items()
        ]

    def release(self) -> None:
        self._runner.execute(StepPlan(self._num_steps, self._admitted, (), ()))

    def _seconds(self, shapes: Sequence[Shape]) -> float:
        """Seconds that one step of each takes, at most."""
        return sum(map(self._expected, shapes))

    def _short_shapes(self) -> list[Shape]:
        expected = {shape: self._expected(shape) for shape in self._results}
        shortest = min(expected.values(), default=0.0)
        return [shape for shape, seconds in expected.items() if seconds <= SHORT_STEPS * shortest]

    def _expected(self, shape: Shape) -> float:
        """Seconds of one step, at most: as the shortest one that is no smaller, or in proportion to one that is."""
        taken = {known: min(result.times.total for result in results) for known, results in self._results.items()}
        if no_smaller := [
            seconds for known, seconds in taken.items() if known.rows >= shape.rows and known.reads >= shape.reads
        ]:
            return min(no_smaller)
        return min(
            [
                seconds * max(1.0, shape.rows / known.rows, shape.reads / known.reads)
                for known, seconds in taken.items()
            ],
            default=0.0,
        )

    def _execute(self, shape: Shape) -> StepResult:
        """One step of sequences that begin with it: what they emitted before does not matter, nor how long they are."""
        # No request that is served has such an id.
        ids = tuple(range(-shape.sequences, 0))
        blocks = itertools.count()
        per_sequence = self._config.blocks_for(shape.length)
        size = shape.context + shape.tokens
        admitted, work = [], []
        for index, request_id in enumerate(ids):
            table = tuple(itertools.islice(blocks, per_sequence))
            drafts = shape.drafts // shape.sequences + (index < shape.drafts % shape.sequences)
            drafted = size - self._first_rows - shape.read_ahead
            admitted.append(Admission(request_id, (0,) * size, size, GREEDY, table, shape.context, drafted))
            work.append(
                SequenceWork(
                    request_id,
                    shape.tokens,
                    samples=True,
                    num_drafts=drafts,
                    method=shape.method if drafts else Method.NONE,
                    draft_catch_up=(self._first_rows + shape.read_ahead) * (shape.method is Method.DRAFT_MODEL),
                )
            )
        plan = StepPlan(self._num_steps, self._admitted, tuple(admitted), tuple(work))
        self._admitted = ids
        self._num_steps += 1
        return self._runner.execute(plan)


def _least(seconds: Sequence[float]) -> float:
    """About the least: what disturbs a step only ever adds to it, and on a busy machine most steps are disturbed."""
    return float(np.quantile(seconds, UNDISTURBED, method="lower"))
