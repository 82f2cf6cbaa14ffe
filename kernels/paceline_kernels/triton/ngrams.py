"""What a text may go on with, looked up in the text itself where it lies on the device (prompt lookup; Saxena 2023).

The longest, latest match of the text's end tells: what followed it may follow again. A match that near to the end is a
loop, so where the text ends, its continuation is what followed the match once more.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline_kernels.triton.state import COLUMNS, UNKNOWN_END, Column, SequenceTable, StepInput, StepOutput

ROW = tl.constexpr(COLUMNS)
COMPUTED = tl.constexpr(Column.COMPUTED.value)
MATCH = tl.constexpr(Column.MATCH.value)
UNKNOWN = tl.constexpr(UNKNOWN_END)
BLOCK = 1024
PLACE_BITS = 28  # of an int32, for places in a text; the others are for how much agrees there


def look_up(table: SequenceTable, seats: Tensor, longest: int, longest_match: int) -> None:
    """Write `table.proposals` and `Column.MATCH` of sequences that decode next; others have UNKNOWN_END, and keep it.

    Args:
        seats: [num_seqs] int64.
        longest: tokens of an end that is looked up, at most 7: longer ones are no better.
        longest_match: tokens up to which matches are told apart, a power of two.
    """
    shape = _shape(table, longest, longest_match)
    _look_up[(len(seats),)](table.facts, table.texts, table.proposals, seats, table.texts.stride(0), **shape)


def score_and_look_up(
    table: SequenceTable, step: StepInput, output: StepOutput, longest: int, longest_match: int
) -> None:
    """Compare what a step emitted with what was proposed, and look up what comes next; see `StepOutput`. Behind the
    verdicts, for the sequences that ask for it and have sampled.
    """
    shape = _shape(table, longest, longest_match)
    _score_and_look_up[(len(step.seats),)](
        table.facts,
        table.texts,
        table.proposals,
        step.seats,
        step.looks_up,
        step.logit_starts,
        output.num_accepted,
        output.scored,
        output.match,
        table.texts.stride(0),
        **shape,
    )


def _shape(table: SequenceTable, longest: int, longest_match: int) -> dict[str, int]:
    assert table.texts.shape[1] < 1 << PLACE_BITS
    count = table.proposals.shape[1]
    return {
        "COUNT": count,
        "WIDTH": triton.next_power_of_2(count),
        "LONGEST": longest,
        "LONGEST_MATCH": longest_match,
        "BITS": PLACE_BITS,
        "BLOCK": BLOCK,
    }


@triton.jit
def _propose(
    text,
    size,
    proposed,
    fact,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    LONGEST: tl.constexpr,
    LONGEST_MATCH: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Propose how a text of `size` tokens goes on: as behind its longest, latest match, or else as it began.

    -> int32: the match
    """
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
    n = tl.arange(1, LONGEST_MATCH + 1)
    mine = tl.load(text + size - n, mask=n <= end, other=-1)
    theirs = tl.load(text + end - n, mask=n <= end, other=-2)
    match = tl.min(tl.where(mine == theirs, LONGEST_MATCH, n - 1), 0)
    j = tl.arange(0, WIDTH)
    tokens = tl.load(text + end + j % (size - end), mask=j < COUNT, other=0)
    tl.store(proposed + j, tokens, mask=j < COUNT)
    tl.store(fact + MATCH, match)
    return match


@triton.jit
def _look_up(
    facts,
    texts,
    proposals,
    seats,
    texts_stride,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    LONGEST: tl.constexpr,
    LONGEST_MATCH: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A sequence each."""
    seat = tl.load(seats + tl.program_id(0))
    fact = facts + seat * ROW
    if tl.load(fact + MATCH) != UNKNOWN:
        size = tl.load(fact + COMPUTED) + 1
        text, proposed = texts + seat * texts_stride, proposals + seat * COUNT
        _propose(text, size, proposed, fact, COUNT, WIDTH, LONGEST, LONGEST_MATCH, BITS, BLOCK)


@triton.jit
def _score_and_look_up(
    facts,
    texts,
    proposals,
    seats,
    looks_up,
    logit_starts,
    num_accepted,
    scored,
    matches,
    texts_stride,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    LONGEST: tl.constexpr,
    LONGEST_MATCH: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A sequence each."""
    i = tl.program_id(0)
    seat = tl.load(seats + i).to(tl.int64)
    samples = tl.load(logit_starts + i + 1) > tl.load(logit_starts + i)
    score = tl.full([], -1, tl.int32)
    match = tl.zeros([], tl.int32)
    fact = facts + seat * ROW
    if (seat >= 0) & samples & (tl.load(looks_up + i) != 0):
        text, proposed = texts + seat * texts_stride, proposals + seat * COUNT
        computed, emitted = tl.load(fact + COMPUTED), tl.load(num_accepted + i) + 1
        if tl.load(fact + MATCH) == UNKNOWN:  # behind a prompt
            _propose(text, computed + 1 - emitted, proposed, fact, COUNT, WIDTH, LONGEST, LONGEST_MATCH, BITS, BLOCK)
            tl.debug_barrier()
        if tl.load(fact + MATCH) > 0:
            j = tl.arange(0, WIDTH)
            news = tl.load(text + computed + 1 - emitted + j, mask=j < emitted, other=-1)
            olds = tl.load(proposed + j, mask=j < emitted, other=-2)
            score = tl.min(tl.where(news == olds, WIDTH, j), 0)
        tl.debug_barrier()  # all have read what is written now
        match = _propose(text, computed + 1, proposed, fact, COUNT, WIDTH, LONGEST, LONGEST_MATCH, BITS, BLOCK)
    elif seat >= 0:
        tl.store(fact + MATCH, UNKNOWN)  # what was proposed there stands no longer at the text's end
    tl.store(scored + i, score)
    tl.store(matches + i, match)
