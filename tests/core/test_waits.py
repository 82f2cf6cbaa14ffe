"""How long decodes wait for prompts, and prompts for decodes; and what is kept free for those that run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from core.harness import Harness
from core.test_speculation import costs
from paceline.core.config import SchedulerConfig
from paceline.core.cost_model import CostModel
from paceline.core.depth_policy import FixedDepth
from paceline.core.params import SchedulingParams
from paceline.core.plan import StepPlan
from paceline.core.request import Request
from paceline.core.slowdown import LEAST_ROWS
from paceline.core.speculation import SpeculationControl
from paceline.sim.control import roofline

BUDGET = 128


def harness_of(priced: bool = True, **config: object) -> Harness:
    """Steps take 10 seconds and half a second for each row, if they are priced."""
    settings: dict[str, object] = {
        "num_blocks": 512,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": BUDGET,
        "max_model_len": 500,
    }
    harness = Harness(SchedulerConfig(**(settings | config)), FixedDepth(0))  # type: ignore[arg-type]
    if priced:
        harness.scheduler.speculation = SpeculationControl(FixedDepth(0), costs())
    return harness


def chunks(plan: StepPlan) -> list[int]:
    """Rows of prompts."""
    return [work.num_tokens for work in plan.work if work.num_tokens > 1]


def start_decoding(harness: Harness, count: int = 1, **scheduling: float) -> list[Request]:
    requests = [
        harness.add(2, 200, scheduling=SchedulingParams(**scheduling))  # type: ignore[arg-type]
        for _ in range(count)
    ]
    harness.step_until(lambda: all(request.output_token_ids for request in requests))
    return requests


def test_one_long_prompt_does_not_fill_the_step() -> None:
    """A short one behind it is read beside it."""
    harness = harness_of(long_prefill_threshold=20)
    long, short = harness.add(200), harness.add(30)
    harness.step_until(lambda: short.output_token_ids)
    assert not long.output_token_ids
    harness.drain()
    assert max(rows for plan in harness.plans for rows in chunks(plan)) == 20


def test_a_step_with_prompts_is_as_short_as_decodes_need_it() -> None:
    """At 10 s and half a second a row, 40 seconds are 60 rows, however many prompts there are."""
    harness = harness_of(max_step_seconds=40.0)
    start_decoding(harness, 3)
    for _ in range(5):
        harness.add(300)
    plans = [harness.step() for _ in range(6)]
    assert [plan.num_rows for plan in plans] == [60] * 6
    assert all(len(plan.work) >= 4 for plan in plans), "every decode has its row"
    harness.drain()


@pytest.mark.parametrize("context", [4, 100, 200])
def test_what_decodes_read_of_their_context_leaves_prompts_less(context: int) -> None:
    prices = CostModel.from_functions(lambda rows: 10.0 + 0.5 * rows, per_context=0.02)
    harness = harness_of(max_step_seconds=40.0)
    harness.scheduler.speculation = SpeculationControl(FixedDepth(0), prices)
    requests = [harness.add(context, 200) for _ in range(3)]
    harness.step_until(lambda: all(request.output_token_ids for request in requests))
    prices = harness.scheduler.speculation.costs  # as they are known by now
    harness.add(300)
    plan = harness.step()
    read = sum(request.num_tokens for request in requests)
    assert prices is not None
    assert prices.target(plan.num_rows, read, 3) <= 40.0 < prices.target(plan.num_rows + 2, read, 3)
    harness.drain()


def test_prompts_without_room_wait_for_the_next_step() -> None:
    """A row of each would cost as much as a sequence, and be read again with the next."""
    harness = harness_of()
    for _ in range(4):
        harness.add(100)
    assert [chunks(harness.step()) for _ in range(4)] == [[100, 28], [72, 55], [45, 81], [19]]
    harness.drain()


def test_without_decodes_there_is_nothing_to_wait() -> None:
    harness = harness_of(max_step_seconds=20.0)
    harness.add(300)
    assert chunks(harness.step()) == [BUDGET]
    harness.drain()


def test_prompts_do_not_starve() -> None:
    """However short a step is wanted."""
    harness = harness_of(max_step_seconds=0.001)
    start_decoding(harness, 3)
    late = harness.add(100)
    plan = harness.step()
    assert chunks(plan) == [LEAST_ROWS]
    harness.step_until(lambda: late.output_token_ids, 100 // LEAST_ROWS + 1)
    harness.drain()


def test_without_prices_a_step_cannot_be_kept_short() -> None:
    harness = harness_of(priced=False, max_step_seconds=40.0)
    start_decoding(harness)
    harness.add(300)
    assert chunks(harness.step()) == [BUDGET - 1]
    harness.drain()


def test_a_request_that_wants_its_tokens_soon_keeps_steps_short_while_it_runs() -> None:
    harness = harness_of()
    (paced,) = start_decoding(harness, time_per_output_token=40.0)
    harness.add(400)
    assert harness.step().num_rows == 60
    harness.abort(paced)
    assert chunks(harness.step()) == [BUDGET]
    harness.drain()


def seconds_of_prompts(*paces: float, prompts: Sequence[int], prices: CostModel, **config: float) -> float:
    """That another tenant's prompts take beside one that decodes, as predicted, with requests that want such paces."""
    harness = harness_of(max_model_len=900, num_blocks=1024, **config)
    harness.scheduler.speculation = SpeculationControl(FixedDepth(0), prices)
    start_decoding(harness)
    for pace in paces:
        start_decoding(harness, time_per_output_token=pace)
    others = [harness.add(prompt, 200, tenant="other") for prompt in prompts]
    start = len(harness.plans)
    harness.step_until(lambda: all(request.output_token_ids for request in others))
    seconds = sum(prices.target(plan.num_rows, 0) for plan in harness.plans[start:])
    harness.drain()
    return seconds


