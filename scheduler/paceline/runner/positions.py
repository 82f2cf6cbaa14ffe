"""Positions at which a token is sampled, each with the state that it has: what stands before it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.grammar import Mask
from paceline.core.params import SequenceParams
from paceline.core.sequence import Sequence

LOW_HALF = 0xFFFFFFFF  # of a seed


# Not frozen: docs/decisions/012.
@dataclass(slots=True)
class Positions:
    """Consecutive positions of one sequence, a row of logits each: row j stands behind drafts[: first + j].

    Attributes:
        drafts: tokens proposed behind those that the sequence knows.
        masks: what the grammar allows at each row, [rows, ceil(vocab / 32)] int32; None without a grammar.
    """

    sequence: Sequence
    drafts: list[int]
    first: int = 0
    masks: Mask | None = None

    def __len__(self) -> int:
        return len(self.drafts) - self.first + 1

    @property
    def params(self) -> SequenceParams:
        return self.sequence.params

    def behind(self, row: int) -> list[int]:
        """The drafts before the row's token."""
        return self.drafts[: self.first + row]

    def only(self, rows: Seq[int]) -> list[Positions]:
        """Some of the rows, one `Positions` each."""
        return [
            Positions(
                self.sequence,
                self.behind(row),
                self.first + row,
                None if self.masks is None else self.masks[row : row + 1],
            )
            for row in rows
        ]


def noise_keys(batch: Seq[Positions], device: torch.device) -> Tensor:
    """What the noise of each row of seeded sequences hangs on, [rows, 4] int64: both halves of the seed, the absolute
    position of the token and the choice. Never the request, the batch or the depth.
    """
    keys = []
    for positions in batch:
        seed, length = positions.params.sampling.seed, len(positions.sequence)
        assert seed is not None, positions.sequence.request_id
        for row in range(len(positions)):
            keys.append((seed & LOW_HALF, seed >> 32, length + positions.first + row, positions.params.choice))
    return torch.tensor(keys, dtype=torch.int64, device=device)
