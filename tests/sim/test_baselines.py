"""Each baseline's rule, by a short trace."""

from __future__ import annotations

import pytest

from paceline.bench.baselines import BASELINES
from paceline.core.cost_model import StepShape
from paceline.core.depth import DepthCandidate, Offer, Outcome, StepLoad
from paceline.core.depth_policy import DepthPolicy
from paceline.core.method import Method


def depths(policy: DepthPolicy, *request_ids: int, lowest: int = 0, highest: int = 20) -> list[int]:
    offer = Offer(Method.DRAFT_MODEL, [0.5] * highest)
    candidates = [DepthCandidate(request_id, (offer,), lowest, highest) for request_id in request_ids]
    chosen = policy.choose(candidates, StepLoad(len(candidates), 0, len(candidates), 1000))
    return [choice.depth for choice in chosen]


def observe(policy: DepthPolicy, *drafts: tuple[int, int, int]) -> None:
    emitted = sum(accepted + 1 for _, _, accepted in drafts)
    policy.observe(Outcome(StepShape(emitted, 0), 0.0, 1.0, len(drafts), emitted, tuple(d for d in drafts if d[1])))


def trace(name: str, shares: list[float]) -> list[int]:
    """Depths of one request of whose drafts these shares are accepted."""
    policy = BASELINES[name]()
    taken = []
    for share in shares:
        (depth,) = depths(policy, 7)
        taken.append(depth)
        observe(policy, (7, depth, round(share * depth)))
    return taken


@pytest.mark.parametrize(
    ("name", "shares", "expected"),
    [
        ("off", [0.0] * 3, [0, 0, 0]),
        ("realizar", [1.0] * 7, [4, 5, 6, 7, 8, 8, 8]),
        ("realizar", [0.0] * 5, [4, 3, 2, 1, 1]),
        ("realizar", [0.75] * 3, [4, 4, 4]),
        ("realizar", [1.0, 0.0, 0.0, 0.0, 0.0], [4, 5, 6, 7, 7]),  # the average: 1, .9, .81, .729
        ("ruvllm", [1.0] * 6, [4, 5, 6, 7, 8, 8]),
        ("ruvllm", [0.0] * 4, [4, 3, 2, 2]),
        ("ruvllm", [0.75, 1.0, 0.0, 1.0], [4, 4, 5, 4]),
        ("hf", [1.0, 1.0, 0.0, 0.5], [5, 7, 9, 8]),
        ("hf", [0.0] * 7, [5, 4, 3, 2, 1, 1, 1]),
    ],
)
def test_one_request(name: str, shares: list[float], expected: list[int]) -> None:
    assert trace(name, shares) == expected


@pytest.mark.parametrize("name", ["realizar", "ruvllm", "hf"])
def test_requests_are_told_apart_and_forgotten(name: str) -> None:
    policy = BASELINES[name]()
    (start,) = depths(policy, 1)
    for _ in range(10):
        observe(policy, (1, start, start), (2, start, 0))
    high, low, fresh = depths(policy, 1, 2, 3)
    assert low < start == fresh < high
    policy.forget(1)
    policy.forget(1)
    assert depths(policy, 1, 2) == [start, low]


@pytest.mark.parametrize("name", ["realizar", "ruvllm", "hf"])
def test_a_step_without_drafts_teaches_nothing(name: str) -> None:
    policy = BASELINES[name]()
    (start,) = depths(policy, 1)
    observe(policy, (1, 0, 0))
    assert depths(policy, 1) == [start]


def ladder(size: int, accepted: float, batches: int) -> list[int]:
    """Depths of a batch that has so many drafts accepted per request, as far as its depth allows."""
    policy = BASELINES["sglang-ema"]()
    taken = []
    for _ in range(batches):
        depth = depths(policy, *range(size))[0]
        taken.append(depth)
        kept = min(depth, accepted)
        # Fractions by sharing: some requests have one more accepted than others.
        extra = round((kept - int(kept)) * size)
        observe(policy, *((i, depth, int(kept) + (i < extra)) for i in range(size)))
    return taken


def test_ladder_climbs_after_its_warm_up_every_fifth_batch() -> None:
    assert ladder(4, 8.0, 17) == [3] * 10 + [5] * 7
    assert ladder(4, 8.0, 60)[-1] == 7


def test_ladder_descends_below_the_rung_beneath() -> None:
    assert ladder(4, 0.25, 11)[-1] == 1, "0.25 <= 1 - 0.75"
    assert ladder(4, 0.5, 40) == [3] * 40, "0.5 > 1 - 0.75"
    assert ladder(4, 2.25, 40) == [3] * 40, "2.25 < 3 - 0.5"


@pytest.mark.parametrize(("size", "most"), [(7, 7), (8, 3), (31, 3), (32, 1), (63, 1), (64, 0)])
def test_ladder_depends_on_the_batch(size: int, most: int) -> None:
    assert ladder(size, 8.0, 60)[-1] == most


def test_ladder_tries_again_from_nothing() -> None:
    policy = BASELINES["sglang-ema"]()
    policy._tiers[8].rung = 0  # type: ignore[attr-defined]
    taken = []
    for _ in range(12):
        taken.append(depths(policy, *range(8))[0])
        observe(policy, *((i, taken[-1], 0) for i in range(8)))
    assert taken == [0] * 10 + [1] * 2


@pytest.mark.parametrize(("size", "depth"), [(1, 3), (16, 3), (17, 2), (63, 2), (64, 1), (127, 1), (128, 0)])
def test_table(size: int, depth: int) -> None:
    assert depths(BASELINES["vllm-table"](), *range(size)) == [depth] * size


@pytest.mark.parametrize("name", BASELINES)
def test_bounds_are_kept(name: str) -> None:
    policy = BASELINES[name]()
    assert depths(policy, 1, lowest=6, highest=9) == [6]
    assert depths(policy, 1, highest=0) == [0]
    assert depths(policy, 1, highest=2)[0] <= 2
    assert depths(policy) == []
