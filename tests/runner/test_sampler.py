"""The chain of the sampler against its oracle: every row has its own parameters, and the state of its position."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import paceline_kernels as ops
from paceline.core.grammar import Mask, mask_of
from paceline.core.params import Constraints
from paceline.runner import sampler
from paceline.runner.positions import Positions
from paceline.runner.sampler import distribution_, edit_, temperatures, truncate_
from runner.rows import Following, make_sequence, positions_of, random_sequence, state_of
from support import chain

VOCAB = 40
CPU = torch.device("cpu")
DTYPES = {torch.float32: 2e-6, torch.float64: 1e-12}  # and how far from the oracle


def random_batch(seed: int, count: int = 60, **fixed: object) -> tuple[Tensor, list[Positions]]:
    """Sequences of all kinds with 0 to 4 drafts, and logits [rows, VOCAB] float64."""
    rng = np.random.default_rng(seed)
    batch = []
    for _ in range(count):
        sequence = random_sequence(rng, VOCAB, **fixed)
        batch.append(positions_of(sequence, rng.integers(0, VOCAB, rng.integers(0, 5)).tolist()))
    return torch.from_numpy(rng.normal(size=(sum(map(len, batch)), VOCAB)) * 2).float().double(), batch


def oracle(logits: Tensor, batch: list[Positions]) -> list[NDArray[np.float64]]:
    """Every row as the oracle edits it."""
    rows = []
    for positions in batch:
        params = positions.params
        for j in range(len(positions)):
            state, allowed = state_of(positions, j)
            row = logits[len(rows)].double().numpy()
            rows.append(chain.process(row, params.sampling, params.constraints, state, allowed))
    return rows


def params_of_rows(batch: list[Positions]) -> list[Positions]:
    return [positions for positions in batch for _ in range(len(positions))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_edits_are_the_oracles_at_every_position(seed: int, dtype: torch.dtype) -> None:
    logits, batch = random_batch(seed)
    found = logits.to(dtype, copy=True)
    dead = edit_(found, batch)
    expected = np.stack(oracle(logits, batch))
    np.testing.assert_array_equal(np.isneginf(found.numpy()), np.isneginf(expected))
    np.testing.assert_allclose(found.numpy(), expected, rtol=DTYPES[dtype], atol=10 * DTYPES[dtype])
    assert sorted(dead) == np.flatnonzero(np.isneginf(expected).all(-1)).tolist()
    assert sum(not np.array_equal(a, b) for a, b in zip(expected, logits.numpy(), strict=True)) > len(logits) / 2
    living = np.setdiff1d(np.arange(len(logits)), dead)
    assert ops.argmax(found)[living].tolist() == [chain.greedy(expected[row]) for row in living]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_distributions_are_the_oracles_at_every_position(seed: int, dtype: torch.dtype) -> None:
    logits, batch = random_batch(seed)
    found = logits.to(dtype, copy=True)
    dead = edit_(found, batch)
    result = distribution_(found, batch)
    assert result is found
    compared = 0
    for row, (positions, edited) in enumerate(zip(params_of_rows(batch), oracle(logits, batch), strict=True)):
        if row in dead:
            assert (found[row] == 0).all()
        elif not positions.params.sampling.greedy:
            compared += 1
            expected = chain.distribution(edited, positions.params.sampling)
            np.testing.assert_array_equal(found[row].numpy() == 0, expected == 0)
            np.testing.assert_allclose(found[row].numpy(), expected, rtol=0, atol=DTYPES[dtype])
    assert compared > 60


def test_rows_one_by_one_are_the_rows_of_a_run() -> None:
    """As a draft model asks for them, and as logprobs do; with as much state."""
    logits, batch = random_batch(5)
    together = logits.clone()
    edit_(together, batch)
    singles = [single for positions in batch for single in positions.only(range(len(positions)))]
    assert [len(single) for single in singles] == [1] * len(logits)
    alone = logits.clone()
    edit_(alone, singles)
    assert torch.equal(together, alone)


def test_some_rows_of_a_run_keep_their_state() -> None:
    positions = Positions(make_sequence((1,), (2,), frequency_penalty=1.0), [3, 4, 5])
    chosen = positions.only([0, 2])
    assert [len(row) for row in chosen] == [1, 1]
    assert [row.behind(0) for row in chosen] == [[], [3, 4]]
    assert [positions.behind(j) for j in range(4)] == [[], [3], [3, 4], [3, 4, 5]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch_mates(dtype: torch.dtype) -> None:
    """To the bit: neither on what the others are, nor on where it stands among them."""
    logits, batch = random_batch(7, temperature=0.75)
    together = logits.to(dtype, copy=True)
    edit_(together, batch)
    distribution_(together, batch)
    for positions, rows, found in zip(
        batch, logits.split([len(p) for p in batch]), together.split([len(p) for p in batch]), strict=True
    ):
        alone = rows.to(dtype, copy=True)
        edit_(alone, [positions])
        assert torch.equal(distribution_(alone, [positions]), found)
    reverse = torch.cat(logits.to(dtype).split([len(p) for p in batch])[::-1])
    edit_(reverse, batch[::-1])
    distribution_(reverse, batch[::-1])
    assert torch.equal(torch.cat(reverse.split([len(p) for p in batch[::-1]])[::-1]), together)


# -- a position's state, by hand --------------------------------------------------------------------------------------


def test_penalties_count_the_drafts_before_a_row() -> None:
    sequence = make_sequence((0,), (1,), frequency_penalty=1.0, presence_penalty=0.25)
    logits = torch.zeros(4, 5)
    edit_(logits, [Positions(sequence, [1, 2, 1])])
    assert logits.tolist() == [
        [0, -1.25, 0, 0, 0],
        [0, -2.25, 0, 0, 0],
        [0, -2.25, -1.25, 0, 0],
        [0, -3.25, -1.25, 0, 0],
    ]


def test_repetition_counts_the_prompt_and_the_drafts() -> None:
    logits = torch.tensor([[2.0, 2.0, -2.0, 2.0]]).repeat(2, 1)
    edit_(logits, [Positions(make_sequence((0,), (), repetition_penalty=2.0), [2])])
    assert logits.tolist() == [[1, 2, -2, 2], [1, 2, -4, 2]]


@pytest.mark.parametrize("penalty", [1e-50, 1e-40, 1e38])
def test_an_extreme_repetition_penalty_leaves_a_distribution(penalty: float) -> None:
    """Finite logits stay finite, and forbidden tokens forbidden."""
    sequence = make_sequence((0, 1, 2), repetition_penalty=penalty, allowed_token_ids=(0, 1, 3))
    logits = torch.tensor([[9.0, -9.0, 9.0, 1.0, 2.0]])
    positions = positions_of(sequence)
    assert edit_(logits, [positions]) == []
    assert torch.isfinite(logits).tolist() == [[True, True, False, True, False]]
    probs = distribution_(logits, [positions])
    torch.testing.assert_close(probs.sum(-1), torch.ones(1))


@pytest.mark.parametrize("penalty", [1e39, 1e300, 1e-46, 1e-300])
def test_a_repetition_penalty_that_float32_cannot_hold_leaves_zero_alone(penalty: float) -> None:
    """0 times infinity is no number. The token that was not there before is still the most probable one."""
    logits = torch.tensor([[0.0, 0.0, -1.0, 5.0]])
    positions = positions_of(make_sequence((0, 1, 2), repetition_penalty=penalty))
    assert edit_(logits, [positions]) == []
    assert logits[0, [0, 1, 3]].tolist() == [0, 0, 5]
    assert torch.isfinite(logits).all()
    assert ops.argmax(logits).tolist() == [3]
    assert torch.isfinite(distribution_(logits, [positions])).all()


def test_numbers_beyond_what_tensors_hold() -> None:
    """Python's own are as large as one likes."""
    vast = positions_of(make_sequence(temperature=1e300, top_k=10**20, typical_p=0.9))
    probs = distribution_(torch.tensor([[0.0, 5.0, -torch.inf, 1.0]]), [vast])
    torch.testing.assert_close(probs, torch.tensor([[1 / 3, 1 / 3, 0, 1 / 3]]))


