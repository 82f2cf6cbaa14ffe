"""Logprobs against numpy, their order where tokens tie, and processed ones against the oracle of the chain."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.core.params import LogprobsMode, LogprobsParams, SamplingParams
from paceline.core.plan import TokenLogprobs
from paceline.runner import logprobs as module
from paceline.runner.logprobs import completion_logprobs, token_logprobs
from paceline.runner.positions import Positions
from runner.rows import make_sequence, positions_of, random_sequence, state_of
from support import chain

VOCAB = 30
PROCESSED = LogprobsParams(completion=4, mode=LogprobsMode.PROCESSED)


def expected(row: NDArray[np.float64], token: int, count: int) -> TokenLogprobs:
    """By the definitions."""
    logprobs = chain.log_softmax(row)
    best = sorted(range(len(row)), key=lambda v: (-logprobs[v], v))[:count]
    rank = 1 + sum(other > logprobs[token] for other in logprobs)
    return TokenLogprobs(float(logprobs[token]), int(rank), tuple(best), tuple(float(logprobs[v]) for v in best))


def assert_close(found: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert (found.rank, found.top_token_ids) == (wanted.rank, wanted.top_token_ids)
    np.testing.assert_allclose(
        [found.logprob, *found.top_logprobs], [wanted.logprob, *wanted.top_logprobs], rtol=1e-5, atol=2e-6
    )


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB, VOCAB + 3])
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
def test_logprobs_are_numpys(count: int, ties: bool) -> None:
    """More than there are tokens gives them all."""
    rng = np.random.default_rng(count)
    rows = rng.normal(size=(40, VOCAB)) * 3
    if ties:
        rows = np.round(rows / 3)
        rows[rng.random(rows.shape) < 0.3] = -np.inf
    logits = torch.from_numpy(rows).float()
    tokens = rng.integers(0, VOCAB, len(rows)).tolist()
    found = token_logprobs(logits, tokens, count)
    assert len(found) == len(rows)
    for row, token, result in zip(logits.double().numpy(), tokens, found, strict=True):
        assert_close(result, expected(row, token, count))
        assert len(result.top_token_ids) == min(count, VOCAB)


def test_ties_have_one_rank_and_stand_in_the_order_of_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, -torch.inf]])
    ranks = [token_logprobs(logits, [token], 0)[0].rank for token in range(6)]
    assert ranks == [3, 1, 3, 1, 3, 6]
    assert [token_logprobs(logits, [0], count)[0].top_token_ids for count in range(1, 7)] == [
        (1,),
        (1, 3),
        (1, 3, 0),
        (1, 3, 0, 2),
        (1, 3, 0, 2, 4),
        (1, 3, 0, 2, 4, 5),
    ]


def test_no_tokens_have_no_logprobs() -> None:
    assert token_logprobs(torch.zeros(0, 5), [], 3) == ()
    assert completion_logprobs(torch.zeros(2, 5), Positions(make_sequence(logprobs=PROCESSED), [1]), []) == ()


def test_logprobs_of_a_row_do_not_depend_on_its_batch_mates() -> None:
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(1))
    tokens = list(range(9))
    together = token_logprobs(logits, tokens, 3)
    assert together == tuple(token_logprobs(logits[i : i + 1], [i], 3)[0] for i in range(9))


def random_runs(seed: int, **fixed: object) -> list[tuple[torch.Tensor, Positions, list[int]]]:
    """Raw logits, the positions of a run and what it emitted, all of them or fewer, and nothing impossible."""
    rng = np.random.default_rng(seed)
    found = []
    while len(found) < 60:
        drafts = rng.integers(0, VOCAB, rng.integers(0, 4)).tolist()
        positions = positions_of(random_sequence(rng, VOCAB, **fixed), drafts)
        raw = torch.from_numpy(rng.normal(size=(len(positions), VOCAB)) * 2).float()
        if all(np.isfinite(row.max()) for row in edited(raw, positions)):
            emitted = [*drafts, int(rng.integers(VOCAB))][: rng.integers(1, len(drafts) + 2)]
            found.append((raw, positions, emitted))
    return found


def edited(raw: torch.Tensor, positions: Positions) -> list[NDArray[np.float64]]:
    params = positions.params
    rows = []
    for j, row in enumerate(raw.double().numpy()):
        state, allowed = state_of(positions, j)
        rows.append(chain.process(row, params.sampling, params.constraints, state, allowed))
    return rows


@pytest.mark.parametrize("seed", [1, 2])
def test_processed_logprobs_are_those_of_the_distribution_sampled(seed: int) -> None:
    """-inf for what was cut away; and the raw logits stay as they are."""
    cut = 0
    for raw, positions, emitted in random_runs(seed, temperature=0.75):
        before = raw.clone()
        found = completion_logprobs(raw, with_logprobs(positions, PROCESSED), emitted)
        assert torch.equal(raw, before)
        assert len(found) == len(emitted)
        for token, row, result in zip(emitted, edited(raw, positions), found, strict=False):
            with np.errstate(divide="ignore"):
                processed = np.log(chain.distribution(row, positions.params.sampling))
            assert_close(result, expected(processed, token, 4))
            cut += bool(np.isneginf(processed[token]))
    assert cut > 5


def test_processed_logprobs_of_greedy_requests_are_of_the_edited_logits() -> None:
    """At temperature 1: nothing is divided."""
    features = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    for raw, positions, emitted in random_runs(3, **features):
        found = completion_logprobs(raw, with_logprobs(positions, PROCESSED), emitted)
        assert len(found) == len(emitted)
        for token, row, result in zip(emitted, edited(raw, positions), found, strict=False):
            assert_close(result, expected(row, token, 4))


def test_processed_logprobs_at_the_smallest_temperature() -> None:
    sequence = make_sequence(temperature=1e-310, logprobs=PROCESSED)
    (found,) = completion_logprobs(torch.tensor([[1.0, 40.0, 39.9]]), Positions(sequence, []), [1])
    assert (found.logprob, found.rank) == (0.0, 1)
    assert found.top_token_ids == (1, 2, 0)
    assert found.top_logprobs[0] == 0.0
    assert max(found.top_logprobs[1:]) < -1e28


def test_raw_logprobs_are_of_the_model_and_no_processor_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("raw logprobs need no processor")

    monkeypatch.setattr(module, "edit_", refuse)
    monkeypatch.setattr(module, "truncate_", refuse)
    for raw, positions, emitted in random_runs(4):
        found = completion_logprobs(raw, with_logprobs(positions, LogprobsParams(completion=2)), emitted)
        assert len(found) == len(emitted)
        for token, row, result in zip(emitted, raw.double().numpy(), found, strict=False):
            assert_close(result, expected(row, token, 2))


def with_logprobs(positions: Positions, wanted: LogprobsParams) -> Positions:
    """The same run of a request that asks for logprobs."""
    own = positions.sequence
    sampling = {name: getattr(own.params.sampling, name) for name in SamplingParams.__slots__}
    sequence = make_sequence(own.prompt, own.output, constraints=own.params.constraints, logprobs=wanted, **sampling)
    return Positions(sequence, positions.drafts, masks=positions.masks)


def test_extreme_logits_have_processed_logprobs() -> None:
    """Where dividing by the temperature overflows, and only in some of the rows."""
    logits = torch.tensor([[9.0, 1.0, 2.0], [-9.0, 1.0, 2.0]])
    sequence = make_sequence((0,), temperature=0.01, repetition_penalty=1e-40, logprobs=PROCESSED)
    first, second = completion_logprobs(logits, positions_of(sequence, [0]), [0, 2])
    assert (first.logprob, first.rank, first.top_token_ids[0]) == (0.0, 1, 0)
    assert np.isfinite(second.logprob)
