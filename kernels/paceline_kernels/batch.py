"""The layout of one forward pass: runs of rows of several sequences, one after the other, over paged KV."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Which rows belong to which sequence, and where each sequence keeps its K and V.

    A sequence contributes one run of consecutive rows: a prefill chunk, a single decode, or a token with its drafts.
    Attention is causal inside the run: row r of n sees `context_len - (n - 1 - r)` tokens. Every row belongs to a run.

        rows         | a0 a1 a2 | b0 | c0 c1 |        query_starts = [0, 3, 4, 6]
        context_lens |    7     | 20 |   2   |        a0 sees 5 tokens, a1 6, a2 7; c0 sees 1, c1 2

    All tensors live on the device of the model. Position p of sequence i is kept in block
    `block_tables[i, p // block_size]` at offset `p % block_size`. Two sequences may share blocks they only read; two
    rows may have the same slot only if they write the same there.
    """

    query_starts: Tensor  # [num_seqs + 1] int32: rows of sequence i are query_starts[i]:query_starts[i + 1]
    context_lens: Tensor  # [num_seqs] int32: tokens that the last row of sequence i sees, itself included
    block_tables: Tensor  # [num_seqs, max_blocks] int32, padded with 0
    block_size: int
    # Where the tables are those of many sequences: each one's row in them, [num_seqs] int32, negative for padding.
    table_rows: Tensor | None = None
    max_rows: int | None = None  # of a run, at most; None: unknown
    # What a backend works out from the layout once, for every layer; by a key of the backend's own.
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def positions(self) -> Tensor:
        """The position of every row in its sequence, [num_tokens] int64."""
        return self._rows()[0]

    @property
    def slots(self) -> Tensor:
        """Where the K and V of every row are written, [num_tokens] int64: block_id * block_size + offset."""
        return self._rows()[1]

    def _rows(self) -> tuple[Tensor, Tensor]:
        if "rows" not in self.derived:
            starts = self.query_starts.long()
            owners = torch.arange(len(self.context_lens), device=starts.device).repeat_interleave(starts.diff())
            behind = starts[1:][owners] - torch.arange(len(owners), device=starts.device)  # rows from here on
            positions = self.context_lens[owners].long() - behind
            blocks = self.block_tables[owners, positions // self.block_size].long()
            self.derived["rows"] = positions, blocks * self.block_size + positions % self.block_size
        positions, slots = self.derived["rows"]
        return positions, slots
