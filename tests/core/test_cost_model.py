"""The cost model against formulas: between and beyond buckets, after corrections, and through storage."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.core.cost_model import (
    MOST_OUTLIERS,
    ROW_BUCKETS,
    WINDOW,
    CostModel,
    StepKind,
    StepShape,
)


def ridge(rows: int) -> float:
    """20 ms up to 24 rows, then 1 ms for each."""
    return 0.020 + 0.001 * max(0, rows - 24)


def make(**changes: Any) -> CostModel:
    arguments: dict[str, Any] = {
        "rows": [1, 8, 32],
        "seconds": [0.010, 0.010, 0.034],
        "per_context": 1e-6,
        "sequences": [1, 4],
        "pass_seconds": [0.001, 0.004],
        "per_draft_row": 0.0005,
        "per_sequence": 0.0001,
        "first_seconds": [0.003, 0.006],
    }
    return CostModel(**(arguments | changes))


def teach(costs: CostModel, shape: StepShape, seconds: Callable[[], tuple[float, float]], steps: int = 400) -> None:
    for _ in range(steps):
        draft, total = seconds()
        costs.observe(shape, draft, total)


# -- predictions -------------------------------------------------------------------------------------------------------


def test_target_is_linear_between_buckets_and_beyond() -> None:
    costs = make()
    assert [costs.target(rows, 0) for rows in (1, 8, 20, 32, 33, 56)] == pytest.approx(
        [0.010, 0.010, 0.022, 0.034, 0.035, 0.058]
    )
    assert costs.target(8, 2000, 5) == pytest.approx(0.010 + 0.002 + 0.0005)


@pytest.mark.parametrize(("rows", "count"), [(1, 0), (1, 31), (20, 30), (40, 5), (32, 1)])
def test_targets_is_target_at_each_count(rows: int, count: int) -> None:
    costs = make()
    expected = [costs.target(r, 700, 3) for r in range(rows, rows + count + 1)]
    np.testing.assert_allclose(costs.targets(rows, count, 700, 3), expected, rtol=1e-12)


def test_draft_passes_by_sequences() -> None:
    costs = make()
    np.testing.assert_allclose(costs.draft_passes(6), [0, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006])
    np.testing.assert_allclose(costs.first_passes(4), [0, 0.003, 0.004, 0.005, 0.006])
    assert costs.draft_rows(10) == pytest.approx(0.005)


def test_a_step_is_the_sum_of_its_parts() -> None:
    costs = make()
    shape = StepShape(20, 1000, draft_passes=(4, 4, 1), draft_rows=2, sequences=10)
    assert costs.step(shape) == pytest.approx(0.022 + 0.001 + 0.001 + (0.006 + 0.004 + 0.001) + 0.001)
    assert costs.step(StepShape(20, 1000)) == pytest.approx(costs.target(20, 1000))
    reading = StepShape(8, 0, draft_rows=7)
    assert costs.step(reading) == pytest.approx(0.010 + 0.003 + 0.0035), "reading alone is a pass too"


def test_what_is_read_in_a_forward_of_its_own_costs_that_forward() -> None:
    costs = make(first_rows=2, reading_seconds=0.002)
    assert costs.draft_rows(0) == 0.0
    assert costs.draft_rows(10) == pytest.approx(0.002 + 0.005)
    reading = StepShape(8, 0, draft_rows=7)
    assert costs.step(reading) == pytest.approx(0.010 + 0.002 + 0.0035), "no pass is needed for that"
    teach(costs, StepShape(8, 0, (1,), 7), lambda: (2 * (0.003 + 0.0055), 0.010 + 2 * (0.003 + 0.0055)))
    assert costs.draft_rows(10) == pytest.approx(2 * 0.007, rel=0.02)
    again = CostModel.from_dict(costs.as_dict())
    assert (again.first_rows, again.draft_rows(10)) == (2, costs.draft_rows(10))


def test_without_a_draft_model_drafting_costs_nothing() -> None:
    costs = CostModel([1, 2], [0.1, 0.2])
    assert not any(costs.draft_passes(9))
    assert costs.step(StepShape(1, 0, draft_passes=(3, 3))) == costs.target(1, 0)


def test_a_pass_costs_as_much_first_as_later_unless_told() -> None:
    costs = make(first_seconds=None)
    assert costs.first_passes(5) == costs.draft_passes(5)


def test_one_bucket_is_enough() -> None:
    costs = CostModel([4], [0.1])
    assert costs.target(1, 0) == costs.target(4, 0) == costs.target(9, 0) == 0.1


def test_from_functions_keeps_them() -> None:
    costs = CostModel.from_functions(
        ridge, lambda count: 0.001 + 0.0001 * count, per_context=1e-7, max_rows=600, max_sequences=64
    )
    assert [costs.target(rows, 0) for rows in range(1, 700)] == pytest.approx([ridge(rows) for rows in range(1, 700)])
    assert [costs.draft_passes(80)[count] for count in (1, 50, 80)] == pytest.approx([0.0011, 0.006, 0.009])
    assert costs.target(1, 1000) == pytest.approx(0.0201)


def test_what_was_handed_out_belongs_to_the_caller() -> None:
    costs = make()
    passes, before = costs.draft_passes(4), costs.draft_passes(4)
    teach(costs, StepShape(8, 0, (4,)), lambda: (0.012, 0.030))
    assert passes == before
    assert costs.draft_passes(4)[4] > before[4]
    passes[0] = 1.0
    assert costs.draft_passes(4)[0] == 0.0


# -- what was measured badly -------------------------------------------------------------------------------------------

SECONDS = st.floats(0, 100)
OBSERVATION = st.tuples(st.integers(1, 3000), st.integers(0, 50000), st.integers(0, 8), SECONDS, SECONDS)


@given(
    st.lists(SECONDS, min_size=len(ROW_BUCKETS), max_size=len(ROW_BUCKETS)),
    st.lists(SECONDS, min_size=3, max_size=3),
    st.lists(OBSERVATION, max_size=3),
)
@example([0.0] * 27 + [99.99999999999999, 100.0] + [0.0] * 12, [0.0] * 3, [(114, 1, 0, 0.0, 1.0)])  # a bit between
def test_more_never_costs_less(
    seconds: list[float], passes: list[float], observed: list[tuple[int, int, int, float, float]]
) -> None:
    """Whatever was measured, and whatever was observed since."""
    costs = CostModel(ROW_BUCKETS, seconds, 1e-6, (1, 4, 16), passes, per_sequence=1e-5)
    for rows, context, drafting, draft, total in observed * 16:
        costs.observe(StepShape(rows, context, (drafting,) * (drafting > 0), sequences=rows), draft, total)
    curve = costs.targets(1, 2500, 0)
    for values in (np.array(curve), np.array(costs.draft_passes(40)), np.array(costs.first_passes(40))):
        assert np.isfinite(values).all()
        assert (values >= 0).all()
        assert (np.diff(values) >= 0).all()
    assert costs.target(5, 100) >= costs.target(5, 10) >= costs.target(5, 10, 0)


# -- corrections -------------------------------------------------------------------------------------------------------


def test_a_slower_machine_is_found_at_the_shape_that_is_seen_and_near_it() -> None:
    costs = CostModel.from_functions(ridge)
    teach(costs, StepShape(8, 0), lambda: (0.0, 0.030))
    assert costs.target(8, 0) == pytest.approx(0.030, rel=0.01)
    marginal = (costs.target(12, 0) - costs.target(8, 0)) / costs.target(8, 0)
    assert 0 <= marginal < 0.06, "the next bucket moves along: slots have not become free, nor dear"


def test_a_faster_machine_does_not_make_drafts_look_dear() -> None:
    costs = CostModel.from_functions(ridge)
    teach(costs, StepShape(8, 0), lambda: (0.0, 0.010))
    assert costs.target(8, 0) == pytest.approx(0.010, rel=0.01)
    assert costs.target(12, 0) < 0.0115


def test_buckets_learn_apart() -> None:
    costs = CostModel.from_functions(ridge)
    for _ in range(2000):
        costs.observe(StepShape(8, 0), 0.0, 0.020)
        costs.observe(StepShape(64, 0), 0.0, 0.090)
    assert costs.target(8, 0) == pytest.approx(0.020, rel=0.02)
    assert costs.target(64, 0) == pytest.approx(0.090, rel=0.02)


def uneven(rows: int) -> float:
    """Of a table whose few rows wait for memory, each a little longer."""
    return 0.0240 + 0.0003 * (rows - 1)


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_memory_that_changes_its_speed_is_followed_within_a_dozen_steps(rows: int) -> None:
    """What the last steps took tells best what the next one will; what a row more costs stays as it was."""
    costs = CostModel.from_functions(lambda rows: 0.020 + 0.0005 * rows)
    for memory in (0.012, 0.025, 0.012):
        seconds = memory + 0.0005 * rows
        teach(costs, StepShape(rows, 0), lambda seconds=seconds: (0.0, seconds), 12)  # type: ignore[misc]
        assert costs.target(rows, 0) == pytest.approx(seconds, rel=0.1)
        assert costs.target(rows + 4, 0) - costs.target(rows, 0) == pytest.approx(0.002, rel=0.15)


def test_faster_memory_leaves_what_a_row_costs() -> None:
    """Also where one number of rows alone is seen."""
    costs = CostModel.from_functions(uneven)
    teach(costs, StepShape(4, 0), lambda: (0.0, uneven(4) - 0.010))
    assert costs.target(4, 0) == pytest.approx(uneven(4) - 0.010, rel=0.01)
    for rows in (1, 3, 8):
        assert costs.target(rows + 1, 0) - costs.target(rows, 0) == pytest.approx(0.0003, rel=0.1)


@pytest.mark.parametrize("rows", [(1, 16), (16, 1), (2, 5)])
def test_steps_of_any_rows_lose_the_same_seconds_to_faster_memory(rows: tuple[int, int]) -> None:
    """Of the shorter one that is more, which says nothing of what rows cost."""
    costs = CostModel.from_functions(uneven)
    for count in rows:
        costs.observe(StepShape(count, 0), 0.0, uneven(count) - 0.010)
    few, many = sorted(rows)
    assert costs.target(many, 0) - costs.target(few, 0) == pytest.approx((many - few) * 0.0003, rel=0.05)


def test_what_a_row_costs_is_learned_while_memory_changes() -> None:
    """From steps that follow each other: its change is much larger."""
    costs = CostModel.from_functions(uneven)
    choose = random.Random(0)
    for step in range(2000):
        rows, memory = choose.choice([2, 4, 5]), 0.014 if step // 50 % 2 else 0.024
        costs.observe(StepShape(rows, 0), 0.0, (memory + 0.0009 * rows) * choose.lognormvariate(0.0, 0.02))
    assert (costs.target(5, 0) - costs.target(2, 0)) / 3 == pytest.approx(0.0009, rel=0.25)
    assert costs.target(64, 0) - costs.target(5, 0) == pytest.approx(59 * 0.0003, rel=0.25), "nobody has seen those"


def slow_memory(rows: int) -> float:
    """What hides the arithmetic of up to twelve rows."""
    return max(0.037, 0.0235 + 0.0014 * rows)


def fast_memory(rows: int) -> float:
    return max(0.023, 0.0092 + 0.0019 * rows)


def test_a_few_steps_of_other_rows_tell_that_memory_hid_what_rows_cost() -> None:
    """Or else whoever drafts at prices that were measured while it was slow would go on for hundreds of steps."""
    costs, noise = CostModel.from_functions(slow_memory), random.Random(0)
    for rows in 3 * (15 * [16] + [8]):
        costs.observe(StepShape(rows, 0), 0.0, fast_memory(rows) * noise.lognormvariate(0.0, 0.02))
    learned = costs.target(16, 0) - costs.target(8, 0)
    assert learned == pytest.approx(fast_memory(16) - fast_memory(8), rel=0.2)


@pytest.mark.parametrize("many", [2, 4, 16])
def test_no_step_teaches_twice(many: int) -> None:
    """The one with more rows is part of two differences."""
    costs = CostModel.from_functions(lambda rows: 0.020 + 0.0001 * rows)
    for rows in (1, many, 1):
        costs.observe(StepShape(rows, 0), 0.0, 0.020 + 0.0001 * rows + 0.004 * (rows > 1))
    assert 0.0 < costs.target(many, 0) - costs.target(1, 0) - 0.0001 * (many - 1) < 0.0044


def test_a_disturbed_step_is_forgotten() -> None:
    """One stream that drafts three, and of whose rare steps without drafts one took a fifth longer."""
    costs = CostModel.from_functions(lambda rows: 0.020 + 0.0005 * rows)
    for number in range(4):
        for rows in 15 * [4] + [1]:
            disturbed = 1.2 if rows == 1 and number == 0 else 1.0
            costs.observe(StepShape(rows, 0), 0.0, (0.020 + 0.0005 * rows) * disturbed)
    assert costs.target(4, 0) - costs.target(1, 0) == pytest.approx(0.0015, abs=0.001)


def test_prompts_teach_little_of_what_a_few_rows_cost() -> None:
    """It is a small part of a long step, which may err by as much for other reasons."""
    costs = CostModel.from_functions(fast_memory)
    for rows in 8 * [8, 1024, 16]:
        costs.observe(StepShape(rows, 0), 0.0, fast_memory(rows) * (1.15 if rows == 1024 else 1.0))
    assert costs.target(16, 0) - costs.target(8, 0) == pytest.approx(fast_memory(16) - fast_memory(8), rel=0.1)


def test_a_stair_that_is_higher_than_measured_leaves_what_is_flat_before_it() -> None:
    """Or else who was once across it would never again take the rows below that cost nothing."""

    def stairs(height: float) -> CostModel:
        return CostModel.from_functions(lambda rows: 0.024 + height * (rows > 16) + height * (rows > 32))

    costs, truth = stairs(0.0036), stairs(0.0050)
    choose = random.Random(0)
    for _ in range(400):
        rows = choose.choice([18, 24, 28, 36, 40])
        costs.observe(StepShape(rows, 0), 0.0, truth.target(rows, 0) * choose.lognormvariate(0.0, 0.02))
    assert costs.target(33, 0) - costs.target(32, 0) == pytest.approx(0.0050, rel=0.15)
    assert costs.target(32, 0) - costs.target(24, 0) < 0.0003
    assert costs.target(40, 0) - costs.target(33, 0) < 0.0003


@pytest.mark.parametrize(
    ("buckets", "steps"), [((1, 256, 512), (512, 2048)), ((1, 24, 48), (32, 200)), ((1, 8, 16), (16, 512))]
)
def test_behind_the_last_bucket_a_difference_is_learned_as_little_at_a_time(
    buckets: tuple[int, ...], steps: tuple[int, int]
) -> None:
    """There a small change of the last rise is a large one of the step."""
    costs, choose = CostModel(buckets, [uneven(count) for count in buckets]), random.Random(0)
    for step in range(4000):
        rows = steps[step % 2]
        costs.observe(StepShape(rows, 0), 0.0, uneven(rows) * choose.lognormvariate(0.0, 0.02))
        if step > 100:
            assert costs.target(rows, 0) == pytest.approx(uneven(rows), rel=0.05)


@pytest.mark.parametrize("stair", [17, 33, 65])
def test_a_stair_that_nobody_measured_is_learned_by_who_crosses_it(stair: int) -> None:
    costs, noise = CostModel.from_functions(lambda rows: 0.024 + 0.0001 * rows), random.Random(0)
    for _ in range(300):
        for rows in (stair - 1, stair):
            truth = 0.024 + 0.0001 * rows + 0.003 * (rows >= stair)
            costs.observe(StepShape(rows, 0), 0.0, truth * noise.lognormvariate(0.0, 0.02))
    assert costs.target(stair, 0) - costs.target(stair - 1, 0) == pytest.approx(0.003, rel=0.3)


def test_disturbed_steps_of_one_row_more_do_not_make_the_rows_behind_it_dear() -> None:
    """Where a row is known, a step that took a fifth longer was disturbed. Rows that look dear are not tried again."""
    costs = CostModel([16, 24, 32], [0.038, 0.052, 0.067])
    for _ in range(6):
        for seconds in (0.0539, 0.0539, 0.065):
            costs.observe(StepShape(24, 0), 0.0, 0.052)
            costs.observe(StepShape(25, 0), 0.0, seconds)
        for _ in range(10):
            costs.observe(StepShape(24, 0), 0.0, 0.052)
    assert costs.target(32, 0) - costs.target(24, 0) == pytest.approx(0.015, rel=0.4)


def test_rows_that_cost_nothing_learn_what_they_cost() -> None:
    costs = CostModel.from_functions(lambda rows: 0.024)
    for _ in range(1000):
        for rows in (18, 28):
            costs.observe(StepShape(rows, 0), 0.0, 0.024 + 0.0002 * (rows - 18))
    assert costs.target(28, 0) - costs.target(18, 0) == pytest.approx(0.002, rel=0.1)


def test_context_answers_for_its_share() -> None:
    costs = CostModel([1, 64], [0.001, 0.001], per_context=1e-6)
    for _ in range(2000):
        costs.observe(StepShape(8, 20_000), 0.0, 0.001 + 20_000 * 2e-6)
        costs.observe(StepShape(8, 100), 0.0, 0.001 + 100 * 2e-6)
    slope = (costs.target(8, 20_000) - costs.target(8, 0)) / 20_000
    assert slope == pytest.approx(2e-6, rel=0.05)


def test_sequences_answer_for_their_share() -> None:
    costs = CostModel([1, 64], [0.001, 0.001], per_sequence=1e-5)
    for _ in range(2000):
        costs.observe(StepShape(64, 0, sequences=64), 0.0, 0.001 + 64 * 3e-5)
        costs.observe(StepShape(64, 0, sequences=1), 0.0, 0.001 + 3e-5)
    assert costs.target(64, 0, 64) - costs.target(64, 0, 0) == pytest.approx(64 * 3e-5, rel=0.1)


def test_drafting_is_corrected_as_a_whole_and_apart_from_the_target() -> None:
    costs = make()
    shape = StepShape(8, 0, draft_passes=(4, 4), draft_rows=2)
    teach(costs, shape, lambda: (0.0055, 0.0155))  # half of 0.006 + 0.004 + 0.001
    assert costs.target(8, 0) == pytest.approx(0.010, rel=0.01)
    assert [*costs.draft_passes(4)[1::3], costs.first_passes(1)[1], costs.draft_rows(2)] == pytest.approx(
        [0.0005, 0.002, 0.0015, 0.0005], rel=0.02
    )


def test_what_a_step_without_a_draft_model_drafts_belongs_to_its_rows() -> None:
    """An n-gram has no pass to put its time on."""
    costs = make()
    teach(costs, StepShape(8, 0), lambda: (0.002, 0.012))
    assert costs.target(8, 0) == pytest.approx(0.012, rel=0.01)


def test_a_disturbed_step_teaches_nothing() -> None:
    costs = make()
    before = costs.as_dict()
    for _ in range(16):
        costs.observe(StepShape(8, 0), 0.0, 0.010)
        costs.observe(StepShape(8, 0), 0.0, 1.0)
        costs.observe(StepShape(8, 0), 0.0, 0.0)
    assert costs.as_dict() == before


def test_a_machine_that_stays_slow_is_believed() -> None:
    costs = make()
    teach(costs, StepShape(8, 0), lambda: (0.0, 0.050), MOST_OUTLIERS)
    assert costs.as_dict() == make().as_dict()
    teach(costs, StepShape(8, 0), lambda: (0.0, 0.050))
    assert costs.target(8, 0) == pytest.approx(0.050, rel=0.01)


def test_noise_averages_out() -> None:
    costs = CostModel.from_functions(ridge)
    noise = np.random.default_rng(0)
    teach(costs, StepShape(16, 0), lambda: (0.0, 0.020 * float(noise.lognormal(0, 0.2))), 2000)
    assert costs.target(16, 0) == pytest.approx(0.020, rel=0.08)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors_by_kind() -> None:
    costs = make()
    assert costs.errors() == {}
    for seconds in (0.010, 0.0125, 0.008):
        costs.observe(StepShape(8, 0, kind=StepKind.VERIFY), 0.0, seconds)
    errors = costs.errors()
    assert list(errors) == ["verify"]
    assert errors["verify"].median == pytest.approx(0.2)  # of 0, .2 and more, since the second step has taught
    assert errors["verify"].repeatability == pytest.approx(np.median([0.2, 0.5625]))
    assert errors["verify"].count == 3


def test_repeatability_compares_equal_shapes_only() -> None:
    costs = make()
    for _ in range(4):
        costs.observe(StepShape(8, 1001), 0.0, 0.010)
        costs.observe(StepShape(9, 1001), 0.0, 0.020)
        costs.observe(StepShape(8, 1010, kind=StepKind.MIXED), 0.0, 0.040)
    assert {kind: error.repeatability for kind, error in costs.errors().items()} == {"decode": 0.0, "mixed": 0.0}
    costs.observe(StepShape(8, 1001, sequences=2), 0.0, 0.030)
    assert not any(costs._errors[StepKind.DECODE].differences), "sequences are priced"
    costs.observe(StepShape(8, 1023), 0.0, 0.020)
    costs.observe(StepShape(8, 2000), 0.0, 0.500)
    assert max(costs._errors[StepKind.DECODE].differences) == 0.5, "about the same context is the same shape"


def test_old_errors_are_forgotten() -> None:
    costs = make()
    costs.observe(StepShape(8, 0), 0.0, 0.020)
    teach(costs, StepShape(8, 0), lambda: (0.0, costs.step(StepShape(8, 0))), WINDOW)
    error = costs.errors()["decode"]
    assert (error.median, error.count) == (0.0, WINDOW)


def test_shapes_that_never_come_back_are_forgotten() -> None:
    costs = make()
    for rows in range(1, 2000):
        costs.observe(StepShape(rows, 0), 0.0, 0.010)
    assert len(costs._errors[StepKind.DECODE].last) == 256


# -- storage -----------------------------------------------------------------------------------------------------------


def test_it_comes_back_from_json_as_it_was() -> None:
    costs = make()
    teach(costs, StepShape(20, 500, (3, 2), sequences=3), lambda: (0.02, 0.07), 64)
    again = CostModel.from_dict(json.loads(json.dumps(costs.as_dict())))
    assert again.as_dict() == costs.as_dict()
    # To rounding: between buckets it goes by what they differ by.
    np.testing.assert_allclose(again.targets(1, 100, 300, 5), costs.targets(1, 100, 300, 5), rtol=1e-14)
    np.testing.assert_allclose(again.draft_passes(9), costs.draft_passes(9), rtol=1e-14)
    np.testing.assert_allclose(again.first_passes(9), costs.first_passes(9), rtol=1e-14)


BAD: list[tuple[str, Any]] = [
    ("rows", []),
    ("rows", [1, 8, 8]),
    ("rows", [8, 1, 32]),
    ("rows", [0, 8, 32]),
    ("rows", [1, 8, 1 << 40]),
    ("rows", [1, 8, 32.0]),
    ("rows", [1, 8, True]),
    ("rows", [1, 8]),
    ("rows", "abc"),
    ("rows", None),
    ("seconds", [0.1, -0.1, 0.2]),
    ("seconds", [0.1, math.nan, 0.2]),
    ("seconds", [0.1, math.inf, 0.2]),
    ("seconds", [0.1, "0.1", 0.2]),
    ("seconds", [0.1, 10**400, 0.2]),
    ("seconds", [0.1, 0.2]),
    ("sequences", [1]),
    ("pass_seconds", [0.1, -1.0]),
    ("first_seconds", [0.1]),
    ("first_seconds", None),
    ("per_context", -1e-9),
    ("per_context", math.nan),
    ("per_context", True),
    ("per_draft_row", "0"),
    ("per_sequence", None),
    ("first_rows", 0),
    ("first_rows", 1.0),
    ("first_rows", True),
    ("reading_seconds", -1.0),
    ("reading_seconds", "0"),
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_what_is_malformed_is_refused(key: str, value: Any) -> None:
    data = copy.deepcopy(make().as_dict())
    data[key] = value
    with pytest.raises(ValueError):  # noqa: PT011
        CostModel.from_dict(data)


@pytest.mark.parametrize("data", [None, [], "x", {}, {**make().as_dict(), "more": 1}])
def test_what_is_no_model_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="keys"):
        CostModel.from_dict(data)


@pytest.mark.parametrize("key", make().as_dict())
def test_a_key_that_is_missing_is_refused(key: str) -> None:
    data = make().as_dict()
    del data[key]
    with pytest.raises(ValueError, match="keys"):
        CostModel.from_dict(data)
