"""The operations in plain torch: the oracle for every other backend, and the path where there is none.

Rounding follows the Llama of transformers step by step, so that bf16 results agree with it up to matmul order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline_kernels.batch import PagedBatch
from paceline_kernels.int8 import Int8Weight

PIECE_ROWS = 256  # longer runs are cut, which bounds the mask and skips most of the upper triangle
GATHERED_TOKENS = 1 << 15  # tokens whose K and V are copied out of the pages at a time, which bounds the copy
SMALLEST_WIDTH = 64


def linear(x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus bias [out] -> [rows, out]; all of one dtype, but a weight of
    8 bits goes with either.
    """
    return F.linear(x, weight.dequantized(x.dtype) if isinstance(weight, Int8Weight) else weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension of x to unit root mean square, then by weight [size]; returns x's shape and dtype.

    The mean and the scaling are fp32; the result is rounded to x's dtype before it meets the weight.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum, rounded to their dtype; both new, of their shape [rows, size]."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query [num_tokens, num_heads, head_dim] and key [num_tokens, num_kv_heads, head_dim] by their positions.

    Dimension j turns together with j + head_dim / 2, by the angle whose cos and sin stand in column j of
    [num_tokens, head_dim / 2] tensors of the same dtype. Returns new tensors.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


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
    """Rotate query and key, and write key and value where their rows belong; returns the rotated query, a new tensor.

    Args:
        query: [num_tokens, num_heads, head_dim]; it, key and value may be views of one tensor.
        key, value: [num_tokens, num_kv_heads, head_dim].
        cos, sin: tables of all positions, [max_positions, head_dim / 2], of the same dtype.
        positions: rows of the tables, [num_tokens] int64 or int32.
        key_cache, value_cache: mutated; see `store_kv`.
        slots: [num_tokens] int64 or int32.

    A backend whose batches are padded takes rows with negative slots, which it does not write, and with negative
    positions, which it reads as 0; this one does not.
    """
    query, key = rotary(query, key, cos[positions], sin[positions])
    store_kv(key, value, key_cache, value_cache, slots.long())
    return query


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate_up [rows, 2 * size] holds the two side by side -> [rows, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear_silu_mul(x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor:
    """`silu_mul` of `linear`: [rows, in] times [2 * size, in] -> [rows, size]."""
    return silu_mul(linear(x, weight, bias))


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_dim] into the caches at slots [num_tokens] int64.

    Mutates key_cache and value_cache [num_blocks, block_size, num_kv_heads, head_dim], of the same dtype as the rows.
    """
    _by_slot(key_cache).index_copy_(0, slots, key)
    _by_slot(value_cache).index_copy_(0, slots, value)


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """Causal attention of query [num_tokens, num_heads, head_dim] over the pages; returns a new tensor of that shape.

    The caches [num_blocks, block_size, num_kv_heads, head_dim] already hold K and V of this batch's own rows. Query
    head i attends with KV head `i // (num_heads // num_kv_heads)`. A sequence reads its own positions only, so nothing
    else in the pages can reach it, NaN included; the shapes it is computed with follow from its own run and context,
    so its result does not depend on which sequences share the batch.
    """
    sharing = query.shape[1] // key_cache.shape[2]
    block_size = key_cache.shape[1]
    geometry = ("reference", block_size, sharing)
    if geometry not in batch.derived:
        batch.derived[geometry] = list(_groups(batch, block_size, sharing))
    out = query.new_empty(query.shape)
    for group in batch.derived[geometry]:
        out[group.rows] = _attend(query[group.rows], key_cache, value_cache, group, scale)
    return out


@dataclass(frozen=True, slots=True)
class _Group:
    """Pieces of runs that are computed together: equal row counts, equal padded contexts (width)."""

    rows: Tensor  # [pieces, rows] int64: their rows in the batch
    slots: Tensor  # [pieces * width] int64: where their contexts lie
    mask: Tensor  # [pieces, 1, sharing * rows, width] bool: which row sees which position


def _groups(batch: PagedBatch, block_size: int, sharing: int) -> Iterator[_Group]:
    """Cut the runs into pieces of at most PIECE_ROWS rows and group those of one shape."""
    pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    starts = batch.query_starts.tolist()
    for sequence, last_context in enumerate(batch.context_lens.tolist()):
        end = starts[sequence + 1]
        for first_row in range(starts[sequence], end, PIECE_ROWS):
            rows = min(PIECE_ROWS, end - first_row)
            context = last_context - (end - first_row - rows)
            pieces.setdefault((rows, _padded(context)), []).append((sequence, first_row, context))
    device = batch.block_tables.device
    for (rows, width), members in pieces.items():
        at_once = max(1, GATHERED_TOKENS // width)
        positions = torch.arange(width, device=device)
        for begin in range(0, len(members), at_once):
            columns = torch.tensor(members[begin : begin + at_once], device=device).unbind(1)
            sequences, first_rows, contexts = columns  # [pieces] each
            # The padding repeats the last token instead of reading slots that belong to nobody or to somebody else.
            kept = torch.minimum(positions, contexts[:, None] - 1)  # [pieces, width]
            blocks = batch.block_tables[sequences].gather(1, kept // block_size).long()
            visible = contexts[:, None] - torch.arange(rows - 1, -1, -1, device=device)  # [pieces, rows]
            yield _Group(
                rows=first_rows[:, None] + torch.arange(rows, device=device),
                slots=(blocks * block_size + kept % block_size).flatten(),
                mask=(positions < visible[..., None]).repeat(1, sharing, 1).unsqueeze(1),
            )


def _padded(context: int) -> int:
    """The next 2^n or 3 * 2^n: few distinct widths, at most half of a context wasted."""
    width = max(SMALLEST_WIDTH, 1 << (context - 1).bit_length())
    return width * 3 // 4 if context <= width * 3 // 4 else width


def _attend(query: Tensor, key_cache: Tensor, value_cache: Tensor, group: _Group, scale: float) -> Tensor:
    """Attention of one group: query [pieces, rows, num_heads, head_dim] -> the same shape."""
    pieces, rows, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    shape = (pieces, group.mask.shape[-1], num_kv_heads, head_dim)
    key = _by_slot(key_cache).index_select(0, group.slots).view(shape).transpose(1, 2)  # [pieces, kv, width, head_dim]
    value = _by_slot(value_cache).index_select(0, group.slots).view(shape).transpose(1, 2)

    # The query heads of one KV head become rows of one matrix, so that K and V are read once and never repeated.
    sharing = num_heads // num_kv_heads
    query = query.view(pieces, rows, num_kv_heads, sharing, head_dim).permute(0, 2, 3, 1, 4)
    query = query.reshape(pieces, num_kv_heads, sharing * rows, head_dim)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask, scale=scale)
    out = out.view(pieces, num_kv_heads, sharing, rows, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(pieces, rows, num_heads, head_dim)


def _by_slot(cache: Tensor) -> Tensor:
    """[num_blocks, block_size, ...] as [num_slots, ...]; a view, or an error where the cache cannot be viewed so."""
    return cache.view(-1, *cache.shape[2:])
