"""The tensors behind the blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from paceline.models import Model, ModelConfig
from paceline_kernels.cpu.memory import zeros


class KVCache(Sequence[tuple[Tensor, Tensor]]):
    """Keys and values of every layer, each [num_blocks, padded block, num_kv_heads, head_dim], in one piece of memory.

    Blocks are padded to whole lanes of the model. What lies where in a block is the model's own business: only its
    forward reads and writes here. Target and draft model have one cache each, under the same block ids.
    """

    def __init__(self, model: Model, num_blocks: int, block_size: int) -> None:
        config = model.config
        slots = _padded(block_size, model.kv_lanes)
        shape = (config.num_layers, 2, num_blocks, slots, config.num_kv_heads, config.head_dim)
        cpu = model.device.type == "cpu"
        layers = zeros(shape, model.dtype) if cpu else torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.block_size = block_size
        self._layers = [(keys, values) for keys, values in layers]

    def take_memory(self) -> None:
        """From the system, now: or else whatever step first writes to a page waits for it. All blocks are zero then."""
        for keys, values in self._layers:
            keys.zero_()
            values.zero_()

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype, lanes: int) -> int:
        slots = _padded(block_size, lanes)
        return 2 * config.num_layers * slots * config.num_kv_heads * config.head_dim * dtype.itemsize

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


def _padded(block_size: int, lanes: int) -> int:
    return -(-block_size // lanes) * lanes
