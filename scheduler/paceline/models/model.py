"""What serves as a model: the seam between the decoders and who runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.models.config import ModelConfig
from paceline_kernels import PagedBatch


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor of a checkpoint belongs: `fill` takes it, in the shape and any dtype that it is stored in."""

    shape: tuple[int, ...]
    fill: Callable[[Tensor], Any]


class Model(Protocol):
    """A decoder over paged KV.

    Attributes:
        dtype: of hidden states and KV.
        kv_lanes: blocks of KV are padded to a multiple of so many positions.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    kv_lanes: int

    def forward(self, token_ids: Tensor, batch: PagedBatch, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Run all layers over the rows of a batch, mutating the pages -> hidden states, [num_tokens, hidden]."""
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows that `forward` returned, [rows, hidden], to [rows, vocab] float32; in `out`, if that is given."""
        ...

    def logits_of(
        self,
        token_ids: Tensor,
        batch: PagedBatch,
        kv_cache: Sequence[tuple[Tensor, Tensor]],
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """`forward`, and the logits of some of its rows, ascending and each once, or of all -> [rows, vocab] float32,
        which the next call may overwrite.
        """
        ...
