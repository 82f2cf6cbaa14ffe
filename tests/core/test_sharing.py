"""Completions of one prompt: who computes it, who shares its blocks, and that nobody waits for good.

The harness checks at each admission that the request shares what it can; the runner, that what it shares is its own.
"""

from __future__ import annotations

from collections.abc import ValuesView

import pytest

from core.harness import Harness, always, never, percent_right, prompt_of
from core.test_scheduler import both_lags, harness_of, rows
from paceline.core.config import PrefixScope, SchedulerConfig
from paceline.core.depth_policy import FixedDepth
from paceline.core.method import Method
from paceline.core.plan import FinishReason
from paceline.core.request import Request, RequestStatus
from paceline.sim import reference_output

every_method = pytest.mark.parametrize("method", Method)


# -- how much is shared ----------------------------------------------------------------------------------------------


@both_lags
@every_method
@pytest.mark.parametrize(
    ("prompt_len", "num_shared"),
    [(1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)],  # less than a block, a block, several
)
def test_the_blocks_that_the_prompt_fills_are_shared(
    lag: int, method: Method, prompt_len: int, num_shared: int
) -> None:
    """All but the last token's, which everybody computes for its logits."""
    harness = harness_of(method=method, lag=lag, budget=64)
    leader, *followers = harness.add_group(4, prompt_len, max_tokens=9)
    harness.step_until(lambda: all(request.status is RequestStatus.RUNNING for request in followers))
    first = harness.scheduler.kv.table(leader.request_id)[:num_shared]
    tables = [harness.scheduler.kv.table(request_id) for request_id in harness.requests]
    assert {table[:num_shared] for table in tables} == {first}
    assert harness.num_in_use == num_shared + sum(len(table) - num_shared for table in tables)
    for request in harness.requests.values():
        assert request.num_cached_tokens == (0 if request is leader else 4 * num_shared)
    harness.drain()
    for request in followers:
        assert harness.works(request)[0].num_tokens == prompt_len - 4 * num_shared
    cached = [finished.stats.cached_prompt_tokens for finished in harness.finished.values() if finished.stats]
    assert sorted(cached) == [0, *[4 * num_shared] * 3]


@both_lags
@every_method
def test_sharing_saves_blocks_and_rows(lag: int, method: Method) -> None:
    def cost(shared: bool) -> tuple[int, int]:
        """Most blocks in use, and rows of prompts."""
        harness = harness_of(method=method, lag=lag, budget=100)
        prompt = prompt_of(21)
        if shared:
            harness.add_group(4, prompt, max_tokens=12)
        else:
            for _ in range(4):
                harness.add(prompt, max_tokens=12)
        most = 0
        while harness.scheduler.has_requests:
            harness.step()
            most = max(most, harness.num_in_use)
        harness.drain()
        assert all(tokens == reference_output(prompt, 12) for tokens in harness.outputs.values())
        return most, sum(work.num_tokens for plan in harness.plans for work in plan.work if work.num_tokens > 1)

    (blocks, prompt_rows), (blocks_alone, prompt_rows_alone) = cost(True), cost(False)
    assert blocks <= blocks_alone - 3 * 5 + 3  # the leader is a step or two ahead, and may hold a block more for it
    assert (prompt_rows, prompt_rows_alone) == (21, 4 * 21)


@both_lags
def test_followers_wait_for_the_result_that_computes_the_prompt(lag: int) -> None:
    """And not longer: chunks of 8, 8 and 5, and then the three others at once."""
    harness = harness_of(budget=8, lag=lag)
    leader, *followers = harness.add_group(4, 21, max_tokens=9)
    while len(harness.works(leader)) < 3:
        assert rows(harness.step()).keys() <= {leader.request_id}
    while harness.outstanding:
        harness.land()
    plan = harness.plan()
    assert rows(plan) == dict.fromkeys(harness.requests, 1)
    assert [admission.num_computed for admission in plan.admitted] == [20, 20, 20]
    harness.drain()
    assert len(followers) == 3


