"""Runs of tokens become rows with the right positions and slots."""

from __future__ import annotations

import numpy as np
import torch

from paceline.runner.input_batch import MOST_ROOMS, InputBatch, TokenRun, flatten

CPU = torch.device("cpu")


def test_rows_of_a_mixed_batch() -> None:
    runs = [
        TokenRun([7, 2], start=3, token_ids=[10, 11, 12]),
        TokenRun([5], start=0, token_ids=[20]),
        TokenRun([1, 9], 4, [30, 31]),
    ]
    token_ids, batch = flatten(runs, block_size=4, device=CPU)
    assert token_ids.tolist() == [10, 11, 12, 20, 30, 31]
    assert batch.positions.tolist() == [3, 4, 5, 0, 4, 5]
    assert batch.slots.tolist() == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 5 * 4, 9 * 4, 9 * 4 + 1]
    assert batch.query_starts.tolist() == [0, 3, 4, 6]
    assert batch.context_lens.tolist() == [6, 1, 6]
    assert batch.block_tables.tolist() == [[7, 2], [5, 0], [1, 9]]


def test_random_batches_agree_with_a_loop_over_tokens() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        blocks = rng.permutation(64)
        runs = []
        for index in range(int(rng.integers(1, 6))):
            start, count = int(rng.integers(0, 12)), int(rng.integers(1, 9))
            runs.append(
                TokenRun(blocks[index * 8 : index * 8 + 8].tolist(), start, rng.integers(0, 99, count).tolist())
            )
        token_ids, batch = flatten(runs, block_size=3, device=CPU)
        expected = [
            (token, run.start + i, run.block_ids[(run.start + i) // 3] * 3 + (run.start + i) % 3)
            for run in runs
            for i, token in enumerate(run.token_ids)
        ]
        found = list(zip(token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), strict=True))
        assert found == expected


def test_blocks_reserved_beyond_the_rows_are_left_out() -> None:
    _, batch = flatten([TokenRun([4, 5, 6], start=0, token_ids=[1, 2])], block_size=2, device=CPU)
    assert batch.block_tables.tolist() == [[4]]


def test_arrays_of_an_earlier_batch_keep_nothing_of_it() -> None:
    """Batches of few shapes, one after the other, of sequences that grow, shrink and change their blocks."""
    rng = np.random.default_rng(5)
    inputs = InputBatch(block_size=3, device=CPU)
    shapes = set()
    for _ in range(200):
        runs = []
        for _ in range(int(rng.integers(1, 4))):
            start, count = int(rng.integers(0, 9)), int(rng.integers(1, 3))
            runs.append(TokenRun(rng.integers(1, 6, 4).tolist(), start, rng.integers(0, 99, count).tolist()))
        ahead = int(rng.integers(0, 3))
        (token_ids, batch), (expected_ids, expected) = inputs.flatten(runs, ahead), flatten(runs, 3, CPU, ahead)
        assert token_ids.tolist() == expected_ids.tolist()
        for name in ("query_starts", "context_lens", "positions", "slots"):
            assert getattr(batch, name).tolist() == getattr(expected, name).tolist(), name
        width = expected.block_tables.shape[1]
        assert torch.equal(batch.block_tables[:, :width], expected.block_tables)
        assert not batch.block_tables[:, width:].any(), "padded with 0"
        assert batch.max_rows == expected.max_rows
        shapes.add((len(token_ids), *batch.block_tables.shape))
    assert len(shapes) < 100, "shapes come again"


def test_a_shape_that_comes_again_has_the_same_arrays() -> None:
    inputs = InputBatch(block_size=4, device=CPU)
    first = inputs.flatten([TokenRun([1], start=0, token_ids=[7])])
    second = inputs.flatten([TokenRun([2], start=1, token_ids=[8])])
    assert second[0] is first[0]
    assert second[1].block_tables is first[1].block_tables
    assert second[1].positions.tolist() == [1], "what was worked out from the first is not kept"
    for rows in range(2, 2 + MOST_ROOMS):
        inputs.flatten([TokenRun([1] * rows, start=0, token_ids=[7] * rows)])
    assert inputs.flatten([TokenRun([2], start=1, token_ids=[8])])[0] is not first[0], "there are not more and more"
