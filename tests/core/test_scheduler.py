"""The scheduler's decisions, step by step, on plans small enough to read."""

from __future__ import annotations

import pytest

from core.harness import GREEDY, Harness, never, prompt_of
from paceline.core.config import PrefixScope, SchedulerConfig
from paceline.core.depth_policy import FixedDepth
from paceline.core.method import Method
from paceline.core.params import SpeculationParams, StopParams
from paceline.core.plan import Finish, FinishReason, SequenceResult, StepPlan, StepResult
from paceline.core.request import Request, RequestStatus
from paceline.errors import AlreadyExists, InvalidArgument, ResourceExhausted, Unavailable
from paceline.sim import reference_output

both_lags = pytest.mark.parametrize("lag", [0, 1])


def harness_of(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    budget: int = 16,
    max_model_len: int = 64,
    max_queued: int = 100,
    method: Method = Method.NONE,
    depth: int = 3,
    lag: int = 0,
    prefix_cache: PrefixScope = PrefixScope.OFF,
    long_prefill_threshold: int | None = None,
) -> Harness:
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        max_queued=max_queued,
        method=method,
        prefix_cache=prefix_cache,
        long_prefill_threshold=long_prefill_threshold,
    )
    return Harness(config, FixedDepth(depth), lag)


def rows(plan: StepPlan) -> dict[int, int]:
    """Known tokens computed, by request."""
    return {work.request_id: work.num_tokens for work in plan.work}


# -- arrival ---------------------------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    harness = harness_of(max_num_seqs=2, budget=8)
    for _ in range(5):
        harness.add(4, max_tokens=3)
    harness.drain()
    assert list(harness.finished) == [0, 1, 2, 3, 4]
    admitted = [admission.request_id for plan in harness.plans for admission in plan.admitted]
    assert admitted == [0, 1, 2, 3, 4]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    """The second in line needs more blocks than are left; the third, which would fit, waits behind it."""
    harness = harness_of(num_blocks=8)
    harness.add(12, max_tokens=8)
    harness.step()
    big, small = harness.add(24, max_tokens=2), harness.add(1, max_tokens=2)
    while not harness.finished:
        assert big.status is small.status is RequestStatus.WAITING
        harness.step()
    harness.drain()
    assert list(harness.finished) == [0, 1, 2]


@pytest.mark.parametrize(("blocks_left", "admitted"), [(2, False), (3, True)])
def test_admission_leaves_a_block_to_each_running_request(blocks_left: int, admitted: bool) -> None:
    harness = harness_of(num_blocks=5 + blocks_left, block_size=2, method=Method.NONE)
    harness.add(5, max_tokens=2)
    harness.add(3, max_tokens=2)
    harness.step()
    assert harness.scheduler.kv.num_free_blocks == blocks_left
    third = harness.add(1, max_tokens=2)
    harness.plan()
    assert (third.status is RequestStatus.RUNNING) is admitted


def test_no_more_than_max_num_seqs_run() -> None:
    harness = harness_of(max_num_seqs=2)
    for _ in range(3):
        harness.add(2, max_tokens=4)
    assert rows(harness.step()) == {0: 2, 1: 2}
    assert rows(harness.step()) == {0: 1, 1: 1}
    harness.drain()


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(13, 4), (1, None)])
def test_what_never_fits_is_refused_at_once(prompt_len: int, max_tokens: int | None) -> None:
    harness = harness_of(num_blocks=4, block_size=4, max_model_len=17)
    with pytest.raises(ResourceExhausted, match="17 tokens can never fit the KV cache: 16 tokens"):
        harness.add(prompt_len, max_tokens)
    assert not harness.scheduler.has_requests
    assert len(harness.scheduler.waiting) == 0


def test_what_just_fits_is_served() -> None:
    harness = harness_of(num_blocks=4, block_size=4, max_model_len=17, method=Method.NGRAM)
    harness.add(13, max_tokens=3)
    harness.add(1, max_tokens=15)
    harness.drain()


