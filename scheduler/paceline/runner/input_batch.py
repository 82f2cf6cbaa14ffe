"""From runs of tokens to the flattened rows of one forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline_kernels import PagedBatch

MOST_ROOMS: Final = 16  # shapes whose arrays are kept
WIDTH_STEP: Final = 8  # blocks: tables that grow with their sequences have other shapes as rarely


# Not frozen: docs/decisions/012.
@dataclass(slots=True)
class TokenRun:
    """Consecutive tokens of one sequence: the first stands at position `start`; its KV goes to `block_ids`."""

    block_ids: list[int]
    start: int
    token_ids: list[int]


class InputBatch:
    """Lays out one batch after the other, on a CPU in the arrays of an earlier one of the same shape: to make arrays
    takes longer than to fill them. So a layout holds until the next one. Tables there are wider than they need be.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self._rooms: dict[tuple[int, int, int], _Room] = {}  # by shape

    def flatten(self, runs: Sequence[TokenRun], ahead: int = 0) -> tuple[Tensor, PagedBatch]:
        """What the function of this name gives."""
        room_for = self._room if self.device.type == "cpu" else _Room
        return _flatten(runs, self.block_size, self.device, ahead, room_for)

    def _room(self, num_rows: int, num_seqs: int, width: int) -> _Room:
        shape = num_rows, num_seqs, -(-width // WIDTH_STEP) * WIDTH_STEP
        room = self._rooms.get(shape)
        if room is None:
            if len(self._rooms) == MOST_ROOMS:
                self._rooms.clear()
            room = self._rooms[shape] = _Room(*shape)
        return room


class _Room:
    """Arrays for so many rows and sequences, with tables of `width` blocks, and tensors that share their memory."""

    def __init__(self, num_rows: int, num_seqs: int, width: int) -> None:
        self._token_ids = np.zeros(num_rows, dtype=np.int64)
        self._starts = np.zeros(num_seqs + 1, dtype=np.int32)
        self._context_lens = np.zeros(num_seqs, dtype=np.int32)
        self._tables = np.zeros((num_seqs, width), dtype=np.int32)
        self._blocks: list[list[int]] = [[] for _ in range(num_seqs)]  # what the tables show
        arrays = self._token_ids, self._starts, self._context_lens, self._tables
        self.tensors = tuple(map(torch.from_numpy, arrays))

    def fill(self, runs: Sequence[TokenRun], starts: list[int], context_lens: list[int], width: int) -> None:
        """Tables show the first `width` blocks of each run, with zeros behind them."""
        self._token_ids[:] = [token for run in runs for token in run.token_ids]
        self._starts[:] = starts
        self._context_lens[:] = context_lens
        for row, run in enumerate(runs):
            blocks = run.block_ids[:width]
            if blocks != self._blocks[row]:  # mostly they are those of the step before
                self._blocks[row] = blocks
                self._tables[row] = blocks + [0] * (self._tables.shape[1] - len(blocks))


def flatten(
    runs: Sequence[TokenRun], block_size: int, device: torch.device, ahead: int = 0
) -> tuple[Tensor, PagedBatch]:
    """Lay runs one after the other.

        rows       | a5 a6 a7 | b9 |        counts [3, 1], query_starts [0, 3, 4], context_lens [8, 10]

    Args:
        ahead: positions behind the runs whose blocks the tables should show too, as far as there are any.

    Returns:
        token_ids [num_tokens] int64, and where each row belongs.
    """
    return _flatten(runs, block_size, device, ahead, _Room)


def _flatten(
    runs: Sequence[TokenRun],
    block_size: int,
    device: torch.device,
    ahead: int,
    room_for: Callable[[int, int, int], _Room],
) -> tuple[Tensor, PagedBatch]:
    """The same in a room for so many rows and sequences, and tables of so many blocks or more."""
    counts = [len(run.token_ids) for run in runs]
    starts = row_bounds(counts)
    context_lens = [run.start + count for run, count in zip(runs, counts, strict=True)]
    width = -(-(max(context_lens) + ahead) // block_size)
    room = room_for(starts[-1], len(runs), width)
    room.fill(runs, starts, context_lens, width)
    token_ids, query_starts, contexts, tables = room.tensors
    batch = PagedBatch(query_starts, contexts, tables, block_size, max_rows=max(counts))
    return (token_ids, batch) if device.type == "cpu" else (token_ids.to(device), _moved(batch, runs, device))


def _moved(batch: PagedBatch, runs: Sequence[TokenRun], device: torch.device) -> PagedBatch:
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
    """Tell where the rows of each sequence begin, and where all end, if so many of each lie one after the other."""
    return list(itertools.accumulate(counts, initial=0))


def logit_rows(parts: Iterable[tuple[int, int, bool]]) -> list[int]:
    """Choose the rows whose logits are wanted, of runs of known tokens and drafts that lie one after the other: the
    last known one and the drafts of every sequence that samples.

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


def _rows(runs: Sequence[TokenRun], block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What `PagedBatch.positions` and `PagedBatch.slots` are, [num_tokens] each."""
    positions = [np.arange(run.start, run.start + len(run.token_ids)) for run in runs]
    slots = [
        np.array(run.block_ids, dtype=np.int64)[own // block_size] * block_size + own % block_size
        for run, own in zip(runs, positions, strict=True)
    ]
    return np.concatenate(positions), np.concatenate(slots)
