"""Bugs that other engines shipped, one test per case; the numbers are those of our survey of their issue trackers.

Most of the proof is in the scripted runner, which fails when a row reads a KV slot that does not hold the sequence's
own token, in the target's cache or in the draft's. The assertions here show that the dangerous situation came up.
"""

from __future__ import annotations

import pytest

from core.harness import GREEDY, CyclingDepth, Harness, always, never, percent_right, rows_of
from paceline.core.acceptance import Residual
from paceline.core.config import SchedulerConfig
from paceline.core.depth_policy import FixedDepth
from paceline.core.method import Method
from paceline.core.params import (
    Constraints,
    LogprobsParams,
    SamplingParams,
    SpeculationParams,
    StopParams,
    Verification,
)
from paceline.core.plan import FinishReason
from paceline.core.stopping import cut_run
from paceline.sim import next_token, reference_output

both_lags = pytest.mark.parametrize("lag", [0, 1])


def config(**changes: object) -> SchedulerConfig:
    """A roomy configuration with a draft model."""
    settings: dict[str, object] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "method": Method.DRAFT_MODEL,
    }
    return SchedulerConfig(**(settings | changes))  # type: ignore[arg-type]


@both_lags
def test_case_1_draft_kv_after_full_acceptance(lag: int) -> None:
    """The last draft of a fully accepted run was never fed to the draft model, nor was the bonus token: the draft's KV
    kept a hole, and everything drafted behind it was made from garbage."""
    harness = Harness(config(), FixedDepth(3), lag, always)
    request = harness.add(5, max_tokens=25)
    harness.drain()
    assert request.counts.accepted_by_position == [6, 6, 6]  # 1 + 6 * 4 tokens
    if lag == 0:
        decodes = [work for work in harness.works(request) if work.num_drafts]
        # The first reads the newest token; then, each time, the last draft and the bonus token.
        assert [work.draft_catch_up for work in decodes] == [1, 2, 2, 2, 2, 2]


@both_lags
def test_case_2_draft_kv_after_steps_without_drafts(lag: int) -> None:
    """Steps at depth 0 moved the target on and not the draft; and when drafting came back, acceptance collapsed."""
    harness = Harness(config(), CyclingDepth((0, 0, 0, 3)), lag, always)
    request = harness.add(5, max_tokens=40)
    harness.drain()
    drafting = [work for work in harness.works(request) if work.num_drafts]
    assert len(drafting) >= 4
    assert all(work.draft_catch_up >= 4 for work in drafting)
    assert request.counts.accepted == request.counts.drafted >= 12


@both_lags
def test_case_2_catch_up_in_pieces(lag: int) -> None:
    """The same, with a gap larger than a step's budget: the draft reads what fits, and drafts once it has read all."""
    harness = Harness(config(max_num_batched_tokens=6, max_num_seqs=2), CyclingDepth((0,) * 20 + (3,) * 100), lag)
    request = harness.add(1, max_tokens=40)
    harness.drain()
    works = harness.works(request)
    reading = [work for work in works if work.draft_catch_up > 1 and not work.num_drafts]
    assert len(reading) >= 3, "the gap did not fit one step"
    assert request.counts.accepted == request.counts.drafted > 0


@both_lags
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_case_3_slots_for_drafts_are_reserved_first(lag: int, block_size: int) -> None:
    """With fewer than k slots left in the last block, drafts were written over somebody else's block."""
    harness = Harness(config(block_size=block_size), FixedDepth(5), lag)
    for prompt_len in (3, 4, 5, 6):
        harness.add(prompt_len, max_tokens=20)
    while harness.scheduler.has_requests:
        harness.step()
        for request in harness.scheduler.running.values():
            assert harness.scheduler.kv.capacity(request.request_id) >= request.most_tokens - 1
    harness.drain()
    blocks = [work.new_block_ids for plan in harness.plans for work in plan.work if work.num_drafts]
    assert any(blocks), "no draft ever needed a block"


def test_case_3_drafts_shrink_before_anyone_is_preempted() -> None:
    """Two requests whose tokens just fit: with drafts at depth 6 they would not, so depth gives way and nobody goes."""
    harness = Harness(config(num_blocks=10, block_size=2, max_num_seqs=2), FixedDepth(6))
    requests = [harness.add(2, max_tokens=8), harness.add(2, max_tokens=8)]
    harness.drain()
    assert harness.num_preemptions == 0
    granted = {work.num_drafts for request in requests for work in harness.works(request)}
    assert granted & {1, 2, 3, 4}, "depth never had to give way"


