"""Whose turn it is, what a tenant is granted, and what it is charged."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.harness import GREEDY, Harness, percent_right, prompt_of
from paceline.core.config import PrefixScope, SchedulerConfig
from paceline.core.depth_policy import FixedDepth
from paceline.core.method import Method
from paceline.core.params import SchedulingParams, SpeculationParams, StopParams
from paceline.core.plan import StepPlan, StepTimes
from paceline.core.request import Request, RequestStatus
from paceline.core.tenant_policy import ONE_SHARE, TenantPolicy
from paceline.core.tenants import MOST_IDLE, Tenants
from paceline.errors import (
    DeadlineExceeded,
    InvalidArgument,
    PacelineError,
    QueueTimeout,
    ResourceExhausted,
    Unavailable,
)

STEP = 1.0  # seconds of every step


class Shop(Harness):
    """A harness with tenants, whose steps take a second."""

    def __init__(self, policies: Mapping[str, TenantPolicy] | None = None, lag: int = 0, **config: object) -> None:
        settings: dict[str, object] = {
            "num_blocks": 64,
            "block_size": 4,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 64,
            "max_model_len": 200,
            "min_run_seconds": 1000.0,
        }
        super().__init__(SchedulerConfig(**(settings | config)), FixedDepth(0), lag)  # type: ignore[arg-type]
        self.scheduler.batch.tenants = Tenants(policies or {})
        self.runner.times = self._times  # type: ignore[method-assign]

    def _times(self, plan: StepPlan) -> StepTimes:
        return StepTimes(total=STEP)

    def add_for(self, tenant: str, prompt: int = 4, max_tokens: int = 8, priority: int = 0) -> Request:
        return self.add(prompt, max_tokens, scheduling=SchedulingParams(tenant, priority))

    def service(self, tenant: str) -> float:
        return self.scheduler.tenants[tenant].charged_seconds

    @property
    def order(self) -> list[str]:
        """Tenants in the order in which their requests were first admitted."""
        return [self.requests[admission.request_id].tenant for plan in self.plans for admission in plan.admitted]


# -- fair shares -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("weights", "prompts"), [((1, 3), (4, 4)), ((1, 1), (4, 60)), ((2, 1), (60, 4))])
def test_service_follows_weights(lag: int, weights: tuple[int, int], prompts: tuple[int, int]) -> None:
    """In seconds charged, whatever the prompts' lengths, as long as both have requests waiting."""
    policies = {"a": TenantPolicy(weight=weights[0]), "b": TenantPolicy(weight=weights[1])}
    shop = Shop(policies, lag, max_queued=2000, num_blocks=128)
    for _ in range(400):
        shop.add_for("a", prompts[0])
        shop.add_for("b", prompts[1])
    while all(len(shop.scheduler.tenants[name].queue) > 10 for name in "ab"):
        shop.step()
    ratio = shop.service("a") / shop.service("b")
    assert ratio == pytest.approx(weights[0] / weights[1], rel=0.05)


def test_who_comes_where_another_has_run_for_long_is_owed_a_little() -> None:
    """And not as much as that one had meanwhile, which would lock it out."""
    shop = Shop(max_num_seqs=1)
    shop.add_for("a", max_tokens=100)
    for _ in range(98):
        shop.step()
    for _ in range(20):
        shop.add_for("b", max_tokens=4)
        shop.add_for("a", max_tokens=4)
    shop.drain()
    first, *others = shop.order
    assert first == "a"
    assert others[:3] == ["b", "b", "b"]
    assert abs(others[:20].count("a") - 9) <= 1, others


def test_within_a_tenant_first_come_first_served() -> None:
    shop = Shop(max_num_seqs=1)
    requests = [shop.add_for("a", max_tokens=2) for _ in range(5)]
    shop.drain()
    admitted = [admission.request_id for plan in shop.plans for admission in plan.admitted]
    assert admitted == [request.request_id for request in requests]


