"""Paged batches for tests: block tables in random order, caches full of NaN where nothing was written."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline_kernels import PagedBatch


class Pages:
    """Block tables that grow on demand from a shuffled pool. A slot that was never written holds NaN."""

    def __init__(
        self,
        *,
        num_layers: int = 1,
        num_kv_heads: int,
        head_dim: int,
        block_size: int = 8,
        num_blocks: int = 128,
        dtype: torch.dtype = torch.float32,
        lanes: int = 1,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        """Blocks are padded to a multiple of `lanes`, as the model asks for by its `kv_lanes`."""
        self.block_size = block_size
        self.device = device
        padded = -(-block_size // lanes) * lanes
        shape = (num_layers, 2, num_blocks, padded, num_kv_heads, head_dim)
        layers = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.kv_cache = [(keys, values) for keys, values in layers]
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def batch(self, runs: Sequence[tuple[str, int]]) -> PagedBatch:
        """The next `rows` positions (maybe 0) of each named sequence, as one batch; their length grows by that much."""
        starts = [0]
        for name, rows in runs:
            begin = self.lengths.get(name, 0)
            self.lengths[name] = begin + rows
            self.reserve(name, begin + rows)
            starts.append(starts[-1] + rows)
        widest = max(len(self.tables[name]) for name, _ in runs)
        padded = [self.tables[name] + [0] * (widest - len(self.tables[name])) for name, _ in runs]
        return PagedBatch(
            query_starts=torch.tensor(starts, dtype=torch.int32, device=self.device),
            context_lens=torch.tensor([self.lengths[name] for name, _ in runs], dtype=torch.int32, device=self.device),
            block_tables=torch.tensor(padded, dtype=torch.int32, device=self.device),
            block_size=self.block_size,
        )

    def reserve(self, name: str, length: int) -> None:
        """Blocks for so many positions of a sequence, shown by every batch that it is in from now on."""
        table = self.tables.setdefault(name, [])
        while len(table) * self.block_size < length:
            table.append(self._free.pop())

    def slot(self, name: str, position: int) -> int:
        return self.tables[name][position // self.block_size] * self.block_size + position % self.block_size

    def context(self, name: str, length: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """K and V of the first `length` positions, [length, num_kv_heads, head_dim]."""
        slots = [self.slot(name, position) for position in range(length)]
        keys, values = (cache.flatten(0, 1)[slots] for cache in self.kv_cache[layer])
        return keys, values
