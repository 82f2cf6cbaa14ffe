"""Which token each row of a forward holds and where it belongs, found out on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline_kernels.batch import PagedBatch
from paceline_kernels.triton.state import Column, SequenceTable, StepInput

COMPUTED = tl.constexpr(Column.COMPUTED.value)
PREVIOUS = tl.constexpr(Column.PREVIOUS.value)
NEWEST = tl.constexpr(Column.NEWEST.value)
BLOCK = 128


def step_rows(table: SequenceTable, step: StepInput, block_size: int, max_rows: int) -> tuple[Tensor, PagedBatch]:
    """The rows of the target's forward: token ids [num_rows] int64, and where they belong.

    Args:
        max_rows: of a run, at most.
    """
    num_rows, num_seqs = len(step.row_sequences), len(step.seats)
    token_ids, positions, slots = step.seats.new_empty(3, num_rows, dtype=torch.int64).unbind(0)
    context_lens = torch.empty_like(step.seats)
    grid = (triton.cdiv(num_rows, BLOCK) + triton.cdiv(num_seqs, BLOCK),)
    _step_rows[grid](
        table.facts,
        table.block_tables,
        table.drafts,
        step.seats,
        step.num_tokens,
        step.query_starts,
        step.row_sequences,
        step.host_tokens,
        token_ids,
        positions,
        slots,
        context_lens,
        num_rows,
        num_seqs,
        table.facts.stride(0),
        table.block_tables.stride(0),
        table.drafts.stride(0),
        block_size,
        BLOCK=BLOCK,
    )
    return token_ids, _batch(table, step.seats, step.query_starts, context_lens, block_size, max_rows, positions, slots)


def draft_rows(
    table: SequenceTable,
    seats: Tensor,
    depths: Tensor,
    pass_index: Tensor,
    starts: Tensor,
    block_size: int,
    per_seq: int,
) -> tuple[Tensor, PagedBatch]:
    """The rows of a pass of the draft model, `per_seq` for each sequence whose depth goes beyond the pass.

    The first pass has two: a draft model whose drafts were all accepted has not seen the last of them yet; for others
    the row writes what is there already. Later passes have one, the draft of the pass before.

    Args:
        seats, depths: [num_seqs] int32, the deepest first.
        pass_index: [1] int32.
        starts: 0, per_seq, 2 * per_seq, ..., [num_seqs + 1] int32.
    """
    num_seqs = len(seats)
    token_ids, positions, slots = seats.new_empty(3, num_seqs * per_seq, dtype=torch.int64).unbind(0)
    context_lens = torch.empty_like(seats)
    _draft_rows[(triton.cdiv(num_seqs, BLOCK),)](
        table.facts,
        table.block_tables,
        table.drafts,
        seats,
        depths,
        pass_index,
        token_ids,
        positions,
        slots,
        context_lens,
        num_seqs,
        table.facts.stride(0),
        table.block_tables.stride(0),
        table.drafts.stride(0),
        block_size,
        PER_SEQ=per_seq,
        BLOCK=BLOCK,
    )
    return token_ids, _batch(table, seats, starts, context_lens, block_size, per_seq, positions, slots)


def _batch(
    table: SequenceTable,
    seats: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_size: int,
    max_rows: int,
    positions: Tensor,
    slots: Tensor,
) -> PagedBatch:
    return PagedBatch(
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=table.block_tables,
        block_size=block_size,
        table_rows=seats,
        max_rows=max_rows,
        derived={"rows": (positions, slots)},
    )


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def _step_rows(
    facts,
    block_tables,
    drafts,
    seats,
    num_tokens,
    query_starts,
    row_sequences,
    host_tokens,
    token_ids,
    positions,
    slots,
    context_lens,
    num_rows,
    num_seqs,
    facts_stride,
    table_stride,
    drafts_stride,
    block_size,
    BLOCK: tl.constexpr,
):
    row_programs = tl.cdiv(num_rows, BLOCK)
    program = tl.program_id(0)
    if program < row_programs:
        rows = program * BLOCK + tl.arange(0, BLOCK)
        inside = rows < num_rows
        sequence = tl.load(row_sequences + rows, mask=inside, other=-1)
        real = sequence >= 0
        seat = tl.load(seats + sequence, mask=real, other=0)
        offset = rows - tl.load(query_starts + sequence, mask=real, other=0)
        known = tl.load(num_tokens + sequence, mask=real, other=1)
        position = tl.load(facts + seat * facts_stride + COMPUTED, mask=real, other=0) + offset
        from_host = tl.load(host_tokens + rows, mask=real, other=0)
        newest = tl.load(facts + seat * facts_stride + NEWEST, mask=real, other=0)
        is_draft = real & (offset >= known)
        draft = tl.load(drafts + seat * drafts_stride + offset - known, mask=is_draft, other=0)
        token = tl.where(from_host >= 0, from_host, tl.where(is_draft, draft, newest))
        block = tl.load(block_tables + seat.to(tl.int64) * table_stride + position // block_size, mask=real, other=0)
        slot = block.to(tl.int64) * block_size + position % block_size
        tl.store(token_ids + rows, token.to(tl.int64), mask=inside)
        tl.store(positions + rows, position.to(tl.int64), mask=inside)
        tl.store(slots + rows, tl.where(real, slot, -1), mask=inside)
    else:
        index = (program - row_programs) * BLOCK + tl.arange(0, BLOCK)
        inside = index < num_seqs
        seat = tl.load(seats + index, mask=inside, other=-1)
        real = seat >= 0
        computed = tl.load(facts + seat * facts_stride + COMPUTED, mask=real, other=0)
        begin = tl.load(query_starts + index, mask=real, other=0)
        end = tl.load(query_starts + index + 1, mask=real, other=0)
        tl.store(context_lens + index, computed + end - begin, mask=inside)


@triton.jit(do_not_specialize=["num_seqs"])
def _draft_rows(
    facts,
    block_tables,
    drafts,
    seats,
    depths,
    pass_index,
    token_ids,
    positions,
    slots,
    context_lens,
    num_seqs,
    facts_stride,
    table_stride,
    drafts_stride,
    block_size,
    PER_SEQ: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_seqs
    number = tl.load(pass_index)
    seat = tl.load(seats + index, mask=inside, other=-1)
    real = (seat >= 0) & (tl.load(depths + index, mask=inside, other=0) > number)
    computed = tl.load(facts + seat * facts_stride + COMPUTED, mask=real, other=0)
    if PER_SEQ == 2:
        newest = tl.load(facts + seat * facts_stride + NEWEST, mask=real, other=0)
        last = computed
        token = tl.load(facts + seat * facts_stride + PREVIOUS, mask=real, other=0)
        before = tl.maximum(computed - 1, 0)
        has_before = real & (computed > 0)
        block = tl.load(
            block_tables + seat.to(tl.int64) * table_stride + before // block_size, mask=has_before, other=0
        )
        slot = block.to(tl.int64) * block_size + before % block_size
        tl.store(token_ids + 2 * index, token.to(tl.int64), mask=inside)
        tl.store(positions + 2 * index, before.to(tl.int64), mask=inside)
        tl.store(slots + 2 * index, tl.where(has_before, slot, -1), mask=inside)
    else:
        newest = tl.load(drafts + seat * drafts_stride + number - 1, mask=real, other=0)
        last = computed + number
    block = tl.load(block_tables + seat.to(tl.int64) * table_stride + last // block_size, mask=real, other=0)
    slot = block.to(tl.int64) * block_size + last % block_size
    row = PER_SEQ * index + (PER_SEQ - 1)
    tl.store(token_ids + row, newest.to(tl.int64), mask=inside)
    tl.store(positions + row, last.to(tl.int64), mask=inside)
    tl.store(slots + row, tl.where(real, slot, -1), mask=inside)
    tl.store(context_lens + index, tl.where(real, last + 1, 0), mask=inside)
