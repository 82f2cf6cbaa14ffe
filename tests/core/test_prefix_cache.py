"""Prefixes are computed once: what is found, by whom, what it saves, and what is never found.

The scripted runner is the oracle of contents: it fails where a slot that is read does not hold the request's own token,
in the target's cache or in the draft's.
"""

from __future__ import annotations

import pytest

from core.harness import CyclingDepth, Harness, percent_right, prompt_of
from core.test_scheduler import both_lags
from paceline.core.config import PrefixScope, SchedulerConfig
from paceline.core.depth_policy import DepthPolicy, FixedDepth
from paceline.core.method import Method
from paceline.core.params import LogprobsParams
from paceline.core.prefix_cache import PrefixCache, first_key, next_key
from paceline.core.request import Request
from paceline.sim import reference_output

SIZE = 4
every_method = pytest.mark.parametrize("method", Method)


def harness_of(
    num_blocks: int = 64,
    scope: PrefixScope = PrefixScope.TENANT,
    method: Method = Method.NONE,
    policy: DepthPolicy | None = None,
    lag: int = 0,
    max_num_seqs: int = 4,
    budget: int = 64,
) -> Harness:
    config = SchedulerConfig(num_blocks, SIZE, max_num_seqs, budget, 400, method=method, prefix_cache=scope)
    return Harness(config, policy or FixedDepth(3), lag)


def served(harness: Harness, prompt: tuple[int, ...], max_tokens: int = 8, tenant: str = "") -> Request:
    """Add a request and run it to its end."""
    request = harness.add(prompt, max_tokens, tenant=tenant)
    harness.drain()
    return request


# -- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_tells_every_token_before_it() -> None:
    root = first_key("a")
    first = next_key(root, (1, 2, 3, 4))
    assert first == next_key(root, [1, 2, 3, 4])
    others = [next_key(root, (1, 2, 3, 5)), next_key(first_key("b"), (1, 2, 3, 4)), next_key(first, (1, 2, 3, 4))]
    assert len({first, *others}) == 4
    assert next_key(first, (5,)) != next_key(others[0], (5,))


def test_the_first_of_two_equal_blocks_is_known() -> None:
    cache = PrefixCache()
    cache.insert(b"k", 3)
    cache.insert(b"k", 5)
    assert cache.find([b"k", b"other"]) == [3]
    assert cache.num_drafted([3]) == 0
    cache.mark_drafted(b"k", 5)
    assert cache.find([b"k"]) == [5], "that has draft KV"
    cache.mark_drafted(b"k", 3)
    assert cache.num_drafted(cache.find([b"k"])) == 1
    cache.forget(3)
    cache.forget(5)
    cache.check_invariants()
    assert not len(cache)


# -- what is found ---------------------------------------------------------------------------------------------------


@both_lags
@every_method
def test_a_prompt_is_computed_once(lag: int, method: Method) -> None:
    """All but its last token, whose logits are wanted, and what does not fill a block."""
    harness = harness_of(method=method, lag=lag)
    prompt = prompt_of(21)
    served(harness, prompt)
    again = served(harness, prompt)
    assert again.num_cached_tokens == 20
    assert harness.works(again)[0].num_tokens == 1
    exact = served(harness, prompt[:20])
    assert exact.num_cached_tokens == 16


@both_lags
@every_method
def test_a_conversation_hits_its_whole_history(lag: int, method: Method) -> None:
    """Twenty turns: every block that was full, of prompts and of answers, is there at the next turn."""
    harness = harness_of(num_blocks=128, method=method, lag=lag)
    history: tuple[int, ...] = ()
    hits = full = 0
    for turn in range(20):
        history += prompt_of(7, salt=turn)
        request = served(harness, history, max_tokens=9)
        hits += request.num_cached_tokens
        history = request.all_token_ids
        full += (len(history) - 1) // SIZE * SIZE if turn < 19 else 0  # the newest token has no KV
    assert hits == full


@both_lags
def test_two_that_run_at_once_share(lag: int) -> None:
    harness = harness_of(lag=lag)
    first = harness.add(prompt_of(13), max_tokens=30)
    for _ in range(3):
        harness.step()
    second = harness.add(prompt_of(13), max_tokens=30)
    harness.step_until(lambda: second.first_token is not None)
    tables = [harness.scheduler.kv.table(request.request_id) for request in (first, second)]
    assert tables[0][:3] == tables[1][:3]
    assert not set(tables[0][3:]) & set(tables[1][3:])
    harness.drain()


@both_lags
def test_a_prefix_that_ends_within_a_block_hits_the_blocks_before(lag: int) -> None:
    harness = harness_of(lag=lag)
    served(harness, prompt_of(30))
    forked = prompt_of(30)[:17] + prompt_of(9, salt=1)
    assert served(harness, forked).num_cached_tokens == 16


@both_lags
def test_a_preempted_request_finds_what_is_left_of_its_own(lag: int) -> None:
    """Its emitted tokens included: nothing took its blocks meanwhile."""
    harness = Harness(SchedulerConfig(14, 2, 2, 24, 28), FixedDepth(0), lag)
    older, younger = harness.add(6, max_tokens=20), harness.add(4, max_tokens=16)
    harness.step_until(lambda: younger.num_preemptions)
    assert younger.output_token_ids
    harness.abort(older)
    harness.drain()
    *_, last = harness.admissions(younger)
    assert last.num_computed > 4
    assert younger.num_cached_tokens == 0, "told as of the first admission"


