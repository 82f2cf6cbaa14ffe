"""Temperature, top-k and top-p against a plain loop, and draws against their distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from paceline.core.params import SamplingParams
from paceline.runner.sampler import distribution, draw


def naive(logits: list[float], params: SamplingParams) -> list[float]:
    """By the definitions, one token at a time."""
    scaled = [x / params.temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    mass = sum(math.exp(scaled[i]) for i in order)
    kept, before = [], 0.0
    for i in order:
        if before >= params.top_p:
            break
        kept.append(i)
        before += math.exp(scaled[i]) / mass
    mass = sum(math.exp(scaled[i]) for i in kept)
    return [math.exp(scaled[i]) / mass if i in kept else 0.0 for i in range(len(logits))]


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.4),
    SamplingParams(top_k=1),
    SamplingParams(top_k=3),
    SamplingParams(top_k=1000),
    SamplingParams(top_p=0.5),
    SamplingParams(temperature=1.7, top_k=5, top_p=0.8),
    SamplingParams(top_p=1e-9),
]


def test_every_row_has_its_own_parameters() -> None:
    logits = torch.randn(len(PARAMS), 11, generator=torch.Generator().manual_seed(1)) * 2
    before = logits.clone()
    found = distribution(logits, PARAMS)
    assert torch.equal(logits, before)
    for row, params in enumerate(PARAMS):
        expected = torch.tensor(naive(logits[row].tolist(), params))
        torch.testing.assert_close(found[row], expected, atol=1e-6, rtol=1e-5)
        assert ((found[row] == 0) == (expected == 0)).all()


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-45, 1e-310])
def test_the_smallest_temperatures_leave_the_maximum(temperature: float) -> None:
    logits = torch.tensor([[-3.0, 40.0, 39.9, -80.0]])
    assert distribution(logits, [SamplingParams(temperature=temperature)]).tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_equal_logits_are_cut_at_the_lowest_ids() -> None:
    assert distribution(torch.zeros(1, 6), [SamplingParams(top_k=2)]).tolist() == [[0.5, 0.5, 0, 0, 0, 0]]


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    alone = distribution(logits[:1], [SamplingParams(temperature=0.7)])
    together = distribution(logits, [SamplingParams(temperature=0.7), SamplingParams(top_k=4, top_p=0.3)])
    assert torch.equal(alone[0], together[0])


@pytest.mark.parametrize("probs", [[0.5, 0.2, 0.3], [0.02, 0.9, 0.0, 0.08]])
def test_draws_follow_the_distribution(probs: list[float]) -> None:
    count = 20_000
    drawn = draw(torch.tensor(probs).expand(count, -1), torch.Generator().manual_seed(5)).numpy()
    observed = np.bincount(drawn, minlength=len(probs))
    expected = np.array(probs) * count
    assert (observed[expected == 0] == 0).all(), "a token of probability 0 was drawn"
    assert chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 0.001