def test_idle_time_is_no_credit() -> None:
    """Who comes late shares from then on, and gets nothing for the time before."""
    shop = Shop(max_num_seqs=1)
    for _ in range(40):
        shop.add_for("early")
    while shop.service("early") < 50:
        shop.step()
    for _ in range(40):
        shop.add_for("late")
    before = shop.service("early")
    for _ in range(100):
        shop.step()
    assert shop.service("early") - before == pytest.approx(50, abs=10)


def test_a_limit_that_is_lifted_leaves_no_claim() -> None:
    """What its old policy kept from a tenant is not made up for at the cost of others."""
    held = TenantPolicy(max_running=1)
    shop = Shop({"batch": held}, max_num_seqs=4, num_blocks=256, min_run_seconds=1.0, max_queued=1000)
    for _ in range(300):
        shop.add_for("batch", max_tokens=20)
        shop.add_for("chat", max_tokens=20)
    for _ in range(200):
        shop.step()
    shop.scheduler.tenants.set_policies({}, ONE_SHARE, shop.now)
    for _ in range(4):
        before = shop.service("chat")
        for _ in range(20):
            shop.step()
        assert shop.service("chat") - before == pytest.approx(10, abs=4)


def test_nobody_is_preempted_in_vain() -> None:
    """All that may give way hold too few blocks for who is owed more: they run on."""
    shop = Shop(max_num_seqs=16, num_blocks=80, min_run_seconds=1.0, max_num_batched_tokens=256)
    small = [shop.add_for("a", max_tokens=44) for _ in range(2)]
    for _ in range(10):
        shop.step()
    shop.scheduler.tenants["a"].service += 100.0
    large = shop.add_for("b", prompt=150, max_tokens=50)
    shop.step()
    late = shop.add_for("b", prompt=190, max_tokens=2)
    while large.status is not RequestStatus.FINISHED:
        shop.step()
        assert not late.output_token_ids
    assert [request.num_preemptions for request in small] == [0, 0]
    shop.drain()


def test_a_flood_delays_others_by_no_more_than_it_is_ahead() -> None:
    shop = Shop(max_num_seqs=1)
    for _ in range(100):
        shop.add_for("flood")
    for _ in range(20):
        shop.step()
    shop.add_for("small")
    shop.drain()
    assert "small" in shop.order[:6]


def test_rejected_drafts_are_on_their_owners_account() -> None:
    """Two tenants with the same texts; the drafts of one are always wrong."""
    shop = Shop(max_num_seqs=8, method=Method.DRAFT_MODEL)
    shop.scheduler.speculation.policy = FixedDepth(4)
    shop.runner.draft_is_right = lambda request_id, position: request_id % 2 == 0
    for index in range(4):
        shop.add_for("good" if index % 2 == 0 else "bad", max_tokens=30)
    shop.drain()
    assert shop.service("bad") > 1.5 * shop.service("good")


@pytest.mark.parametrize("lag", [0, 1])
def test_every_second_is_charged_once(lag: int) -> None:
    """To requests that were aborted on the way, too."""
    shop = Shop(lag=lag, max_num_seqs=3)
    requests = [shop.add_for(name) for name in "abcabc"]
    for _ in range(4):
        shop.step()
    shop.abort(next(request for request in requests if request.status is RequestStatus.RUNNING))
    shop.drain()
    assert sum(shop.service(name) for name in "abc") == pytest.approx(len(shop.plans) * STEP)
    told = [finished.stats.engine_seconds for finished in shop.finished.values() if finished.stats]
    assert 0.0 < sum(told) < len(shop.plans) * STEP


# -- preemption ------------------------------------------------------------------------------------------------------


def test_who_ends_with_results_to_come_pays_for_them_and_teaches_nothing() -> None:
    shop = Shop(lag=1)
    kept, gone = shop.add_for("a"), shop.add_for("b")
    shop.plan()
    shop.plan()
    shop.abort(gone)
    known = gone.charged_seconds, gone.counts.verify_steps, gone.depth
    for pending in (1, 0):
        shop.land()
        assert len(gone.pending) == pending
    assert (gone.charged_seconds, gone.counts.verify_steps, gone.depth) == known
    assert shop.service("a") + shop.service("b") == pytest.approx(2 * STEP)
    assert shop.service("b") > 0.0
    assert kept.charged_seconds == pytest.approx(shop.service("a"))
    shop.drain()