def test_bad_words_are_completed_by_drafts_and_never_by_the_prompt() -> None:
    constraints = Constraints(bad_words=((1, 2), (0, 1, 3), (4,)))
    logits = torch.zeros(4, 5)
    edit_(logits, [Positions(make_sequence((0, 1), (0,), constraints=constraints), [1, 2, 1])])
    assert [torch.isneginf(row).nonzero().flatten().tolist() for row in logits] == [[4], [2, 3, 4], [4], [2, 4]]


def test_the_minimum_length_ends_within_a_run() -> None:
    constraints = Constraints(min_tokens=3, stop_token_ids=(0, 2))
    logits = torch.zeros(4, 3)
    edit_(logits, [Positions(make_sequence((1,), (1,), constraints=constraints), [1, 1, 1])])
    assert [torch.isneginf(row).nonzero().flatten().tolist() for row in logits] == [[0, 2], [0, 2], [], []]


def test_a_grammar_has_a_mask_of_its_own_at_every_row() -> None:
    table = np.array([[True, False, False], [False, True, True], [True, True, True]])
    sequence = make_sequence((2,), (0,), constraints=Constraints(grammar=Following(table)))
    logits = torch.zeros(3, 3)
    assert edit_(logits, [positions_of(sequence, [1, 2])]) == []
    assert [torch.isneginf(row).nonzero().flatten().tolist() for row in logits] == [[1, 2], [0], []]