def test_a_sibling_that_comes_late_shares_at_once() -> None:
    harness = harness_of(budget=64)
    leader = harness.add(9, max_tokens=20)
    for _ in range(4):
        harness.step()
    late = harness.add(leader.prompt_token_ids, sibling=leader)
    plan = harness.step()
    assert rows(plan)[late.request_id] == 1
    assert plan.admitted[0].block_ids == harness.scheduler.kv.table(leader.request_id)[:2]
    harness.drain()


def test_a_sibling_that_has_ended_is_no_error() -> None:
    harness = harness_of()
    leader = harness.add(9, max_tokens=1)
    harness.drain()
    late = harness.add(leader.prompt_token_ids, sibling=leader)
    harness.drain()
    assert [admission.block_ids for admission in harness.admissions(late)] == [()]


def test_equal_prompts_of_different_requests_do_not_share() -> None:
    """What one client is told of cached tokens depends on no other."""
    harness = harness_of(budget=64)
    for _ in range(2):
        harness.add_group(2, prompt_of(9), max_tokens=9)
    harness.drain()
    assert [request.num_cached_tokens for request in harness.requests.values()] == [0, 8, 0, 8]
    first, second = (harness.admissions(harness.requests[follower])[0] for follower in (1, 3))
    assert not set(first.block_ids) & set(second.block_ids)


# -- the draft model -------------------------------------------------------------------------------------------------


@both_lags
def test_the_drafts_kv_is_shared_too(lag: int) -> None:
    harness = harness_of(method=Method.DRAFT_MODEL, lag=lag, budget=64)
    leader, *followers = harness.add_group(3, 13, max_tokens=21)
    harness.drain()
    for request in followers:
        (admission,) = harness.admissions(request)
        assert (admission.num_computed, admission.num_draft_computed) == (12, 12)
        first, *_ = harness.works(request)
        assert (first.num_tokens, first.draft_catch_up, first.num_drafts) == (1, 1, 3), "its first row drafts already"
    assert leader.counts.accepted == leader.counts.drafted > 0
    assert all(request.counts.accepted == request.counts.drafted > 0 for request in followers)


@both_lags
def test_draft_kv_that_the_source_does_not_have_is_caught_up(lag: int) -> None:
    """The source does not draft: its blocks hold the target's KV only."""
    harness = harness_of(method=Method.DRAFT_MODEL, lag=lag, budget=64)
    leader = harness.add(13, max_tokens=20, max_depth=0)
    drafting = harness.add(leader.prompt_token_ids, max_tokens=12, sibling=leader)
    harness.drain()
    (admission,) = harness.admissions(drafting)
    assert (admission.num_computed, admission.num_draft_computed) == (12, 0)
    assert harness.works(drafting)[0].draft_catch_up == 13
    assert drafting.counts.accepted == drafting.counts.drafted > 0


def test_catching_up_on_shared_tokens_keeps_the_budget() -> None:
    """The rows that the draft model reads of a shared prompt are nobody's target rows, and count all the same."""
    harness = harness_of(method=Method.DRAFT_MODEL, budget=8, num_blocks=100)
    leader = harness.add(29, max_tokens=20, max_depth=0)
    drafting = harness.add(leader.prompt_token_ids, max_tokens=20, sibling=leader)
    harness.drain()
    reading = [work for work in harness.works(drafting) if work.draft_catch_up > 1 and not work.num_drafts]
    assert len(reading) >= 3, "the gap did fit one step"
    assert drafting.counts.accepted == drafting.counts.drafted > 0


# -- the leader goes -------------------------------------------------------------------------------------------------


@both_lags
@every_method
def test_one_token_each(lag: int, method: Method) -> None:
    """A completion of one token ends as its prompt is computed: there is nothing to wait for, and nothing to share."""
    harness = harness_of(method=method, lag=lag, budget=64)
    harness.add_group(4, 9, max_tokens=1)
    assert rows(harness.plan()) == dict.fromkeys(range(4), 9)
    harness.drain()
    assert [request.num_cached_tokens for request in harness.requests.values()] == [0] * 4


