"""The profile of a runner that knows its prices: it has to find them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from paceline.core.config import SchedulerConfig
from paceline.core.cost_model import StepShape
from paceline.core.method import Method
from paceline.core.plan import SequenceResult, StepPlan, StepResult, StepTimes
from paceline.core.sequence import Sequence
from paceline.engine.profile import MAX_ROUNDS, profile
from paceline.sim import VirtualClock

CONFIG = SchedulerConfig(num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=2048)

PER_CONTEXT, PER_SEQUENCE, PER_DRAFT_ROW, BEFORE = 2e-6, 3e-5, 2e-5, 1e-4
READING = 8e-4


def target(rows: int) -> float:
    return 0.004 + 1e-5 * rows + 1e-4 * max(0, rows - 32)


def first_pass(sequences: int) -> float:
    return 0.0009 + 1e-5 * sequences


def later_pass(sequences: int) -> float:
    return 0.0004 + 5e-6 * sequences


class FormulaRunner:
    """Implements `StepRunner`: keeps a mirror, holds plans to its contract, and takes as long as formulas say.

    Args:
        noise: factor on each step's times.
        ngram: whether an n-gram has anything to propose.
        slowness: factor on all times.
        setup: seconds more that the first step of each shape takes.
        first_rows: of a sequence in the first pass; where they are several, what it reads besides takes a forward more.
    """

    def __init__(
        self,
        clock: VirtualClock,
        noise: Callable[[], float] = lambda: 1.0,
        ngram: bool = True,
        slowness: float = 1.0,
        config: SchedulerConfig = CONFIG,
        setup: float = 0.1,
        first_rows: int = 1,
    ) -> None:
        self.clock = clock
        self.noise = noise
        self.ngram = ngram
        self.slowness = slowness
        self.config = config
        self.sequences: dict[int, Sequence] = {}
        self.setup = setup
        self.first_rows = first_rows
        self.shapes: set[tuple[int, int, int]] = set()
        self.num_steps = Counter[int]()  # by rows

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            del self.sequences[request_id]
        for admission in plan.admitted:
            assert admission.request_id not in self.sequences
            self.sequences[admission.request_id] = Sequence(admission)
        tables: list[int] = []
        results = []
        depths = []
        rows = context = ahead = 0
        for work in plan.work:
            sequence = self.sequences[work.request_id]
            sequence.extend(work)
            count = len(sequence.rows(work))
            drafts = work.num_drafts if work.method is Method.DRAFT_MODEL or self.ngram else 0
            if work.method is Method.DRAFT_MODEL:
                gap = len(sequence.draft_gap(work))
                assert sequence.num_draft_computed + gap == len(sequence)
                depths.append(drafts)
                ahead += gap - self.first_rows
            length = sequence.num_computed + count + drafts
            assert length <= min(self.config.max_model_len, len(sequence.block_ids) * self.config.block_size)
            rows += count + drafts
            context += sequence.num_computed + count
            tables.extend(sequence.block_ids)
            sequence.commit(work, [1], 0)
            results.append(SequenceResult(work.request_id, (1,), drafts))
        assert len(tables) == len(set(tables))
        assert all(block < self.config.num_blocks for block in tables)
        self.num_steps[rows] += 1
        times = self._times(rows, context, len(plan.work), depths, ahead)
        self.clock.advance(times.total)
        return StepResult(plan.step_id, tuple(results), times)

    def _times(self, rows: int, context: int, sequences: int, depths: list[int], ahead: int) -> StepTimes:
        factor = self.noise() * self.slowness
        shape = rows, context, max(depths, default=0)
        setup = 0.0 if shape in self.shapes else self.setup
        self.shapes.add(shape)
        draft = BEFORE
        if depths:
            passes = [sum(depth > number for depth in depths) for number in range(max(depths))]
            draft += first_pass(passes[0]) + sum(map(later_pass, passes[1:])) + PER_DRAFT_ROW * ahead
            if ahead and self.first_rows > 1:
                draft += READING
        computing = target(rows) + PER_CONTEXT * context + PER_SEQUENCE * sequences
        return StepTimes(draft=draft * factor, total=(draft + computing) * factor + setup)


def test_the_formulas_are_found() -> None:
    """The first step of each shape takes 100 ms more, which must not show."""
    clock = VirtualClock()
    costs = profile(FormulaRunner(clock), CONFIG, draft=True, seconds=60.0, clock=clock)
    for rows in (1, 2, 5, 8, 24, 32, 48, 100, 500, 1024):
        sequences = min(rows, 20)
        exact = target(rows) + PER_CONTEXT * 3000 + PER_SEQUENCE * sequences
        assert costs.target(rows, 3000, sequences) == pytest.approx(exact, rel=0.05), rows
    assert costs.target(8, 0, 8) - costs.target(8, 0, 0) == pytest.approx(8 * PER_SEQUENCE, rel=0.05)
    assert costs.target(1, 10_000) - costs.target(1, 0) == pytest.approx(10_000 * PER_CONTEXT, rel=0.05)
    for count in (1, 3, 8, 64):
        assert costs.first_passes(count)[count] == pytest.approx(first_pass(count), rel=0.05)
        assert costs.draft_passes(count)[count] == pytest.approx(later_pass(count), rel=0.05)
    assert costs.draft_rows(100) == pytest.approx(100 * PER_DRAFT_ROW, rel=0.05)


def test_a_forward_in_which_a_draft_model_reads_has_a_price_of_its_own() -> None:
    clock = VirtualClock()
    runner = FormulaRunner(clock, first_rows=2)
    costs = profile(runner, CONFIG, draft=True, first_rows=2, seconds=60.0, clock=clock)
    assert costs.first_rows == 2
    for rows in (4, 8, 60, 128):
        assert costs.draft_rows(rows) == pytest.approx(READING + rows * PER_DRAFT_ROW, rel=0.05)
    for count in (1, 64):
        assert costs.first_passes(count)[count] == pytest.approx(first_pass(count), rel=0.05)


def test_an_ngram_with_nothing_to_propose_is_seen() -> None:
    """Rows that were never there have no price; sequences have theirs as rows."""
    clock = VirtualClock()
    costs = profile(FormulaRunner(clock, ngram=False), CONFIG, draft=False, seconds=60.0, clock=clock)
    for rows in (1, 5, 24, 64):
        assert costs.target(rows, 0, rows) == pytest.approx(target(rows) + PER_SEQUENCE * rows, rel=0.05), rows


def test_a_busy_machine_hardly_shows() -> None:
    clock, chance = VirtualClock(), np.random.default_rng(0)

    def noise() -> float:
        return float(chance.normal(1.0, 0.01)) * (30.0 if chance.random() < 0.6 else 1.0)

    costs = profile(FormulaRunner(clock, noise), CONFIG, draft=True, seconds=1000.0, clock=clock)
    for rows in (8, 32, 100, 500):
        exact = target(rows) + PER_SEQUENCE * 8
        assert costs.target(rows, 0, 8) == pytest.approx(exact, rel=0.05), rows
    for count in (1, 16):
        assert costs.first_passes(count)[count] == pytest.approx(first_pass(count), rel=0.05)
        assert costs.draft_passes(count)[count] == pytest.approx(later_pass(count), rel=0.1)


class DisturbedAtEight(FormulaRunner):
    """Whenever there are eight sequences, something else runs."""

    def _times(self, rows: int, context: int, sequences: int, depths: list[int], ahead: int) -> StepTimes:
        times = super()._times(rows, context, sequences, depths, ahead)
        factor = 9.0 if sequences == 8 else 1.0
        return StepTimes(draft=times.draft * factor, total=times.total * factor)


def test_what_took_longer_than_something_larger_does_not_count() -> None:
    clock = VirtualClock()
    costs = profile(DisturbedAtEight(clock), CONFIG, draft=True, seconds=100.0, clock=clock)
    for rows in (4, 8, 24, 100):
        exact = target(rows) + PER_SEQUENCE * 4
        assert costs.target(rows, 0, 4) == pytest.approx(exact, rel=0.1), rows
    assert costs.target(32, 0, 4) <= 1.05 * (target(48) + PER_SEQUENCE * 12), "which eight sequences took 9 times"
    assert costs.first_passes(8)[8] == pytest.approx(first_pass(16), rel=0.05)
    assert costs.first_passes(16)[16] == pytest.approx(first_pass(16), rel=0.05)


def test_nothing_that_drafts_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the difference of two noisy measurements: what costs nothing can never be corrected."""
    monkeypatch.setitem(globals(), "later_pass", lambda sequences: 0.0)
    clock = VirtualClock()
    costs = profile(FormulaRunner(clock), CONFIG, draft=True, seconds=60.0, clock=clock)
    assert 0 < costs.draft_passes(8)[8] < 0.1 * first_pass(8)


