"""Random operations against invariants and a reference: whatever is added, aborted and stepped, nothing leaks.

The oracle is in two parts: the scripted runner knows which token every KV slot must hold when a row reads it, and the
harness knows what each request must emit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from core.harness import CyclingDepth, Harness, percent_right, prompt_of
from core.workload import costs
from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.config import PrefixScope, SchedulerConfig
from paceline.core.depth_policy import DepthPolicy, FixedDepth
from paceline.core.method import Method
from paceline.core.params import ANYBODY, SchedulingParams
from paceline.core.plan import StepTimes
from paceline.core.request import Request
from paceline.core.tenant_policy import ONE_SHARE, TenantPolicy
from paceline.core.tenants import Tenants
from paceline.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from paceline.sim import reference_output

MAX_MODEL_LEN = 30
EOS = tuple(range(40))  # of 997 ids: about one token in 25 ends a completion

POLICIES_OF = {
    "heavy": TenantPolicy(weight=3.0, max_priority=2),
    "few": TenantPolicy(max_running=1, max_queued=2),
    "poor": TenantPolicy(tokens_per_second=2.0, burst_tokens=8.0),
    "small": TenantPolicy(max_blocks=5),
}
# What a reload may make of them while their requests live.
NARROWED = POLICIES_OF | {"few": TenantPolicy(max_running=1, max_queued=1), "small": TenantPolicy(max_blocks=1)}
SCHEDULING = st.builds(
    SchedulingParams,
    st.sampled_from(["", *POLICIES_OF]),
    st.integers(-2, 4),
    st.none() | st.integers(1, 40).map(float),
    st.none() | st.integers(1, 20).map(float),
    st.none() | st.integers(1, 20).map(float),
    st.none() | st.floats(0.1, 3.0),
)

POLICIES: list[Callable[[], DepthPolicy]] = [
    lambda: AdaptiveDepth(costs()),
    lambda: FixedDepth(1),
    lambda: FixedDepth(4),
    lambda: CyclingDepth((0, 3, 0, 0, 5)),
]


def small_config(
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    spare_rows: int,
    method: Method,
    max_draft_len: int,
    hybrid: bool,
    prefix_cache: PrefixScope,
) -> SchedulerConfig:
    """Pools of a few tokens, so that memory is short most of the time."""
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + spare_rows,
        max_model_len=MAX_MODEL_LEN,
        max_queued=6,
        min_run_seconds=3.0,
        max_slowdown=1.02,
        long_prefill_threshold=4 if hybrid else None,
        max_depth=6,
        method=method,
        max_draft_len=max_draft_len,
        hybrid=hybrid,
        eos_token_ids=EOS,
        prefix_cache=prefix_cache,
    )


def try_add(
    harness: Harness,
    prompt_len: int,
    max_tokens: int | None,
    method: Method | None,
    min_depth: int,
    spread: int | None,
    stop_at: int | None,
    ignore_eos: bool,
    sibling: Request | None = None,
    scheduling: SchedulingParams = ANYBODY,
) -> Request | None:
    """Add a request, to the prompt of `sibling` if there is one; None if it was refused, for a reason that holds."""
    if sibling is not None:
        scheduling = replace(scheduling, tenant=sibling.tenant)
    if scheduling.deadline is not None:  # given from now on
        scheduling = replace(scheduling, deadline=harness.now + scheduling.deadline)
    config = harness.config
    # Of few kinds, so that many find the prefix of another.
    prompt = prompt_of(prompt_len, salt=len(harness.requests) % 3) if sibling is None else sibling.prompt_token_ids
    stop_ids = () if stop_at is None else (reference_output(prompt, stop_at + 1)[-1],)
    max_depth = None if spread is None else min_depth + spread
    total = min(len(prompt) + (max_tokens or MAX_MODEL_LEN), MAX_MODEL_LEN)
    try:
        return harness.add(
            prompt,
            max_tokens,
            method,
            min_depth,
            max_depth,
            stop_ids,
            ignore_eos,
            sibling=sibling,
            scheduling=scheduling,
        )
    except ResourceExhausted as error:
        policy = harness.scheduler.tenants.policy(scheduling.tenant)
        blocks = min(config.num_blocks, policy.max_blocks or config.num_blocks)
        if error.retry_after is None:
            assert total > blocks * config.block_size
        else:
            assert len(harness.scheduler.tenants[scheduling.tenant].queue) >= (policy.max_queued or 0)
    except DeadlineExceeded:
        assert scheduling.deadline is not None or scheduling.time_to_first_token is not None
    except Unavailable:
        assert len(harness.scheduler.waiting) >= config.max_queued
        assert not gives_way(harness, scheduling.tenant)
    harness.check()
    return None


def gives_way(harness: Harness, name: str) -> bool:
    """Another tenant has so many requests in the queue, for its share, that one of them would leave it to this one."""
    most, tenants = harness.config.max_queued, harness.scheduler.tenants
    missing = len(harness.scheduler.waiting) + 1 - most
    own = (len(tenants[name].queue) + 1) / tenants[name].policy.weight
    longest = max(tenants.waiting, key=lambda one: len(one.queue) / one.policy.weight)
    fresh = [request for request in longest.queue if not request.siblings.have_begun]
    left = (len(longest.queue) - missing) / longest.policy.weight
    return longest.name != name and left >= own and len(fresh) >= missing


def harness_of(
    config: SchedulerConfig, policy: DepthPolicy, lag: int, right: Callable[[int, int], bool], max_ngram: int
) -> Harness:
    """With tenants, and steps that take a second."""
    harness = Harness(config, policy, lag, right, max_ngram)
    harness.scheduler.batch.tenants = Tenants(POLICIES_OF)
    if isinstance(policy, AdaptiveDepth):
        harness.scheduler.speculation.costs = policy.costs
    harness.runner.times = lambda plan: StepTimes(total=1.0)  # type: ignore[method-assign]
    return harness


class SchedulerMachine(RuleBasedStateMachine):
    """Plans and results in any legal order: a plan may be outstanding while requests come and go."""

    harness: Harness

    @initialize(
        config=st.builds(
            small_config,
            num_blocks=st.integers(3, 12),
            block_size=st.integers(1, 4),
            max_num_seqs=st.integers(1, 5),
            spare_rows=st.integers(0, 12),
            method=st.sampled_from(Method),
            max_draft_len=st.integers(0, 2 * MAX_MODEL_LEN),
            hybrid=st.booleans(),
            prefix_cache=st.sampled_from(PrefixScope),
        ),
        policy=st.sampled_from(POLICIES),
        lag=st.integers(0, 1),
        percent=st.sampled_from([0, 50, 80, 100]),
        salt=st.integers(0, 1 << 16),
        max_ngram=st.sampled_from([0, 2, 99]),
    )
    def start(
        self,
        config: SchedulerConfig,
        policy: Callable[[], DepthPolicy],
        lag: int,
        percent: int,
        salt: int,
        max_ngram: int,
    ) -> None:
        self.harness = harness_of(config, policy(), lag, percent_right(percent, salt), max_ngram)

    @rule(
        prompt_len=st.integers(1, 12),
        max_tokens=st.none() | st.integers(1, 12),
        method=st.none() | st.sampled_from(Method),
        min_depth=st.integers(0, 4),
        spread=st.none() | st.integers(0, 4),
        stop_at=st.none() | st.integers(0, 8),
        ignore_eos=st.booleans(),
        scheduling=SCHEDULING,
    )
    def add(
        self,
        prompt_len: int,
        max_tokens: int | None,
        method: Method | None,
        min_depth: int,
        spread: int | None,
        stop_at: int | None,
        ignore_eos: bool,
        scheduling: SchedulingParams,
    ) -> None:
        try_add(
            self.harness,
            prompt_len,
            max_tokens,
            method,
            min_depth,
            spread,
            stop_at,
            ignore_eos,
            scheduling=scheduling,
        )

    @rule(n=st.integers(2, 4), prompt_len=st.integers(1, 12), max_tokens=st.none() | st.integers(1, 12))
    def add_group(self, n: int, prompt_len: int, max_tokens: int | None) -> None:
        """The completions of one prompt as the engine queues them: together, and alike."""
        leader = None
        for _ in range(n):
            leader = try_add(self.harness, prompt_len, max_tokens, None, 0, None, None, False, leader) or leader

    @precondition(lambda self: self.harness.live)
    @rule(
        index=st.integers(0, 9),
        max_tokens=st.none() | st.integers(1, 12),
        method=st.none() | st.sampled_from(Method),
        stop_at=st.none() | st.integers(0, 8),
    )
    def add_sibling(self, index: int, max_tokens: int | None, method: Method | None, stop_at: int | None) -> None:
        """One more completion of a live prompt, at any stage, and with limits of its own."""
        live = self.harness.live
        try_add(self.harness, 0, max_tokens, method, 0, None, stop_at, False, live[index % len(live)])

    @precondition(lambda self: self.harness.live)
    @rule(index=st.integers(0, 9))
    def abort(self, index: int) -> None:
        live = self.harness.live
        self.harness.abort(live[index % len(live)])

    @precondition(lambda self: len(self.harness.outstanding) <= self.harness.lag)
    @rule()
    def plan(self) -> None:
        self.harness.plan()

    @precondition(lambda self: self.harness.outstanding)
    @rule()
    def land(self) -> None:
        self.harness.land()

    @rule(policies=st.sampled_from([POLICIES_OF, NARROWED]))
    def reload(self, policies: dict[str, TenantPolicy]) -> None:
        self.harness.scheduler.tenants.set_policies(policies, ONE_SHARE, self.harness.now)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def test_a_thousand_sequences() -> None:
    """1,000 seeded sequences of 50 to 80 operations: every invariant after each, every request ends exactly once."""
    operations = preemptions = preempting = aborted = finished = drafted = sharing = sharing_again = found = refused = 0
    for seed in range(1000):
        harness, done = run_sequence(random.Random(seed))
        assert done >= 50
        operations += done
        preemptions += harness.num_preemptions
        preempting += harness.num_preemptions > 0
        aborted += len(harness.aborted)
        finished += len(harness.finished)
        refused += len(harness.refused)
        drafted += sum(result.num_drafted for result in harness.results)
        for request in harness.requests.values():
            found += request.num_cached_tokens > 0
            shares = [bool(admission.block_ids) for admission in harness.admissions(request)]
            sharing += any(shares)
            sharing_again += any(shares[1:])
    # Not vacuous: each of these happened often.
    assert operations >= 50_000
    assert preempting >= 500, f"{preempting} sequences preempted"
    assert preemptions >= 1000, preemptions
    assert aborted >= 1000, aborted
    assert finished >= 5000, finished
    assert drafted >= 10_000, drafted
    assert found >= 1000, f"{found} requests found a prefix"
    assert refused >= 500, f"{refused} requests came too late"
    assert sharing >= 1000, f"{sharing} requests shared blocks"
    assert sharing_again >= 50, f"{sharing_again} requests shared blocks after a preemption"


def random_harness(rng: random.Random, num_blocks: int, block_size: int, percents: list[int]) -> Harness:
    """Of any kind, but for the size of its pool; drafts are right as often in a hundred as one of these says."""
    config = small_config(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=rng.randint(2, 5),
        spare_rows=rng.randint(0, 10),
        method=rng.choice(list(Method)),
        max_draft_len=rng.choice([8, 16, 1000]),
        hybrid=rng.random() < 0.5,
        prefix_cache=rng.choice(list(PrefixScope)),
    )
    right = percent_right(rng.choice(percents), salt=rng.randrange(1 << 16))
    return harness_of(config, rng.choice(POLICIES)(), rng.randint(0, 1), right, rng.choice([1, 99]))


def run_sequence(rng: random.Random) -> tuple[Harness, int]:
    """One random sequence of operations, run to the end of every request; the harness and the number of operations."""
    harness = random_harness(rng, rng.randint(5, 12), rng.randint(1, 3), [0, 50, 80, 100])
    operations = rng.randint(50, 80)
    for _ in range(operations):
        match rng.choices(["step", "add", "sibling", "abort"], weights=[60, 22, 13, 5])[0]:
            case "sibling" if harness.live:
                for _ in range(rng.randint(1, 3)):
                    try_add(
                        harness,
                        prompt_len=0,
                        max_tokens=rng.randint(1, 12),
                        method=rng.choice([None, *Method]),
                        min_depth=0,
                        spread=rng.choice([None, None, 0, 2]),
                        stop_at=rng.choice([None, None, rng.randint(0, 8)]),
                        ignore_eos=rng.random() < 0.3,
                        sibling=rng.choice(harness.live),
                    )
            case "add":
                try_add(
                    harness,
                    prompt_len=rng.randint(1, 5),
                    max_tokens=rng.randint(1, 12),
                    method=rng.choice([None, *Method]),
                    min_depth=rng.choice([0, 0, 2]),
                    spread=rng.choice([None, None, 0, 2]),
                    stop_at=rng.choice([None, rng.randint(0, 8)]),
                    ignore_eos=rng.random() < 0.3,
                    scheduling=SchedulingParams(
                        rng.choice(["", *POLICIES_OF]),
                        rng.choice([0, 0, 1, 9, -3]),
                        rng.choice([None, None, 5.0, 20.0, 60.0]),
                        rng.choice([None, None, 10.0]),
                        rng.choice([None, None, 8.0]),
                    ),
                )
            case "abort" if harness.live:
                harness.abort(rng.choice(harness.live))
            case _:
                harness.step()
    harness.drain()
    return harness, operations