@both_lags
def test_a_leader_whose_first_token_ends_it(lag: int) -> None:
    """Its blocks are gone when the next is admitted, who leads then."""
    prompt = prompt_of(9)
    harness = harness_of(lag=lag, budget=64)
    leader = harness.add(prompt, stop_ids=tuple(reference_output(prompt, 1)))
    second, third = (harness.add(prompt, max_tokens=9, sibling=leader) for _ in range(2))
    harness.drain()
    assert next(iter(harness.finished)) == leader.request_id
    assert [r.num_cached_tokens for r in (leader, second, third)] == [0, 0, 8]
    finish = harness.finished[leader.request_id].finish
    assert finish is not None
    assert finish.reason is FinishReason.STOP_TOKEN


@both_lags
@every_method
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("budget", [8, 64])
def test_a_leader_aborted_in_its_prompt(lag: int, method: Method, planned: bool, budget: int) -> None:
    """The next computes the prompt anew, and the last shares with that one."""
    harness = harness_of(method=method, lag=lag, budget=budget, long_prefill_threshold=8)
    leader, second, third = harness.add_group(3, 21, max_tokens=9)
    harness.step()
    while planned and len(harness.outstanding) <= lag and harness.plan().work:
        pass
    assert leader.status is RequestStatus.RUNNING
    assert not leader.output_token_ids
    harness.abort(leader)
    harness.drain()
    assert harness.finished.keys() == {second.request_id, third.request_id}
    assert (second.num_cached_tokens, third.num_cached_tokens) == (0, 20)


@both_lags
@every_method
def test_a_leader_aborted_while_others_hold_its_blocks(lag: int, method: Method) -> None:
    harness = harness_of(method=method, lag=lag, budget=64)
    leader, second, third = harness.add_group(3, 13, max_tokens=30)
    harness.step_until(lambda: third.output_token_ids)
    shared = harness.scheduler.kv.table(leader.request_id)[:3]
    harness.abort(leader)
    stranger = harness.add(20, max_tokens=9)
    harness.step()
    harness.step()
    assert stranger.status is RequestStatus.RUNNING
    assert not set(shared) & set(harness.scheduler.kv.table(stranger.request_id)), "a block in use was given away"
    for request, count in ((second, 1), (third, 0)):
        assert {harness.scheduler.kv.pool.ref_counts[block] for block in shared} == {count + 1}
        harness.abort(request)
    harness.drain()


@both_lags
@pytest.mark.parametrize("budget", [8, 64])
def test_a_follower_aborted_in_the_queue_holds_up_nobody(lag: int, budget: int) -> None:
    harness = harness_of(budget=budget, lag=lag, long_prefill_threshold=8)
    leader, second, third = harness.add_group(3, 21, max_tokens=9)
    harness.step()
    harness.abort(second)
    harness.drain()
    assert third.num_cached_tokens == 20
    assert (leader.siblings.running, leader.siblings.held) == ({}, [])


def test_who_waits_for_the_prompt_has_one_turn_however_many_leave_the_queue_meanwhile() -> None:
    harness = harness_of(budget=64, max_queued=200, long_prefill_threshold=8)
    leader, second, third = harness.add_group(3, 21, max_tokens=9)
    others = [harness.add(40) for _ in range(150)]
    harness.step()
    for request in reversed(others):
        if request.status is RequestStatus.WAITING:
            harness.abort(request)
    harness.drain()
    assert [len(harness.admissions(request)) for request in (leader, second, third)] == [1, 1, 1]


# -- short of blocks -------------------------------------------------------------------------------------------------