def test_nothing_is_left_behind_and_progress_is_told() -> None:
    clock = VirtualClock()
    runner = FormulaRunner(clock)
    told: list[tuple[int, int]] = []
    profile(runner, CONFIG, draft=True, seconds=60.0, progress=lambda done, of: told.append((done, of)), clock=clock)
    assert runner.sequences == {}
    assert told == [(done, len(told)) for done in range(1, len(told) + 1)]
    assert len(told) == MAX_ROUNDS
    profile(runner, CONFIG, draft=True, seconds=60.0, clock=clock)


@pytest.mark.parametrize("slowness", [1.0, 20.0, 200.0])
def test_time_is_kept_and_what_is_not_measured_is_extrapolated(slowness: float) -> None:
    clock = VirtualClock()
    runner = FormulaRunner(clock, slowness=slowness)
    costs = profile(runner, CONFIG, draft=True, seconds=4.0, clock=clock)
    # Two steps at least of each of the six kinds; the first is longer.
    one_of_each = 6 * (0.1 + 2 * costs.step(StepShape(16, 512, (1, 1, 1), 128)))
    assert clock() <= max(4.5, one_of_each)
    assert costs.target(1, 0) == pytest.approx(slowness * target(1), rel=0.05)
    assert costs.target(1024, 0) > 2 * costs.target(24, 0)
    assert costs.draft_passes(1)[1] == pytest.approx(slowness * later_pass(1), rel=0.1)
    if slowness == 200.0:
        assert max(runner.num_steps) < 1024


