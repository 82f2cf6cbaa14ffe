"""Matrices of 8 bits, as the torch decoder keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

LEVELS: Final = 127  # on each side of zero
AT_ONCE: Final = 1 << 24  # numbers that are rounded at a time, which bounds what they take in float32


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Rows rounded to 255 levels about zero, of which the largest is a row's own largest magnitude; as the native
    backend rounds them.

    Attributes:
        values: [out, in] int8.
        scales: what a level of each row is worth, [out] float32.
    """

    values: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, outputs: int, inputs: int, device: torch.device | None = None) -> Int8Weight:
        return cls(
            torch.empty(outputs, inputs, dtype=torch.int8, device=device),
            torch.empty(outputs, dtype=torch.float32, device=device),
        )

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def numel(self) -> int:
        return self.values.numel()

    def split(self, sizes: Sequence[int]) -> list[Int8Weight]:
        """So many rows each, sharing memory with this one."""
        parts = zip(torch.split(self.values, list(sizes)), torch.split(self.scales, list(sizes)), strict=True)
        return [Int8Weight(values, scales) for values, scales in parts]

    def copy_(self, rows: Tensor) -> None:
        """Round rows [out, in] of any floating dtype, on any device, into this one."""
        if rows.shape != self.shape:
            raise ValueError(f"rows: {list(rows.shape)}: expected {list(self.shape)}")
        at_once = max(1, AT_ONCE // max(1, rows.shape[1]))
        for first in range(0, len(rows), at_once):
            chosen = slice(first, first + at_once)
            wide = rows[chosen].to(self.values.device).float()
            largest = wide.abs().amax(1)
            self.scales[chosen] = largest / LEVELS
            inverse = torch.where(largest > 0, LEVELS / largest, 0.0)
            self.values[chosen] = (wide * inverse[:, None]).round_().to(torch.int8)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """What the levels stand for, [out, in]."""
        return (self.values.float() * self.scales[:, None]).to(dtype)