@both_lags
@pytest.mark.parametrize("right", [always, never])
def test_case_4_no_leak_of_over_allocated_slots(lag: int, right: object) -> None:
    """Slots taken for drafts that were rejected, or cut off by the end, were missing from what was given back."""
    prompt_end = reference_output((1, 2, 3), 6)[-1]
    harness = Harness(config(block_size=1), FixedDepth(8), lag, right)  # type: ignore[arg-type]
    harness.add((1, 2, 3), max_tokens=30, stop_ids=(prompt_end,))
    harness.add(3, max_tokens=4)
    harness.drain()
    assert harness.scheduler.kv.num_free_blocks == 64
    assert set(harness.scheduler.kv.pool.ref_counts) == {0}


@both_lags
def test_case_5_the_budget_counts_draft_and_catch_up_rows(lag: int) -> None:
    """Prompt chunks were sized as if drafts took no rows, and steps grew past the budget that buffers were made for."""
    limit = 12
    harness = Harness(config(max_num_batched_tokens=limit, max_num_seqs=4), CyclingDepth((0, 0, 4)), lag)
    for _ in range(4):
        harness.add(9, max_tokens=12)
        for _ in range(4):
            harness.step()
    harness.drain()
    totals = [rows_of(plan) for plan in harness.plans]
    assert max(totals) == limit, "the budget was never tight"
    assert any(plan.num_rows < rows_of(plan) for plan in harness.plans), "nothing had to catch up"


def test_case_5_what_is_being_read_is_not_charged_again() -> None:
    """The other way round: rows charged for what the outstanding step feeds to the draft anyway are lost to drafts."""
    depths = []
    for lag in (0, 1):
        harness = Harness(config(max_num_batched_tokens=40), FixedDepth(3), lag)
        request = harness.add(39, max_tokens=20)
        harness.drain()
        works = harness.works(request)[1:]
        assert all(work.draft_catch_up <= 2 for work in works)
        depths.append([work.num_drafts for work in works if work.num_drafts])
    assert depths[0] == depths[1]


def test_case_6_abort_between_plan_and_result() -> None:
    """A result that came after the abort met stale draft ids, or the request that had taken its place."""
    harness = Harness(config(num_blocks=12, max_num_seqs=2, max_model_len=32), FixedDepth(3), lag=1)
    first, second = harness.add(9, max_tokens=20), harness.add(9, max_tokens=20)
    for _ in range(3):
        harness.step()
    assert len(first.pending) == len(second.pending) == 1
    before = list(first.output_token_ids)
    freed = set(harness.scheduler.kv.table(first.request_id))
    harness.abort(first)
    third = harness.add(20, max_tokens=8)
    plan = harness.plan()  # while the step with the aborted request is still running
    assert [admission.request_id for admission in plan.admitted] == [third.request_id]
    assert freed & set(harness.scheduler.kv.table(third.request_id)), "no block was reused"
    harness.drain()
    assert first.output_token_ids == before, "a late result was booked"
    assert harness.finished.keys() == {second.request_id, third.request_id}


def test_case_6_preemption_between_plan_and_result() -> None:
    """Late output of a preempted request was lost or emitted twice, and its old draft count crashed the next step."""
    harness = Harness(config(num_blocks=5, max_num_seqs=2, max_model_len=20), FixedDepth(3), lag=1)
    first, second = harness.add(6, max_tokens=12), harness.add(6, max_tokens=12)
    while not second.num_preemptions:
        harness.step()
    kept = len(second.output_token_ids)
    assert not second.pending
    while not harness.finished:
        harness.step()
    assert second.output_token_ids[:kept] == reference_output(second.prompt_token_ids, kept)
    harness.drain()
    assert first.num_preemptions == 0, "the older one goes first"


def test_case_6_a_result_of_before_the_preemption_keeps_its_tokens() -> None:
    """As above, with the preemption decided while the victim's step is running: its tokens count, its KV does not."""
    harness = Harness(config(num_blocks=5, max_num_seqs=2, max_model_len=20), FixedDepth(3), lag=1)
    harness.add(6, max_tokens=12)
    second = harness.add(6, max_tokens=12)
    while not second.num_preemptions:
        if len(harness.outstanding) == 2:
            harness.land()
        harness.plan()
    assert len(second.pending) == 1
    assert second in harness.scheduler.waiting
    before = len(second.output_token_ids)
    while second.pending:
        harness.land()
    assert len(second.output_token_ids) > before
    assert second.num_computed_tokens == second.num_draft_computed == 0
    harness.drain()


