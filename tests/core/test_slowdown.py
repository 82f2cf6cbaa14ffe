"""A tenant that asks for more than it gets does not slow those that do not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from core.harness import Harness
from paceline.core.config import PrefixScope, SchedulerConfig
from paceline.core.cost_model import CostModel
from paceline.core.depth_policy import FixedDepth
from paceline.core.method import Method
from paceline.core.params import SchedulingParams
from paceline.core.plan import StepPlan, StepTimes
from paceline.core.request import Request, RequestStatus
from paceline.core.slowdown import LEAST_ROWS, Slowdown
from paceline.core.speculation import SpeculationControl
from paceline.core.tenant_policy import TenantPolicy
from paceline.core.tenants import Tenants
from paceline.errors import InvalidArgument
from paceline.sim.control import roofline

FREE_ROWS = 4
STEP = 1.0  # seconds of a step of up to FREE_ROWS rows; each row more takes a quarter of it


def costs() -> CostModel:
    return roofline(STEP, FREE_ROWS, 0.05)


class Shop(Harness):
    """Two tenants, steps that cost what the model says, and places for everybody."""

    def __init__(self, lag: int = 0, **config: object) -> None:
        settings: dict[str, object] = {
            "num_blocks": 512,
            "block_size": 4,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 256,
            "max_model_len": 400,
            "max_queued": 1000,
            "method": Method.DRAFT_MODEL,
            "max_slowdown": 1.5,
        }
        super().__init__(SchedulerConfig(**(settings | config)), FixedDepth(2), lag)  # type: ignore[arg-type]
        self.costs = costs()
        self.scheduler.speculation = SpeculationControl(FixedDepth(2), costs())
        self.scheduler.batch.tenants = Tenants({})
        self.runner.times = self._times  # type: ignore[method-assign]

    def _times(self, plan: StepPlan) -> StepTimes:
        return StepTimes(total=self.costs.target(plan.num_rows, 0))

    def add_for(self, tenant: str, prompt: int, max_tokens: int) -> Request:
        return self.add(prompt, max_tokens, scheduling=SchedulingParams(tenant))

    def rows_of(self, tenant: str, plan: StepPlan) -> list[int]:
        return [work.num_rows for work in plan.work if self.requests[work.request_id].tenant == tenant]


def flooded(lag: int = 0, prompt: int = 100, max_tokens: int = 40, guests: int = 1, **config: object) -> Shop:
    """`a` floods, and so many requests of `b` decode."""
    shop = Shop(lag, **config)
    for _ in range(90):
        shop.add_for("a", prompt, max_tokens)
    for _ in range(10):
        shop.step()
    newest = [shop.add_for("b", 4, 60) for _ in range(guests)]
    while not all(request.output_token_ids for request in newest):
        shop.step()
    return shop


def test_who_runs_goes_on_while_the_next_of_another_finds_no_room() -> None:
    """Though that tenant is owed: nothing would come of it."""
    shop = Shop(num_blocks=600, min_run_seconds=1.0, max_model_len=2400, prefix_cache=PrefixScope.OFF)
    light = shop.add_for("b", 300, 900)
    shop.step_until(lambda: bool(light.output_token_ids))
    shop.step_until(lambda: len(light.output_token_ids) > 60)
    ahead = [shop.add_for("a", 8, 40) for _ in range(200)]
    for _ in range(30):
        shop.step()
    for _ in range(90):
        shop.add_for("c", 2200, 10)
    started = [request for request in ahead if request.first_scheduled is not None]
    assert any(request.request_id in shop.scheduler.running for request in started)
    shop.step_until(lambda: not any(request.request_id in shop.scheduler.running for request in started), 200)
    assert all(len(request.output_token_ids) == 40 for request in started)


def test_who_runs_goes_on_while_those_of_another_wait_for_their_prompt() -> None:
    """Though that tenant is owed: it can start nothing before, but for what does not wait."""
    shop = Shop(max_num_seqs=16, max_model_len=1000, long_prefill_threshold=LEAST_ROWS, max_slowdown=8.0)
    light = shop.add_for("b", 4, 400)
    shop.step_until(lambda: bool(light.output_token_ids))
    for _ in range(40):
        shop.add_for("a", 4, 300)
    for _ in range(50):
        shop.step()
    leader = shop.add_for("c", 800, 20)
    for _ in range(13):
        shop.add(leader.prompt_token_ids, 20, sibling=leader, scheduling=SchedulingParams("c"))
    shop.step_until(lambda: leader.num_computed_tokens > 0)
    for _ in range(10):
        shop.step()
        assert light.status is RequestStatus.RUNNING
        assert shop.rows_of("c", shop.plans[-1]) == [LEAST_ROWS]
        assert shop.rows_of("a", shop.plans[-1])
    other = shop.add_for("c", 4, 20)
    shop.step()
    assert other.status is RequestStatus.RUNNING
    shop.abort(light)
    shop.drain()


def until_b_ends(shop: Shop) -> list[StepPlan]:
    """The plans that are made meanwhile for `b`."""
    start = len(shop.plans)
    while any(request.tenant == "b" for request in shop.scheduler.running.values()):
        shop.step()
    return [plan for plan in shop.plans[start + 1 :] if shop.rows_of("b", plan)]


def slowdown(shop: Shop, plans: Sequence[StepPlan]) -> float:
    """How many times as long they take as with `b` alone."""
    alone = [shop.costs.target(sum(shop.rows_of("b", plan)), 0) for plan in plans]
    return sum(shop.costs.target(plan.num_rows, 0) for plan in plans) / sum(alone)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("prompt", [4, 100])
def test_steps_become_half_as_long_again_in_the_mean(lag: int, prompt: int) -> None:
    shop = flooded(lag, prompt)
    planned = until_b_ends(shop)
    assert len(planned) > 10
    one_more = shop.costs.target(LEAST_ROWS + FREE_ROWS, 0) / sum(shop.costs.target(1, 0) for _ in planned)
    assert 1.2 < slowdown(shop, planned) <= 1.5 + one_more
    shop.drain()


def test_who_has_more_weight_may_slow_others_by_more() -> None:
    shop = Shop()
    shop.scheduler.batch.tenants = Tenants({"a": TenantPolicy(weight=6.0)})
    for _ in range(90):
        shop.add_for("a", 100, 40)
    shop.add_for("b", 4, 60)
    while "b" not in {one.tenant for one in shop.scheduler.running.values() if one.output_token_ids}:
        shop.step()
    planned = until_b_ends(shop)
    assert 2.0 < slowdown(shop, planned) < 5.0  # 1 + 6 * .5, and what is left over
    shop.drain()


def test_only_those_who_run_a_few_are_worth_it() -> None:
    """A quarter of their share of 32 places between two."""
    shop = flooded(guests=5)
    assert slowdown(shop, until_b_ends(shop)) > 3.0
    shop.drain()


def test_who_waits_for_a_little_is_not_held_back() -> None:
    """With many tenants that have a request waiting now and then, every place is taken."""
    shop = Shop()
    for number in range(60):
        shop.add_for(f"tenant {number % 20}", 8, 60)
    for _ in range(4):
        shop.step()
    assert len(shop.scheduler.running) == 32
    assert shop.scheduler.tenants.num_waiting == 28
    assert len(shop.plans[-1].work) == 32
    shop.drain()


def test_a_step_that_is_kept_short_counts_towards_no_turn_of_those_it_is_kept_short_for() -> None:
    """Else the crowd, which takes less than it might, would take `b` for over-served and preempt it."""
    shop = flooded()
    tenant = shop.scheduler.tenants["b"]
    service, charged = tenant.service, tenant.charged_seconds
    planned = until_b_ends(shop)
    assert tenant.service == service
    assert tenant.charged_seconds > charged + len(planned) * 0.2 * STEP
    assert shop.scheduler.tenants["a"].service > service
    shop.drain()


def test_a_tenant_that_floods_later_is_not_locked_out() -> None:
    """By the running requests of the one that came first, while a light tenant decodes."""
    shop = Shop(max_slowdown=1.1, num_blocks=1024, method=Method.NONE)
    for _ in range(60):
        shop.add_for("a", 8, 200)
    for _ in range(10):
        shop.step()
    light = shop.add_for("b", 4, 390)
    while not light.output_token_ids:
        shop.step()
    for _ in range(90):
        shop.add_for("c", 8, 200)
    for _ in range(200):
        shop.step()
    assert light.request_id in shop.scheduler.running
    assert shop.scheduler.tenants["c"].num_running > 0
    served = {name: 0 for name in "abc"}
    for plan in shop.plans[-100:]:
        for name in served:
            served[name] += len(shop.rows_of(name, plan))
    assert served["c"] > served["a"], "it goes first, as long as it is owed"
    shop.drain()


def test_two_requests_are_no_flood() -> None:
    """However small the share of each of many tenants is."""
    shop = Shop(max_slowdown=1.02, method=Method.NONE)
    for number in range(70):
        shop.add_for(f"tenant {number % 40}", 4, 60)
    for _ in range(20):
        shop.step()
    assert len(shop.scheduler.running) == 32
    assert len(shop.plans[-1].work) == 32
    shop.drain()


def test_a_light_tenant_does_not_give_way_in_vain() -> None:
    """It has had far more than one that comes, in a step that was kept short for it, but what it holds would not be
    room enough. It runs on, and somebody runs in every step.
    """
    shop = Shop(
        0,
        num_blocks=128,
        max_num_seqs=16,
        max_model_len=500,
        max_slowdown=1.1,
        method=Method.NONE,
        watermark=0.0,
        prefix_cache=PrefixScope.OFF,
    )
    shop.costs = linear()
    shop.scheduler.speculation = SpeculationControl(FixedDepth(0), linear())
    light = shop.add_for("l", 4, 400)
    for _ in range(150):
        shop.step()
    for _ in range(14):
        shop.add_for("c", 4, 100)
    shop.step()
    shop.step()
    for _ in range(40):
        shop.add_for("c", 4, 100)
    for _ in range(3):
        shop.step()
    shop.add_for("m", 360, 8)
    for _ in range(12):
        shop.step()
        assert shop.plans[-1].work
    assert light.num_preemptions == 0
    shop.drain()


def linear() -> CostModel:
    return CostModel([1, 2, 4096], [0.01, 0.0125, 0.01 + 0.0025 * 4095])


def test_without_a_limit_it_becomes_as_long_as_it_likes() -> None:
    shop = flooded(max_slowdown=math.inf)
    assert max(plan.num_rows for plan in until_b_ends(shop)) > 4 * LEAST_ROWS
    shop.drain()


def test_those_ahead_take_turns_and_draft_nothing() -> None:
    shop = flooded(prompt=8, max_tokens=80)
    seen: dict[int, int] = {}
    for plan in until_b_ends(shop)[:-1]:
        for work in plan.work:
            if shop.requests[work.request_id].tenant == "a" and work.samples and work.num_tokens == 1:
                assert work.num_drafts == 0
                seen[work.request_id] = seen.get(work.request_id, 0) + 1
    running = [i for i in seen if seen[i] > 1]
    assert len(running) >= 20
    assert max(seen.values()) - min(seen[i] for i in running) <= 3, "everybody had its turn"
    shop.drain()


def test_two_that_flood_do_not_hold_each_other_back() -> None:
    shop = flooded()
    for _ in range(40):
        shop.add_for("b", 100, 40)
    for _ in range(5):
        shop.step()
    assert max(plan.num_rows for plan in shop.plans[-4:]) > 2 * LEAST_ROWS
    shop.drain()


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([1] * 9, [1, 1, 1, 1, 1, 0, 0, 0, 0]),
        ([100, 1], [0, 0]),
        ([3, 100, 1], [3, 0, 0]),
    ],
)
def test_rows_that_fit(wanted: Sequence[int], taken: Sequence[int]) -> None:
    """Beside one row: three are free, and two more take half a step. Nobody overtakes who has to wait."""
    room = Slowdown(costs(), 1, 0, 1, 200, 1.5, 0.0)
    assert not room.is_full
    assert [room.take(rows, 0) for rows in wanted] == list(taken)
    assert room.is_full == (0 in taken)


def test_what_is_too_dear_for_a_step_waits_for_what_several_leave() -> None:
    """A piece of a prompt takes 13 quarters of a step behind the free rows, and a step leaves two."""
    saved, waited = 0.0, []
    for _ in range(21):
        room = Slowdown(costs(), 1, 0, 1, 200, 1.5, saved)
        taken = room.take(1000, 0)
        assert taken in (0, LEAST_ROWS, LEAST_ROWS + 1)
        waited.append(not taken)
        saved = room.saved
    assert waited.count(False) == 3
    assert not any(waited[6::7])


def test_nothing_is_saved_where_nobody_waits() -> None:
    room = Slowdown(costs(), 1, 0, 1, 200, 1.5, 0.25)
    assert room.take(2, 0) == 2
    assert room.saved == 0.0


def test_a_full_step_has_no_rows() -> None:
    room = Slowdown(costs(), 1, 0, 1, 0, 1.5, 0.0)
    assert not room.fits_or_closes(1, 0)
    assert room.take(1, 0) == 0
    assert room.saved == 0.0


def test_context_counts() -> None:
    """Of KV that takes a step's time to read, half fits."""

    room = Slowdown(CostModel([1], [STEP], per_context=0.001), 1, 0, 1, 50, 1.5, 0.001)
    assert [room.take(1, 100) for _ in range(8)] == [1, 1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("limit", [0.5, 1.0, -math.inf, math.nan])
def test_a_limit_that_makes_no_sense_is_refused(limit: float) -> None:
    with pytest.raises(InvalidArgument, match=r"max_slowdown = .*: must be a number > 1"):
        SchedulerConfig(num_blocks=1, max_slowdown=limit)
