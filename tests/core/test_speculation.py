"""Between scheduler and policy: who is offered what, what is learned from results, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from core.harness import Harness, always, never, prompt_of
from paceline.core.acceptance import Residual
from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.config import PrefixScope, SchedulerConfig
from paceline.core.cost_model import CostModel, StepShape
from paceline.core.depth import NOTHING, Chosen, DepthCandidate, StepLoad
from paceline.core.depth_policy import DepthPolicy, FixedDepth
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SchedulingParams, SpeculationParams, StopParams, Verification
from paceline.core.plan import SequenceResult, SequenceWork, StepPlan, StepTimes
from paceline.core.request import Request, RequestStatus
from paceline.core.sequence import Sequence
from paceline.core.speculation import MAX_TENANTS, SpeculationControl
from paceline.core.speculation_counts import SpeculationCounts
from paceline.sim import ScriptedRunner, reference_output

GREEDY = SamplingParams(temperature=0.0)
PASS = 0.5  # seconds of a draft pass


def costs() -> CostModel:
    """10 seconds, half a second for every row, half a second for a pass of the draft model."""
    return CostModel.from_functions(lambda rows: 10.0 + 0.5 * rows, lambda sequences: PASS)


def crowded() -> CostModel:
    """Ten rows wait for memory together, and each behind them costs a tenth of a step."""
    return CostModel.from_functions(lambda rows: max(10.0, float(rows)), lambda sequences: PASS)


def config(**changes: object) -> SchedulerConfig:
    return SchedulerConfig(**{"num_blocks": 512, "max_model_len": 900, "method": Method.DRAFT_MODEL, **changes})  # type: ignore[arg-type]


class Bench(Harness):
    """A harness whose control tells seconds, and whose drafters may differ in how often they are right."""

    def __init__(
        self,
        policy: DepthPolicy,
        right: Callable[[int, int], bool] = always,
        ngram_right: Callable[[int, int], bool] | None = None,
        lag: int = 0,
        prices: CostModel | None = None,
        **changes: object,
    ) -> None:
        super().__init__(config(**changes), policy, lag, right)
        self.scheduler.speculation = SpeculationControl(policy, prices or costs())
        if ngram_right is not None:
            self.runner = _TwoDrafters(self.config, right, ngram_right)

    @property
    def control(self) -> SpeculationControl:
        return self.scheduler.speculation

    def add_for(self, tenant: str, max_tokens: int = 40, sampling: SamplingParams = GREEDY) -> Request:
        request_id = len(self.requests)
        request = self.scheduler.add(
            request_id,
            (1, 2, 3),
            sampling,
            StopParams(max_tokens=max_tokens),
            SpeculationParams(),
            0.0,
            scheduling=SchedulingParams(tenant),
        )
        self.requests[request_id] = request
        return request


class _TwoDrafters(ScriptedRunner):
    """Says by the method whether a draft is right."""

    def __init__(
        self, config: SchedulerConfig, right: Callable[[int, int], bool], ngram_right: Callable[[int, int], bool]
    ) -> None:
        super().__init__(config.num_blocks, config.block_size, right)
        self._right = {Method.DRAFT_MODEL: right, Method.NGRAM: ngram_right, Method.NONE: right}

    def _draft(self, sequence: Sequence, work: SequenceWork) -> list[int]:
        self.draft_is_right = self._right[work.method]
        return super()._draft(sequence, work)

    def _verify(self, work: SequenceWork, drafts: list[int]):  # type: ignore[no-untyped-def]
        self.draft_is_right = self._right[Method.NGRAM]  # of which only what is scored is asked here
        return super()._verify(work, drafts)

    def times(self, plan: StepPlan) -> StepTimes:
        """What `costs` tells, of a single request: else the price of time would rise and rise."""
        passes = sum(work.num_drafts for work in plan.work if work.method is Method.DRAFT_MODEL)
        target = costs().target(plan.num_rows, 0)
        return StepTimes(draft=PASS * passes, verify=target, total=target + PASS * passes)


# -- seconds -----------------------------------------------------------------------------------------------------------


def test_what_drafts_save_is_what_their_tokens_would_have_taken_less_what_they_took() -> None:
    bench = Bench(FixedDepth(3))
    request = bench.add(5, max_tokens=9)
    bench.drain()
    # Two verify steps of 4 tokens: 1 row, which takes 10.5 s, for each; instead of 4 rows and 3 passes.
    counts = request.counts
    assert (counts.verify_steps, counts.emitted, counts.depths) == (2, 8, [0, 0, 0, 2])
    assert counts.saved_seconds == pytest.approx(2 * (3 * 10.5 - 3 * 0.5 - 3 * PASS))
    assert counts.rejected_seconds == 0


def test_rejected_drafts_are_paid_by_their_owner() -> None:
    right = {0: always, 1: never}
    bench = Bench(FixedDepth(2), right=lambda request_id, position: right[request_id](request_id, position))
    good, bad = bench.add(5, max_tokens=61), bench.add(5, max_tokens=21)
    bench.drain()
    assert good.counts.rejected_seconds == 0
    # Each of its steps: two rows, and its half of the two passes.
    assert bad.counts.rejected_seconds == pytest.approx(20 * (2 * 0.5 + 2 * PASS / 2), rel=0.2)
    assert bad.counts.saved_seconds == pytest.approx(-bad.counts.rejected_seconds)
    assert good.counts.saved_seconds > 0


def test_totals_are_the_sum_of_tenants() -> None:
    bench = Bench(FixedDepth(3), right=lambda request_id, position: position % 3 > 0)
    requests = [bench.add_for(tenant) for tenant in ("a", "b", "a")]
    bench.drain()
    for name in ("verify_steps", "emitted", "drafted", "accepted", "saved_seconds", "rejected_seconds"):
        total = getattr(bench.control.totals, name)
        assert sum(getattr(counts, name) for counts in bench.control.tenants.values()) == pytest.approx(total)
        assert sum(getattr(request.counts, name) for request in requests) == pytest.approx(total)


def test_without_a_cost_model_no_seconds_are_told() -> None:
    harness = Harness(config(), FixedDepth(3))
    request = harness.add(5, max_tokens=20)
    harness.drain()
    assert (request.counts.saved_seconds, request.counts.rejected_seconds) == (0.0, 0.0)
    assert request.counts.drafted > 0


def test_tenants_are_forgotten_one_by_one() -> None:
    bench = Bench(FixedDepth(1))
    for number in range(MAX_TENANTS + 3):
        bench.add_for(f"tenant {number}", max_tokens=2)
    bench.drain()
    assert len(bench.control.tenants) == MAX_TENANTS
    assert "tenant 0" not in bench.control.tenants


# -- learning ----------------------------------------------------------------------------------------------------------


def survival(bench: Bench, tenant: str) -> float:
    """What a new request of the tenant would be expected to have accepted."""
    return bench.control.drafters[Method.DRAFT_MODEL, Verification.GREEDY].acceptance.survivals(
        tenant, Request(99, (1,), bench.requests[0].params, StopParams(), SpeculationParams(), 0.0,
                        methods=(Method.DRAFT_MODEL,), max_total_tokens=9).residuals[Method.DRAFT_MODEL], 1
    )[0]  # fmt: skip


def test_a_request_starts_from_its_tenants_estimate() -> None:
    bench = Bench(FixedDepth(3), right=lambda request_id, position: request_id % 2 == 0)
    for number in range(12):
        bench.add_for(("good", "bad")[number % 2])
    bench.drain()
    assert survival(bench, "good") > 0.8
    assert survival(bench, "bad") < 0.3


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0, presence_penalty=1.0)])
def test_what_only_the_target_sees_teaches_nothing_about_others(sampling: SamplingParams) -> None:
    bench = Bench(FixedDepth(3), right=never)
    before = None
    for _ in range(6):
        request = bench.add_for("a", sampling=sampling)
        before = survival(bench, "a") if before is None else before
    bench.drain()
    assert request.residuals[Method.DRAFT_MODEL].shift < 0
    assert survival(bench, "a") == before


class _Matches(_TwoDrafters):
    """n-grams whose matches are so long, by the length of the text."""

    def __init__(self, config: SchedulerConfig, match: Callable[[int], int], right: Callable[[int, int], bool]) -> None:
        super().__init__(config, right, right)
        self._match = match

    def _verify(self, work: SequenceWork, drafts: list[int]) -> SequenceResult:
        result = super()._verify(work, drafts)
        result.match = self._match(len(self.sequences[work.request_id])) if work.scores_ngram else 0
        return result


@pytest.mark.parametrize("lag", [0, 1])
def test_ngrams_draft_where_they_have_something_to_propose(lag: int) -> None:
    bench = Bench(FixedDepth(3), method=Method.NGRAM, lag=lag)
    bench.runner = _Matches(bench.config, lambda length: length % 3 == 0, always)
    request = bench.add(5, max_tokens=200)
    bench.drain()
    length, lengths, asked = 5, list[int](), {True: [0, 0], False: [0, 0]}
    for index, (work, result) in enumerate(zip(bench.works(request), bench.results, strict=True)):
        lengths.append(length)
        known = lengths[index - lag] if index >= lag else 0  # as of the last result that was in when it was planned
        if known > 5:
            asked[known % 3 == 0][work.num_drafts > 0] += 1
        length += len(result.token_ids)
    drafted, idle = asked[True], asked[False]
    # The last tokens have no room for drafts.
    assert drafted[1] > 10 >= drafted[0]
    assert not idle[1]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_planned_ahead_teaches_what_others_do(depth: int, lag: int) -> None:
    """Of matches as they are when it runs: one that has gone by then is no news of those that have not."""
    bench = Bench(FixedDepth(depth), method=Method.NGRAM, lag=lag)
    bench.runner = _Matches(
        bench.config, lambda length: 3 * (length % 2), lambda request_id, position: position % 2 == 1
    )
    request = bench.add(6, max_tokens=100)
    bench.drain()
    acceptance = bench.control.drafters[Method.NGRAM, Verification.GREEDY].acceptance
    assert any(work.num_drafts for work in bench.works(request)) == (depth > 0)
    assert acceptance.survivals("", Residual(), 1, agreed=2)[0] > 0.8


@pytest.mark.parametrize("depth", [0, 1])
def test_what_follows_a_match_is_known_by_its_length(depth: int) -> None:
    """Drafted or only scored: long matches go on, short ones do not."""

    def match(length: int) -> int:
        return 1 + 5 * (length % 3 > 0)

    bench = Bench(FixedDepth(depth), method=Method.NGRAM)
    bench.runner = _Matches(bench.config, match, lambda request_id, position: match(position) > 1)
    request = bench.add(6, max_tokens=300)
    bench.drain()
    acceptance, own = bench.control.drafters[Method.NGRAM, Verification.GREEDY].acceptance, Residual()
    short, long = (acceptance.survivals("", own, 1, agreed=agreed)[0] for agreed in (0, 5))
    assert short < 0.2 < 0.8 < long
    assert request.counts.verify_steps > 100


def test_ngrams_are_offered_for_what_the_text_holds_now() -> None:
    """Deep behind a long match, not at all behind a short one."""
    bench = Bench(AdaptiveDepth(costs()), method=Method.NGRAM)
    bench.runner = matches = _Matches(
        bench.config, lambda length: 1 + 11 * (length % 50 > 25), lambda _, position: position % 50 > 25
    )
    request = bench.add(6, max_tokens=800)
    depths: dict[bool, list[int]] = {True: [], False: []}
    while bench.scheduler.requests:
        is_long = request.match > 1
        if len(matches.sequences.get(0, ())) > 400:
            report = bench.control.report([request])
            assert (report.requests[0].acceptance[Method.NGRAM] > 0.8) is is_long
        plan = bench.plan()
        if len(matches.sequences.get(0, ())) > 400:
            depths[is_long].append(plan.work[0].num_drafts)
        bench.land()
    assert np.mean(depths[True]) > 6 > 0.5 > np.mean(depths[False])


def test_a_prompts_last_row_is_no_label() -> None:
    """What stood before it was not looked at: its match is not known. Prompts of more rows are no labels either."""
    for prompt in (1, 6):
        bench = Bench(FixedDepth(0), method=Method.NGRAM)
        bench.add(prompt, max_tokens=2)
        bench.step()
        assert bench.results[0].scored
        assert not bench.control.drafters[Method.NGRAM, Verification.GREEDY].acceptance.is_observed
        bench.step()
        assert bench.control.drafters[Method.NGRAM, Verification.GREEDY].acceptance.is_observed


def test_nothing_is_scored_for_who_may_not_draft() -> None:
    bench = Bench(FixedDepth(0), method=Method.NGRAM)
    requests = [bench.add(6, max_tokens=4, max_depth=depth) for depth in (0, 1)]
    bench.drain()
    assert [any(work.scores_ngram for work in bench.works(request)) for request in requests] == [False, True]


def test_forgetting_is_complete() -> None:
    bench = Bench(FixedDepth(3), right=never)
    bench.add(5, max_tokens=20)
    bench.drain()
    bench.control.forget()
    assert bench.control.totals == SpeculationCounts()
    assert not bench.control.tenants
    assert all(drafter.counts == SpeculationCounts() for drafter in bench.control.drafters.values())


# -- two drafters ------------------------------------------------------------------------------------------------------


def methods_of(bench: Bench, request: Request) -> list[Method]:
    """Who drafted, step by step."""
    return [work.method for work in bench.works(request) if work.num_drafts]


@pytest.mark.parametrize(
    ("model", "ngram", "expected"), [(always, never, Method.DRAFT_MODEL), (never, always, Method.NGRAM)]
)
def test_the_better_drafter_is_taken(
    model: Callable[[int, int], bool], ngram: Callable[[int, int], bool], expected: Method
) -> None:
    bench = Bench(AdaptiveDepth(costs()), model, ngram, hybrid=True)
    request = bench.add(5, max_tokens=400)
    bench.drain()
    drafted = methods_of(bench, request)
    late = drafted[len(drafted) // 2 :]
    assert late.count(expected) > 0.9 * len(late)


def test_a_lowest_depth_is_kept_by_the_draft_model() -> None:
    """n-grams may have nothing to propose, however well they were expected to do."""
    bench = Bench(AdaptiveDepth(costs()), never, always, hybrid=True)
    request = bench.add(5, max_tokens=100, min_depth=2)
    bench.drain()
    assert set(methods_of(bench, request)) == {Method.DRAFT_MODEL}


def test_a_request_changes_its_drafter_as_its_text_changes() -> None:
    def early(request_id: int, position: int) -> bool:
        return position < 300

    def late(request_id: int, position: int) -> bool:
        return position >= 300

    bench = Bench(AdaptiveDepth(costs()), late, early, hybrid=True)
    request = bench.add(5, max_tokens=800)
    bench.drain()
    works = [work for work in bench.works(request) if work.num_drafts]
    assert works[len(works) // 4].method is Method.NGRAM
    assert works[-3].method is Method.DRAFT_MODEL


def test_without_a_match_the_draft_model_drafts() -> None:
    """And what n-grams drafted meanwhile leaves it behind."""
    bench = Bench(AdaptiveDepth(costs()), hybrid=True)
    bench.runner = _Matches(bench.config, lambda length: 16 * (length % 100 < 50), always)
    request = bench.add(5, max_tokens=800)
    methods: dict[bool, list[Method]] = {True: [], False: []}
    idle = []
    while bench.scheduler.requests:
        has_match, has_room = request.match > 0, request.num_tokens + 1 < request.max_total_tokens
        [work] = bench.plan().work
        method = work.method if work.num_drafts else Method.NONE  # as in a step that checks what drafts save
        bench.land()
        if has_room:  # for a draft
            methods[has_match].append(method)
        idle.append((method, request.steps_without_model))
    late = {has_match: used[len(used) // 2 :] for has_match, used in methods.items()}
    assert set(late[True]) <= {Method.NGRAM, Method.NONE}
    assert late[True].count(Method.NGRAM) > 0.9 * len(late[True])
    assert late[False].count(Method.DRAFT_MODEL) > 0.9 * len(late[False])
    assert all((steps == 0) == (method is Method.DRAFT_MODEL) for method, steps in idle[2:-1])


def test_a_request_that_names_its_drafter_keeps_it() -> None:
    bench = Bench(AdaptiveDepth(costs()), never, always, hybrid=True)
    request = bench.add(5, max_tokens=100, method=Method.DRAFT_MODEL)
    bench.drain()
    assert set(methods_of(bench, request)) <= {Method.DRAFT_MODEL}
    assert not any(work.scores_ngram for work in bench.works(request))


def test_a_draft_model_reads_prompts_only_while_it_drafts() -> None:
    """Under load, where it does not pay, its reading would be a price without a return."""
    bench = Bench(FixedDepth(0))
    first = bench.add(40, max_tokens=10)
    bench.drain()
    second = bench.add(40, max_tokens=10)
    bench.drain()
    read = [sum(work.draft_catch_up for work in bench.works(request)) for request in (first, second)]
    assert read == [40, 0]


@pytest.mark.parametrize(("comers", "reads"), [(1, True), (30, False)])
def test_a_draft_model_reads_no_prompts_of_so_many_that_none_will_draft(comers: int, reads: bool) -> None:
    """One stream drafts, of which half is kept; thirty more come, and rows are dear where they are many."""
    prices = crowded()
    bench = Bench(AdaptiveDepth(prices), lambda _, position: position * 37 % 101 < 50, prices=prices, max_num_seqs=64)
    first = bench.add(40, max_tokens=400)
    while first.counts.accepted < 20:
        bench.step()
    second, *_ = [bench.add(40, max_tokens=10) for _ in range(comers)]
    while not second.output_token_ids:
        bench.step()
    assert bool(sum(work.draft_catch_up for work in bench.works(second))) == reads
    bench.drain()


def test_who_asks_for_drafts_has_its_prompt_read_however_many_come() -> None:
    bench = Bench(AdaptiveDepth(costs()), max_num_seqs=64)
    bench.control.model_drafts = False
    asks, *_ = [bench.add(40, max_tokens=10, min_depth=int(number == 0)) for number in range(31)]
    while not asks.output_token_ids:
        bench.step()
    assert sum(work.draft_catch_up for work in bench.works(asks)) >= 40
    bench.drain()


@pytest.mark.parametrize(("max_tokens", "reads"), [(4, False), (60, True)])
def test_a_prompt_is_not_read_along_for_a_few_tokens(max_tokens: int, reads: bool) -> None:
    """400 tokens take as long as twenty passes."""
    prices = CostModel.from_functions(lambda rows: 10.0, lambda sequences: PASS, per_draft_row=0.25)
    bench = Bench(AdaptiveDepth(prices), prices=prices, prefix_cache=PrefixScope.OFF)
    request = bench.add(400, max_tokens=max_tokens)
    bench.drain()
    assert (sum(work.draft_catch_up for work in bench.works(request)) > 300) == reads


def test_a_prompt_that_was_read_for_another_is_read_along_to_its_end_even_for_a_few_tokens() -> None:
    prices = CostModel.from_functions(lambda rows: 10.0, lambda sequences: PASS, per_draft_row=0.25)
    bench = Bench(AdaptiveDepth(prices), prices=prices, prefix_cache=PrefixScope.TENANT)
    prompt = prompt_of(400)
    bench.add(prompt, max_tokens=60)
    bench.drain()
    request = bench.add(prompt, max_tokens=4)
    bench.drain()
    first = bench.works(request)[0]
    assert 0 < first.draft_catch_up == first.num_tokens < 50


def test_a_prompt_is_read_along_for_those_who_will_find_it() -> None:
    """As soon as it is known that others come with the same one."""
    prices = CostModel.from_functions(lambda rows: 10.0, lambda sequences: PASS, per_draft_row=0.5)
    bench = Bench(AdaptiveDepth(prices), prices=prices, prefix_cache=PrefixScope.TENANT)

    def times(plan: StepPlan) -> StepTimes:
        [work] = plan.work
        draft = prices.draft_rows(work.draft_catch_up) + PASS * work.num_drafts
        return StepTimes(draft=draft, total=10.0 + draft)

    bench.runner.times = times  # type: ignore[method-assign]
    prompt = prompt_of(400)
    requests = []
    for _ in range(12):
        requests.append(bench.add(prompt, max_tokens=12))
        bench.drain()
    assert requests[0].counts.drafted == 0
    assert requests[-1].counts.drafted > 0
    assert sum(work.draft_catch_up for work in bench.works(requests[-1])) < 50, "it was read for an earlier one"


@pytest.mark.parametrize("reads", [True, False])
def test_who_has_missed_its_prompt_counts_as_idle_at_once(reads: bool) -> None:
    """Else it would pay for all of it in its first step, and not draft before the next decision."""

    class Reading(FixedDepth):
        def __init__(self) -> None:
            super().__init__(1)
            self.idle: list[int] = []

        def reads_along(self, unread: int, tokens: float, survival: float, sequences: int, context: int) -> bool:
            return reads

        def choose(
            self, candidates: Iterable[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0
        ) -> list[Chosen]:
            [candidate] = candidates
            self.idle.append(candidate.steps_without_model)
            return super().choose([candidate], load, slot_price=slot_price)

    policy = Reading()
    bench = Bench(policy)
    bench.add(40, max_tokens=10)
    bench.drain()
    assert policy.idle == [int(not reads), 0, 0, 0]


@pytest.mark.parametrize("lag", [0, 1])
def test_who_was_preempted_near_its_end_is_not_read_again_for_a_few_tokens(lag: int) -> None:
    """Reading takes as long as ten steps, and it drafted right before, as the others go on to."""
    prices = CostModel.from_functions(lambda rows: 10.0, lambda sequences: PASS, per_draft_row=0.25)
    bench = Bench(AdaptiveDepth(prices), prices=prices, prefix_cache=PrefixScope.OFF, lag=lag)

    def times(plan: StepPlan) -> StepTimes:
        read = sum(prices.draft_rows(work.draft_catch_up) for work in plan.work)
        draft = read + PASS * max(work.num_drafts for work in plan.work)
        return StepTimes(draft=draft, total=10.0 + draft)

    bench.runner.times = times  # type: ignore[method-assign]
    request, *_ = bench.add(300, max_tokens=100), *[bench.add(5, max_tokens=300) for _ in range(9)]
    bench.step_until(lambda: len(request.output_token_ids) >= 76)
    assert request.depth > 0
    bench.scheduler._preempt(request)
    before = len(bench.works(request))
    bench.step_until(lambda: request.status is RequestStatus.FINISHED)
    assert sum(work.draft_catch_up for work in bench.works(request)[before:]) < 50
    bench.drain()


def test_a_completion_is_expected_to_become_as_long_as_usual_and_twice_as_long_as_it_is() -> None:
    bench = Bench(FixedDepth(0))
    for _ in range(3):
        bench.add(prompt_of(3), max_tokens=12, stop_ids=(reference_output(prompt_of(3), 10)[-1],))
        bench.drain()
    request = bench.add(5, max_tokens=15)
    expected = []
    while not request.output_token_ids:
        bench.step()
    while bench.scheduler.has_requests:
        expected.append((len(request.output_token_ids), request.tokens_to_serve))
        bench.step()
    assert request.usual_length == pytest.approx(12.5)
    assert expected == [
        (emitted, pytest.approx(min(max(12.5 - emitted, emitted), 15 - emitted))) for emitted in range(1, 15)
    ]


def test_a_draft_model_reads_prompts_while_others_copy() -> None:
    """It goes on as soon as they do not."""
    bench = Bench(AdaptiveDepth(costs()), hybrid=True)
    bench.runner = _Matches(bench.config, lambda length: 16 * (length > 150), always)
    first = bench.add(5, max_tokens=800)
    while bench.works(first)[-1:] == [] or bench.works(first)[-1].method is not Method.NGRAM:
        bench.step()
    second = bench.add(140, max_tokens=60)
    while not second.output_token_ids:
        bench.step()
    assert second.draft_gap <= 2


class _EveryOther(DepthPolicy):
    """Drafts by the draft model, and keeps for how long it was idle before."""

    def __init__(self) -> None:
        self.idle: list[int] = []

    def choose(self, candidates: Any, load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        self.idle += [one.steps_without_model for one in candidates]
        return [Chosen(Method.DRAFT_MODEL, 1) if len(self.idle) % 2 else NOTHING for _ in candidates]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_draft_model_whose_result_is_not_in_yet_is_not_idle(lag: int) -> None:
    policy = _EveryOther()
    bench = Bench(policy, lag=lag)
    bench.add(5, max_tokens=40)
    bench.drain()
    behind_a_plain_step, behind_a_draft = policy.idle[2:-2:2], policy.idle[3:-2:2]
    assert set(behind_a_draft) == {0}
    assert set(behind_a_plain_step) == {1 - lag}, "which counts once its result is in"


def test_a_draft_model_that_is_far_behind_catches_up_in_parts() -> None:
    """More than a step has rows for: it must not be left behind for good."""
    bench = Bench(AdaptiveDepth(costs()), max_num_seqs=4, max_num_batched_tokens=12)
    bench.control.model_drafts = False  # so that it does not read along with the prompt
    request = bench.add(100, max_tokens=60)
    bench.drain()
    assert [work.num_drafts for work in bench.works(request)][-3] > 0
    assert request.counts.accepted > 0


def test_a_draft_model_with_a_single_row_does_not_read_for_nothing() -> None:
    """It falls behind by a token with every step, and would have no row to draft in."""
    bench = Bench(FixedDepth(1), max_num_seqs=1, max_num_batched_tokens=2)
    request = bench.add(1, max_tokens=100)
    bench.drain()
    assert sum(work.draft_catch_up > 0 and not work.num_drafts for work in bench.works(request)) <= 1


def test_a_draft_model_is_tried_again_however_far_it_is_behind() -> None:
    """It had a bad time. What has come since was not read along, so that one draft costs more than probes may save."""
    prices = CostModel.from_functions(lambda rows: 15.0 + 0.01 * rows, lambda sequences: PASS, per_draft_row=0.1)
    good = False
    bench = Bench(
        AdaptiveDepth(prices),
        lambda *_: good,
        prices=prices,
        num_blocks=1000,
        max_model_len=1500,
        max_num_batched_tokens=2048,
    )
    bench.check = lambda: None  # type: ignore[method-assign]

    def times(plan: StepPlan) -> StepTimes:
        passes = max([work.num_drafts for work in plan.work])
        draft = PASS * passes + 0.1 * sum(work.draft_catch_up + work.num_drafts for work in plan.work)
        return StepTimes(draft=draft, total=15.0 + 0.01 * plan.num_rows + draft)

    bench.runner.times = times  # type: ignore[method-assign]
    for _ in range(12):
        bench.add(1000, max_tokens=200)
        bench.drain()
    good = True
    for _ in range(30):
        last = bench.add(1000, max_tokens=200)
        bench.drain()
    assert last.counts.accepted > 100


# -- the report --------------------------------------------------------------------------------------------------------


def test_a_report_has_the_ended_and_the_live() -> None:
    bench = Bench(AdaptiveDepth(costs()), right=lambda request_id, position: request_id % 2 == 0)
    ended, lasting = bench.add_for("good", 40), bench.add_for("bad", 400)
    while 0 in bench.scheduler.requests:
        bench.step()
    report = bench.control.report(bench.scheduler.requests.values())
    assert report.decision is not None
    assert report.decision.price_of_time > 0
    assert report.requests.keys() == {lasting.request_id}
    assert report.requests[1].acceptance[Method.DRAFT_MODEL] < 0.3
    assert report.totals.emitted == ended.counts.emitted + lasting.counts.emitted
    assert bench.control.totals.emitted == ended.counts.emitted, "asking changes nothing"
    drafter = report.drafters[Method.DRAFT_MODEL, Verification.GREEDY]
    assert len(drafter.acceptance) == len(drafter.counts.depths) - 1
    acceptance = {
        name: tenant.acceptance[Method.DRAFT_MODEL, Verification.GREEDY] for name, tenant in report.tenants.items()
    }
    assert acceptance["good"] > acceptance["bad"]
    assert sum(tenant.counts.accepted for tenant in report.tenants.values()) == report.totals.accepted


def test_what_is_saved_is_checked_by_steps_without_drafts() -> None:
    """Which take twice as long here as the model says, until it has learned better."""
    bench = Bench(FixedDepth(3))
    bench.add(5, max_tokens=9)
    bench.drain()
    assert bench.control.report([]).checked_saved_seconds is None
    control = bench.control
    assert control.costs is not None
    control.costs.observe(StepShape(1, 0), 0.0, 21.0)
    report = control.report([])
    gained = report.totals.gained_seconds
    assert report.checked_saved_seconds == pytest.approx(2 * gained - report.totals.spent_seconds)
