"""Elementwise operations against the modules of transformers, bit for bit: rounding included."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from paceline_kernels import linear, rms_norm, rotary, silu_mul, store_kv

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    x, weight = (10 * torch.randn(7, 48)).to(dtype), torch.randn(48).to(dtype)
    module = LlamaRMSNorm(48, eps=1e-3)
    module.weight.data = weight
    assert torch.equal(rms_norm(x, weight, 1e-3), module(x).detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    query, key = torch.randn(5, 4, 16).to(dtype), torch.randn(5, 2, 16).to(dtype)
    angles = 100 * torch.rand(5, 8)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = apply_rotary_pos_emb(query, key, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    for ours, theirs in zip(rotary(query, key, cos, sin), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_gates_the_second_half_by_the_first(dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 20).to(dtype)
    gate, up = gate_up[:, :10], gate_up[:, 10:]
    assert torch.equal(silu_mul(gate_up), torch.nn.SiLU()(gate) * up)


def test_linear_adds_its_bias() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    torch.testing.assert_close(linear(x, weight, bias), x @ weight.T + bias)
    torch.testing.assert_close(linear(x, weight), x @ weight.T)


def test_store_kv_writes_the_slots_and_nothing_else() -> None:
    key_cache, value_cache = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    key, value = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    store_kv(key, value, key_cache, value_cache, torch.tensor([9, 2]))
    for cache, rows in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache[2, 1], rows[0])
        assert torch.equal(cache[0, 2], rows[1])
        assert cache.count_nonzero() == rows.count_nonzero()


def test_store_kv_refuses_a_cache_it_could_only_write_to_a_copy_of() -> None:
    cache = torch.zeros(4, 3, 2, 8).transpose(0, 1)
    with pytest.raises(RuntimeError, match="view"):
        store_kv(torch.ones(1, 2, 8), torch.ones(1, 2, 8), cache, cache, torch.tensor([0]))
