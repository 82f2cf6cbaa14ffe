"""Depth policies: what they choose, and the bounds they keep."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.harness import Harness, always, never, percent_right
from paceline.core.config import SchedulerConfig
from paceline.core.depth import DRAFT_PRICE, PROBE_INTERVAL, AdaptiveDepth, DepthCandidate, DepthPolicy, FixedDepth
from paceline.core.params import Method

drafting = st.sampled_from([Method.NGRAM, Method.DRAFT_MODEL])


def candidate(
    acceptance: float, method: Method = Method.DRAFT_MODEL, lowest: int = 0, highest: int = 8, without: int = 0
) -> DepthCandidate:
    return DepthCandidate(method, acceptance, lowest, highest, without)


def depth_of(policy: DepthPolicy, one: DepthCandidate) -> int:
    (depth,) = policy.choose([one])
    return depth


def tokens_per_pass(acceptance: float, depth: int, price: float) -> float:
    """Leviathan et al. 2023, equation 1, over the cost of the step."""
    return sum(acceptance**position for position in range(depth + 1)) / (1 + price * depth)


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(acceptance=st.floats(0, 1), method=drafting, highest=st.integers(0, 12))
def test_adaptive_depth_is_the_best_of_all(acceptance: float, method: Method, highest: int) -> None:
    rates = [tokens_per_pass(acceptance, depth, DRAFT_PRICE[method]) for depth in range(highest + 1)]
    chosen = depth_of(AdaptiveDepth(), candidate(acceptance, method, highest=highest))
    assert rates[chosen] == pytest.approx(max(rates), rel=1e-12)


@pytest.mark.parametrize(("acceptance", "depth"), [(0.05, 0), (0.3, 1), (0.6, 2), (0.8, 5), (1.0, 8)])
def test_better_drafts_go_deeper(acceptance: float, depth: int) -> None:
    assert depth_of(AdaptiveDepth(), candidate(acceptance)) == depth


def test_cheaper_drafts_go_deeper() -> None:
    assert depth_of(AdaptiveDepth(), candidate(0.6, Method.NGRAM)) > depth_of(AdaptiveDepth(), candidate(0.6))


@settings(deadline=None, derandomize=True, database=None)
@given(
    policy=st.sampled_from([AdaptiveDepth(), FixedDepth(0), FixedDepth(3), FixedDepth(99)]),
    acceptance=st.floats(0, 1),
    method=drafting,
    lowest=st.integers(0, 6),
    spread=st.integers(0, 6),
    without=st.integers(0, 2 * PROBE_INTERVAL),
)
def test_bounds_are_kept(
    policy: DepthPolicy, acceptance: float, method: Method, lowest: int, spread: int, without: int
) -> None:
    one = candidate(acceptance, method, lowest, lowest + spread, without)
    assert lowest <= depth_of(policy, one) <= lowest + spread


def test_fixed_depth_is_fixed() -> None:
    candidates = [candidate(0.0), candidate(1.0), candidate(0.5, highest=2), candidate(0.5, lowest=5)]
    assert FixedDepth(3).choose(candidates) == [3, 3, 2, 5]


def test_each_request_for_itself() -> None:
    candidates = [candidate(0.1), candidate(0.9), candidate(0.5)]
    assert AdaptiveDepth().choose(candidates) == [depth_of(AdaptiveDepth(), one) for one in candidates]
    assert AdaptiveDepth().choose([]) == []


@pytest.mark.parametrize(("without", "depth"), [(PROBE_INTERVAL - 1, 0), (PROBE_INTERVAL, 1), (10**6, 1)])
def test_a_request_that_does_not_draft_probes_now_and_then(without: int, depth: int) -> None:
    assert depth_of(AdaptiveDepth(), candidate(0.0, without=without)) == depth


def test_a_probe_keeps_the_upper_bound() -> None:
    assert depth_of(AdaptiveDepth(), candidate(0.0, highest=0, without=10**6)) == 0


# -- in the scheduler ------------------------------------------------------------------------------------------------


def adaptive_harness(percent: int) -> Harness:
    config = SchedulerConfig(num_blocks=64, max_model_len=900, method=Method.DRAFT_MODEL)
    return Harness(config, AdaptiveDepth(), right={0: never, 100: always}.get(percent) or percent_right(percent))


def test_depth_follows_acceptance() -> None:
    """Drafts that fail are given up, but for a probe now and then; drafts that hold go to the maximum."""
    depths = {}
    for percent in (0, 60, 100):
        harness = adaptive_harness(percent)
        request = harness.add(5, max_tokens=400)
        harness.drain()
        late = [work.num_drafts for work in harness.works(request)][20:-3]
        depths[percent] = sum(late) / len(late)
    assert depths[0] < 0.1
    assert 1 < depths[60] < 4
    assert depths[100] == 8


def test_depth_recovers_when_drafts_become_good() -> None:
    harness = adaptive_harness(0)
    request = harness.add(5, max_tokens=800)
    while len(request.output_token_ids) < 100:
        harness.step()
    harness.runner.draft_is_right = always
    harness.drain()
    assert [work.num_drafts for work in harness.works(request)][-3] >= 4


def test_a_new_request_starts_from_what_the_drafter_showed() -> None:
    harness = adaptive_harness(0)
    requests = []
    for _ in range(2):
        requests.append(harness.add(5, max_tokens=100))
        harness.drain()
    first, second = ([work.num_drafts for work in harness.works(request)] for request in requests)
    assert first[1] >= 2, "an unknown drafter is given a chance"
    assert second[1] <= 1, "a known one is not"
