"""What a request changes of its logits, where they lie: forbidden tokens, biases and penalties.

The order is that of `paceline.runner.sampler.edit_`, and so is what is rounded. A row that nobody edits is not touched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline_kernels.triton.sampling import HIGHEST, LOWEST
from paceline_kernels.triton.state import MOST_EDITS, Column, Edit

EDITED = tl.constexpr(int(Column.EDITED))
COUNTED = tl.constexpr(int(Column.COUNTED))
REPETITION = tl.constexpr(int(Column.REPETITION))
FREQUENCY = tl.constexpr(int(Column.FREQUENCY))
PRESENCE = tl.constexpr(int(Column.PRESENCE))
ROOM = tl.constexpr(MOST_EDITS)
WORDS = tl.constexpr(len(Edit))
TOKEN = tl.constexpr(int(Edit.TOKEN))
BIAS = tl.constexpr(int(Edit.BIAS))
FORBIDDEN_UNTIL = tl.constexpr(int(Edit.FORBIDDEN_UNTIL))
EDITS_AT_ONCE = tl.constexpr(64)


@triton.jit
def edit_row(row, fact, seat, counts, edits, length, drafts, num_drafts, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Edit the logits behind a text and some drafts, in place.

    Args:
        row: of logits, which nobody reads or writes meanwhile.
        fact, seat: of the sequence in the table, of which `counts` and `edits` are.
        length: tokens of the text; `counts` tells of all of them.
        drafts: tokens that stand behind it, of which the first `num_drafts` are before this row.
    """
    edited = tl.load(fact + EDITED)
    if edited > 0:
        tl.debug_barrier()
        _forbid_and_bias(row, edits + seat.to(tl.int64) * (ROOM * WORDS), edited - 1, length + num_drafts)
        if tl.load(fact + COUNTED) > 0:
            count = counts + seat.to(tl.int64) * VOCAB
            _penalise(row, fact, count, drafts, num_drafts, VOCAB, BLOCK)
        tl.debug_barrier()


@triton.jit
def _forbid_and_bias(row, edit, count, length):
    """Each edit has a token of its own, so that no two write the same."""
    for start in range(0, count, EDITS_AT_ONCE):
        k = start + tl.arange(0, EDITS_AT_ONCE)
        there = k < count
        word = edit + k * WORDS
        token = tl.load(word + TOKEN, mask=there, other=0)
        bias = tl.load(word + BIAS, mask=there, other=0).to(tl.float32, bitcast=True)
        until = tl.load(word + FORBIDDEN_UNTIL, mask=there, other=0)
        x = tl.load(row + token, mask=there, other=0.0) + bias
        tl.store(row + token, tl.where(length < until, float("-inf"), x), mask=there)
    tl.debug_barrier()


@triton.jit
def _penalise(row, fact, counts, drafts, num_drafts, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """However extreme the penalty, it makes no logit infinite and forbids no token."""
    repetition = tl.load(fact + REPETITION).to(tl.float32, bitcast=True)
    frequency = tl.load(fact + FREQUENCY).to(tl.float32, bitcast=True)
    presence = tl.load(fact + PRESENCE).to(tl.float32, bitcast=True)
    for start in range(0, VOCAB, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(row + v, mask=v < VOCAB, other=float("-inf"))
        count = tl.load(counts + v, mask=v < VOCAB, other=0)
        times, seen = count >> 1, count > 0
        j = tl.zeros([], tl.int32)
        while j < num_drafts:
            drafted = v == tl.load(drafts + j).to(tl.int32)
            times += drafted.to(tl.int32)
            seen = seen | drafted
            j += 1
        changed = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
        # A product that is rounded, as the host's is: in float32 it would be fused with what it is taken off.
        changed -= (frequency.to(tl.float64) * times.to(tl.float64)).to(tl.float32)
        changed -= tl.where(times > 0, presence, 0.0)
        changed = tl.minimum(tl.maximum(changed, LOWEST), HIGHEST)
        tl.store(row + v, tl.where(seen & (x > float("-inf")), changed, x), mask=v < VOCAB)


@triton.jit
def count_token(fact, seat, counts, token, VOCAB: tl.constexpr):
    """One more of it in the completion, if anybody counts."""
    if tl.load(fact + COUNTED) > 0:
        place = counts + seat.to(tl.int64) * VOCAB + token
        tl.atomic_or(place, 1)
        tl.atomic_add(place, 2)