def test_a_tenant_below_its_share_takes_the_newest_place_of_the_one_above() -> None:
    shop = Shop(min_run_seconds=5.0)
    long = [shop.add_for("a", max_tokens=100) for _ in range(2)]
    for _ in range(20):
        shop.step()
    small = shop.add_for("b")
    shop.step()
    assert small.status is RequestStatus.RUNNING
    assert [request.num_preemptions for request in long] == [0, 1]
    shop.drain()
    assert sum(request.num_preemptions for request in shop.requests.values()) < 10, "they do not fight"


def test_a_minimum_run_is_granted() -> None:
    shop = Shop(min_run_seconds=30.0)
    long = [shop.add_for("a", max_tokens=100) for _ in range(2)]
    shop.step()
    small = shop.add_for("b")
    for _ in range(20):
        shop.step()
        assert small.status is RequestStatus.WAITING
    shop.step_until(lambda: small.status is RequestStatus.RUNNING)
    assert long[1].num_preemptions == 1


@pytest.mark.parametrize("lag", [0, 1])
def test_tenants_do_not_take_turns_at_prompts_that_neither_ends(lag: int) -> None:
    """A prompt takes nine steps, after three of which it may have to give way; and nothing of it is kept."""
    shop = Shop(lag=lag, max_num_seqs=1, max_num_batched_tokens=2, min_run_seconds=3.0, prefix_cache=PrefixScope.OFF)
    requests = [shop.add_for(tenant, 17, 12) for tenant in "abab"]
    shop.drain(max_steps=2000)
    assert all(len(request.output_token_ids) == 12 for request in requests)
    assert any(request.num_preemptions for request in requests)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("min_run", [0.0, 1.0, 4.0])
