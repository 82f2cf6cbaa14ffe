"""Attention over the pages: one kernel for decodes, verifications and prefill chunks.

A program computes a tile: some rows of one run, with all query heads of one KV head, since they read the same K and V.
Where that gives too few programs to fill the device, the context is split among several, and a second kernel combines
what they found. All launches follow from shapes, so that a CUDA graph can hold them; what a step turns out not to need
is left by programs that exit at once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline_kernels.batch import PagedBatch
from paceline_kernels.triton.dependent import DEPENDENT, LAUNCH, release, wait

TILES: Final = (16, 32, 64, 128)  # lines of a tile, one for each row and query head
LARGEST_TILE: Final = {torch.float32: 16, torch.bfloat16: 64}  # fp32 has no matrix units, and registers are few
NUM_WARPS: Final = {16: 4, 32: 4, 64: 4, 128: 8}  # by lines of a tile
# Where a block is, is read a stage before it, so that five stages hold two turns of the loop.
NUM_STAGES: Final = {16: 5, 32: 5, 64: 3, 128: 3}
READ_BYTES: Final = {16: 8192, 32: 8192, 64: 8192, 128: 16384}  # of K, and of V, that a turn of the loop reads
FEWEST_READ: Final = 16  # tokens, which the matrix units ask for
MOST_READ: Final = 128
COMBINED: Final = 2048  # fp32 that a program of the second kernel holds
COMBINE_WARPS: Final = 2
PROGRAMS_PER_PROCESSOR: Final = 2  # at least; the number of splits, a power of two, may double it
MOST_SPLITS: Final = 32
ASSUMED_PROCESSORS: Final = 132  # where there is no GPU

SEARCH_WIDTH = tl.constexpr(256)  # sequences looked at in one go


@triton.jit
def _place(
    query_starts,
    context_lens,
    table_rows,
    num_seqs,
    SHARING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MANY: tl.constexpr,
):
    """This program's tile in the run of its sequence, the run's first row, its number of rows, or 0 if nothing is to be
    done, the sequence's context and its row in the tables.

    If a run may have many tiles, those of sequence i begin at `lines before it // BLOCK_M + i`, which leaves enough for
    every run, and hardly more than there are lines, however uneven the runs are.
    """
    tile = 0
    sequence = tl.program_id(1)
    if MANY:
        # The last rows of a chunk see the most, so their tiles start first.
        tile = tl.num_programs(1) - 1 - tl.program_id(1)
        sequence = -1
        for begin in range(0, num_seqs, SEARCH_WIDTH):
            sequences = begin + tl.arange(0, SEARCH_WIDTH)
            exists = sequences < num_seqs
            starts = tl.load(query_starts + sequences, mask=exists, other=0)
            first_tiles = starts * SHARING // BLOCK_M + sequences
            sequence += tl.sum((exists & (first_tiles <= tile)).to(tl.int32))
        tile -= tl.load(query_starts + sequence) * SHARING // BLOCK_M + sequence
    start = tl.load(query_starts + sequence)
    rows = tl.load(query_starts + sequence + 1) - start
    context = tl.load(context_lens + sequence)
    table_row = sequence
    if table_rows is not None:
        table_row = tl.load(table_rows + sequence)
    rows = tl.where((context > 0) & (table_row >= 0), rows, 0)
    return tile, start, rows, context, table_row


@triton.jit
def _read(cache, offsets, dims, present, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """[BLOCK_N, DIM] of a cache; 0 where no token is, since not even a weight of 0 makes a number of NaN."""
    pointers = cache + offsets[:, None] + dims[None, :]
    if MASKED:
        if DIM == HEAD_DIM:
            return tl.load(pointers, mask=present[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=present[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    else:
        if DIM == HEAD_DIM:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _absorb(
    out,  # [BLOCK_M, DIM] fp32
    top,  # [BLOCK_M]: the largest score so far
    total,  # [BLOCK_M]: of weights relative to it
    begin,
    query,  # [BLOCK_M, DIM]
    visible,  # [BLOCK_M]: tokens that a line sees
    context,  # that any line sees
    key_cache,
    value_cache,
    table,
    scale,
    block_stride,
    slot_stride,
    dims,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """The next BLOCK_N tokens. Not MASKED: every line sees all of them."""
    positions = begin + tl.arange(0, BLOCK_N)
    present = positions < context
    if MASKED:
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=present, other=0)
    else:
        blocks = tl.load(table + positions // BLOCK_SIZE)
    offsets = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * slot_stride
    key = _read(key_cache, offsets, dims, present, MASKED, HEAD_DIM, DIM)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(positions[None, :] < visible[:, None], scores, float("-inf"))
    value = _read(value_cache, offsets, dims, present, MASKED, HEAD_DIM, DIM)
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = new_top
    if MASKED:  # a line may have seen nothing so far
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    out = tl.dot(weights.to(value.dtype), value, out * shrink[:, None], input_precision="ieee")
    return out, new_top, total


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _attend(
    out,  # [num_tokens, num_heads, HEAD_DIM], or if SPLIT [num_tokens, num_heads, splits, HEAD_DIM] fp32
    sums,  # if SPLIT: [num_tokens, num_heads, splits] fp32: log2 of the sum of weights, -inf if there are none
    query,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache,  # [num_blocks, block_size, num_kv_heads, HEAD_DIM]
    value_cache,
    query_starts,
    context_lens,
    block_tables,
    table_rows,
    scale,  # times log2(e), since powers of two are what the device computes
    num_seqs,
    row_stride,
    head_stride,
    block_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    SHARING: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MANY: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """One tile, KV head and split: programs are [num_kv_heads, tiles, splits]. The KV heads of a token lie side by side
    in memory, so programs that run at the same time read what does.
    """
    if DEPENDS:
        release()
        wait()
    kv_head = tl.program_id(0)
    num_heads = tl.num_programs(0) * SHARING
    tile, start, rows, context, table_row = _place(
        query_starts, context_lens, table_rows, num_seqs, SHARING, BLOCK_M, MANY
    )
    if tile * BLOCK_M >= rows * SHARING:
        return

    # Line m of a run is row m // SHARING with the query head m % SHARING of the KV head.
    lines = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = lines < rows * SHARING
    unseen = context - rows + 1  # what row 0 sees
    visible = unseen + tl.minimum(lines // SHARING, rows - 1)
    least = unseen + tile * BLOCK_M // SHARING
    context = unseen + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // SHARING, rows - 1)
    at = (start + lines // SHARING).to(tl.int64)
    heads = kv_head * SHARING + lines % SHARING
    outputs = at * num_heads + heads  # [BLOCK_M]: which of all rows and heads

    begin = 0
    end = context
    if SPLIT:
        share = tl.cdiv(tl.cdiv(context, tl.num_programs(2)), BLOCK_N) * BLOCK_N
        begin = tl.program_id(2) * share
        end = tl.minimum(begin + share, context)
        outputs = outputs * tl.num_programs(2) + tl.program_id(2)
        if begin >= context:
            tl.store(sums + outputs, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=real)
            return

    dims = tl.arange(0, DIM)
    there = real[:, None]
    if DIM != HEAD_DIM:
        there = there & (dims < HEAD_DIM)[None, :]
    pointers = query + (at * row_stride + heads * head_stride)[:, None] + dims[None, :]
    lines_query = tl.load(pointers, mask=there, other=0.0)

    key_cache += kv_head * kv_head_stride
    value_cache += kv_head * kv_head_stride
    table = block_tables + table_row.to(tl.int64) * table_stride
    total = tl.zeros([BLOCK_M], tl.float32)
    top = total + float("-inf")
    result = tl.zeros([BLOCK_M, DIM], tl.float32)
    seen_by_all = begin + tl.maximum(tl.minimum(end, least) - begin, 0) // BLOCK_N * BLOCK_N
    for token in range(begin, seen_by_all, BLOCK_N):
        result, top, total = _absorb(
            result, top, total, token, lines_query, visible, context, key_cache, value_cache, table, scale,
            block_stride, slot_stride, dims, False, BLOCK_SIZE, BLOCK_N, HEAD_DIM, DIM,
        )  # fmt: skip
    for token in range(seen_by_all, end, BLOCK_N):
        result, top, total = _absorb(
            result, top, total, token, lines_query, visible, context, key_cache, value_cache, table, scale,
            block_stride, slot_stride, dims, True, BLOCK_SIZE, BLOCK_N, HEAD_DIM, DIM,
        )  # fmt: skip

    divisor = tl.where(total == 0.0, 1.0, total)  # a line may see nothing of this split
    result = result / divisor[:, None]
    tl.store(out + outputs[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=there)
    if SPLIT:
        tl.store(sums + outputs, top + tl.log2(divisor), mask=real)


@triton.jit(do_not_specialize=["num_seqs"])
def _combine(
    out,  # [num_tokens, num_heads, HEAD_DIM]
    parts,  # [num_tokens, num_heads, SPLITS, HEAD_DIM] fp32
    sums,  # [num_tokens, num_heads, SPLITS] fp32
    query_starts,
    context_lens,
    table_rows,
    num_seqs,
    SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MANY: tl.constexpr,
    SPLITS: tl.constexpr,
    LINES: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """LINES lines: programs are [num_kv_heads, tiles, lines of a tile / LINES]. The tiles are those of the parts, which
    tell what was written from what was not.
    """
    if DEPENDS:
        release()
        wait()
    num_heads = tl.num_programs(0) * SHARING
    tile, start, rows, _, _ = _place(query_starts, context_lens, table_rows, num_seqs, SHARING, BLOCK_M, MANY)
    first = tile * BLOCK_M + tl.program_id(2) * LINES
    if first >= rows * SHARING:
        return
    lines = first + tl.arange(0, LINES)
    real = lines < rows * SHARING
    outputs = (start + lines // SHARING).to(tl.int64) * num_heads + tl.program_id(0) * SHARING + lines % SHARING
    inputs = outputs[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
    logs = tl.load(sums + inputs, mask=real[:, None], other=float("-inf"))
    top = tl.max(logs, 1)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weights, 1)
    weights = weights / tl.where(total == 0.0, 1.0, total)[:, None]
    dims = tl.arange(0, DIM)
    # Nobody wrote the part of an empty split.
    there = (logs > float("-inf"))[:, :, None] & (dims < HEAD_DIM)[None, None, :]
    values = tl.load(parts + inputs[:, :, None] * HEAD_DIM + dims[None, None, :], mask=there, other=0.0)
    result = tl.sum(values * weights[:, :, None], 1)
    there = real[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + outputs[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=there)


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """Causal attention of query [num_tokens, num_heads, head_dim] over the pages; returns a new tensor of that shape.

    As `reference.paged_attention`, with two differences. Query heads and rows may lie apart, and rows that belong to no
    sequence are left as they come. And the last bits of a result depend on the shape of the batch, since that decides
    how a context is split; never on what its other sequences hold.

    `batch.query_starts` must not fall, not even over padding. Without `batch.max_rows` the host waits for the device,
    once per batch.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    num_seqs = batch.query_starts.shape[0] - 1
    out = query.new_empty(query.shape)
    if num_tokens == 0 or num_seqs == 0:
        return out
    if query.stride(2) != 1 or key_cache.stride(3) != 1 or key_cache.stride() != value_cache.stride():
        raise ValueError("the values of a head must lie side by side, and both caches in the same way")
    sharing = num_heads // num_kv_heads
    plan = _plan(batch, num_tokens, num_kv_heads, sharing, head_dim, query.dtype, query.device)
    shared: dict[str, Any] = {
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
        "table_rows": batch.table_rows,
        "num_seqs": num_seqs,
        "SHARING": sharing,
        "HEAD_DIM": head_dim,
        "DIM": plan.dim,
        "BLOCK_M": plan.block_m,
        "MANY": plan.many,
        "DEPENDS": DEPENDENT,
        **LAUNCH,
    }
    parts, sums = out, None
    if plan.splits > 1:
        parts = query.new_empty((num_tokens, num_heads, plan.splits, head_dim), dtype=torch.float32)
        sums = query.new_empty((num_tokens, num_heads, plan.splits), dtype=torch.float32)
    _attend[(num_kv_heads, plan.tiles, plan.splits)](
        parts,
        sums,
        query,
        key_cache,
        value_cache,
        block_tables=batch.block_tables,
        scale=scale * math.log2(math.e),
        row_stride=query.stride(0),
        head_stride=query.stride(1),
        block_stride=key_cache.stride(0),
        slot_stride=key_cache.stride(1),
        kv_head_stride=key_cache.stride(2),
        table_stride=batch.block_tables.stride(0),
        BLOCK_SIZE=batch.block_size,
        BLOCK_N=plan.block_n,
        SPLIT=plan.splits > 1,
        num_warps=NUM_WARPS[plan.block_m],
        num_stages=NUM_STAGES[plan.block_m],
        **shared,
    )
    if plan.splits > 1:
        at_once = max(1, min(COMBINED // (plan.splits * plan.dim), plan.block_m))
        _combine[(num_kv_heads, plan.tiles, -(-plan.lines // at_once))](
            out, parts, sums, SPLITS=plan.splits, LINES=at_once, num_warps=COMBINE_WARPS, **shared
        )
    return out


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a batch is launched: what follows from shapes alone."""

    dim: int  # head_dim as a power of two
    block_m: int  # lines of a tile
    block_n: int  # tokens read in a turn
    many: bool  # a run may have more than one tile
    tiles: int  # at most
    lines: int  # of a tile, at most
    splits: int  # a power of two


def _plan(
    batch: PagedBatch,
    num_tokens: int,
    num_kv_heads: int,
    sharing: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _Plan:
    """Worked out once per batch, for every layer."""
    key = ("triton", num_tokens, num_kv_heads, sharing, head_dim, dtype)
    plan: _Plan | None = batch.derived.get(key)
    if plan is None:
        num_seqs = batch.query_starts.shape[0] - 1
        max_rows = int(batch.query_starts.diff().max()) if batch.max_rows is None else batch.max_rows
        lines = min(max_rows, num_tokens) * sharing
        largest = LARGEST_TILE[dtype]
        block_m = next((size for size in TILES if lines <= size), largest)
        block_m = min(block_m, largest)
        dim = max(16, _power_of_two(head_dim))
        block_n = min(max(READ_BYTES[block_m] // (dim * dtype.itemsize), FEWEST_READ), MOST_READ)
        many = lines > block_m
        tiles = num_tokens * sharing // block_m + num_seqs if many else num_seqs
        wanted = -(-PROGRAMS_PER_PROCESSOR * _processors(device) // (tiles * num_kv_heads))
        most = -(-batch.block_tables.shape[1] * batch.block_size // block_n)
        splits = _power_of_two(max(1, min(wanted, most, MOST_SPLITS)))
        plan = _Plan(dim, block_m, block_n, many, tiles, min(lines, block_m), splits)
        batch.derived[key] = plan
    return plan


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return ASSUMED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_two(number: int) -> int:
    """The next, or the number itself."""
    return 1 << (number - 1).bit_length()