@pytest.mark.parametrize("prompts", [(20,), (64,), (400,), (300, 30, 500)])
@pytest.mark.parametrize("free_rows", [8, 32, 64, 128])
@pytest.mark.parametrize("paces", [(1e-9,), (1e-9, 2e-9, 0.5)])
def test_a_pace_makes_prompts_of_others_take_twice_as_long_at_most(
    paces: tuple[float, ...], free_rows: int, prompts: tuple[int, ...]
) -> None:
    """However short it is, and however many want one; but for one step, since decodes have rows, and prompts ends."""
    prices = roofline(1.0, free_rows, 0.05)
    alone = seconds_of_prompts(*[1e9] * len(paces), prompts=prompts, prices=prices)
    step = prices.target(BUDGET, 0)
    assert seconds_of_prompts(*paces, prompts=prompts, prices=prices) <= 2.0 * alone + step


def test_a_pace_holds_as_far_as_prompts_keep_half_their_speed() -> None:
    """Full steps of 128 rows take 2 seconds: 64 tokens per second. With half of that, steps take one."""
    harness = harness_of()
    harness.scheduler.speculation = SpeculationControl(FixedDepth(0), roofline(1.0, 64, 0.05))
    (paced,) = start_decoding(harness, time_per_output_token=1e-9)
    harness.add(400)
    assert chunks(harness.step()) == [32]
    harness.abort(paced)
    harness.drain()


def test_the_servers_own_limit_is_kept_in_any_case() -> None:
    """A pace holds back of what that limit leaves."""
    harness = harness_of(max_step_seconds=1.0)
    harness.scheduler.speculation = SpeculationControl(FixedDepth(0), roofline(1.0, 64, 0.05))
    start_decoding(harness)
    harness.add(400)
    assert chunks(harness.step()) == [63]
    start_decoding(harness, time_per_output_token=1e-9)
    harness.add(400)
    assert sum(chunks(harness.step())) == 31, "two decode, which leaves 62"
    harness.drain()


def test_prompts_have_a_row_each_in_any_case() -> None:
    """As many decodes as there are places, and a budget of one row for each place."""
    harness = harness_of(max_num_seqs=4, max_num_batched_tokens=4)
    start_decoding(harness, 3)
    late = harness.add(30)
    harness.step_until(lambda: late.output_token_ids, 31)
    harness.drain()


@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, 2), (0.5, 1)])
def test_admissions_leave_blocks_free_for_those_that_run(watermark: float, admitted: int) -> None:
    harness = harness_of(num_blocks=40, watermark=watermark, max_model_len=160)
    harness.add(60, 60)
    harness.add(60, 60)
    harness.step()
    assert len(harness.scheduler.running) == admitted
    harness.drain()


def test_who_is_alone_may_have_them_all() -> None:
    harness = harness_of(num_blocks=40, watermark=0.9, max_model_len=160)
    request = harness.add(150, 10)
    harness.step()
    assert harness.scheduler.running
    harness.drain()
    assert request.num_preemptions == 0


def test_short_of_blocks_drafts_become_dear() -> None:
    """Before they become impossible."""
    harness = harness_of(num_blocks=20, max_num_seqs=2, max_model_len=80)
    harness.add(40, 40)
    harness.add(30, 9)
    prices = []
    while harness.scheduler.has_requests:
        harness.step()
        if harness.scheduler.running:
            prices.append(harness.scheduler.batch.slot_price)
    assert min(prices) == 0.0
    assert 0.0 < max(prices) <= 1.0