# -- what is never found ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "same", "other"),
    [(PrefixScope.TENANT, 20, 0), (PrefixScope.SHARED, 20, 20), (PrefixScope.OFF, 0, 0)],
)
def test_who_finds_whose(scope: PrefixScope, same: int, other: int) -> None:
    harness = harness_of(scope=scope)
    prompt = prompt_of(21)
    served(harness, prompt, tenant="a")
    assert served(harness, prompt, tenant="a").num_cached_tokens == same
    assert served(harness, prompt, tenant="b").num_cached_tokens == other


@both_lags
@pytest.mark.parametrize("percent", [0, 50])
def test_a_rejected_slot_is_never_cached(lag: int, percent: int) -> None:
    """Drafts that were wrong lie in the blocks for a while. Whoever continues the text finds the right tokens: the
    runner looks at every slot that is read.
    """
    harness = harness_of(method=Method.DRAFT_MODEL, policy=FixedDepth(6), lag=lag, num_blocks=256)
    harness.runner.draft_is_right = percent_right(percent)
    for salt in range(8):
        first = served(harness, prompt_of(9, salt), max_tokens=20)
        second = served(harness, first.all_token_ids, max_tokens=9)
        assert second.num_cached_tokens == (len(first.all_token_ids) - 1) // SIZE * SIZE
        assert harness.outputs[second.request_id] == reference_output(second.prompt_token_ids, 9)


def test_who_wants_logprobs_of_the_prompt_computes_it() -> None:
    harness = harness_of()
    prompt = prompt_of(21)
    served(harness, prompt)
    request = harness.add(prompt, logprobs=LogprobsParams(prompt=1))
    harness.drain()
    assert request.num_cached_tokens == 0
    assert harness.works(request)[0].num_tokens == 21
    assert served(harness, prompt).num_cached_tokens == 20, "others find it"


def test_what_is_overwritten_is_forgotten_the_oldest_first() -> None:
    harness = harness_of(num_blocks=12, max_num_seqs=1)
    old, new = prompt_of(17), prompt_of(17, salt=1)
    served(harness, old, max_tokens=4)
    served(harness, new, max_tokens=4)
    served(harness, prompt_of(9, salt=2), max_tokens=4)  # takes 3 of 12 blocks, 2 of them unused
    assert served(harness, new, max_tokens=4).num_cached_tokens == 16
    assert served(harness, old, max_tokens=4).num_cached_tokens < 16


# -- draft KV --------------------------------------------------------------------------------------------------------


@both_lags
def test_draft_kv_is_found_along(lag: int) -> None:
    harness = harness_of(method=Method.DRAFT_MODEL, lag=lag)
    prompt = prompt_of(21)
    served(harness, prompt)
    again = served(harness, prompt)
    assert harness.admissions(again)[0].num_draft_computed == 20
    assert all(work.draft_catch_up <= 2 for work in harness.works(again))


@both_lags
def test_case_19_missing_draft_kv_costs_the_draft_model_alone(lag: int) -> None:
    """Elsewhere a last block without the draft's state made the whole hit worthless. Here the target takes the hit, and
    the draft model reads from its own last block on.
    """
    policy = CyclingDepth((0,) * 10 + (3,) * 200)
    harness = harness_of(method=Method.DRAFT_MODEL, policy=policy, lag=lag)
    harness.scheduler.speculation.model_drafts = False  # as under load: prompts are not read along
    prompt = prompt_of(21)
    harness.add(prompt, max_tokens=4)
    harness.drain()
    harness.scheduler.speculation.model_drafts = False
    again = harness.add(prompt, max_tokens=40)
    harness.drain()
    (admission,) = harness.admissions(again)
    assert (admission.num_computed, admission.num_draft_computed) == (20, 0)
    assert sum(work.num_tokens for work in harness.works(again)[:1]) == 1
    assert again.counts.accepted == again.counts.drafted > 0
    third = served(harness, again.all_token_ids)
    (admission,) = harness.admissions(third)
    assert admission.num_computed >= admission.num_draft_computed >= 56, "what was caught up is known too"


# -- admission -------------------------------------------------------------------------------------------------------


def test_blocks_that_are_found_free_are_not_counted_twice() -> None:
    """They leave the free ones with the admission, so room for the others is what is left without them."""
    harness = harness_of(num_blocks=10, max_num_seqs=2)
    prompt = prompt_of(21)
    served(harness, prompt, max_tokens=4)
    long = harness.add(prompt_of(9, salt=1), max_tokens=20)
    harness.step()
    again = harness.add(prompt, max_tokens=12)
    harness.drain()
    assert again.num_cached_tokens == 20
    assert {long.request_id, again.request_id} <= harness.finished.keys()


def test_a_hit_needs_fewer_blocks() -> None:
    """With one of its blocks in use by another, a prompt fits where it would not alone."""
    harness = harness_of(num_blocks=12, max_num_seqs=2)
    prompt = prompt_of(25)
    first = harness.add(prompt, max_tokens=8)
    harness.step()
    harness.step()
    second = harness.add(prompt, max_tokens=4)
    harness.step()
    assert {first.request_id, second.request_id} == set(harness.scheduler.running)
    harness.drain()


def test_outputs_are_those_without_a_cache() -> None:
    outputs = []
    for scope in (PrefixScope.OFF, PrefixScope.SHARED):
        harness = harness_of(num_blocks=24, scope=scope, method=Method.DRAFT_MODEL)
        harness.runner.draft_is_right = percent_right(60)
        for index in range(12):
            harness.add(prompt_of(5 + index % 3 * 6, salt=index % 2), max_tokens=10)
            harness.step()
        harness.drain()
        outputs.append(harness.outputs)
    assert outputs[0] == outputs[1]