def test_a_full_queue_refuses_and_recovers() -> None:
    harness = harness_of(max_num_seqs=1, max_queued=2)
    harness.add(2, max_tokens=2)
    harness.step()
    harness.add(2, max_tokens=2)
    harness.add(2, max_tokens=2)
    with pytest.raises(Unavailable, match="2 requests are waiting, and max_queued is 2"):
        harness.add(2, max_tokens=2)
    harness.drain()
    harness.add(2, max_tokens=2)
    harness.drain()


@pytest.mark.parametrize(("prompt_len", "allowed"), [(0, "at least one token"), (64, "at most 63 tokens")])
def test_prompts_without_tokens_or_without_room_are_refused(prompt_len: int, allowed: str) -> None:
    harness = harness_of(max_model_len=64)
    with pytest.raises(InvalidArgument, match=allowed) as caught:
        harness.add(prompt_len)
    assert caught.value.field == "prompt"
    harness.add(63, max_tokens=100)
    harness.drain()


def test_a_live_id_is_not_taken_twice() -> None:
    harness = harness_of()
    harness.add(2)
    with pytest.raises(AlreadyExists):
        harness.scheduler.add(0, (1,), GREEDY, StopParams(), SpeculationParams(), 0.0)


# -- the budget ------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks() -> None:
    harness = harness_of(budget=8)
    request = harness.add(21, max_tokens=2)
    harness.drain()
    assert [(w.num_tokens, w.samples) for w in harness.works(request)] == [(8, False), (8, False), (5, True), (1, True)]


def test_decodes_run_beside_the_chunks_of_a_long_prompt() -> None:
    harness = harness_of(budget=8, num_blocks=100)
    streams = [harness.add(2, max_tokens=20) for _ in range(3)]
    harness.step()
    long = harness.add(40, max_tokens=2)
    for chunk in (5, 5, 5, 5, 5, 5, 5, 5):
        assert rows(harness.step()) == {0: 1, 1: 1, 2: 1, long.request_id: chunk}
    assert all(len(request.output_token_ids) == 9 for request in streams)
    harness.drain()


def test_an_older_prompt_does_not_stop_younger_decodes() -> None:
    """Preempted while others were not, the old come back first and long; a row stays for each that stands behind."""
    harness = harness_of(budget=6, num_blocks=100)
    long = harness.add(9, max_tokens=20)
    harness.add(3, max_tokens=20)
    harness.step()
    assert rows(harness.step()) == {0: 3, 1: 3}
    # The long one falls back to its start, as a lost cache would make it.
    long.num_computed_tokens = 0
    harness.runner.sequences[0].num_computed = 0
    assert rows(harness.step()) == {0: 5, 1: 1}
    assert rows(harness.step()) == {0: 5, 1: 1}
    harness.drain()


def test_prompts_share_what_the_budget_leaves() -> None:
    harness = harness_of(budget=10)
    harness.add(6, max_tokens=2)
    harness.add(6, max_tokens=2)
    assert rows(harness.step()) == {0: 6, 1: 4}
    assert rows(harness.step()) == {0: 1, 1: 2}
    harness.drain()


def test_drafts_take_only_the_rows_that_are_left() -> None:
    harness = harness_of(budget=8, method=Method.NGRAM, depth=4)
    harness.add(2, max_tokens=30)
    harness.step()
    harness.add(5, max_tokens=2)
    plan = harness.step()
    assert [(w.num_tokens, w.num_drafts) for w in plan.work] == [(1, 2), (5, 0)]
    harness.drain()


# -- short of blocks -------------------------------------------------------------------------------------------------


