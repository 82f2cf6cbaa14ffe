"""The simulator: chances come true at their rate, time passes at its price, and the trace accounts for both."""

from __future__ import annotations

import pytest

from paceline.core.config import SchedulerConfig
from paceline.core.depth_policy import FixedDepth
from paceline.core.method import Method
from paceline.core.params import SpeculationParams, StopParams
from paceline.core.plan import SequenceWork, StepPlan
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.sim import Arrival, SimulatedRunner, Simulation, StepCost, VirtualClock, reference_output, simulate

COST = StepCost(overhead=0.5, target_pass=10.0, free_rows=4, target_row=2.0, draft_pass=1.0)


def arrival(time: float, request_id: int, max_tokens: int = 8, method: Method = Method.DRAFT_MODEL) -> Arrival:
    return Arrival(time, request_id, (1, 2, 3), StopParams(max_tokens=max_tokens), SpeculationParams(method))


def run(
    arrivals: list[Arrival],
    clock: VirtualClock,
    acceptance: dict[int, float] | None = None,
    depth: int = 3,
    lag: int = 0,
    cost: StepCost = COST,
) -> Simulation:
    config = SchedulerConfig(num_blocks=256, max_model_len=2000, max_num_seqs=8)
    runner = SimulatedRunner(config.num_blocks, config.block_size, clock, cost, acceptance)
    return simulate(Scheduler(config, SpeculationControl(FixedDepth(depth))), runner, arrivals, clock, lag, check=True)


@pytest.mark.parametrize("depth", [1, 4])
def test_drafts_are_accepted_at_their_rate(depth: int) -> None:
    """At each position that was reached, that is; 0.7 is the default."""
    rates = {0: 0.2, 1: 0.9, 2: 0.7}
    trace = run([arrival(0, i, max_tokens=900) for i in rates], VirtualClock(), {0: 0.2, 1: 0.9}, depth)
    for request_id, rate in rates.items():
        stats = trace.finished[request_id]
        rejected = stats.verify_steps - stats.accepted_by_position[-1]
        assert stats.accepted_tokens / (stats.accepted_tokens + rejected) == pytest.approx(rate, abs=0.06)


def test_certain_drafts() -> None:
    trace = run([arrival(0, 0, 50), arrival(0, 1, 50)], VirtualClock(), {0: 0.0, 1: 1.0})
    assert trace.finished[0].accepted_tokens == 0
    assert trace.finished[1].accepted_tokens == trace.finished[1].drafted_tokens > 30


@pytest.mark.parametrize(
    ("works", "draft", "verify"),
    [
        ([SequenceWork(0, 1, True)], 0.0, 10.0),
        ([SequenceWork(0, 4, True)], 0.0, 10.0),
        ([SequenceWork(0, 7, True)], 0.0, 16.0),
        ([SequenceWork(0, 1, True, 2, Method.DRAFT_MODEL), SequenceWork(1, 1, True, 3, Method.DRAFT_MODEL)], 3.0, 16.0),
        ([SequenceWork(0, 1, True, 3, Method.NGRAM)], 0.0, 10.0),
    ],
)
def test_the_price_of_a_step(works: list[SequenceWork], draft: float, verify: float) -> None:
    times = COST.times(StepPlan(0, (), (), tuple(works)))
    assert (times.draft, times.verify, times.total) == (draft, verify, 0.5 + draft + verify)


def test_the_clock_advances_by_what_the_steps_cost() -> None:
    clock = VirtualClock(start=100.0)
    trace = run([arrival(0, 0), arrival(0, 1)], clock)
    assert clock() == pytest.approx(100.0 + sum(COST.times(plan).total for plan in trace.plans))


def test_the_clock_jumps_to_the_next_arrival() -> None:
    clock = VirtualClock()
    trace = run([arrival(1000.0, 1, max_tokens=1), arrival(3.0, 0, max_tokens=1)], clock)
    assert clock() == 1010.5
    assert [work.request_id for plan in trace.plans for work in plan.work] == [0, 1]


def test_the_clock_does_not_go_back() -> None:
    clock = VirtualClock()
    clock.advance(0.0)
    with pytest.raises(AssertionError):
        clock.advance(-1.0)


def test_the_account_of_a_simulated_request() -> None:
    """A plain step takes 10.5 s, one with a draft pass 11.5: the prompt, two tokens with drafts, the last without."""
    trace = run([arrival(0.0, 0, max_tokens=4)], VirtualClock(), {0: 0.0}, depth=1)
    stats = trace.finished[0]
    assert (stats.prompt_tokens, stats.completion_tokens) == (3, 4)
    assert (stats.verify_steps, stats.drafted_tokens, stats.accepted_tokens) == (3, 2, 0)
    assert stats.acceptance_length == 1.0
    assert stats.queue_seconds == 0.0
    assert stats.time_to_first_token == 10.5
    assert stats.total_seconds == 10.5 + 11.5 + 11.5 + 10.5


def test_good_drafts_save_time_and_bad_ones_cost_it() -> None:
    def seconds(rate: float, method: Method) -> float:
        clock = VirtualClock()
        run([arrival(0, 0, 100, method)], clock, {0: rate})
        return clock()

    alone = seconds(0.0, Method.NONE)
    assert seconds(0.9, Method.DRAFT_MODEL) < 0.6 * alone
    assert seconds(0.0, Method.DRAFT_MODEL) > 1.2 * alone


@pytest.mark.parametrize("lag", [0, 1])
def test_outputs_are_the_models(lag: int) -> None:
    trace = run([arrival(0.1 * i, i, 20) for i in range(10)], VirtualClock(), lag=lag)
    assert trace.outputs == {i: reference_output((1, 2, 3), 20) for i in range(10)}


def test_a_run_that_does_not_end_says_so() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8), SpeculationControl(FixedDepth(0)))
    clock = VirtualClock()
    runner = SimulatedRunner(8, 16, clock, COST)
    with pytest.raises(AssertionError, match="not finished after 3 steps"):
        simulate(scheduler, runner, [arrival(0, 0, 50)], clock, max_steps=3)


def test_the_draws_do_not_depend_on_the_batch() -> None:
    alone = run([arrival(0, 5, 60)], VirtualClock())
    together = run([arrival(0, i, 60) for i in range(8)], VirtualClock())
    assert alone.finished[5].accepted_by_position == together.finished[5].accepted_by_position