@both_lags
@every_method
@pytest.mark.parametrize("leader_lives", [False, True])
def test_a_preempted_follower_shares_again_if_it_can(lag: int, method: Method, leader_lives: bool) -> None:
    """Beside the prompt's last token, it computes what it has emitted; or all anew, if nobody else has the prompt."""
    config = SchedulerConfig(12, 2, 3, 24, 24, method=method, prefix_cache=PrefixScope.OFF)
    harness = Harness(config, FixedDepth(1), lag, never)
    stranger, leader = harness.add(4, max_tokens=20, max_depth=0), harness.add(9, max_tokens=12, max_depth=0)
    follower = harness.add(leader.prompt_token_ids, max_tokens=12, sibling=leader)
    harness.step_until(lambda: follower.num_preemptions)
    assert follower.output_token_ids
    assert stranger.status is leader.status is RequestStatus.RUNNING
    harness.abort(stranger if leader_lives else leader)
    harness.drain()
    first, second, *_ = harness.admissions(follower)
    assert (first.num_computed, second.num_computed) == (8, 8 if leader_lives else 0)
    assert len(second.token_ids) > 9
    assert follower.num_cached_tokens == 8, "told as of the first admission"


@both_lags
@every_method
def test_a_leader_preempted_in_its_prompt(lag: int, method: Method) -> None:
    """An older request takes the blocks back; when the leader returns, its followers still wait for it and share."""
    harness = harness_of(
        num_blocks=13, block_size=2, max_model_len=24, max_num_seqs=3, method=method, lag=lag, budget=3
    )
    older = harness.add(4, max_tokens=18)
    harness.step_until(lambda: len(harness.scheduler.kv.table(older.request_id)) >= 4)
    leader, follower = harness.add_group(2, 13, max_tokens=4)
    harness.step_until(lambda: leader.num_preemptions)
    assert not leader.output_token_ids
    assert follower.status is RequestStatus.WAITING
    assert [request.request_id for request in harness.scheduler.waiting] == [leader.request_id, follower.request_id]
    harness.drain()
    assert harness.admissions(follower)[0].num_computed == 12
    assert older.num_preemptions == 0


@both_lags
@every_method
def test_a_leader_that_is_alone_is_computed_anew_after_a_preemption(lag: int, method: Method) -> None:
    harness = harness_of(num_blocks=10, block_size=2, max_model_len=20, max_num_seqs=2, method=method, lag=lag)
    harness.add(3, max_tokens=17)
    leader = harness.add(7, max_tokens=9)
    harness.step_until(lambda: leader.num_preemptions)
    late = harness.add(leader.prompt_token_ids, max_tokens=9, sibling=leader)
    harness.drain()
    assert [admission.num_computed for admission in harness.admissions(leader)] == [0] * (1 + leader.num_preemptions)
    assert harness.admissions(late)


@both_lags
@every_method
@pytest.mark.parametrize("n", [2, 4])
def test_a_pool_for_one_serves_a_group(lag: int, method: Method, n: int) -> None:
    """The tightest pool there is: everybody ends, whoever has to wait for whom."""
    harness = harness_of(num_blocks=4, block_size=4, max_num_seqs=4, max_model_len=16, method=method, lag=lag)
    for prompt_len in (13, 1, 5, 9):
        harness.add_group(n, prompt_len, max_tokens=None)
    harness.drain()


# -- the queue -------------------------------------------------------------------------------------------------------


@both_lags
def test_who_waits_behind_a_group_starts_while_its_prompt_is_read(lag: int) -> None:
    """Followers, who wait for it, hold nobody up; once it is read, they are first in line again."""
    config = SchedulerConfig(
        num_blocks=64,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        long_prefill_threshold=4,
        prefix_cache=PrefixScope.OFF,
    )
    harness = Harness(config, FixedDepth(0), lag)
    leader, follower = harness.add_group(2, 20, max_tokens=12)  # five steps to read the prompt
    others = [harness.add(3, max_tokens) for max_tokens in (7, 30, 30)]
    last = harness.add(3)
    assert rows(harness.step()) == {leader.request_id: 4, **dict.fromkeys([other.request_id for other in others], 3)}
    harness.step_until(lambda: follower.status is RequestStatus.RUNNING)
    assert follower.num_cached_tokens == 16
    assert last.status is RequestStatus.WAITING
    harness.drain()