@both_lags
def test_case_7_a_cancelled_request_leaves_nothing_behind(lag: int) -> None:
    """A request that took over the slot of a cancelled one inherited its speculation state."""
    harness = Harness(config(num_blocks=6, max_num_seqs=1, max_model_len=24), FixedDepth(3), lag, never)
    first = harness.add(8, max_tokens=12)
    for _ in range(5):
        harness.step()
    assert first.residuals[Method.DRAFT_MODEL].shift < 0
    harness.abort(first)
    harness.runner.draft_is_right = always
    second = harness.add(8, max_tokens=13)
    assert second.residuals == {Method.DRAFT_MODEL: Residual()}
    harness.drain()
    assert second.counts.accepted_by_position == [3, 3, 3]


@both_lags
def test_case_7_abort_in_the_final_step(lag: int) -> None:
    """A request aborted while its last step ran ended twice, or never."""
    harness = Harness(config(), FixedDepth(3), lag)
    request = harness.add(4, max_tokens=1)
    harness.plan()
    harness.abort(request)
    harness.land()
    assert not harness.finished
    assert not harness.scheduler.abort(request.request_id)
    harness.drain()


@both_lags
@pytest.mark.parametrize(("max_tokens", "reason"), [(7, FinishReason.MAX_TOKENS), (None, FinishReason.CONTEXT_LENGTH)])
def test_case_8_depth_keeps_the_limits_of_request_and_model(
    lag: int, max_tokens: int | None, reason: FinishReason
) -> None:
    """Near max_tokens or the model's length, drafts ran past the last position."""
    harness = Harness(config(max_model_len=16), FixedDepth(8), lag)
    request = harness.add(6, max_tokens=max_tokens)
    while harness.scheduler.has_requests:
        harness.step()
        assert request.num_tokens <= request.max_total_tokens
        assert all(work.num_drafts <= request.max_total_tokens - 1 - 6 - 1 for work in request.pending)
    harness.drain()
    assert harness.finished[request.request_id].finish.reason is reason  # type: ignore[union-attr]
    # One step for the prompt, which emits one token; then one step emits all that is left, and not a draft more.
    assert [work.num_drafts for work in harness.works(request)][:2] == [0, request.max_output_tokens - 2]


@both_lags
@pytest.mark.parametrize("right", [always, never])
def test_case_8_the_draft_models_own_shorter_context(lag: int, right: object) -> None:
    """A draft model with a shorter context than the target was run beyond it; drafting has to fade out instead."""
    longest = 16
    harness = Harness(config(max_draft_len=longest), FixedDepth(4), lag, right)  # type: ignore[arg-type]
    request, long = harness.add(9, max_tokens=30), harness.add(20, max_tokens=10)
    harness.drain()
    assert all(result.num_draft_computed <= longest for result in harness.results)
    assert any(work.num_drafts for work in harness.works(request))
    assert not any(work.num_drafts or work.draft_catch_up for work in harness.works(long))


@both_lags
def test_case_9_eos_inside_the_accepted_run(lag: int) -> None:
    """An EOS among the accepted drafts was passed over, because only the last token of a run was looked at."""
    prompt = (11, 12, 13)
    eos = reference_output(prompt, 3)[-1]  # the second of four tokens that one step accepts
    harness = Harness(config(eos_token_ids=(eos,)), FixedDepth(3), lag)
    request, other = harness.add(prompt, max_tokens=20), harness.add(prompt, max_tokens=20, ignore_eos=True)
    harness.drain()
    assert harness.outputs[request.request_id] == reference_output(prompt, 3)
    finish = harness.finished[request.request_id].finish
    assert finish is not None
    assert (finish.reason, finish.stop_token_id) == (FinishReason.EOS, eos)
    assert len(harness.outputs[other.request_id]) == 20


@pytest.mark.parametrize(
    ("run", "emitted", "reason"),
    [
        ((1, 2, 9), (1, 2, 9), FinishReason.EOS),  # the last that fits: the stop wins over the length
        ((1, 9, 3, 4), (1, 9), FinishReason.EOS),
        ((1, 2, 3, 9), (1, 2, 3), FinishReason.MAX_TOKENS),  # behind the limit there is no EOS
        ((1, 2, 3), (1, 2, 3), FinishReason.MAX_TOKENS),
        ((1, 2), (1, 2), None),
    ],
)
def test_case_10_stop_and_length_in_one_run(
    run: tuple[int, ...], emitted: tuple[int, ...], reason: FinishReason | None
) -> None:
    """A stop inside the budget was reported as a length, and tokens behind the stop were emitted."""
    request = Harness(config()).add(5, max_tokens=3)
    cut, finish = cut_run(request, run, eos_token_ids=(9,))
    assert cut == emitted
    assert (finish.reason if finish else None) is reason