def test_dead_rows_are_told() -> None:
    """By a grammar, by a grammar and allowed tokens together, by bans, and by bans on what a grammar leaves."""
    only_1 = Constraints(grammar=Following(np.array([[False, True, False]] * 3)))
    nothing_behind_2 = Constraints(grammar=Following(np.array([[True] * 3, [True] * 3, [False] * 3])))
    every_word = Constraints(bad_words=((0,), (1,), (0,), (2, 2)), min_tokens=2, stop_token_ids=(1, 2))
    banned_1 = Constraints(grammar=only_1.grammar, bad_words=((2, 1),))
    batch = [
        positions_of(make_sequence((0,), (1,), constraints=nothing_behind_2), [1, 2, 0]),  # rows 0 to 3
        positions_of(make_sequence(), [2]),
        positions_of(make_sequence((0,), (0,), constraints=only_1, allowed_token_ids=(0, 2))),  # row 6
        positions_of(make_sequence((0,), (), constraints=every_word), [2, 1]),  # rows 7 to 9
        positions_of(make_sequence((0,), (0,), constraints=banned_1), [2]),  # rows 10 and 11
    ]
    logits = torch.zeros(12, 3)
    assert sorted(edit_(logits, batch)) == [2, 6, 7, 8, 11]
    assert torch.isneginf(logits).all(-1).nonzero().flatten().tolist() == [2, 6, 7, 8, 11]
    assert (distribution_(logits, batch)[[2, 6, 7, 8, 11]] == 0).all()


def test_the_mask_of_allowed_tokens_is_made_once_and_goes_with_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Mask]] = []

    def make(token_ids: Iterable[int], vocab_size: int) -> Mask:
        mask = mask_of(token_ids, vocab_size)
        made.append(weakref.ref(mask))
        return mask

    monkeypatch.setattr(sampler, "mask_of", make)
    for count in (1, 2):
        sequence = make_sequence(allowed_token_ids=(0, 2))
        for drafts in ([], [2, 0]):
            logits = torch.zeros(1 + len(drafts), 3)
            edit_(logits, [positions_of(sequence, drafts)])
            assert torch.isneginf(logits).tolist() == [[False, True, False]] * len(logits)
        assert len(made) == count
    del sequence
    assert [ref() for ref in made] == [None, None]


