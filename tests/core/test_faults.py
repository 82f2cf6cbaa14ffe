"""Steps in which requests fail alone, and drafts are dropped, at random moments: nobody else notices."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from core.harness import Harness
from core.test_properties import NARROWED, POLICIES_OF, random_harness, try_add
from paceline.core.method import Method
from paceline.core.params import SchedulingParams
from paceline.core.plan import SequenceResult, StepPlan, StepResult, StepTimes
from paceline.core.sequence import Sequence
from paceline.core.tenant_policy import ONE_SHARE, TenantPolicy
from paceline.errors import NotFinite, ResourceExhausted
from paceline.sim import ScriptedRunner

SEEDS = 60
OUT_OF_MEMORY = "out of memory"


class FaultyRunner(ScriptedRunner):
    """Fails as `ModelRunner` does where memory is short or logits are no numbers: a request alone, for good; or the
    drafts of a step.

    Attributes:
        failures, drops: how often in a hundred, of each work and of each step.
        num_dropped: requests whose drafts were.
        exhausted: requests that have failed, and that a plan made meanwhile may still name.
    """

    def __init__(self, of: ScriptedRunner, num_blocks: int, rng: random.Random) -> None:
        super().__init__(num_blocks, of.block_size, of.draft_is_right, of.max_ngram)
        self.rng = rng
        self.failures, self.drops = rng.choice([0, 2, 10, 30]), rng.choice([0, 10, 50])
        self.num_dropped = 0
        self.exhausted: set[int] = set()
        self._seconds = rng.choice([0.0, 1.0])

    def times(self, plan: StepPlan) -> StepTimes:
        return StepTimes(total=self._seconds)

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            del self.sequences[request_id]
            self.exhausted.discard(request_id)
        self.sequences.update((admission.request_id, Sequence(admission)) for admission in plan.admitted)
        dropped = self._happens(self.drops)
        asked_for = sum([work.num_drafts > 0 and work.method is Method.DRAFT_MODEL for work in plan.work])
        self.num_dropped += asked_for if dropped else 0
        going = []
        for work in plan.work:
            if work.request_id not in self.exhausted:
                sequence = self.sequences[work.request_id]
                sequence.extend(work)
                left_out = dropped and work.method is Method.DRAFT_MODEL
                behind = sequence.num_draft_computed + work.draft_catch_up < len(sequence)
                asked = replace(work, num_drafts=0) if behind and work.method is Method.DRAFT_MODEL else work
                going.append((work, [] if left_out else self._draft(sequence, asked)))
        self.exhausted.update(work.request_id for work, _ in going if self._happens(self.failures))
        going = [(work, drafts) for work, drafts in going if work.request_id not in self.exhausted]
        for work, drafts in going:
            sequence = self.sequences[work.request_id]
            self._write(self.target_kv, sequence, sequence.num_computed, sequence.rows(work) + drafts)
        results = {work.request_id: self._verify(work, drafts) for work, drafts in going}
        ids = [work.request_id for work in plan.work]
        error = self.rng.choice([ResourceExhausted(OUT_OF_MEMORY), NotFinite()])
        found = tuple(results.get(one) or SequenceResult(one, error=error) for one in ids)
        return StepResult(plan.step_id, found, self.times(plan))

    def _happens(self, percent: int) -> bool:
        return self.rng.random() * 100 < percent


def run(rng: random.Random) -> Harness:
    """A random sequence of operations and faults, run to the end of every request."""
    harness = random_harness(rng, rng.randint(5, 14), rng.randint(1, 4), [0, 50, 90, 100])
    harness.runner = FaultyRunner(harness.runner, harness.scheduler.config.num_blocks, rng)
    tenants = harness.scheduler.tenants
    for _ in range(rng.randint(40, 80)):
        match rng.choices(["step", "add", "sibling", "abort", "reload", "later"], [58, 22, 10, 5, 4, 1])[0]:
            case "add":
                bounds = rng.choice([None, 5.0, 20.0]), rng.choice([None, None, 8.0])
                scheduling = SchedulingParams(rng.choice(["", *POLICIES_OF]), 0, *bounds)
                add(harness, rng, prompt_len=rng.randint(1, 9), scheduling=scheduling)
            case "sibling" if harness.live:
                add(harness, rng, prompt_len=0, sibling=rng.choice(harness.live))
            case "abort" if harness.live:
                harness.abort(rng.choice(harness.live))
            case "reload":
                default = rng.choice([ONE_SHARE, TenantPolicy(max_running=1), TenantPolicy(tokens_per_second=1.0)])
                tenants.set_policies(rng.choice([POLICIES_OF, NARROWED, {}]), default, harness.now)
            case "later":
                harness.now += 1e6
            case _:
                harness.step()
    harness.drain()
    assert all(not tenant.is_live for tenant in tenants)
    return harness


def add(harness: Harness, rng: random.Random, **fields: object) -> None:
    try_add(
        harness,
        max_tokens=rng.randint(1, 12),
        method=rng.choice([None, *Method]),
        min_depth=rng.choice([0, 0, 2]),
        spread=rng.choice([None, 0, 2]),
        stop_at=rng.choice([None, rng.randint(0, 8)]),
        ignore_eos=rng.random() < 0.3,
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("part", range(2))
def test_whoever_fails_fails_alone(part: int) -> None:
    """The others emit what they would have, from KV that is theirs, and nothing is left of anybody."""
    ends: Counter[str] = Counter()
    for seed in range(part * SEEDS, (part + 1) * SEEDS):
        harness = run(random.Random(seed))
        ends["finished"] += len(harness.finished)
        ends["failed"] += sum(str(error) == OUT_OF_MEMORY for error in harness.refused.values())
        ends["broken"] += sum(isinstance(error, NotFinite) for error in harness.refused.values())
        ends["preempted"] += harness.num_preemptions
        assert isinstance(harness.runner, FaultyRunner)
        ends["dropped"] += harness.runner.num_dropped
    # Not vacuous: each of these happened often.
    assert ends["finished"] >= 3 * SEEDS, ends
    assert ends["failed"] >= SEEDS // 2, ends
    assert ends["broken"] >= SEEDS // 2, ends
    assert ends["preempted"] >= SEEDS // 4, ends
    assert ends["dropped"] >= SEEDS // 4, ends
