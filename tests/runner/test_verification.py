"""Exact verification: what is emitted is distributed as the target, whatever the draft."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from paceline.core.params import SamplingParams
from paceline.runner import verification
from paceline.runner.drafter import Draft
from paceline.runner.verification import Verifier

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0)
DRAWS = 20_000
# p and q at the three rows of a depth-2 run, over 4 tokens; a position's distribution does not depend on the prefix.
P = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.4, 0.4], [0.25, 0.25, 0.25, 0.25]])
Q = torch.tensor([[0.2, 0.3, 0.1, 0.4], [0.7, 0.1, 0.1, 0.1]])


def emit(probs: torch.Tensor | None, seed: int = 0) -> list[list[int]]:
    """Verify DRAWS runs, drafted from Q (probs = Q) or by a fixed guess (one-hot), and return what each emitted."""
    rng = np.random.default_rng(seed)
    drafts = []
    for _ in range(DRAWS):
        if probs is None:
            drafts.append(Draft([1, 2]))
        else:
            drafts.append(Draft([int(rng.choice(4, p=row / row.sum())) for row in probs.double().numpy()], probs))
    logits = P.log().repeat(DRAWS, 1)
    verdicts = Verifier(seed, CPU).verify(logits, drafts, [SAMPLED] * DRAWS)
    return [verdict.token_ids for verdict in verdicts]


def pvalue(runs: list[list[int]], length: int) -> float:
    """Chi-square of the first `length` tokens; shorter runs are continued by the target itself."""
    rng = np.random.default_rng(9)
    rows = P.double().numpy()
    rows /= rows.sum(-1, keepdims=True)
    filled = [run + [int(rng.choice(4, p=rows[j])) for j in range(len(run), length)] for run in runs]
    counts = {key: 0 for key in itertools.product(range(4), repeat=length)}
    for run in filled:
        counts[tuple(run[:length])] += 1
    expected = {key: DRAWS * float(np.prod([rows[j][t] for j, t in enumerate(key)])) for key in counts}
    assert all(counts[key] == 0 for key in counts if expected[key] == 0), "a token with p = 0 was emitted"
    keys = [key for key in counts if expected[key] > 0]
    return float(chisquare([counts[k] for k in keys], [expected[k] for k in keys]).pvalue)


@pytest.mark.parametrize("probs", [Q, None], ids=["drawn", "one-hot"])
def test_emitted_runs_follow_the_target(probs: torch.Tensor | None) -> None:
    assert pvalue(emit(probs), length=3) > 0.001


@pytest.mark.parametrize("probs", [Q, None], ids=["drawn", "one-hot"])
def test_recovering_from_p_instead_of_the_residual_is_noticed(
    probs: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "residual", lambda p, q: p)
    assert pvalue(emit(probs), length=3) < 1e-6


def test_acceptance_is_the_overlap_of_reached_positions() -> None:
    overlap = torch.minimum(P[:2], Q).sum(-1).tolist()
    verdicts = Verifier(0, CPU).verify(P.log().repeat(200, 1), [Draft([0, 0], Q)] * 200, [SAMPLED] * 200)
    for verdict in verdicts:
        assert verdict.acceptance == pytest.approx(overlap[: min(verdict.num_accepted + 1, 2)])
    assert {verdict.num_accepted for verdict in verdicts} >= {1, 2}


def test_equal_distributions_accept_everything() -> None:
    verdicts = Verifier(0, CPU).verify(P.log().repeat(500, 1), [Draft([1, 3], P[:2])] * 500, [SAMPLED] * 500)
    assert all(verdict.num_accepted == 2 and len(verdict.token_ids) == 3 for verdict in verdicts)


def test_greedy_keeps_the_agreeing_prefix() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, 1.0], [0.0, 0.0, 1.0]])  # argmax 1, 0 (a tie), 2
    verifier = Verifier(0, CPU)
    for tokens, accepted, emitted in [([1, 0], 2, [1, 0, 2]), ([1, 1], 1, [1, 0]), ([0, 0], 0, [1])]:
        (verdict,) = verifier.verify(logits, [Draft(tokens)], [GREEDY])
        assert (verdict.num_accepted, verdict.token_ids) == (accepted, emitted)
        assert verdict.acceptance == [1.0] * accepted + [0.0] * (accepted < 2)


def test_a_mixed_batch_keeps_its_order() -> None:
    """Greedy and sampled requests of different depths, in one call."""
    certain = torch.full((6, 4), -100.0)
    for row, token in enumerate([3, 1, 2, 0, 3, 1]):
        certain[row, token] = 100.0
    drafts = [Draft([3]), Draft([]), Draft([0, 2], torch.full((2, 4), 0.25))]
    verdicts = Verifier(0, CPU).verify(certain, drafts, [SAMPLED, GREEDY, SAMPLED])
    assert [v.token_ids for v in verdicts] == [[3, 1], [2], [0, 3]]
    assert [v.num_accepted for v in verdicts] == [1, 0, 1]
