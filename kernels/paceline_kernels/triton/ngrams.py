"""What a text may go on with, looked up in the text itself where it lies on the device (prompt lookup; Saxena 2023)."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline_kernels.triton.state import Column, SequenceTable, StepInput

COMPUTED = tl.constexpr(Column.COMPUTED.value)
BLOCK = 1024
LENGTH_BITS = 28  # of an int32, for places in a text; the others are for how much agrees there


def propose(table: SequenceTable, step: StepInput, longest: int) -> None:
    """Write what followed the longest, latest match of a text's end to `table.drafts`, for all whose drafts are chosen.

    A match that near to the end is a loop, so where the text ends, what followed the match follows again. Without any,
    the text's beginning is proposed: it has been settled how many drafts there are.

    Args:
        longest: tokens of a match, from which on longer ones are no better; at most 7.
    """
    assert table.texts.shape[1] < 1 << LENGTH_BITS
    _propose[(len(step.seats),)](
        table.facts,
        table.texts,
        table.drafts,
        step.seats,
        step.num_tokens,
        step.num_drafts,
        step.one_hot,
        table.facts.stride(0),
        table.texts.stride(0),
        table.drafts.stride(0),
        LONGEST=longest,
        DEPTH=triton.next_power_of_2(table.drafts.shape[1]),
        BITS=LENGTH_BITS,
        BLOCK=BLOCK,
    )


@triton.jit
def _propose(
    facts,
    texts,
    drafts,
    seats,
    num_tokens,
    num_drafts,
    one_hot,
    facts_stride,
    texts_stride,
    drafts_stride,
    LONGEST: tl.constexpr,
    DEPTH: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A sequence each."""
    i = tl.program_id(0)
    seat = tl.load(seats + i)
    depth = tl.load(num_drafts + i)
    if (seat >= 0) & (depth > 0) & (tl.load(one_hot + i) != 0):
        text = texts + seat.to(tl.int64) * texts_stride
        size = tl.load(facts + seat * facts_stride + COMPUTED) + tl.load(num_tokens + i)
        best = tl.zeros([BLOCK], tl.int32)
        for start in range(1, size, BLOCK):
            ends = start + tl.arange(0, BLOCK)
            agrees = ends < size
            length = tl.zeros([BLOCK], tl.int32)
            for n in tl.static_range(1, LONGEST + 1):
                mine = tl.load(text + size - n, mask=size >= n, other=-1)
                theirs = tl.load(text + ends - n, mask=agrees & (ends >= n), other=-2)
                agrees = agrees & (theirs == mine)
                length += agrees.to(tl.int32)
            best = tl.maximum(best, tl.where(length > 0, (length << BITS) + ends, 0))
        end = tl.max(best, 0) & ((1 << BITS) - 1)
        j = tl.arange(0, DEPTH)
        tokens = tl.load(text + end + j % (size - end), mask=j < depth, other=0)
        tl.store(drafts + seat * drafts_stride + j, tokens, mask=j < depth)
