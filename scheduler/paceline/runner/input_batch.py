"""From runs of tokens to the flattened rows of one forward."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline_kernels import PagedBatch


# Not frozen: docs/decisions/012.
@dataclass(slots=True)
class Run:
    """Consecutive tokens of one sequence: the first stands at position `start`; its KV goes to `block_ids`."""

    block_ids: list[int]
    start: int
    token_ids: list[int]


def flatten(runs: Sequence[Run], block_size: int, device: torch.device, ahead: int = 0) -> tuple[Tensor, PagedBatch]:
    """Lay runs one after the other.

        rows       | a5 a6 a7 | b9 |        counts [3, 1], query_starts [0, 3, 4], context_lens [8, 10]

    Args:
        ahead: positions behind the runs whose blocks the tables should show too, as far as there are any.

    Returns:
        token_ids [num_tokens] int64, and where each row belongs.
    """
    counts = [len(run.token_ids) for run in runs]
    context_lens = [run.start + count for run, count in zip(runs, counts, strict=True)]
    width = -(-(max(context_lens) + ahead) // block_size)
    tables = np.zeros((len(runs), width), dtype=np.int32)
    for row, run in enumerate(runs):
        blocks = run.block_ids[:width]
        tables[row, : len(blocks)] = blocks
    token_ids = [token for run in runs for token in run.token_ids]
    batch = PagedBatch(
        query_starts=torch.from_numpy(np.array(row_bounds(counts), dtype=np.int32)),
        context_lens=torch.from_numpy(np.array(context_lens, dtype=np.int32)),
        block_tables=torch.from_numpy(tables),
        block_size=block_size,
        max_rows=max(counts),
    )
    rows = torch.from_numpy(np.array(token_ids, dtype=np.int64))
    return (rows, batch) if device.type == "cpu" else (rows.to(device), _moved(batch, runs, device))


def _moved(batch: PagedBatch, runs: Sequence[Run], device: torch.device) -> PagedBatch:
    """The same on a GPU."""
    return replace(
        batch,
        query_starts=batch.query_starts.to(device),
        context_lens=batch.context_lens.to(device),
        block_tables=batch.block_tables.to(device),
        # Always there, so that kernels are compiled for one case alone.
        table_rows=torch.arange(len(runs), dtype=torch.int32, device=device),
        # Worked out over there they would have to be waited for.
        derived={"rows": tuple(torch.from_numpy(x).to(device) for x in _rows(runs, batch.block_size))},
    )


def row_bounds(counts: Iterable[int]) -> list[int]:
    """Of rows that lie one after the other, so many of each sequence: where each one's begin, and where all end."""
    return list(itertools.accumulate(counts, initial=0))


def logit_rows(parts: Iterable[tuple[int, int, bool]]) -> list[int]:
    """Of runs of known tokens and drafts, one after the other, the rows whose logits are wanted: the last known one and
    the drafts of every sequence that samples.

    Args:
        parts: known tokens, drafts and whether it samples, of each sequence.
    """
    wanted: list[int] = []
    first = 0
    for known, drafts, samples in parts:
        if samples:
            wanted.extend(range(first + known - 1, first + known + drafts))
        first += known + drafts
    return wanted


def _rows(runs: Sequence[Run], block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What `PagedBatch.positions` and `PagedBatch.slots` are, [num_tokens] each."""
    positions = [np.arange(run.start, run.start + len(run.token_ids)) for run in runs]
    slots = [
        np.array(run.block_ids, dtype=np.int64)[own // block_size] * block_size + own % block_size
        for run, own in zip(runs, positions, strict=True)
    ]
    return np.concatenate(positions), np.concatenate(slots)
