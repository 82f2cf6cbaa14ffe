"""Elementwise operations against the modules of transformers, bit for bit: rounding included. Kernels for GPUs against
the same, as closely as sums in another order are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from paceline_kernels import Int8Weight, linear, reference, rotary, store_kv
from support.backends import BACKENDS, DEVICE, ULP, assert_same, backend
from support.native import quantized_weights

DTYPES = [torch.float32, torch.bfloat16]
fuzz = settings(max_examples=15, deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    backend(request.param)
    return str(request.param)


@pytest.fixture
def ops(name: str) -> Any:
    return backend(name)


# ---- Norms ----


def llama_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    module = LlamaRMSNorm(len(weight), eps=eps)
    module.weight.data = weight
    out: Tensor = module(x).detach()
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_as_transformers_does(dtype: torch.dtype, ops: Any, name: str) -> None:
    x, weight = 10 * randn(7, 48, dtype=dtype), randn(48, dtype=dtype)
    assert_same(ops.rms_norm(x, weight, 1e-3), llama_norm(x, weight, 1e-3), name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_takes_heads_out_of_wider_rows(dtype: torch.dtype, ops: Any, name: str) -> None:
    heads, weight = randn(5, 11, 16, dtype=dtype), randn(16, dtype=dtype)
    for part in torch.split(heads, [6, 2, 3], dim=1):
        assert_same(ops.rms_norm(part, weight, 1e-5), llama_norm(part, weight, 1e-5), name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_rounds_the_sum_before_it_is_normed(dtype: torch.dtype, ops: Any, name: str) -> None:
    x, residual, weight = randn(7, 48, dtype=dtype), 10 * randn(7, 48, dtype=dtype), randn(48, dtype=dtype)
    kept = x.clone(), residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-3)
    assert torch.equal(total, x + residual)
    assert_same(normed, llama_norm(x + residual, weight, 1e-3), name)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


@fuzz
@given(
    rows=st.integers(1, 5),
    heads=st.integers(0, 9),
    size=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_norms_of_any_size(rows: int, heads: int, size: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    ops = backend("triton")
    shape = (rows, heads, size) if heads else (rows, size)
    x, weight = randn(*shape, dtype=dtype), randn(size, dtype=dtype)
    assert_same(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), "triton")
    x, residual = randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype)
    for found, expected in zip(
        ops.add_rms_norm(x, residual, weight, 1e-5), reference.add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        assert_same(found, expected, "triton")


# ---- Rotation, and where keys and values go ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    query, key = torch.randn(5, 4, 16).to(dtype), torch.randn(5, 2, 16).to(dtype)
    angles = 100 * torch.rand(5, 8)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = apply_rotary_pos_emb(query, key, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    for ours, theirs in zip(rotary(query, key, cos, sin), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_store_kv_writes_the_slots_and_nothing_else() -> None:
    key_cache, value_cache = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    key, value = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    store_kv(key, value, key_cache, value_cache, torch.tensor([9, 2]))
    for cache, rows in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache[2, 1], rows[0])
        assert torch.equal(cache[0, 2], rows[1])
        assert cache.count_nonzero() == rows.count_nonzero()


def test_store_kv_refuses_a_cache_it_could_only_write_to_a_copy_of(ops: Any) -> None:
    cache = torch.zeros(4, 3, 2, 8, device=DEVICE).transpose(0, 1)
    with pytest.raises(RuntimeError, match="view"):
        store_kv(torch.ones(1, 2, 8), torch.ones(1, 2, 8), cache.cpu(), cache.cpu(), torch.tensor([0]))
    rows, table, zero = randn(1, 2, 8), randn(1, 4), torch.zeros(1, dtype=torch.long, device=DEVICE)
    with pytest.raises(RuntimeError, match="view"):
        ops.rotate_and_store(rows, rows, rows, table, table, zero, cache, cache, zero)


def assert_rotates_and_stores(
    ops: Any,
    name: str,
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    index: torch.dtype,
    padding: list[int],
) -> None:
    """Rows of a fused product, into caches full of NaN; those in `padding` are as a padded batch has them."""
    block_size, num_blocks, max_positions = 4, 9, 50
    num_heads, num_kv_heads = heads
    fused = randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    query, key, value = torch.split(fused, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = 100 * torch.rand(max_positions, head_dim // 2)
    cos, sin = angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)
    positions = torch.randint(max_positions, (num_tokens,)).to(DEVICE, index)
    slots = torch.randperm(block_size * num_blocks)[:num_tokens].to(DEVICE, index)
    positions[padding], slots[padding] = -1, -1
    shape = num_blocks, block_size, num_kv_heads, head_dim
    caches = [torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
    found = ops.rotate_and_store(query, key, value, cos, sin, positions, *caches, slots)

    read = positions.clamp(min=0)
    turned_query, turned_key = rotary(query, key, cos[read], sin[read])
    assert found.is_contiguous()
    assert_same(found, turned_query, name)
    kept = [row for row in range(num_tokens) if row not in padding]
    for cache, rows in zip(caches, (turned_key, value), strict=True):
        by_slot = cache.flatten(0, 1)
        if kept:
            assert_same(by_slot[slots[kept].long()], rows[kept], name)
        others = torch.ones(len(by_slot), dtype=torch.bool, device=DEVICE)
        others[slots[kept].long()] = False
        assert by_slot[others].isnan().all()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_and_store(dtype: torch.dtype, index: torch.dtype, ops: Any, name: str) -> None:
    assert_rotates_and_stores(ops, name, 7, (6, 2), 16, dtype, index, [])


@fuzz
@given(
    num_tokens=st.integers(1, 6),
    sharing=st.integers(1, 5),
    num_kv_heads=st.integers(1, 5),
    half=st.sampled_from([1, 5, 8, 40, 64]),
    dtype=st.sampled_from(DTYPES),
    index=st.sampled_from([torch.int32, torch.int64]),
    padding=st.sets(st.integers(0, 5)),
    seed=st.integers(0, 999),
)
def test_rotate_and_store_of_any_size_leaves_padding_out(
    num_tokens: int,
    sharing: int,
    num_kv_heads: int,
    half: int,
    dtype: torch.dtype,
    index: torch.dtype,
    padding: set[int],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    heads = sharing * num_kv_heads, num_kv_heads
    left_out = [row for row in padding if row < num_tokens]
    assert_rotates_and_stores(backend("triton"), "triton", num_tokens, heads, 2 * half, dtype, index, left_out)


# ---- Gates ----


@pytest.mark.parametrize("size", [10, 1030])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_gates_the_second_half_by_the_first(dtype: torch.dtype, size: int, ops: Any, name: str) -> None:
    gate_up = 5 * randn(3, 2 * size, dtype=dtype)
    gate_up[0, :2] = torch.tensor([-200.0, 200.0])
    gate, up = gate_up[:, :size], gate_up[:, size:]
    assert_same(ops.silu_mul(gate_up), torch.nn.SiLU()(gate) * up, name)


# ---- Products ----


def test_linear_adds_its_bias() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    torch.testing.assert_close(linear(x, weight, bias), x @ weight.T + bias)
    torch.testing.assert_close(linear(x, weight), x @ weight.T)


def test_int8_weights_are_rounded_as_the_native_ones() -> None:
    rows = torch.randn(40, 70) * torch.logspace(-3, 3, 40)[:, None]
    rows[3] = 0
    rows[4, :9] = torch.arange(9) - 4.5
    weight = Int8Weight.empty(40, 70)
    first, second = weight.split([13, 27])
    first.copy_(rows[:13])
    second.copy_(rows[13:])
    expected = quantized_weights(rows)
    error = (weight.dequantized(torch.float32).double() - expected.values).abs()
    assert (error <= expected.slack + 1e-6 * expected.values.abs()).all()
    assert weight.values.abs().amax(1).tolist() == [127 if row != 3 else 0 for row in range(40)]


def test_int8_weights_are_rounded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(11, 30).bfloat16()
    whole, pieces = Int8Weight.empty(11, 30), Int8Weight.empty(11, 30)
    whole.copy_(rows)
    monkeypatch.setattr("paceline_kernels.int8.AT_ONCE", 100)
    pieces.copy_(rows)
    assert torch.equal(whole.values, pieces.values)
    assert torch.equal(whole.scales, pieces.scales)
    with pytest.raises(ValueError, match=r"rows: \[10, 30\]: expected \[11, 30\]"):
        whole.copy_(rows[:10])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 70])
def test_products_equal_float64(rows: int, dtype: torch.dtype, int8: bool, ops: Any) -> None:
    x, values, bias = randn(rows, 96, dtype=dtype), randn(40, 96, dtype=dtype), randn(40, dtype=dtype)
    weight: Tensor | Int8Weight = values
    if int8:
        weight = Int8Weight.empty(40, 96, DEVICE)
        weight.copy_(values)
        values = weight.dequantized(torch.float32)
    for added in (None, bias):
        expected = F.linear(x.double(), values.double(), None if added is None else added.double())
        found = ops.linear(x, weight, added)
        assert found.dtype == dtype
        # The reference rounds weights of 8 bits to the dtype, which shows in sums.
        atol = 1e-4 if dtype == torch.float32 else 0.2 if int8 else 0.03
        torch.testing.assert_close(found.double(), expected, rtol=ULP if dtype == torch.bfloat16 else 1e-4, atol=atol)