@both_lags
@pytest.mark.parametrize("at", range(1, 9))
def test_case_10_stop_at_the_limit_of_a_run(lag: int, at: int) -> None:
    """The same in whole runs: a stop id at the last token that fits is a stop, and one behind it was never reached."""
    prompt = (11, 12, 13)
    eos = reference_output(prompt, at)[-1]
    harness = Harness(config(eos_token_ids=(eos,)), FixedDepth(7), lag)
    last, behind = harness.add(prompt, max_tokens=at), harness.add(prompt, max_tokens=max(1, at - 1))
    harness.drain()
    reasons = [finished.finish.reason for _, finished in sorted(harness.finished.items()) if finished.finish]
    assert reasons == [FinishReason.EOS, FinishReason.EOS if at == 1 else FinishReason.MAX_TOKENS]
    assert harness.outputs[last.request_id] == reference_output(prompt, at)
    assert harness.outputs[behind.request_id] == reference_output(prompt, max(1, at - 1))


@both_lags
@pytest.mark.parametrize("depth", [0, 1, 3, 8])
@pytest.mark.parametrize("min_tokens", [0, 1, 4, 5, 9])
def test_case_12_min_tokens_are_tokens_and_not_steps(lag: int, depth: int, min_tokens: int) -> None:
    """Counted in steps, a completion went on as many times too long as a step has tokens; whatever the depth, the stop
    that counts is the first behind `min_tokens` tokens, inside an accepted run or not."""
    prompt = (11, 12, 13)
    tokens = reference_output(prompt, 20)
    stops = {tokens[0], tokens[4], tokens[9]}
    assert [index for index, token in enumerate(tokens) if token in stops] == [0, 4, 9]
    harness = Harness(config(eos_token_ids=(tokens[0], tokens[9])), FixedDepth(depth), lag)
    request = harness.add(prompt, max_tokens=20, stop_ids=(tokens[4],), min_tokens=min_tokens)
    harness.drain()
    end = min(index + 1 for index in (0, 4, 9) if index >= min_tokens)
    assert harness.outputs[request.request_id] == tokens[:end]
    finish = harness.finished[request.request_id].finish
    assert finish is not None
    assert finish.stop_token_id == tokens[end - 1]


@both_lags
def test_case_20_chunked_prefill_feeds_the_draft_and_does_not_draft(lag: int) -> None:
    """Drafting behind an unfinished chunk verified nonsense; not feeding the draft its chunks left it blind."""
    harness = Harness(config(max_num_batched_tokens=8), FixedDepth(3), lag)
    request = harness.add(21, max_tokens=10)
    for _ in range(3 + lag):
        harness.step()
    chunks = harness.works(request)[:3]
    assert [(work.num_tokens, work.samples, work.num_drafts) for work in chunks] == [
        (8, False, 0),
        (8, False, 0),
        (5, True, 0),
    ]
    assert request.num_draft_computed >= 21
    harness.drain()
    assert request.counts.drafted == request.counts.accepted >= 6


@both_lags
@pytest.mark.parametrize("method", [Method.NGRAM, Method.DRAFT_MODEL])
def test_case_21_the_last_token_is_not_drafted_for(lag: int, method: Method) -> None:
    """A request with one token left drafted k more, for nothing: +10 % on short completions."""
    harness = Harness(config(), FixedDepth(3), lag, never)
    one, few = harness.add(1, max_tokens=1, method=method), harness.add(5, max_tokens=4, method=method)
    harness.drain()
    assert [work.num_drafts for work in harness.works(one)] == [0]
    assert all(work.draft_catch_up == 0 for work in harness.works(one)), "the draft read a prompt for nothing"
    if lag == 0:
        assert [work.num_drafts for work in harness.works(few)] == [0, 2, 1, 0]


def test_case_22_truncated_drafts_are_not_counted_as_accepted() -> None:
    """Drafts behind the end of a completion were counted as accepted, though nobody was sent them."""
    prompt = (11, 12, 13)
    stop = reference_output(prompt, 3)[-1]
    harness = Harness(config(), FixedDepth(5))
    request = harness.add(prompt, max_tokens=20, stop_ids=(stop,))
    harness.drain()
    stats = harness.finished[request.request_id].stats
    assert stats is not None
    assert (stats.completion_tokens, stats.drafted_tokens, stats.accepted_tokens) == (3, 5, 2)
    assert stats.accepted_by_position == (1, 1)


