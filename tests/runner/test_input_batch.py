"""Runs of tokens become rows with the right positions and slots."""

from __future__ import annotations

import numpy as np
import torch

from paceline.runner.input_batch import Run, flatten

CPU = torch.device("cpu")


def test_rows_of_a_mixed_batch() -> None:
    runs = [Run([7, 2], start=3, token_ids=[10, 11, 12]), Run([5], start=0, token_ids=[20]), Run([1, 9], 4, [30, 31])]
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
            runs.append(Run(blocks[index * 8 : index * 8 + 8].tolist(), start, rng.integers(0, 99, count).tolist()))
        token_ids, batch = flatten(runs, block_size=3, device=CPU)
        expected = [
            (token, run.start + i, run.block_ids[(run.start + i) // 3] * 3 + (run.start + i) % 3)
            for run in runs
            for i, token in enumerate(run.token_ids)
        ]
        found = list(zip(token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), strict=True))
        assert found == expected


def test_blocks_reserved_beyond_the_rows_are_left_out() -> None:
    _, batch = flatten([Run([4, 5, 6], start=0, token_ids=[1, 2])], block_size=2, device=CPU)
    assert batch.block_tables.tolist() == [[4]]
