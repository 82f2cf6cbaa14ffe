"""The operations of the decoder by backend: on a GPU where there is one, else the kernels are interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.models import Decoder
from paceline_kernels import PagedBatch, reference
from support.native import needs_compiler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = ["reference", "triton"]
# What computes in an engine here.
ENGINES = ["torch", "triton" if DEVICE.type == "cuda" else pytest.param("native", marks=needs_compiler)]
ULP = 2.0**-7  # of bf16, relative, at most


def backend(name: str) -> Any:
    """All of `Ops`, attention aside: that of the reference comes with both."""
    if name == "reference":
        return reference
    pytest.importorskip("triton")
    from paceline_kernels.triton import elementwise, linear

    return SimpleNamespace(
        linear=linear.linear,
        linear_silu_mul=linear.linear_silu_mul,
        rms_norm=elementwise.rms_norm,
        add_rms_norm=elementwise.add_rms_norm,
        rotate_and_store=elementwise.rotate_and_store,
        silu_mul=elementwise.silu_mul,
        paged_attention=reference.paged_attention,
    )


def assert_same(found: Tensor, expected: Tensor, name: str) -> None:
    """To the bit by the reference; by others as sums in another order allow, and rounding after them."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if name == "reference":
        assert torch.equal(found, expected)
    else:
        bfloat16 = expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=ULP if bfloat16 else 1e-5, atol=1e-6)


class OnDevice:
    """A model on the device for whom all else is on the CPU, as the pages of tests are."""

    def __init__(self, model: Decoder) -> None:
        self.config, self.dtype, self.device, self.kv_lanes = model.config, model.dtype, model.device, model.kv_lanes
        self._model = model

    def forward(self, token_ids: Tensor, batch: PagedBatch, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        caches = [(keys.to(DEVICE), values.to(DEVICE)) for keys, values in kv_cache]
        names = "query_starts", "context_lens", "block_tables"
        there = replace(batch, **{name: getattr(batch, name).to(DEVICE) for name in names}, derived={})
        hidden = self._model.forward(token_ids.to(DEVICE), there, caches)
        for ours, theirs in zip(kv_cache, caches, strict=True):
            for cache, other in zip(ours, theirs, strict=True):
                cache.copy_(other)
        return hidden.cpu()

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        assert out is None
        return self._model.logits(hidden.to(DEVICE)).cpu()