@both_lags
def test_the_youngest_is_preempted_and_keeps_its_tokens_and_its_place(lag: int) -> None:
    harness = harness_of(num_blocks=8, block_size=2, max_num_seqs=3, lag=lag)
    first, second = harness.add(3, max_tokens=11), harness.add(3, max_tokens=11)
    third = harness.add(3, max_tokens=6)
    while not second.num_preemptions:
        harness.step()
    harness.add(1, max_tokens=2)
    assert second.status is RequestStatus.PREEMPTED
    assert [request.request_id for request in harness.scheduler.waiting][:2] == [1, 2]
    kept = len(second.output_token_ids)
    assert kept >= 2
    harness.drain()
    assert first.num_preemptions == 0
    assert third.num_preemptions >= 1
    back = [a for plan in harness.plans for a in plan.admitted if a.request_id == 1][-1]
    assert back.token_ids[:3] == second.prompt_token_ids
    assert list(back.token_ids[3:]) == second.output_token_ids[: len(back.token_ids) - 3]
    assert len(back.token_ids) - 3 >= kept
    assert next(iter(harness.finished)) == 0


def test_a_preempted_request_is_released_before_it_is_admitted_again() -> None:
    harness = harness_of(num_blocks=5, block_size=2, max_num_seqs=2)
    harness.add(3, max_tokens=7)
    harness.add(3, max_tokens=7)
    harness.drain()
    assert harness.num_preemptions
    mirrored: set[int] = set()
    for plan in harness.plans:
        assert mirrored.issuperset(plan.released)
        mirrored.difference_update(plan.released)
        for admission in plan.admitted:
            assert admission.request_id not in mirrored
            mirrored.add(admission.request_id)


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    """The victim's slots for rejected drafts would let it back in at once, only to be the next victim."""
    harness = harness_of(num_blocks=16, block_size=1, max_num_seqs=2, depth=7)
    harness.runner.draft_is_right = never
    harness.add(2, max_tokens=14)
    victim = harness.add(2, max_tokens=14, method=Method.NGRAM)
    while not victim.num_preemptions:
        room = harness.scheduler.kv.capacity(victim.request_id) - victim.num_tokens
        plan = harness.step()
    assert room >= 2
    assert not plan.admitted
    harness.drain()


@both_lags
@pytest.mark.parametrize("method", list(Method))
def test_a_pool_for_one_serves_many_in_turn(lag: int, method: Method) -> None:
    """The tightest pool there is: no deadlock, whatever is outstanding."""
    harness = harness_of(num_blocks=4, block_size=4, max_num_seqs=4, max_model_len=16, method=method, lag=lag)
    for prompt_len in (1, 5, 9, 13, 2, 7):
        harness.add(prompt_len, max_tokens=None)
    harness.drain()


# -- one plan outstanding --------------------------------------------------------------------------------------------


def test_a_plan_without_work_is_not_outstanding() -> None:
    harness = harness_of()
    assert harness.plan() == StepPlan(0, (), (), ())
    assert not harness.outstanding
    harness.add(2, max_tokens=1)
    assert harness.plan().step_id == 0
    assert harness.plan().work == ()  # its one token is on the way
    harness.land()
    assert harness.plan() == StepPlan(1, (), (), ())


def test_releases_wait_for_a_plan_that_is_executed() -> None:
    harness = harness_of()
    request = harness.add(2, max_tokens=1)
    harness.step()
    assert harness.plan().released == ()
    harness.add(2, max_tokens=1)
    assert harness.plan().released == (request.request_id,)
    harness.land()
    assert request.request_id not in harness.runner.sequences


def test_two_plans_without_a_result_between_them() -> None:
    harness = harness_of(lag=1, method=Method.DRAFT_MODEL)
    request = harness.add(6, max_tokens=20)
    first, second = harness.plan(), harness.plan()
    assert [(w.num_tokens, w.samples, w.num_drafts) for w in (*first.work, *second.work)] == [
        (6, True, 0),
        (1, True, 3),
    ]
    assert (request.num_tokens, request.most_tokens, request.num_to_compute) == (6, 6 + 1 + 4, 1)
    assert harness.scheduler.kv.capacity(request.request_id) >= 10
    with pytest.raises(AssertionError, match="more than one plan is outstanding"):
        harness.scheduler.schedule(9.0)
    harness.land()
    assert (request.num_tokens, request.most_tokens) == (7, 11)
    harness.drain()


