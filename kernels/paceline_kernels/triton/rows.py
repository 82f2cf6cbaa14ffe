"""Which token each row of a forward holds and where it belongs, found out on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline_kernels.batch import PagedBatch
from paceline_kernels.triton.state import FIRST_PASS_ROWS, Column, SequenceTable, StepInput

COMPUTED = tl.constexpr(Column.COMPUTED.value)
DRAFT_COMPUTED = tl.constexpr(Column.DRAFT_COMPUTED.value)
DRAFTED = tl.constexpr(Column.DRAFTED.value)
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
        table.texts,
        table.block_tables,
        table.proposals,
        table.drafts,
        step.seats,
        step.num_tokens,
        step.one_hot,
        step.query_starts,
        step.row_sequences,
        token_ids,
        positions,
        slots,
        context_lens,
        num_rows,
        num_seqs,
        table.facts.stride(0),
        table.texts.stride(0),
        table.block_tables.stride(0),
        table.proposals.stride(0),
        table.drafts.stride(0),
        block_size,
        BLOCK=BLOCK,
    )
    return token_ids, _batch(table, step.seats, step.query_starts, context_lens, block_size, max_rows, positions, slots)


def logit_rows(step: StepInput, count: int) -> Tensor:
    """Which rows of the forward have logits, [count] int64; 0 for padding."""
    rows = torch.empty(count, dtype=torch.int64, device=step.seats.device)
    _logit_rows[(triton.cdiv(count, BLOCK),)](
        step.num_tokens, step.query_starts, step.logit_starts, step.logit_sequences, rows, count, BLOCK=BLOCK
    )
    return rows


def draft_rows(
    table: SequenceTable,
    seats: Tensor,
    depths: Tensor,
    starts: Tensor,
    block_size: int,
    *,
    first: bool,
) -> tuple[Tensor, PagedBatch]:
    """The rows of a pass of the draft model, for each sequence whose depth goes beyond the pass.

    The first pass has FIRST_PASS_ROWS of each, two: a draft model whose drafts were all accepted has not seen the last
    of them yet; for others the row writes what is there already. Later passes have one, the draft of the pass before;
    `Column.DRAFTED` says which that is.

    Args:
        seats, depths: [num_seqs] int32, the deepest first.
        starts: where the rows of each begin, [num_seqs + 1] int32.
    """
    num_seqs, per_seq = len(seats), FIRST_PASS_ROWS if first else 1
    token_ids, positions, slots = seats.new_empty(3, num_seqs * per_seq, dtype=torch.int64).unbind(0)
    context_lens = torch.empty_like(seats)
    _draft_rows[(triton.cdiv(num_seqs, BLOCK),)](
        table.facts,
        table.texts,
        table.block_tables,
        table.drafts,
        seats,
        depths,
        token_ids,
        positions,
        slots,
        context_lens,
        num_seqs,
        table.facts.stride(0),
        table.texts.stride(0),
        table.block_tables.stride(0),
        table.drafts.stride(0),
        block_size,
        FIRST=first,
        BLOCK=BLOCK,
    )
    return token_ids, _batch(table, seats, starts, context_lens, block_size, per_seq, positions, slots)


def read_rows(
    table: SequenceTable, step: StepInput, num_rows: int, block_size: int, max_rows: int
) -> tuple[Tensor, PagedBatch]:
    """The rows of what the draft model has not read: token ids [num_rows] int64, and where they belong.

    A run is as long as the step says, whatever is left to read: rows behind that are written nowhere.

    Args:
        num_rows: room for the runs of `step.read_starts`.
        max_rows: of a run, at most.
    """
    token_ids, positions = step.read_seats.new_zeros(2, num_rows, dtype=torch.int64).unbind(0)
    slots = torch.full_like(positions, -1)
    context_lens = torch.empty_like(step.read_seats)
    _read_rows[(len(step.read_seats),)](
        table.facts,
        table.texts,
        table.block_tables,
        step.read_seats,
        step.read_until,
        step.read_starts,
        token_ids,
        positions,
        slots,
        context_lens,
        table.facts.stride(0),
        table.texts.stride(0),
        table.block_tables.stride(0),
        block_size,
        BLOCK=BLOCK,
    )
    starts = step.read_starts
    return token_ids, _batch(table, step.read_seats, starts, context_lens, block_size, max_rows, positions, slots)


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
    texts,
    block_tables,
    proposals,
    drafts,
    seats,
    num_tokens,
    one_hot,
    query_starts,
    row_sequences,
    token_ids,
    positions,
    slots,
    context_lens,
    num_rows,
    num_seqs,
    facts_stride,
    texts_stride,
    table_stride,
    proposals_stride,
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
        is_draft = real & (offset >= known)
        proposed = is_draft & (tl.load(one_hot + sequence, mask=real, other=0) != 0)
        drafted = is_draft & (proposed == 0)
        token = tl.load(texts + seat.to(tl.int64) * texts_stride + position, mask=real & (offset < known), other=0)
        token += tl.load(proposals + seat * proposals_stride + offset - known, mask=proposed, other=0)
        token += tl.load(drafts + seat * drafts_stride + offset - known, mask=drafted, other=0)
        block = tl.load(block_tables + seat.to(tl.int64) * table_stride + position // block_size, mask=real, other=0)
        slot = block.to(tl.int64) * block_size + position % block_size
        tl.store(token_ids + rows, token.to(tl.int64), mask=inside)
        tl.store(positions + rows, tl.where(real, position, 0).to(tl.int64), mask=inside)  # its angles are read
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


@triton.jit(do_not_specialize=["count"])
def _logit_rows(num_tokens, query_starts, logit_starts, logit_sequences, rows, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    sequence = tl.load(logit_sequences + index, mask=inside, other=-1)
    real = sequence >= 0
    last_known = tl.load(query_starts + sequence, mask=real, other=0) + tl.load(num_tokens + sequence, mask=real) - 1
    row = last_known + index - tl.load(logit_starts + sequence, mask=real, other=0)
    tl.store(rows + index, tl.where(real, row, 0).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["num_seqs"])
def _draft_rows(
    facts,
    texts,
    block_tables,
    drafts,
    seats,
    depths,
    token_ids,
    positions,
    slots,
    context_lens,
    num_seqs,
    facts_stride,
    texts_stride,
    table_stride,
    drafts_stride,
    block_size,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_seqs
    seat = tl.load(seats + index, mask=inside, other=-1)
    real = seat >= 0
    number = tl.zeros([BLOCK], tl.int32)
    if not FIRST:
        number = tl.load(facts + seat * facts_stride + DRAFTED, mask=real, other=0)
    real = real & (tl.load(depths + index, mask=inside, other=0) > number)
    computed = tl.load(facts + seat * facts_stride + COMPUTED, mask=real, other=0)
    if FIRST:
        text = texts + seat.to(tl.int64) * texts_stride
        newest = tl.load(text + computed, mask=real, other=0)
        last = computed
        before = tl.maximum(computed - 1, 0)
        has_before = real & (computed > 0)
        token = tl.load(text + before, mask=has_before, other=0)
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
    row = 2 * index + 1 if FIRST else index
    tl.store(token_ids + row, newest.to(tl.int64), mask=inside)
    tl.store(positions + row, last.to(tl.int64), mask=inside)
    tl.store(slots + row, tl.where(real, slot, -1), mask=inside)
    tl.store(context_lens + index, tl.where(real, last + 1, 0), mask=inside)


@triton.jit
def _read_rows(
    facts,
    texts,
    block_tables,
    read_seats,
    read_until,
    read_starts,
    token_ids,
    positions,
    slots,
    context_lens,
    facts_stride,
    texts_stride,
    table_stride,
    block_size,
    BLOCK: tl.constexpr,
):
    """A sequence each."""
    index = tl.program_id(0)
    seat = tl.load(read_seats + index)
    context = tl.zeros([], tl.int32)
    if seat >= 0:
        begin = tl.load(read_starts + index)
        end = tl.load(read_starts + index + 1)
        read = tl.load(facts + seat * facts_stride + DRAFT_COMPUTED)
        until = tl.load(facts + seat * facts_stride + COMPUTED) + tl.load(read_until + index)
        text = texts + seat.to(tl.int64) * texts_stride
        table = block_tables + seat.to(tl.int64) * table_stride
        for start in range(begin, end, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            inside = rows < end
            position = read + rows - begin
            real = inside & (position < until)
            token = tl.load(text + position, mask=real, other=0)
            block = tl.load(table + position // block_size, mask=real, other=0)
            slot = block.to(tl.int64) * block_size + position % block_size
            tl.store(token_ids + rows, token.to(tl.int64), mask=inside)
            tl.store(positions + rows, tl.where(real, position, 0).to(tl.int64), mask=inside)
            tl.store(slots + rows, tl.where(real, slot, -1), mask=inside)
        context = read + end - begin
    tl.store(context_lens + index, context)
