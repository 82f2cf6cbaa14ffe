"""The decoder's operations one by one, as a module offers them: `reference` does. The native CPU backend has no use for
them, since it runs all layers in one call.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from paceline_kernels.batch import PagedBatch
from paceline_kernels.int8 import Int8Weight


class Ops(Protocol):
    """The operations of a decoder, as `reference` documents them. They run on fp32 and bf16, without gradients.

    They are cut so that each one reads its inputs once: what a GPU waits for between two products is memory.
    """

    def linear(self, x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def rotate_and_store(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> Tensor: ...

    def linear_silu_mul(self, x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor: ...

    def paged_attention(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, scale: float
    ) -> Tensor: ...
