"""The acceptance estimate sees a truncated geometric number, and must not be fooled by the truncation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.acceptance import DECAY, PRIOR_RATE, PRIOR_WEIGHT, Acceptance


def reached(rng: np.random.Generator, rate: float, depth: int) -> tuple[float, ...]:
    """One verify step: a 1 per accepted draft, and a 0 for the rejected one, if there is one."""
    accepted = min(int(rng.geometric(1.0 - rate)) - 1, depth)
    return (1.0,) * accepted + (0.0,) * (accepted < depth)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8])
def test_the_estimate_is_right_on_average_at_every_depth(rate: float, depth: int) -> None:
    rng = np.random.default_rng(1)
    acceptance = Acceptance()
    estimates = []
    for step in range(12_000):
        acceptance.observe(reached(rng, rate, depth))
        if step >= 500:
            estimates.append(acceptance.accepted / (acceptance.accepted + acceptance.rejected))
    assert np.mean(estimates) == pytest.approx(rate, abs=0.015)


def test_accepted_over_depth_is_not() -> None:
    """Why it is not done like that: 0.59 for a true 0.8 at depth 4, and lower the deeper one drafts."""
    rng = np.random.default_rng(1)
    naive = np.mean([sum(reached(rng, 0.8, 4)) / 4 for _ in range(12_000)])
    assert naive == pytest.approx(0.59, abs=0.01)


def test_overlaps_estimate_the_same_with_less_noise() -> None:
    """Observing the probability of acceptance instead of its outcome: the same mean, a smaller spread."""
    rng = np.random.default_rng(2)
    by_outcome, by_overlap = Acceptance(), Acceptance()
    outcomes, overlaps = [], []
    for _ in range(6_000):
        overlap = rng.uniform(0.4, 0.8, size=3)
        accepted = rng.random(3) < overlap
        count = 3 if accepted.all() else int(np.argmin(accepted)) + 1
        by_outcome.observe(tuple(map(float, accepted[:count])))
        by_overlap.observe(tuple(map(float, overlap[:count])))
        outcomes.append(by_outcome.rate())
        overlaps.append(by_overlap.rate())
    assert np.mean(overlaps[500:]) == pytest.approx(np.mean(outcomes[500:]), abs=0.02)
    assert np.std(overlaps[500:]) < 0.5 * np.std(outcomes[500:])


def test_without_observations_the_prior_stands() -> None:
    assert Acceptance().rate() == pytest.approx(PRIOR_RATE)
    assert Acceptance().rate(prior=0.25) == pytest.approx(0.25)


def test_the_prior_weighs_as_much_as_its_number_of_observations() -> None:
    acceptance = Acceptance()
    acceptance.observe((1.0,) * int(PRIOR_WEIGHT))
    assert acceptance.rate(prior=0.0) == pytest.approx(0.5)


def test_a_step_that_reached_nothing_changes_nothing() -> None:
    acceptance = Acceptance(3.0, 2.0)
    acceptance.observe(())
    assert acceptance == Acceptance(3.0, 2.0)


def test_the_past_fades() -> None:
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.observe((1.0, 1.0))
    for _ in range(200):
        acceptance.observe((0.0,))
    assert acceptance.rate() < 0.2
    assert acceptance.accepted == pytest.approx(2 * (1 - DECAY**200) / (1 - DECAY) * DECAY**200)


@settings(deadline=None, derandomize=True, database=None)
@given(
    steps=st.lists(st.lists(st.floats(0, 1), max_size=5).map(tuple), max_size=40),
    prior=st.floats(0, 1),
)
def test_the_rate_is_a_probability(steps: list[tuple[float, ...]], prior: float) -> None:
    acceptance = Acceptance()
    for step in steps:
        acceptance.observe(step)
        assert acceptance.accepted >= 0
        assert acceptance.rejected >= 0
    assert -1e-12 <= acceptance.rate(prior) <= 1 + 1e-12