def with_stairs(seconds: float, per_row: float, stairs: dict[int, float]) -> Callable[[int], float]:
    """As of a matrix unit."""
    return lambda rows: seconds + per_row * rows + sum(height for row, height in stairs.items() if rows >= row)


def test_stairs_behind_blocks_of_16_rows_are_found_where_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before counts between them, for which it is too short."""
    stairs = {17: 0.0034, 33: 0.0057, 49: 0.0076}
    monkeypatch.setitem(globals(), "target", with_stairs(0.034, 6e-5, stairs))
    clock = VirtualClock()
    costs = profile(FormulaRunner(clock), CONFIG, draft=True, seconds=14.0, clock=clock)
    for row, stair in stairs.items():
        assert costs.target(row, 0) - costs.target(row - 1, 0) == pytest.approx(stair, rel=0.2)


def test_where_time_is_shorter_still_the_first_stairs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before counts between them, and those before stairs that are farther behind."""
    stairs = {17: 0.006, 33: 0.010, 49: 0.013}
    monkeypatch.setitem(globals(), "target", with_stairs(0.06, 1e-4, stairs))
    clock = VirtualClock()
    runner = FormulaRunner(clock, setup=0.0)
    costs = profile(runner, CONFIG, draft=True, seconds=14.0, clock=clock)
    for row, stair in stairs.items():
        assert costs.target(row, 0) - costs.target(row - 1, 0) == pytest.approx(stair, rel=0.2)
    assert {5, 7, 9} <= runner.num_steps.keys()
    assert not {15, 65, 97} & runner.num_steps.keys()


def test_short_steps_are_measured_oftener_than_long_ones_where_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "target", with_stairs(0.02, 4e-4, {}))
    clock = VirtualClock()
    runner = FormulaRunner(clock, setup=0.0)
    profile(runner, CONFIG, draft=False, seconds=16.0, clock=clock)
    assert runner.num_steps[12] > 2 == runner.num_steps[512]


@pytest.mark.parametrize("per_row", [6e-4, 1.5e-3, 3e-3])
def test_no_step_is_long_that_can_be_done_without(monkeypatch: pytest.MonkeyPatch, per_row: float) -> None:
    monkeypatch.setitem(globals(), "target", with_stairs(0.02, per_row, {}))
    clock = VirtualClock()
    runner = FormulaRunner(clock, setup=0.0)
    costs = profile(runner, replace(CONFIG, max_num_batched_tokens=2048), draft=True, seconds=16.0, clock=clock)
    assert clock() <= 16.5
    assert target(max(runner.num_steps)) <= 1.0
    assert costs.target(2048, 0) == pytest.approx(target(2048), rel=0.1), "as a line goes on"


def test_a_stair_before_the_last_measured_count_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "target", with_stairs(0.02, 2.6e-3, {257: 0.08}))
    clock = VirtualClock()
    runner = FormulaRunner(clock, setup=0.0)
    config = replace(CONFIG, max_num_seqs=1, max_num_batched_tokens=2048)
    costs = profile(runner, config, draft=False, seconds=16.0, clock=clock)
    assert sorted(runner.num_steps)[-2:] == [193, 257]
    assert costs.target(2048, 0) == pytest.approx(target(2048), rel=0.3), "a line from 193 is half as steep again"


def test_without_a_draft_model() -> None:
    clock = VirtualClock()
    costs = profile(FormulaRunner(clock), CONFIG, draft=False, seconds=60.0, clock=clock)
    assert not any(costs.draft_passes(64))
    assert costs.target(100, 0) == pytest.approx(target(100), rel=0.05)


@pytest.mark.parametrize(
    "config",
    [
        SchedulerConfig(num_blocks=2, block_size=16, max_num_seqs=1, max_num_batched_tokens=4, max_model_len=20),
        SchedulerConfig(num_blocks=1, block_size=2, max_num_seqs=1, max_num_batched_tokens=2, max_model_len=2),
        SchedulerConfig(num_blocks=40, max_num_seqs=32, max_num_batched_tokens=64, max_model_len=600, max_draft_len=40),
        SchedulerConfig(num_blocks=900, max_num_seqs=100, max_num_batched_tokens=100, max_model_len=200, max_depth=0),
        SchedulerConfig(num_blocks=900, max_num_seqs=3, max_num_batched_tokens=3000, max_model_len=200, max_depth=1),
    ],
)
def test_limits_are_kept(config: SchedulerConfig) -> None:
    """The runner asserts that blocks and lengths suffice."""
    clock = VirtualClock()
    runner = FormulaRunner(clock, config=config)
    costs = profile(runner, config, draft=True, seconds=60.0, clock=clock)
    assert max(runner.num_steps) <= config.max_num_batched_tokens
    assert costs.target(1, 0, 1) == pytest.approx(target(1) + PER_SEQUENCE, rel=0.05)
    assert (costs.draft_passes(1)[1] > 0) == (config.max_depth > 0)