@pytest.mark.parametrize("short_of", ["places", "blocks", "nothing"])
def test_nobody_looks_at_all_who_wait_for_their_prompts(short_of: str) -> None:
    """Who may be thousands, in every step until these are read."""

    class Running(dict[int, Request]):
        looks = 0

        def values(self) -> ValuesView[Request]:
            self.looks += 1
            return super().values()

    config = SchedulerConfig(
        num_blocks=60 if short_of == "blocks" else 256,
        block_size=4,
        max_num_seqs=2 if short_of == "places" else 8,
        max_model_len=200,
        long_prefill_threshold=4,
    )
    harness = Harness(config, FixedDepth(0))
    for _ in range(2):
        group = harness.add_group(20, 100)
        running = group[0].siblings.running = Running()
    harness.add(100)  # finds no room behind the groups where blocks are short
    harness.step_until(lambda: group[0].status is RequestStatus.RUNNING)
    harness.step()
    before = running.looks
    for _ in range(10):
        harness.step()
    assert group[0].num_computed_tokens < 100
    assert running.looks - before <= 10
    harness.drain()


def test_a_group_larger_than_the_batch_comes_in_turn() -> None:
    harness = harness_of(max_num_seqs=2, budget=32)
    group = harness.add_group(6, 9, max_tokens=4)
    harness.drain()
    assert list(harness.finished) == [request.request_id for request in group]
    assert sum(request.num_cached_tokens for request in group) >= 8


@both_lags
@pytest.mark.parametrize("seed", range(5))
def test_sharing_changes_no_completion(lag: int, seed: int) -> None:
    """Each of a group's completions is that of a request on its own; only how it is computed differs."""
    config = SchedulerConfig(16, 4, 6, 24, 64, method=Method.DRAFT_MODEL)
    harness = Harness(config, FixedDepth(3), lag, percent_right(60, seed) if seed else always)
    for prompt_len in (6, 17, 4):
        harness.add_group(3, prompt_len, max_tokens=15)
    harness.drain()
    assert harness.num_preemptions, "memory was never short"
    for request in harness.requests.values():
        assert harness.outputs[request.request_id] == reference_output(request.prompt_token_ids, 15)


# -- the books -------------------------------------------------------------------------------------------------------


def test_the_books_notice_different_prompts_in_one_block() -> None:
    harness = harness_of(budget=64)
    first, second = harness.add(9, max_tokens=9), harness.add(9, max_tokens=9)
    harness.step()
    kv = harness.scheduler.kv
    kv.free(second.request_id)
    kv.share(second.request_id, kv.table(first.request_id)[:2])
    kv.grow(second.request_id, 12)
    with pytest.raises(AssertionError, match="prefixes differ"):
        harness.scheduler.check_invariants()


def test_the_books_notice_a_shared_block_that_is_still_written_to() -> None:
    harness = harness_of(budget=64)
    leader, follower = harness.add_group(2, 10, max_tokens=9)
    harness.step()
    harness.step()
    harness.scheduler.check_invariants()
    kv = harness.scheduler.kv
    kv.free(follower.request_id)
    kv.share(follower.request_id, kv.table(leader.request_id)[:3])
    with pytest.raises(AssertionError, match="is open"):
        harness.scheduler.check_invariants()


def test_the_books_notice_a_block_at_two_places() -> None:
    harness = harness_of(budget=64)
    leader, follower = harness.add_group(2, 10, max_tokens=9)
    harness.step()
    harness.step()
    kv = harness.scheduler.kv
    kv._tables[follower.request_id][:2] = reversed(kv._tables[leader.request_id][:2])
    with pytest.raises(AssertionError, match="shared at different places"):
        harness.scheduler.check_invariants()
