"""What stands between two products, one kernel each: a program holds a whole row or a part of one, and reads it once.

Sums and factors are float32; results are rounded to the dtype wherever `reference` rounds.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline_kernels.triton.dependent import DEPENDENT, LAUNCH, release, wait

SILU_BLOCK: Final = 1024
NORM_BLOCK: Final = 1024  # numbers of a program at least, where rows are short: several of them
HEAD_BLOCK: Final = 256  # pairs of dimensions that a warp rotates: 16 bytes a thread in bf16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`; x is [rows, size] or [rows, heads, size], maybe a view, its last dimension without
    gaps.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, x, weight, eps, out, out, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`; both [rows, size] without gaps."""
    if not (x.is_contiguous() and residual.is_contiguous()):
        raise ValueError("x and residual must be contiguous")
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, residual, weight, eps, out, total, add=True)
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`; gate_up [rows, 2 * size] without gaps."""
    if not gate_up.is_contiguous():
        raise ValueError("gate_up must be contiguous")
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if rows:
        _silu_mul_kernel[(rows, triton.cdiv(size, SILU_BLOCK))](
            gate_up, out, size, BLOCK=SILU_BLOCK, DEPENDS=DEPENDENT, num_warps=4, **LAUNCH
        )
    return out


def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """See `reference.rotate_and_store`. Heads lie side by side in a row of query, key and value; rows may have gaps.

    Rows with a negative slot are not written, and a negative position counts as 0: padding.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, half = key.shape[1], head_dim // 2
    key_slots, value_slots = (cache.view(-1, num_kv_heads, head_dim) for cache in (key_cache, value_cache))
    for name, tensor in (("query", query), ("key", key), ("value", value), ("caches", key_slots), ("", value_slots)):
        if tensor.stride(2) != 1 or tensor.stride(1) != head_dim:
            raise ValueError(f"{name}: the heads of a row must lie side by side")
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("cos and sin must be contiguous")
    out = query.new_empty(query.shape)
    block_half = triton.next_power_of_2(half)
    block_heads = min(max(1, HEAD_BLOCK // block_half), triton.next_power_of_2(num_heads))
    query_blocks = triton.cdiv(num_heads, block_heads)
    if num_tokens:
        _rotate_and_store_kernel[(num_tokens, query_blocks + triton.cdiv(num_kv_heads, block_heads))](
            query,
            key,
            value,
            cos,
            sin,
            positions,
            key_slots,
            value_slots,
            slots,
            out,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            key_slots.stride(0),
            value_slots.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=half,
            BLOCK_HALF=block_half,
            BLOCK_HEADS=block_heads,
            DEPENDS=DEPENDENT,
            num_warps=1,
            enable_fp_fusion=False,  # products are rounded before they are added, as in the reference
            **LAUNCH,
        )
    return out


def _launch_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, total: Tensor, *, add: bool
) -> None:
    size = x.shape[-1]
    inner = x.shape[1] if x.dim() == 3 else 1
    if x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != size):
        raise ValueError("x: what is normed must lie side by side in a row")
    rows = x.shape[0] * inner
    block = triton.next_power_of_2(size)
    block_rows = max(1, NORM_BLOCK // block) if inner > 1 else 1
    if rows:
        _rms_norm_kernel[(triton.cdiv(rows, block_rows),)](
            x,
            residual,
            weight,
            out,
            total,
            rows,
            x.stride(0),
            eps,
            INNER=inner,
            SIZE=size,
            BLOCK=block,
            BLOCK_ROWS=block_rows,
            ADD=add,
            DEPENDS=DEPENDENT,
            num_warps=4 if block <= 2048 else 8,
            **LAUNCH,
        )


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    rows,
    x_stride,
    eps,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """Rows of `out` are counted through: row r is part r % INNER of row r // INNER of x."""
    if DEPENDS:
        release()
        wait()
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK)
    there = (column < SIZE)[None, :] & (row < rows)[:, None]
    source = ((row // INNER) * x_stride + (row % INNER) * SIZE)[:, None] + column[None, :]
    target = (row * SIZE)[:, None] + column[None, :]
    factor = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    wide = tl.load(x + source, mask=there, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK]
    dtype = out.dtype.element_ty
    if ADD:
        wide += tl.load(residual + target, mask=there, other=0.0).to(tl.float32)
        narrow = wide.to(dtype)
        tl.store(total + target, narrow, mask=there)
        wide = narrow.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / SIZE
    wide *= tl.rsqrt(mean + eps)[:, None]
    tl.store(out + target, (wide.to(dtype).to(tl.float32) * factor[None, :]).to(dtype), mask=there)


@triton.jit
def _silu_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr, DEPENDS: tl.constexpr):
    if DEPENDS:
        release()
        wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, gate_times(gate, up, out.dtype.element_ty), mask=there)


@triton.jit
def gate_times(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of float32 that are rounded to `dtype`, as both products are."""
    # Not a power that overflows, which would warn where kernels are interpreted.
    small = tl.exp(-tl.abs(gate))
    silu = (gate * tl.where(gate >= 0, 1.0, small) / (1.0 + small)).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)


@triton.jit
def _rotate_and_store_kernel(
    query,
    key,
    value,
    cos,
    sin,
    positions,
    key_cache,
    value_cache,
    slots,
    out,
    query_stride,
    key_stride,
    value_stride,
    key_cache_stride,
    value_cache_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """A program has some query heads of a row, or some KV heads."""
    if DEPENDS:
        release()
        wait()
    row = tl.program_id(0).to(tl.int64)
    QUERY_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    column = tl.arange(0, BLOCK_HALF)
    position = tl.maximum(tl.load(positions + row).to(tl.int64), 0)
    c = tl.load(cos + position * HALF + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + position * HALF + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    if tl.program_id(1) < QUERY_BLOCKS:
        head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        within = head[:, None] * (2 * HALF) + column[None, :]
        there = (head < NUM_HEADS)[:, None] & (column < HALF)[None, :]
        low, high = _rotated(query + row * query_stride + within, c, s, there, HALF)
        to = out + row * (NUM_HEADS * 2 * HALF) + within
        tl.store(to, low, mask=there)
        tl.store(to + HALF, high, mask=there)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            head = (tl.program_id(1) - QUERY_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            within = head[:, None] * (2 * HALF) + column[None, :]
            there = (head < NUM_KV_HEADS)[:, None] & (column < HALF)[None, :]
            low, high = _rotated(key + row * key_stride + within, c, s, there, HALF)
            to = key_cache + slot * key_cache_stride + within
            tl.store(to, low, mask=there)
            tl.store(to + HALF, high, mask=there)
            source = value + row * value_stride + within
            to = value_cache + slot * value_cache_stride + within
            tl.store(to, tl.load(source, mask=there), mask=there)
            tl.store(to + HALF, tl.load(source + HALF, mask=there), mask=there)


@triton.jit
def _rotated(source, c, s, there, HALF: tl.constexpr):
    """Both halves of heads [BLOCK_HEADS, BLOCK_HALF]; every product is rounded, and their sum again."""
    dtype = source.dtype.element_ty
    low = tl.load(source, mask=there, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    turned_low = (low * c).to(dtype).to(tl.float32) - (high * s).to(dtype).to(tl.float32)
    turned_high = (high * c).to(dtype).to(tl.float32) + (low * s).to(dtype).to(tl.float32)
    return turned_low.to(dtype), turned_high.to(dtype)