def test_chunks_of_a_prompt_are_planned_ahead() -> None:
    harness = harness_of(lag=1, budget=8)
    harness.add(20, max_tokens=3)
    assert [rows(harness.plan()), rows(harness.plan())] == [{0: 8}, {0: 8}]
    harness.land()
    assert rows(harness.plan()) == {0: 4}
    harness.drain()


def test_a_preempted_request_comes_back_when_its_outstanding_result_is_in() -> None:
    """Until then nobody knows what it has to compute anew, even if there is room for it."""
    harness = harness_of(num_blocks=6, block_size=1, lag=1)
    first, second = harness.add(2, max_tokens=2), harness.add(2, max_tokens=4)
    harness.plan()
    harness.plan()
    harness.land()
    assert harness.plan().work == ()
    assert second.status is RequestStatus.PREEMPTED
    harness.abort(first)
    assert harness.plan().work == ()
    harness.land()
    (admission,) = harness.plan().admitted
    assert admission.token_ids == second.all_token_ids
    assert len(second.output_token_ids) == 2
    harness.drain()


@pytest.mark.parametrize("accepts", [True, False])
def test_nothing_is_planned_behind_a_certain_end(accepts: bool) -> None:
    """With one token to come and its step on the way, there is nothing to plan; with two, there may be."""
    harness = harness_of(lag=1, method=Method.NGRAM)
    if not accepts:
        harness.runner.draft_is_right = never
    request = harness.add(6, max_tokens=3)
    harness.plan()
    harness.land()
    assert not request.surely_ends
    plan = harness.plan()
    assert [w.num_drafts for w in plan.work] == [1]
    assert not request.surely_ends  # one token is out; two if the draft is accepted, else one, may still come
    plan = harness.plan()
    assert [w.num_drafts for w in plan.work] == [0]
    harness.land()
    assert (request.request_id in harness.finished) is accepts
    harness.drain()
    assert harness.outputs[0] == reference_output(prompt_of(6, 0), 3)


def test_a_draft_model_that_was_left_behind_reads_all_of_it() -> None:
    """Where a step had no memory for its drafts, the plan behind it did not know; the next one does."""
    harness = harness_of(lag=1, depth=2, method=Method.DRAFT_MODEL)
    request = harness.add(8, max_tokens=50)
    for _ in range(4):
        harness.step()
    behind = request.num_tokens - request.num_draft_computed
    request.num_draft_computed -= 5  # as its runner tells, of a step whose drafts were dropped
    assert [work.num_drafts for work in request.pending] == [2]
    assert request.draft_gap >= behind + 5
    harness.drain()


def test_results_come_in_the_order_of_their_plans() -> None:
    harness = harness_of(lag=1)
    harness.add(6)
    first, second = harness.plan(), harness.plan()
    harness.runner.execute(first)
    result = harness.runner.execute(second)
    with pytest.raises(AssertionError):
        harness.scheduler.update(first, result, 1.0)


# -- abort -----------------------------------------------------------------------------------------------------------


def is_waiting(harness: Harness, request: Request) -> bool:
    return request.status is RequestStatus.WAITING


def is_in_prefill(harness: Harness, request: Request) -> bool:
    return 0 < request.num_computed_tokens < len(request.prompt_token_ids)


def is_decoding(harness: Harness, request: Request) -> bool:
    return len(request.output_token_ids) >= 2


def is_preempted(harness: Harness, request: Request) -> bool:
    return request.status is RequestStatus.PREEMPTED


def is_back(harness: Harness, request: Request) -> bool:
    return request.num_preemptions > 0 and request.status is RequestStatus.RUNNING