@pytest.mark.parametrize(("prompt", "max_tokens"), [(40, 100), (160, 20), (120, 70)])
def test_tenants_that_take_turns_at_memory_read_no_more_than_they_write(
    lag: int, min_run: float, prompt: int, max_tokens: int
) -> None:
    """There is room for one of two prompts, each of which takes several steps, and what gave way is read again."""
    length = prompt + max_tokens
    shop = Shop(lag=lag, num_blocks=length // 4 + 6, max_num_batched_tokens=8, min_run_seconds=min_run)
    requests = [shop.add(prompt, max_tokens, ignore_eos=True, tenant=name) for name in "ab"]
    shop.drain(max_steps=3 * len(requests) * (prompt // 8 + max_tokens))
    assert all(len(request.output_token_ids) == max_tokens for request in requests)
    # Not the length of a stay, after which the token of a step that was on its way may still come.
    assert all(0 < request.seconds_to_token <= length // 8 + 4 for request in requests)


@pytest.mark.parametrize("lag", [0, 1])
def test_short_of_memory_the_most_over_served_gives_way(lag: int) -> None:
    """And not whoever came last."""
    shop = Shop(lag=lag, num_blocks=14, block_size=2, max_num_seqs=2, max_model_len=28)
    # "a" owes a lot, and its request is the older one.
    heavy, modest = shop.add_for("a", 6, 20), shop.add_for("b", 4, 16)
    shop.step()
    shop.scheduler.tenants["a"].charge(100.0)
    shop.drain()
    assert heavy.num_preemptions > 0
    assert modest.num_preemptions == 0


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("urgent", [SchedulingParams("a", priority=1), SchedulingParams("a", deadline=40.0)])
def test_short_of_memory_the_least_urgent_of_a_tenant_gives_way(lag: int, urgent: SchedulingParams) -> None:
    """And not whoever came last: what is urgent is not served first and then thrown out by what is not."""
    shop = Shop({"a": TenantPolicy(max_priority=1)}, lag, num_blocks=14, block_size=2, max_model_len=28, patience=60.0)
    patient = shop.add_for("a", 6, 20)
    shop.step()
    hurried = shop.add(4, 16, scheduling=urgent)
    shop.drain()
    assert patient.num_preemptions > 0
    assert hurried.num_preemptions == 0


def test_the_least_urgent_gives_its_place_to_a_tenant_below_its_share() -> None:
    shop = Shop({"a": TenantPolicy(max_priority=1)}, min_run_seconds=5.0)
    patient = shop.add_for("a", max_tokens=100)
    shop.step()
    hurried = shop.add_for("a", max_tokens=100, priority=1)
    for _ in range(20):
        shop.step()
    small = shop.add_for("b")
    shop.step()
    assert small.status is RequestStatus.RUNNING
    assert [request.num_preemptions for request in (patient, hurried)] == [1, 0]
    shop.drain()


# -- limits ----------------------------------------------------------------------------------------------------------


def test_running_requests_are_limited() -> None:
    shop = Shop({"a": TenantPolicy(max_running=1)}, max_num_seqs=4)
    for name in "aaabb":
        shop.add_for(name)
    shop.step()
    assert sorted(request.tenant for request in shop.scheduler.running.values()) == ["a", "b", "b"]
    shop.drain()


def test_waiting_requests_are_limited_by_tenant() -> None:
    shop = Shop({"a": TenantPolicy(max_queued=2)}, max_queued=3)
    shop.add_for("a")
    shop.add_for("a")
    with pytest.raises(ResourceExhausted, match="of tenant 'a' are waiting, and its max_queued is 2") as caught:
        shop.add_for("a")
    assert caught.value.retry_after is not None
    shop.add_for("b")
    with pytest.raises(Unavailable, match="3 requests are waiting, and max_queued is 3") as late:
        shop.add_for("b")
    assert late.value.retry_after is not None
    shop.drain()


@pytest.mark.parametrize(("weight", "places"), [(1.0, 3), (2.0, 4), (0.2, 1)])
def test_who_floods_the_queue_gives_way_to_others(weight: float, places: int) -> None:
    """Up to their shares of it; the newest first."""
    shop = Shop({"b": TenantPolicy(weight=weight)}, max_queued=6)
    flood = [shop.add_for("a") for _ in range(6)]
    for _ in range(places):
        shop.add_for("b")
    with pytest.raises(Unavailable, match="6 requests are waiting, and max_queued is 6"):
        shop.add_for("b")
    shop.step()
    assert list(shop.refused) == [request.request_id for request in reversed(flood[-places:])]
    error = shop.refused[flood[-1].request_id]
    assert isinstance(error, Unavailable)
    assert error.retry_after is not None
    shop.drain()


@pytest.mark.parametrize("error", [QueueTimeout, DeadlineExceeded])
def test_nobody_gives_way_to_who_has_come_too_late(error: type[PacelineError]) -> None:
    """What is prepared for long may be late before it comes here."""
    shop = Shop(max_queued=4)
    for _ in range(4):
        shop.add_for("a")
    shop.now += 10.0
    times = {"queue_timeout": 5.0} if error is QueueTimeout else {"time_to_first_token": 5.0}
    with pytest.raises(error):
        shop.add(4, scheduling=SchedulingParams("b", **times), arrival=shop.now - 5.0)
    shop.step()
    assert not shop.refused
    on_time = shop.add(4, scheduling=SchedulingParams("b", **times), arrival=shop.now - 3.0)
    assert on_time.arrival == shop.now - 3.0
    shop.drain()


def test_a_request_that_has_run_gives_way_to_nobody() -> None:
    """Somebody reads its tokens already."""
    shop = Shop(max_queued=4)
    flood = [shop.add_for("a") for _ in range(4)]
    for request in flood[1:]:
        request.siblings.have_begun = True
    shop.add_for("b")
    with pytest.raises(Unavailable):
        shop.add_for("b")
    shop.step()
    assert list(shop.refused) == [flood[0].request_id]
    shop.drain()


def test_a_choice_gives_way_to_nobody_once_another_one_has_run() -> None:
    """Somebody reads the stream that they share."""
    shop = Shop(max_queued=3, max_num_seqs=1)
    prompt = (1, 2, 3, 4)
    first = shop.add(prompt, 20, tenant="a")
    for _ in range(2):
        shop.add(prompt, 20, tenant="a", sibling=first)
    for _ in range(3):
        shop.step()
    assert first.output_token_ids
    shop.add_for("b")
    with pytest.raises(Unavailable):
        shop.add_for("b")
    shop.drain()
    assert not shop.refused


def test_when_to_come_again_follows_the_rate_of_endings() -> None:
    shop = Shop({"a": TenantPolicy(max_queued=1)}, max_num_seqs=1)
    for _ in range(20):
        shop.add_for("b", max_tokens=10)
    for _ in range(150):
        shop.step()
    shop.add_for("a", max_tokens=100)
    with pytest.raises(ResourceExhausted) as caught:
        shop.add_for("a")
    assert caught.value.retry_after == pytest.approx(10.0, rel=0.3)
    shop.drain()


def test_blocks_are_limited() -> None:
    shop = Shop({"a": TenantPolicy(max_blocks=5)}, max_num_seqs=4)
    requests = [shop.add_for("a", 9, 6) for _ in range(2)]  # three blocks for the prompt, four in the end
    shop.step()
    assert [request.status for request in requests] == [RequestStatus.RUNNING, RequestStatus.WAITING]
    shop.add_for("b", 9, 6)
    shop.step()
    assert len(shop.scheduler.running) == 2
    shop.drain()
    with pytest.raises(ResourceExhausted, match="the KV cache share of tenant 'a': 20 tokens"):
        shop.add_for("a", 9, 30)


def test_what_was_let_in_runs_under_fewer_blocks() -> None:
    """Alone, since its tenant holds more now than it may; and nobody waits behind it for ever."""
    shop = Shop({"a": TenantPolicy(max_blocks=5)}, max_num_seqs=4)
    requests = [shop.add_for("a", 9, 6) for _ in range(2)]
    shop.scheduler.tenants.set_policies({"a": TenantPolicy(max_blocks=2)}, ONE_SHARE, shop.now)
    requests.append(shop.add_for("a", 2, 2))
    while shop.scheduler.has_requests:
        shop.step()
        assert len(shop.scheduler.running) <= 1
    assert all(request.status is RequestStatus.FINISHED for request in requests)


def test_a_late_result_of_a_tenant_that_is_gone_is_dropped() -> None:
    shop = Shop({"a": ONE_SHARE}, max_num_seqs=4)
    request = shop.add_for("a")
    shop.plan()
    shop.abort(request)
    shop.scheduler.tenants.set_policies({}, None, shop.now)
    shop.scheduler.tenants._forget_idle(shop.now)
    shop.land()
    assert "a" not in shop.scheduler.tenants


def test_tokens_per_second_are_limited() -> None:
    """A bucket of 10 tokens, one more each second: prompts that are computed and completions count, drafts do not."""
    shop = Shop({"a": TenantPolicy(tokens_per_second=1.0, burst_tokens=10.0)}, max_num_seqs=1)
    for _ in range(12):
        shop.add_for("a", 5, 7)
    steps = 0
    while shop.scheduler.has_requests:
        shop.step()
        steps += 1
    assert steps == pytest.approx(12 * 12 - 10, rel=0.15)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("gives_way", [False, True])
def test_what_is_not_computed_of_a_prompt_is_not_paid_for(lag: int, gives_way: bool) -> None:
    """It ends after three chunks, running or preempted. Until then it is paid for, lest others be let in beside it."""
    policy = TenantPolicy(tokens_per_second=1e-3, burst_tokens=10.0)
    shop = Shop({"a": policy}, lag, long_prefill_threshold=8, min_run_seconds=1.0)
    prompt, later = shop.add_for("a", 100), shop.add_for("a", 100)
    shop.step_until(lambda: len(shop.works(prompt)) == 3)
    assert later.status is RequestStatus.WAITING
    if gives_way:
        shop.scheduler.tenants["a"].charge(100.0)
        for _ in range(shop.config.max_num_seqs):
            shop.add_for("b")
        shop.step_until(lambda: prompt.status is RequestStatus.PREEMPTED)
    shop.abort(prompt)
    computed = sum(work.num_tokens for work in shop.works(prompt))
    assert 24 <= computed < 40
    assert shop.scheduler.tenants["a"].seconds_until_tokens(shop.now) == pytest.approx(1e3 * (computed - 10), abs=10)
    shop.abort(later)
    shop.drain()


def test_what_is_given_back_fills_no_bucket_beyond_its_size() -> None:
    account = Tenants({"a": TenantPolicy(tokens_per_second=10.0)}).get("a", 0.0)
    account.spend(1000, 0.0)
    assert account.seconds_until_tokens(50.0) == pytest.approx(49.0)
    account.give_back(1000)
    account.spend(30, 50.0)
    assert account.seconds_until_tokens(50.0) == pytest.approx(2.0)


@settings(deadline=None, derandomize=True, database=None)
@given(
    events=st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(-20, 20), st.booleans()), min_size=1),
    burst=st.floats(1.0, 50.0),
)
def test_a_bucket_does_not_depend_on_how_often_one_looks(events: list[tuple[float, int, bool]], burst: float) -> None:
    """Each event: seconds after the last one, tokens that are spent or, below 0, given back, and whether somebody looks
    at one of the two buckets before and after.
    """
    policy = TenantPolicy(tokens_per_second=7.0, burst_tokens=burst)
    watched, unwatched = (Tenants({"a": policy}).get("a", 0.0) for _ in range(2))
    now = 0.0
    for seconds, tokens, looks in events:
        if looks:
            watched.seconds_until_tokens(now + seconds / 2)
        now += seconds
        for account in (watched, unwatched):
            if tokens < 0:
                account.give_back(-tokens)
            else:
                account.spend(tokens, now)
        if looks:
            watched.seconds_until_tokens(now)
    assert unwatched.owes(0.0, now) == pytest.approx(watched.owes(0.0, now), abs=1e-9)


def test_nothing_is_owed_for_the_time_without_a_rate() -> None:
    """A reload lifts the limit, another one restores it."""
    limited = TenantPolicy(tokens_per_second=10.0)
    tenants = Tenants({"a": limited})
    account = tenants.get("a", 0.0)
    account.spend(20, 0.0)
    tenants.set_policies({}, ONE_SHARE, 1.0)
    account.spend(100_000, 2.0)
    assert account.seconds_until_tokens(2.0) == 0.0
    tenants.set_policies({"a": limited}, ONE_SHARE, 2.0)
    assert account.seconds_until_tokens(2.0) == 0.0
    account.spend(30, 2.0)
    assert account.seconds_until_tokens(2.0) == pytest.approx(2.0), "a full bucket, and no more"


def test_time_before_a_reload_is_counted_at_the_old_rate() -> None:
    tenants = Tenants({"a": TenantPolicy(tokens_per_second=1.0)})
    account = tenants.get("a", 0.0)
    account.spend(101, 0.0)
    tenants.set_policies({"a": TenantPolicy(tokens_per_second=10.0)}, ONE_SHARE, 50.0)
    assert account.seconds_until_tokens(50.0) == pytest.approx(5.0)
    tenants.set_policies({"a": TenantPolicy(tokens_per_second=1.0)}, ONE_SHARE, 53.0)
    assert account.seconds_until_tokens(53.0) == pytest.approx(20.0)


def test_who_waits_for_tokens_holds_up_nobody() -> None:
    shop = Shop({"a": TenantPolicy(tokens_per_second=0.001, burst_tokens=1.0)}, max_num_seqs=1)
    shop.add_for("a")
    later = shop.add_for("a")
    others = [shop.add_for("b") for _ in range(3)]
    shop.step_until(lambda: all(request.status is RequestStatus.FINISHED for request in others))
    assert later.status is RequestStatus.WAITING
    assert shop.scheduler.wake_at(shop.now) > shop.now
    shop.abort(later)
    assert shop.scheduler.wake_at(shop.now) == math.inf


# -- priorities ------------------------------------------------------------------------------------------------------


def test_priorities_are_within_a_tenant_and_clamped() -> None:
    shop = Shop({"a": TenantPolicy(max_priority=1)}, max_num_seqs=1)
    first, low, clamped, high = (shop.add_for("a", max_tokens=2, priority=p) for p in (0, -1, 9, 1))
    shop.drain()
    admitted = [admission.request_id for plan in shop.plans for admission in plan.admitted]
    assert admitted == [request.request_id for request in (clamped, high, first, low)]


def test_nobody_starves() -> None:
    """A stream of urgent requests that never ends: what has waited long enough goes before them."""
    shop = Shop({"a": TenantPolicy(max_priority=5)}, max_num_seqs=1, max_queued=10_000)
    low = shop.add_for("a", max_tokens=1)
    for _ in range(60):
        shop.add_for("a", max_tokens=1, priority=5)
        shop.step()
        if low.status is not RequestStatus.WAITING:
            break
    assert low.status is not RequestStatus.WAITING
    assert shop.now > 40, "it was not first"
    shop.drain()


# -- the books -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"weight": 0.0}, "weight = 0.0: must be in 0.0001..10000"),
        ({"weight": 1e12}, "weight = 1000000000000.0: must be in 0.0001..10000"),
        ({"weight": -1.0}, "weight = -1.0"),
        ({"weight": math.inf}, "weight = inf"),
        ({"max_running": 0}, "max_running = 0: must be an integer >= 1"),
        ({"max_blocks": 0}, "max_blocks = 0"),
        ({"tokens_per_second": 0.0}, "tokens_per_second = 0.0"),
        ({"tokens_per_second": 1e-308}, "tokens_per_second = 1e-308: must be a number >= 1e-09"),
        ({"burst_tokens": 5.0}, "burst_tokens = 5.0: must be set together with tokens_per_second"),
        ({"max_priority": -1}, "max_priority = -1"),
    ],
)
def test_a_policy_that_serves_nobody_is_refused(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        TenantPolicy(**wrong)  # type: ignore[arg-type]


def test_an_unknown_tenant_is_refused_where_all_are_known() -> None:
    shop = Shop()
    shop.scheduler.batch.tenants = Tenants({"a": TenantPolicy()}, default=None)
    with pytest.raises(InvalidArgument, match=r"scheduling\.tenant = 'b': must be a tenant of this server"):
        shop.add_for("b")
    shop.add_for("a")
    shop.drain()


def test_idle_tenants_are_forgotten() -> None:
    tenants = Tenants({})
    for index in range(3 * MOST_IDLE):
        tenants.get(f"tenant {index}", 0.0)
    assert len(tenants) <= MOST_IDLE


def test_who_owes_is_remembered() -> None:
    """Tokens or service, though all tenants have a rate: of those who owe, the half that owes least goes first."""
    tenants = Tenants({}, TenantPolicy(tokens_per_second=10.0))
    tenants.get("tokens", 0.0).spend(100_000, 0.0)
    tenants.get("service", 0.0).charge(1e6)
    for index in range(3 * MOST_IDLE):
        tenants.get(f"tenant {index}", 0.0).spend(index % 2, 0.0)
    assert len(tenants) <= MOST_IDLE
    assert tenants["tokens"].seconds_until_tokens(0.0) == 9999.0
    assert tenants["service"].service == 1e6


def test_other_policies_take_effect_and_accounts_stay() -> None:
    shop = Shop()
    shop.add_for("a")
    shop.drain()
    before = shop.service("a")
    shop.scheduler.tenants.set_policies({"a": TenantPolicy(weight=4.0, max_queued=1)}, None, shop.now)
    assert shop.service("a") == before > 0
    shop.add_for("a")
    with pytest.raises(ResourceExhausted):
        shop.add_for("a")
    with pytest.raises(InvalidArgument):
        shop.add_for("b")
    shop.drain()


def test_what_is_added_directly() -> None:
    """The scheduler's own signature, without the harness."""
    shop = Shop()
    request = shop.scheduler.add(
        7, prompt_of(4), GREEDY, StopParams(max_tokens=1), SpeculationParams(), 0.0, scheduling=SchedulingParams("x")
    )
    assert request.tenant == "x"
    assert shop.scheduler.abort(7)
    assert percent_right(100)(7, 1)
