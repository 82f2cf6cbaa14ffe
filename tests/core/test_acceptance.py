"""The acceptance model sees truncated geometric numbers of requests that differ, and must be fooled by neither."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.acceptance import MODEL_TRAITS, NGRAM_TRAITS, PRIOR_RATE, AcceptanceModel, Residual, Traits
from paceline.core.plan import LONGEST_MATCH

Rates = Sequence[float]  # conditional acceptance by position
Rule = Callable[[list[int]], int]  # numbers of accepted drafts so far -> the next depth


def verify(rng: np.random.Generator, rates: Rates, depth: int) -> tuple[float, ...]:
    """One verify step: a 1 per accepted draft, and a 0 for the rejected one, if there is one."""
    accepted = rng.random(depth) < rates[:depth]
    return (1.0,) * depth if accepted.all() else (1.0,) * int(np.argmin(accepted)) + (0.0,)


def conditional(survivals: Sequence[float]) -> list[float]:
    return [after / before for before, after in zip([1.0, *survivals], survivals, strict=False)]


def rate(model: AcceptanceModel, tenant: str, request: Residual) -> float:
    return model.survivals(tenant, request, 1)[0]


def train(model: AcceptanceModel, tenant: str, level: float, steps: int, seed: int = 0, depth: int = 4) -> Residual:
    """A request whose drafts are accepted at the rate `level`, for `steps` verify steps."""
    rng, request = np.random.default_rng(seed), Residual()
    for _ in range(steps):
        model.observe(tenant, request, verify(rng, [level] * depth, depth))
    return request


def serve(model: AcceptanceModel, tenant: str, level: float, requests: int, first_seed: int = 0) -> None:
    for seed in range(first_seed, first_seed + requests):
        train(model, tenant, level, steps=40, seed=seed)


class TestCensoring:
    @pytest.mark.parametrize("depth", range(1, 9))
    @pytest.mark.parametrize("level", [0.3, 0.6, 0.8])
    def test_the_rate_is_right_on_average_at_every_depth(self, level: float, depth: int) -> None:
        rng, model, request = np.random.default_rng(1), AcceptanceModel(), Residual()
        estimates = []
        for step in range(5_000):
            model.observe("a", request, verify(rng, [level] * depth, depth))
            if step >= 500:
                estimates.append(rate(model, "a", request))
        assert np.mean(estimates) == pytest.approx(level, abs=0.02)

    def test_accepted_over_depth_is_not(self) -> None:
        """Why it is not done like that: 0.59 for a true 0.8 at depth 4, and lower the deeper one drafts."""
        rng = np.random.default_rng(1)
        naive = np.mean([sum(verify(rng, [0.8] * 4, 4)) / 4 for _ in range(12_000)])
        assert naive == pytest.approx(0.59, abs=0.01)

    def test_overlaps_estimate_the_same_with_less_noise(self) -> None:
        """Observing the probability of acceptance instead of its outcome: the same mean, a smaller spread."""
        rng = np.random.default_rng(2)
        models = AcceptanceModel(), AcceptanceModel()
        requests = Residual(), Residual()
        estimates = []
        for _ in range(4_000):
            overlap = rng.uniform(0.4, 0.8, size=3)
            outcome = verify(rng, overlap, 3)
            for model, request, labels in zip(models, requests, (outcome, overlap[: len(outcome)]), strict=True):
                model.observe("a", request, tuple(labels))
            estimates.append([rate(model, "a", r) for model, r in zip(models, requests, strict=True)])
        by_outcome, by_overlap = np.array(estimates[500:]).T
        assert by_overlap.mean() == pytest.approx(by_outcome.mean(), abs=0.02)
        assert by_overlap.std() < 0.5 * by_outcome.std()


RISING = [0.71, 0.73, 0.76, 0.78, 0.80, 0.82, 0.84, 0.86]
FALLING = [0.81, 0.79, 0.76, 0.74, 0.72, 0.71, 0.70, 0.70]


def as_before(accepted: list[int]) -> int:
    """One more than was accepted last."""
    return min(accepted[-1] + 1, 8) if accepted else 3


def as_usual(accepted: list[int]) -> int:
    """Deep for requests that went well so far, shallow for others: so that they are censored differently."""
    return 1 if accepted and np.mean(accepted) < 1.0 else 8


def by_turns(accepted: list[int]) -> int:
    return 1 + len(accepted) % 8


class TestCalibration:
    """Requests differ (beta-distributed rates), tenants differ, positions differ, and depths follow from history."""

    def traffic(self, profile: Rates, rule: Rule, seed: int = 3) -> Iterator[tuple[str, int, tuple[float, ...]]]:
        """Eight requests at a time: (tenant, request, one verify step), 400 requests of 8 to 90 steps."""
        rng = np.random.default_rng(seed)
        position = np.log(np.divide(profile, np.subtract(1, profile)))
        position -= position[0]
        remaining, running = iter(range(400)), []
        while True:
            while len(running) < 8 and (number := next(remaining, None)) is not None:
                tenant = int(rng.integers(4))
                level = rng.beta(1.2 * (tenant + 2), 1.8)
                rates = 1 / (1 + (1 - level) / level * np.exp(-position))
                running.append((str(tenant), number, rates, int(rng.integers(8, 90)), []))
            if not running:
                return
            for request in list(running):
                tenant_name, number, rates, steps, accepted = request
                reached = verify(rng, rates, rule(accepted))
                accepted.append(int(sum(reached)))
                yield tenant_name, number, reached
                if len(accepted) == steps:
                    running.remove(request)

    @pytest.mark.parametrize("rule", [as_before, as_usual, by_turns])
    @pytest.mark.parametrize("profile", [RISING, FALLING], ids=["rising", "falling"])
    def test_predicted_rates_are_those_observed_at_each_position(self, profile: Rates, rule: Rule) -> None:
        model, requests = AcceptanceModel(), [Residual() for _ in range(400)]
        predicted, observed, count = np.zeros(8), np.zeros(8), np.zeros(8)
        for tenant, number, reached in self.traffic(profile, rule):
            n = len(reached)
            predicted[:n] += conditional(model.survivals(tenant, requests[number], n))
            observed[:n] += reached
            count[:n] += 1
            model.observe(tenant, requests[number], reached)
        assert count.min() > 250
        assert predicted / count == pytest.approx(observed / count, abs=0.03)

    def test_a_rate_that_rises_within_a_step_is_the_positions_not_the_requests(self) -> None:
        """Whole steps are easy or hard, so that deep positions are reached in easy ones. A request that learned within
        the step would take the credit, and survivals before the step would miss it.
        """
        rng, model, request = np.random.default_rng(5), AcceptanceModel(), Residual()
        predicted, observed, count = np.zeros(6), np.zeros(6), np.zeros(6)
        for step in range(6_000):
            reached = verify(rng, [rng.choice([0.3, 0.95])] * 6, 6)
            n = len(reached)
            if step >= 1_000:
                predicted[:n] += conditional(model.survivals("a", request, n))
                observed[:n] += reached
                count[:n] += 1
            model.observe("a", request, reached)
        assert (observed / count)[5] > (observed / count)[0] + 0.2
        assert predicted / count == pytest.approx(observed / count, abs=0.03)

    def test_positions_that_nobody_reached_are_taken_for_the_deepest_that_somebody_did(self) -> None:
        model = AcceptanceModel()
        rng, request = np.random.default_rng(4), Residual()
        for _ in range(400):
            model.observe("a", request, verify(rng, [0.5, 0.9], 2))
        rates = conditional(model.survivals("a", request, 5))
        assert rates[0] < rates[1] - 0.2
        assert rates[2:] == pytest.approx([rates[1]] * 3)


class TestLevels:
    def test_without_observations_the_prior_stands(self) -> None:
        assert AcceptanceModel().survivals("a", Residual(), 3) == pytest.approx([PRIOR_RATE**j for j in (1, 2, 3)])
        assert AcceptanceModel().survivals("a", Residual(), 0) == []

    @pytest.mark.parametrize("level", [0.25, 0.9])
    def test_a_new_request_starts_at_its_tenants_rate(self, level: float) -> None:
        starts = []
        for seed in range(0, 10_000, 1_000):
            model = AcceptanceModel()
            for turn in range(4):
                serve(model, "other", 0.6, requests=5, first_seed=seed + 10 * turn)
                serve(model, "a", level, requests=5, first_seed=seed + 10 * turn + 5)
            starts.append([rate(model, tenant, Residual()) for tenant in ("a", "other")])
        assert np.mean(starts, axis=0) == pytest.approx([level, 0.6], abs=0.06)

    def test_a_new_tenant_starts_between_the_prior_and_what_all_tenants_have_in_common(self) -> None:
        model, starts = AcceptanceModel(), [PRIOR_RATE]
        for tenant in range(120):
            serve(model, f"tenant {tenant}", 0.35, requests=2, first_seed=2 * tenant)
            starts.append(rate(model, "new", Residual()))
        assert starts[0] > starts[20] + 0.05 > starts[120] + 0.1
        assert starts[120] > 0.35

    def test_a_young_request_departs_from_its_tenants_rate_at_once(self) -> None:
        model = AcceptanceModel()
        serve(model, "a", 0.8, requests=20)
        assert rate(model, "a", train(model, "a", 0.1, steps=10)) < 0.45, "more than half of the way"

    def test_a_little_luck_moves_a_request_less_than_a_different_kind_of_text(self) -> None:
        """Most requests are alike: a shift that could be chance counts for little, what can hardly be one for much."""
        normal = Traits(MODEL_TRAITS.rates, MODEL_TRAITS.request._replace(tail=inf))
        moved = {}
        for label in (0.5, 0.0):
            models = AcceptanceModel(MODEL_TRAITS), AcceptanceModel(normal)
            for model in models:
                request = Residual()
                for _ in range(15):
                    model.observe("a", request, (label,), shared=False)
                moved[label, model is models[0]] = rate(model, "a", Residual()) - rate(model, "a", request)
        assert moved[0.5, True] < 1.2 * moved[0.5, False]
        assert moved[0.0, True] > 1.4 * moved[0.0, False]

    def test_a_hard_tenant_does_not_move_another(self) -> None:
        moved = []
        for seed in range(0, 10_000, 1_000):
            model = AcceptanceModel()
            serve(model, "easy", 0.8, requests=10, first_seed=seed)
            before = rate(model, "easy", Residual())
            serve(model, "hard", 0.2, requests=20, first_seed=seed + 10)
            moved.append(rate(model, "easy", Residual()) - before)
            assert rate(model, "hard", Residual()) < 0.35
        assert np.mean(moved) == pytest.approx(0.0, abs=0.05)

    def test_an_old_request_tells_less_of_its_tenant_than_a_young_one(self) -> None:
        """What it does late is its own affair: a completion that falls into repetition says nothing of the next."""
        moved = []
        for young in (False, True):
            model = AcceptanceModel()
            serve(model, "a", 0.5, requests=20)
            request = train(model, "a", 0.5, steps=100, seed=20)
            before = rate(model, "a", Residual())
            for _ in range(5):
                model.observe("a", Residual() if young else request, (1.0,) * 4)
            moved.append(rate(model, "a", Residual()) - before)
        assert 0.0 < moved[0] < 0.5 * moved[1]

    def test_what_is_not_shared_moves_the_request_alone(self) -> None:
        model, request = AcceptanceModel(max_tenants=1), Residual()
        serve(model, "a", 0.7, requests=5)
        before = [model.survivals(tenant, Residual(), 8) for tenant in ("a", "new")]
        for reached in [(1.0,) * 7, *[(0.0,)] * 40]:
            model.observe("a", request, reached, shared=False)
            model.observe("new", Residual(), reached, shared=False)
        assert [model.survivals(tenant, Residual(), 8) for tenant in ("a", "new")] == before
        assert rate(model, "a", request) < 0.3

    def test_the_tenants_of_which_least_is_known_are_forgotten(self) -> None:
        model = AcceptanceModel(max_tenants=2)
        for tenant, requests in (("a", 6), ("b", 3), ("c", 3)):
            serve(model, tenant, 0.2, requests=requests)
        stranger = rate(model, "new", Residual())
        assert rate(model, "b", Residual()) == stranger
        assert rate(model, "a", Residual()) < stranger
        assert rate(model, "c", Residual()) < stranger


class TestAgreed:
    def test_positions_begin_behind_what_agreed_before(self) -> None:
        model = AcceptanceModel(NGRAM_TRAITS)
        whole = model.survivals("a", Residual(), 12)
        for agreed in range(8):
            told = conditional(model.survivals("a", Residual(), 4, agreed=agreed))
            assert told == pytest.approx(conditional(whole)[agreed : agreed + 4])

    def test_what_is_learned_there_is_of_these_positions(self) -> None:
        model, rng = AcceptanceModel(NGRAM_TRAITS), np.random.default_rng(7)
        for _ in range(3000):
            agreed = int(rng.integers(4))
            rates = [0.1, 0.3, 0.6, 0.9, 0.9, 0.9]
            model.observe("a", Residual(), verify(rng, rates[agreed : agreed + 2], 2), agreed=agreed)
        assert conditional(model.survivals("a", Residual(), 4)) == pytest.approx([0.1, 0.3, 0.6, 0.9], abs=0.1)
        assert not model.calibration.count[2:].any(), "drafts are numbered as they are drafted"

    def test_far_behind_what_anybody_reached_is_like_the_last(self) -> None:
        model = AcceptanceModel()
        model.observe("a", request := Residual(), (1.0,), agreed=9)
        assert len(model.survivals("a", request, 3, agreed=30)) == 3


class TestTime:
    @pytest.mark.parametrize(("before", "after"), [(0.8, 0.3), (0.3, 0.8), (1.0, 0.5), (0.0, 0.5)])
    def test_a_request_whose_rate_changed_is_followed_within_fifty_steps(self, before: float, after: float) -> None:
        rng, estimates = np.random.default_rng(6), []
        for seed in range(30):
            model = AcceptanceModel()
            serve(model, "a", before, requests=3)
            request = train(model, "a", before, steps=200, seed=seed)
            for _ in range(50):
                model.observe("a", request, verify(rng, [after] * 4, 4))
            estimates.append(rate(model, "a", request))
        assert np.mean(estimates) == pytest.approx(after, abs=0.1)

    def test_doubt_shrinks_with_observations_and_grows_back_without_drafts(self) -> None:
        model = AcceptanceModel()
        serve(model, "a", 0.7, requests=20)

        def doubt(request: Residual) -> float:
            """By how much one rejection would move its rate."""
            moved = Residual(request.shift, request.information)
            model.observe("a", moved, (0.0,), shared=False)
            return rate(model, "a", request) - rate(model, "a", moved)

        request = Residual()
        unknown = doubt(request)
        for _ in range(50):
            model.observe("a", request, (0.7, 0.7))
        known = doubt(request)
        assert known < 0.7 * unknown
        for _ in range(300):
            request.age()
        assert doubt(request) == pytest.approx(unknown, abs=0.01)

    def test_a_request_that_drafts_no_more_comes_back_to_its_tenants_rate(self) -> None:
        model = AcceptanceModel()
        serve(model, "a", 0.8, requests=20)
        request = train(model, "a", 0.05, steps=60)
        mean, before = [rate(model, "a", request)], model.survivals("a", request, 4)
        assert mean[0] < 0.2
        for _ in range(200):
            request.age()
            mean.append(rate(model, "a", request))
            now = model.survivals("a", request, 4)
            assert all(later > earlier for later, earlier in zip(now, before, strict=True))
            before = now
        assert mean[10] < 0.5 * mean[-1]  # slowly
        assert mean[-1] == pytest.approx(rate(model, "a", Residual()), abs=0.02)

    def test_there_is_always_something_left_to_learn(self) -> None:
        model = AcceptanceModel()
        always, never = Residual(), Residual()
        for _ in range(3_000):
            model.observe("always", always, (1.0,) * 8)
            model.observe("never", never, (0.0,))
        for tenant, request in (("always", always), ("never", never)):
            assert 0.0099 <= rate(model, tenant, request) <= 0.9951


def test_a_step_that_reached_nothing_changes_nothing() -> None:
    model, request = AcceptanceModel(max_tenants=1), Residual(0.5, 2.0)
    serve(model, "a", 0.3, requests=3)
    before = model.survivals("a", request, 4)
    model.observe("a", request, ())
    model.observe("b", request, ())
    assert request == Residual(0.5, 2.0)
    assert model.survivals("a", request, 4) == before


steps = st.tuples(
    st.sampled_from("ab"), st.integers(0, 2), st.lists(st.floats(0, 1), max_size=9), st.booleans(), st.booleans()
)


@settings(deadline=None, derandomize=True, database=None)
@given(history=st.lists(steps, max_size=60))
def test_survivals_are_a_chain_of_probabilities_and_a_function_of_history(
    history: list[tuple[str, int, list[float], bool, bool]],
) -> None:
    def replay() -> list[list[float]]:
        model, requests = AcceptanceModel(), [Residual() for _ in range(3)]
        for tenant, number, reached, shared, aged in history:
            model.observe(tenant, requests[number], reached, shared)
            if aged:
                requests[number].age()
        return [model.survivals(tenant, r, 12) for tenant in "abc" for r in requests]

    survivals = replay()
    for chain in survivals:
        assert len(chain) == 12
        assert all(1.0 >= before >= after >= 0.0 for before, after in zip([1.0, *chain], chain, strict=False))
    assert replay() == survivals


@pytest.mark.parametrize(("short", "long"), [(0.7, 0.7), (0.4, 0.9), (0.9, 0.5)])
def test_drafts_that_are_planned_before_their_match_is_known(short: float, long: float) -> None:
    """Of a text that goes on as its match says, by a chance that hangs on its length, and has a new match of one token
    where it did not: as expected when a token was still to come, and as observed.
    """
    model, choose, depth = AcceptanceModel(NGRAM_TRAITS), random.Random(1), 3
    known = match = 1
    expected, observed, count = np.zeros(depth), np.zeros(depth), 0
    for number in range(30_000):
        right = [choose.random() < (short if match + j < 4 else long) for j in range(depth)]
        if number > 3000:
            expected += model.survivals_behind("", Residual(), depth, known - 1, 1)
            observed += np.cumprod(right)
            count += 1
        reached = right.index(False) + 1 if False in right else depth
        model.observe("", Residual(), tuple(map(float, right[:reached])), True, match - 1)
        known, match = match, min(LONGEST_MATCH, match + 1) if right[0] else 1
    assert expected / count == pytest.approx(observed / count, abs=0.02)


def test_a_match_that_goes_on_is_worth_more_than_a_new_one() -> None:
    """What follows one token is right in half of the cases, and what follows two always is."""
    model = AcceptanceModel(NGRAM_TRAITS)
    for number in range(4000):
        model.observe("", Residual(), (float(number % 2),), True, 0)
        model.observe("", Residual(), (1.0,), True, 1)
    first, longer = model.survivals("", Residual(), 1)[0], model.survivals("", Residual(), 1, agreed=1)[0]
    assert model.survivals_behind("", Residual(), 1, 0, 1)[0] == pytest.approx(first * longer + (1 - first) * first)
    assert first + 0.1 < model.survivals_behind("", Residual(), 1, 0, 1)[0] < longer - 0.1