@both_lags
@pytest.mark.parametrize("stage", [is_waiting, is_in_prefill, is_decoding, is_preempted, is_back])
@pytest.mark.parametrize("planned", [False, True])
def test_abort_at_any_stage(lag: int, stage: object, planned: bool) -> None:
    """Its blocks are free at once, nothing more is heard of it, and the other request ends as if alone."""
    harness = harness_of(
        num_blocks=10, block_size=2, max_num_seqs=2, budget=5, max_model_len=20, method=Method.DRAFT_MODEL, lag=lag
    )
    other, request = harness.add(4, max_tokens=14), harness.add(8, max_tokens=12)
    for _ in range(100):
        if stage(harness, request):  # type: ignore[operator]
            break
        harness.step()
    assert stage(harness, request)  # type: ignore[operator]
    while planned and len(harness.outstanding) <= lag and harness.plan().work:
        pass
    held = len(harness.scheduler.kv.table(request.request_id))
    free = harness.scheduler.kv.num_free_blocks
    harness.abort(request)
    assert harness.scheduler.kv.num_free_blocks == free + held
    assert request.status is RequestStatus.FINISHED
    assert not harness.scheduler.abort(request.request_id)
    harness.drain()
    assert harness.finished.keys() == {other.request_id}


def test_abort_of_a_stranger_is_no_error() -> None:
    assert not harness_of().scheduler.abort(77)


def test_an_aborted_request_makes_room_for_the_next() -> None:
    harness = harness_of(max_num_seqs=1)
    first = harness.add(4, max_tokens=50)
    second = harness.add(4, max_tokens=2)
    harness.step()
    harness.abort(first)
    plan = harness.plan()
    assert plan.released == (first.request_id,)
    assert rows(plan) == {second.request_id: 4}


# -- the account -----------------------------------------------------------------------------------------------------


def test_the_account_of_a_request() -> None:
    harness = harness_of(max_num_seqs=1, method=Method.NGRAM)
    harness.add(4, max_tokens=2)  # one step for the prompt, one for the second token
    request = harness.add(5, max_tokens=9)
    harness.drain()
    stats = harness.finished[request.request_id].stats
    assert stats is not None
    assert (stats.prompt_tokens, stats.completion_tokens, stats.method) == (5, 9, Method.NGRAM)
    assert (stats.drafted_tokens, stats.accepted_tokens, stats.accepted_by_position) == (6, 6, (2, 2, 2))
    assert (stats.queue_seconds, stats.time_to_first_token, stats.total_seconds) == (3.0, 3.0, 5.0)
    assert stats.preemptions == 0


def test_a_completion_without_a_token_has_no_first_one() -> None:
    """A grammar may have a dead end right behind the prompt."""
    harness = harness_of()
    request = harness.add(4)
    plan = harness.plan()
    dead_end = SequenceResult(request.request_id, finish=Finish(FinishReason.DEAD_END))
    [output] = harness.scheduler.update(plan, StepResult(plan.step_id, (dead_end,)), now=2.0)
    assert output.finish == dead_end.finish
    assert request.first_token is None


def test_each_request_may_choose_its_method_and_bounds() -> None:
    harness = harness_of(method=Method.DRAFT_MODEL, budget=40)
    default, ngram = harness.add(4, max_tokens=12), harness.add(4, max_tokens=12, method=Method.NGRAM)
    off = harness.add(4, max_tokens=12, method=Method.NONE)
    shallow = harness.add(4, max_tokens=12, max_depth=1)
    harness.step()
    plan = harness.step()
    assert [(w.request_id, w.method, w.num_drafts) for w in plan.work] == [
        (default.request_id, Method.DRAFT_MODEL, 3),
        (ngram.request_id, Method.NGRAM, 3),
        (off.request_id, Method.NONE, 0),
        (shallow.request_id, Method.DRAFT_MODEL, 1),
    ]
    harness.drain()


def test_a_lower_bound_lifts_what_the_policy_wants() -> None:
    harness = harness_of(method=Method.NGRAM, depth=0)
    request = harness.add(4, max_tokens=12, min_depth=2)
    harness.step()
    assert [w.num_drafts for w in harness.step().work] == [2]
    harness.drain()
    assert request.counts.accepted == request.counts.drafted > 0
