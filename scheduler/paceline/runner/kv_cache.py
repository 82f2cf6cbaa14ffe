"""The tensors behind the blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from paceline.models import ModelConfig


class KVCache(Sequence[tuple[Tensor, Tensor]]):
    """Keys and values of every layer, each [num_blocks, block_size, num_kv_heads, head_dim].

    Target and draft model have one each, under the same block ids. Written by the model's forward only.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.block_size = block_size
        self._layers = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(config.num_layers)
        ]

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._layers)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[Tensor, Tensor]]: ...
    def __getitem__(self, index: int | slice) -> tuple[Tensor, Tensor] | list[tuple[Tensor, Tensor]]:
        return self._layers[index]