def test_case_22_rates_are_per_draft_that_was_proposed() -> None:
    """Accepted drafts were divided by the depth asked for, although an n-gram often proposes fewer or none."""
    harness = Harness(config(method=Method.NGRAM), FixedDepth(4), max_ngram=1)
    request = harness.add(5, max_tokens=13)
    harness.drain()
    assert all(work.num_drafts == 4 for work in harness.works(request)[1:3])
    assert request.counts.drafted == request.counts.accepted == 6


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_case_22_the_estimate_does_not_fall_as_depth_grows(depth: int) -> None:
    """Accepted over drafted falls arithmetically with the depth, which looks like worse drafts."""

    harness = Harness(config(num_blocks=512, max_model_len=400), FixedDepth(depth), right=percent_right(80))
    requests = [harness.add(5, max_tokens=300) for _ in range(12)]
    harness.drain()
    model = harness.scheduler.speculation.drafters[Method.DRAFT_MODEL, Verification.GREEDY].acceptance
    estimates = [model.survivals("", request.residuals[Method.DRAFT_MODEL], 1)[0] for request in requests]
    assert sum(estimates) / len(estimates) == pytest.approx(0.8, abs=0.05)


ODD: dict[str, dict[str, object]] = {
    "no drafts": {"speculation": SpeculationParams(Method.NONE)},
    "another method": {"speculation": SpeculationParams(Method.NGRAM)},
    "depth 0": {"speculation": SpeculationParams(max_depth=0)},
    "a lower depth": {"speculation": SpeculationParams(max_depth=1)},
    "a higher depth": {"speculation": SpeculationParams(min_depth=6)},
    "another rule": {
        "sampling": SamplingParams(),
        "speculation": SpeculationParams(verification=Verification.TOKEN_WISE),
    },
    "a seed": {"sampling": SamplingParams(seed=3)},
    "penalties": {"sampling": SamplingParams(temperature=0.0, frequency_penalty=1.0)},
    "min_tokens": {"constraints": Constraints(min_tokens=5)},
    "bad words": {"constraints": Constraints(bad_words=((5, 6),))},
    "logprobs": {"logprobs": LogprobsParams(5, 5)},
}


@both_lags
@pytest.mark.parametrize("odd", ODD)
def test_case_23_an_option_is_its_requests_own(lag: int, odd: str) -> None:
    """One request with an option that speculation did not serve turned speculation off for the whole batch."""

    def others(option: dict[str, object] | None) -> list[list[tuple[int, int, int, Method]]]:
        harness = Harness(config(num_blocks=256), FixedDepth(3), lag)
        requests = [harness.add(length, max_tokens=20) for length in (5, 9)]
        if option is not None:
            arguments = {"sampling": GREEDY, "speculation": SpeculationParams()} | option
            stop = StopParams(max_tokens=20)
            odd_one = harness.scheduler.add(2, (1, 2, 3), stop=stop, now=0.0, **arguments)  # type: ignore[arg-type]
            harness.requests[2] = odd_one
        requests.append(harness.add(3, max_tokens=20))
        harness.drain()
        return [[(w.num_tokens, w.num_drafts, w.draft_catch_up, w.method) for w in harness.works(r)] for r in requests]

    assert others(ODD[odd]) == others({}) == others(None)


@both_lags
def test_case_23_several_completions_of_one_do_not_change_the_others(lag: int) -> None:
    """n > 1 was what turned it off."""
    harness = Harness(config(num_blocks=256), FixedDepth(3), lag)
    alone = harness.add(13, max_tokens=20)
    group = harness.add_group(4, 13, max_tokens=20)
    harness.drain()
    depths = [[work.num_drafts for work in harness.works(request)] for request in (alone, *group)]
    assert depths[0] == depths[1]
    assert depths[2] == depths[3] == depths[4]
    assert all(request.counts.drafted == request.counts.accepted > 10 for request in (alone, *group))


def test_the_stream_of_accepted_tokens_is_the_models() -> None:
    """The premise of this file: the scripted model's tokens depend on all that matters here, token and position."""
    assert next_token((3, 5)) != next_token((3, 3, 5))
    assert reference_output((3, 5), 3) == [next_token((3, 5)), *reference_output((3, 5, next_token((3, 5))), 2)]