def test_a_mask_is_not_written_to() -> None:
    constraints = Constraints(grammar=Following(np.ones((3, 3), np.bool_)), bad_words=((1,),))
    positions = positions_of(make_sequence(constraints=constraints, allowed_token_ids=(0, 1)), [0])
    assert positions.masks is not None
    before = positions.masks.copy()
    for _ in range(2):  # the second time, too: the bits of allowed ids are kept between calls
        logits = torch.zeros(2, 3)
        edit_(logits, [positions])
        assert torch.isneginf(logits).tolist() == [[False, True, True]] * 2
    np.testing.assert_array_equal(positions.masks, before)


# -- temperature ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-45, 1e-310])
def test_the_smallest_temperatures_leave_the_maximum(temperature: float) -> None:
    logits = torch.tensor([[-3.0, 40.0, 39.9, -80.0]])
    for more in ({}, {"typical_p": 0.5}, {"top_p": 0.5, "min_p": 0.25, "top_k": 3}):
        batch = [Positions(make_sequence(temperature=temperature, **more), [])]
        assert distribution_(logits.clone(), batch).tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_temperatures_of_rows() -> None:
    batch = [
        Positions(make_sequence(temperature=t), drafts) for t, drafts in [(0.0, [1]), (0.5, []), (0.0, []), (2.0, [1])]
    ]
    assert temperatures(batch, CPU).tolist() == [1, 1, 0.5, 1, 2, 2]


def test_equal_logits_at_the_cut_are_all_kept() -> None:
    found = distribution_(torch.tensor([[1.0, 0.0, 0.0, -1.0]]), [Positions(make_sequence(top_k=2), [])])
    assert (found > 0).tolist() == [[True, True, True, False]]


# -- who asks for nothing pays nothing --------------------------------------------------------------------------------


def refuse(*_: object) -> None:
    raise AssertionError("an operation that no row needs")


def test_rows_without_features_stay_as_they_are() -> None:
    """To the bit, beside rows that have every feature."""
    logits, batch = random_batch(11)
    plain = [not p.params.edits_logits and not p.params.sampling.truncated for p in params_of_rows(batch)]
    assert sum(plain) > 20
    edited = logits.float()
    edit_(edited, batch)
    truncate_(edited, batch)
    assert torch.equal(edited[plain], logits.float()[plain])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_features_no_operation_runs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, _ = random_batch(12)
    batch = [Positions(make_sequence(temperature=0.5), [1] * (len(logits) - 1))]
    for name in ("mask_", "truncate_"):
        monkeypatch.setattr(sampler.ops, name, refuse)
    for name in ("_restrict", "_add_bias", "_penalise"):
        monkeypatch.setattr(sampler, name, refuse)
    found = logits.to(dtype, copy=True)
    assert edit_(found, batch) == []
    truncate_(found, batch)
    assert torch.equal(found, logits.to(dtype))


def test_only_what_is_asked_for_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties need no mask, and no truncation."""
    for name in ("mask_", "truncate_"):
        monkeypatch.setattr(sampler.ops, name, refuse)
    logits = torch.zeros(1, 3)
    batch = [Positions(make_sequence((0,), (1,), presence_penalty=1.0), [])]
    assert edit_(logits, batch) == []
    truncate_(logits, batch)
    assert logits.tolist() == [[0, -1, 0]]


def test_edited_sequences_are_those_with_a_feature() -> None:
    assert not make_sequence(temperature=0.3, top_k=1, top_p=0.5).params.edits_logits
    for features in (
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": ((0, 1.0),)},
        {"allowed_token_ids": (0,)},
        {"constraints": Constraints(bad_words=((1,),))},
        {"constraints": Constraints(min_tokens=1)},
        {"constraints": Constraints(grammar=Following(np.ones((2, 2), np.bool_)))},
    ):
        assert make_sequence(**features).params.edits_logits, features  # type: ignore[arg-type]
