"""The runner that counts: what it draws, what it takes, and that its books agree with those of a runner that knows
every token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.config import SchedulerConfig
from paceline.core.depth_policy import DepthPolicy, FixedDepth
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.core.plan import Admission, SequenceWork, StepPlan
from paceline.core.scheduler import Scheduler
from paceline.core.sequence import Sequence
from paceline.core.speculation import SpeculationControl
from paceline.sim.clock import VirtualClock
from paceline.sim.control import roofline
from paceline.sim.counting_runner import CountingRunner
from paceline.sim.simulation import cut_result

DEPTH = 6
DRAWS = 4000


def runner(rate: float, seed: int = 0) -> CountingRunner:
    return CountingRunner(roofline(0.02, 8, 0.1), VirtualClock(), lambda request_id: rate, seed)


def accepted(rate: float, seed: int = 0) -> list[int]:
    """Of many decodes with drafts."""
    one = runner(rate, seed)
    plan = StepPlan(0, (), (Admission(0, (0,) * 8, 8, num_computed=7, num_draft_computed=7),), ())
    kept = []
    for step in range(DRAWS):
        work = SequenceWork(0, 1, True, DEPTH, Method.DRAFT_MODEL, draft_catch_up=DEPTH)
        result = one.execute(replace(plan, step_id=step, work=(work,)))
        plan = StepPlan(step, (), (), ())
        (sequence,) = result.sequences
        assert sequence.num_drafted == DEPTH
        assert len(sequence.token_ids) == sequence.num_accepted + 1
        reached = min(sequence.num_accepted + 1, DEPTH)
        assert list(sequence.acceptance) == [1.0] * sequence.num_accepted + [0.0] * (reached - sequence.num_accepted)
        kept.append(sequence.num_accepted)
    return kept


@pytest.mark.parametrize("rate", [0.2, 0.7, 0.95])
def test_what_is_kept_is_geometric(rate: float) -> None:
    """Chi-square over the counts of 0 to DEPTH drafts kept; 27.9 is the 99.99 % quantile of 6 degrees of freedom."""
    counts = Counter(accepted(rate))
    chances = [rate**kept * (1.0 - rate) for kept in range(DEPTH)] + [rate**DEPTH]
    expected = DRAWS * np.array(chances)
    observed = np.array([counts[kept] for kept in range(DEPTH + 1)])
    frequent = expected >= 5.0
    rest = expected[~frequent].sum(), observed[~frequent].sum()
    statistic = float(((observed - expected)[frequent] ** 2 / expected[frequent]).sum())
    if rest[0] > 0.0:
        statistic += (rest[1] - rest[0]) ** 2 / rest[0]
    assert statistic < 27.9, (observed, expected)


@pytest.mark.parametrize(("rate", "kept"), [(0.0, 0), (1.0, DEPTH)])
def test_certain_drafts(rate: float, kept: int) -> None:
    assert set(accepted(rate)) == {kept}


def test_draws_follow_from_the_seed() -> None:
    assert accepted(0.6, seed=1) == accepted(0.6, seed=1) != accepted(0.6, seed=2)


class Checked:
    """Compares every step with mirrors that know all tokens, as a real runner has them."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.runner = CountingRunner(roofline(0.02, 64, 0.1), clock, lambda request_id: 0.3 + 0.1 * (request_id % 7))
        self.sequences: dict[int, Sequence] = {}
        self.drafts = 0

    def check(self, plan: StepPlan, scheduler: Scheduler) -> None:
        for request_id in plan.released:
            del self.sequences[request_id]
        for admission in plan.admitted:
            self.sequences[admission.request_id] = Sequence(admission)
        before = self.clock()
        result = cut_result(scheduler, self.runner.execute(plan))
        assert result.times.total == pytest.approx(self.clock() - before)
        for work, found in zip(plan.work, result.sequences, strict=True):
            sequence = self.sequences[work.request_id]
            sequence.rows(work)  # which looks whether there are such rows
            sequence.num_draft_computed += len(sequence.draft_gap(work))
            if work.num_drafts:
                # The newest token must have been read before anything is proposed, and the last draft is never fed.
                assert sequence.num_draft_computed == len(sequence)
                sequence.num_draft_computed += work.num_drafts - 1
                self.drafts += work.num_drafts
            sequence.commit(work, list(found.token_ids), found.num_accepted)
            if found.finish is None:
                assert found.num_draft_computed == sequence.num_draft_computed, (work, found)
        scheduler.update(plan, result, self.clock())
        scheduler.check_invariants()


@pytest.mark.parametrize("adaptive", [False, True])
def test_its_books_are_those_of_a_real_runner(adaptive: bool) -> None:
    """With prompts in chunks, preemptions, and drafts that come and go, so that the draft model falls behind."""
    clock = VirtualClock()
    costs = roofline(0.02, 64, 0.1)
    policy: DepthPolicy = AdaptiveDepth(costs) if adaptive else FixedDepth(3)
    config = SchedulerConfig(
        num_blocks=60,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        max_model_len=128,
        method=Method.DRAFT_MODEL,
    )
    scheduler = Scheduler(config, SpeculationControl(policy, costs))
    one = Checked(clock)
    for request_id in range(40):
        prompt = tuple(range(1000 * request_id, 1000 * request_id + 5 + 3 * (request_id % 11)))
        greedy, stop = SamplingParams(temperature=0.0), StopParams(max_tokens=8 + request_id)
        scheduler.add(request_id, prompt, greedy, stop, SpeculationParams(), clock())
    preempted = 0
    while scheduler.has_requests:
        running = len(scheduler.running)
        plan = scheduler.schedule(clock())
        preempted += len(scheduler.running) < running + len(plan.admitted)
        one.check(plan, scheduler)
    assert one.drafts > 100
    assert preempted, "nobody had to give way: the test is too easy"
