"""The decoder's operations one by one, as a module offers them: `reference` does. The native CPU backend has no use for
them, since it runs all layers in one call.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from paceline_kernels.batch import PagedBatch


class Ops(Protocol):
    """The operations of a decoder, as `reference` documents them. They run on fp32 and bf16, without gradients."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def store_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None: ...

    def paged_attention(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, scale: float
    ) -> Tensor: ...
