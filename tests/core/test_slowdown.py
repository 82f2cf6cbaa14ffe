"""A tenant that asks for more than it gets does not slow those that do not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from core.harness import Harness
from paceline.core.config import SchedulerConfig
from paceline.core.cost_model import CostModel
from paceline.core.depth_policy import FixedDepth
from paceline.core.params import Method, SchedulingParams
from paceline.core.plan import StepPlan, StepTimes
from paceline.core.request import Request
from paceline.core.slowdown import LEAST_ROWS, Slowdown
from paceline.core.speculation import SpeculationControl
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
        self.scheduler.tenants = Tenants({})
        self.runner.times = self._times  # type: ignore[method-assign]

    def _times(self, plan: StepPlan) -> StepTimes:
        return StepTimes(total=self.costs.target(plan.num_rows, 0))

    def add_for(self, tenant: str, prompt: int, max_tokens: int) -> Request:
        return self.add(prompt, max_tokens, scheduling=SchedulingParams(tenant))

    def rows_of(self, tenant: str, plan: StepPlan) -> list[int]:
        return [work.num_rows for work in plan.work if self.requests[work.request_id].tenant == tenant]


def flooded(lag: int = 0, prompt: int = 100, max_tokens: int = 40, **config: object) -> tuple[Shop, Request]:
    """`a` floods, and one request of `b` decodes."""
    shop = Shop(lag, **config)
    for _ in range(90):
        shop.add_for("a", prompt, max_tokens)
    for _ in range(10):
        shop.step()
    guest = shop.add_for("b", 4, 60)
    while not guest.output_token_ids:
        shop.step()
    return shop, guest


@pytest.mark.parametrize("lag", [0, 1])
def test_the_step_becomes_half_as_long_again_at_most(lag: int) -> None:
    shop, guest = flooded(lag)
    start = len(shop.plans)
    while guest.request_id in shop.scheduler.running:
        shop.step()
    planned = [plan for plan in shop.plans[start + 1 :] if shop.rows_of("b", plan)]
    assert len(planned) > 10
    for plan in planned:
        own = shop.costs.target(1 + 8, 0)  # with the drafts that it might have
        assert shop.costs.target(plan.num_rows, 0) <= max(1.5 * own, shop.costs.target(LEAST_ROWS + FREE_ROWS, 0))
    shop.drain()


def test_without_a_limit_it_becomes_as_long_as_it_likes() -> None:
    shop, guest = flooded(max_slowdown=math.inf)
    start = len(shop.plans)
    while guest.request_id in shop.scheduler.running:
        shop.step()
    assert max(plan.num_rows for plan in shop.plans[start + 1 :]) > 4 * LEAST_ROWS
    shop.drain()


def test_those_ahead_take_turns_and_draft_nothing() -> None:
    shop, guest = flooded(prompt=8, max_tokens=80)
    start = len(shop.plans)
    while guest.request_id in shop.scheduler.running:
        shop.step()
    seen: dict[int, int] = {}
    steps = shop.plans[start + 1 : -1]
    for plan in steps:
        for work in plan.work:
            if shop.requests[work.request_id].tenant == "a" and work.samples and work.num_tokens == 1:
                assert work.num_drafts == 0
                seen[work.request_id] = seen.get(work.request_id, 0) + 1
    running = [i for i in seen if seen[i] > 1]
    assert len(running) >= 20
    assert max(seen.values()) - min(seen[i] for i in running) <= 3, "everybody had its turn"
    shop.drain()


def test_two_that_flood_do_not_hold_each_other_back() -> None:
    shop, _ = flooded()
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
        ([100, 1], [LEAST_ROWS, 0]),
        ([1] * 9, [1, 1, 1, 1, 1, 0, 0, 0, 0]),
        ([3, 100, 1], [3, 2, 0]),
    ],
)
def test_rows_that_fit(wanted: Sequence[int], taken: Sequence[int]) -> None:
    """Beside one row: three are free, and two more take half a step."""
    room = Slowdown(costs(), 1, 0, 1, 200, 0, 1.5)
    assert not room.is_full
    assert [room.take(rows, 0) for rows in wanted] == list(taken)
    assert room.is_full == (sum(taken) >= 5)


def test_context_counts() -> None:
    """Of KV that takes a step's time to read, half fits."""

    class WithContext:
        def target(self, rows: int, context: int, sequences: int = 0) -> float:
            return STEP + context / 1000

        def targets(self, rows: int, count: int, context: int, sequences: int = 0) -> object:
            return costs().targets(1, 0, 0, 1).repeat(count + 1) + context / 1000

    room = Slowdown(WithContext(), 1, 0, 1, 50, 1000, 1.5)  # type: ignore[arg-type]
    assert [room.take(1, 100) for _ in range(8)] == [1, 1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("limit", [0.5, -math.inf, math.nan])
def test_a_limit_that_makes_no_sense_is_refused(limit: float) -> None:
    with pytest.raises(InvalidArgument, match=r"max_slowdown = .*: must be a number >= 1"):
        SchedulerConfig(num_blocks=1, max_slowdown=limit)
