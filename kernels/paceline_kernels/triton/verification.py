"""Drafts are chosen and judged, and the table of sequences moved on, without the host being asked.

The rules are those of `paceline.runner.verification`, whose modules say why they are exact. Everything is launched
whatever the numbers are, so that it can be captured in a CUDA graph: grids hang on shapes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline_kernels import reference_sampling
from paceline_kernels.triton.edits import count_token, edit_row
from paceline_kernels.triton.sampling import (
    HIGHEST,
    NUM_WARPS,
    argmax_of,
    block_of,
    draw_from,
    gumbel_argmax_of,
    softmax_row,
    truncate_row,
    uniform_of,
)
from paceline_kernels.triton.state import (
    COLUMNS,
    FIRST_PASS_ROWS,
    Column,
    Noise,
    Rule,
    SequenceTable,
    StepInput,
    StepOutput,
)

ROW = tl.constexpr(COLUMNS)
COMPUTED = tl.constexpr(int(Column.COMPUTED))
DRAFT_COMPUTED = tl.constexpr(int(Column.DRAFT_COMPUTED))
DRAFTED = tl.constexpr(int(Column.DRAFTED))
RULE = tl.constexpr(int(Column.RULE))
TOP_K = tl.constexpr(int(Column.TOP_K))
SEED_LOW = tl.constexpr(int(Column.SEED_LOW))
SEED_HIGH = tl.constexpr(int(Column.SEED_HIGH))
CHOICE = tl.constexpr(int(Column.CHOICE))
TEMPERATURE = tl.constexpr(int(Column.TEMPERATURE))
TOP_P = tl.constexpr(int(Column.TOP_P))
MIN_P = tl.constexpr(int(Column.MIN_P))
TYPICAL_P = tl.constexpr(int(Column.TYPICAL_P))
GREEDY = tl.constexpr(int(Rule.GREEDY))
COUPLED = tl.constexpr(int(Rule.COUPLED))
TOKEN_WISE = tl.constexpr(int(Rule.TOKEN_WISE))
BLOCK_RULE = tl.constexpr(int(Rule.BLOCK))
DRAFT = tl.constexpr(int(Noise.DRAFT))
ACCEPT = tl.constexpr(int(Noise.ACCEPT))
SAMPLE = tl.constexpr(int(Noise.SAMPLE))
NO_CHOICE = tl.constexpr(-1)  # of logits that are no numbers
NEARLY_1 = tl.constexpr(1 - 1e-6)  # what float32 may leave of a probability of 1

UNIFORM_DOMAIN = 0x5041434E  # sets this noise apart from that of `sampling.gumbel_argmax`


def choose_drafts(logits: Tensor, table: SequenceTable, step: StepInput, *, first: bool) -> None:
    """Choose the next draft j of the sequences whose depth goes beyond it, as the target would: see `Rule`.

    Writes `table.drafts[seat, j]`, and what it was drawn from, where it was, to `table.probs[seat, j]`, and counts it.
    Other rows are not looked at.

    Args:
        logits: [rows, vocab] float32, row i for the sequence at `step.draft_seats[i]`; overwritten.
        first: j is 0 for all; else `Column.DRAFTED` says it.
    """
    rows, vocab = _checked(logits, table)
    if not rows:
        return
    _choose[(rows,)](
        logits,
        table.facts,
        table.drafts,
        table.probs,
        table.counts,
        table.edits,
        step.draft_seats,
        step.draft_depths,
        step.noise_key,
        FIRST=first,
        DEPTH=table.drafts.shape[1],
        VOCAB=vocab,
        BLOCK=block_of(vocab),
        num_warps=NUM_WARPS,
    )


def judge(logits: Tensor, token_ids: Tensor, table: SequenceTable, step: StepInput, output: StepOutput) -> None:
    """Decide what each sequence emits, and move it on in the table.

    Both columns move that say what the models have computed; a sequence without rows of logits emits nothing. Those
    that are not judged stay as they are, and so do their logits.

    Args:
        logits: [rows, vocab] float32, row r for `step.logit_sequences[r]`; overwritten.
        token_ids: of the rows of the forward, [num_rows] int32 or int64.
    """
    rows, vocab = _checked(logits, table)
    num_seqs, depth = step.seats.shape[0], table.drafts.shape[1]
    choices = torch.empty(max(1, rows), dtype=torch.int32, device=logits.device)
    z = torch.empty(max(1, rows), dtype=torch.float32, device=logits.device)
    sequences = (table.facts, step.seats, step.is_judged, step.num_tokens, step.num_drafts)
    width = output.labels.shape[1]
    shape = {"DEPTH": depth, "VOCAB": vocab, "BLOCK": block_of(vocab)}
    if rows:
        where = (step.logit_sequences, step.logit_starts)
        _evaluate[(rows,)](
            logits,
            choices,
            table.counts,
            table.edits,
            token_ids,
            *sequences,
            step.query_starts,
            *where,
            VOCAB=vocab,
            BLOCK=shape["BLOCK"],
            num_warps=NUM_WARPS,
        )
        _compare[(rows,)](
            logits,
            z,
            output.labels,
            table.probs,
            token_ids,
            *sequences,
            step.one_hot,
            step.query_starts,
            *where,
            LABELS=width,
            **shape,
            num_warps=NUM_WARPS,
        )
    if num_seqs:
        _decide[(num_seqs,)](
            logits,
            choices,
            z,
            output.num_accepted,
            output.tokens,
            output.labels,
            output.broken,
            table.probs,
            table.counts,
            token_ids,
            *sequences,
            step.num_read,
            step.one_hot,
            step.query_starts,
            step.logit_starts,
            step.noise_key,
            table.texts,
            table.texts.stride(0),
            LABELS=width,
            FIRST_ROWS=FIRST_PASS_ROWS,
            **shape,
            num_warps=NUM_WARPS,
        )


def uniform(noise_key: Tensor, stream: Noise, seats: Tensor, j: int | Tensor) -> Tensor:
    """The noise of the kernels, by the reference's Philox: [...] int64 seats and drafts -> [...] float64 in [0, 1).

    53 bits of Philox4x32-10 with the engine's seed as key and (seat, step, stream * 65536 + j, `UNIFORM_DOMAIN`) as
    counter. A seat has one sequence in a step, so that nothing is drawn twice.
    """
    low, high, step, _ = noise_key.long().unbind()
    numbers = torch.as_tensor(j, device=seats.device) + int(stream) * 65536
    counter = (seats.long(), step, numbers.long(), torch.full_like(step, UNIFORM_DOMAIN))
    first, second, _, _ = reference_sampling.philox(counter, (low, high))
    return ((first >> 5).double() * 2.0**26 + (second >> 6).double()) * 2.0**-53


def _checked(logits: Tensor, table: SequenceTable) -> tuple[int, int]:
    """The shape of the logits."""
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32, f"{logits.dtype}, where the kernels read float32"
    assert logits.is_contiguous(), "the kernels see no strides"
    # Where nothing is ever drawn, the table has no room for what it would be drawn from.
    assert table.probs.shape[2] in (1, vocab), f"{vocab} tokens, {table.probs.shape[2]} in the table"
    assert table.counts.shape[1] == vocab, f"{vocab} tokens, {table.counts.shape[1]} counted"
    return rows, vocab


# --- device functions ---


@triton.jit
def _float(column):
    return tl.load(column).to(tl.float32, bitcast=True)


@triton.jit
def _truncate(row, fact, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    top_p, min_p, typical_p = _float(fact + TOP_P), _float(fact + MIN_P), _float(fact + TYPICAL_P)
    truncate_row(row, VOCAB, _float(fact + TEMPERATURE), tl.load(fact + TOP_K), top_p, min_p, typical_p, BLOCK)


@triton.jit
def _chosen(row, fact, rule, position, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """By argmax, or with the noise of the seed; for target and draft alike.  -> int32"""
    token = tl.zeros([], tl.int32)
    if rule == GREEDY:
        token = argmax_of(row, VOCAB, BLOCK)
    else:
        _truncate(row, fact, VOCAB, BLOCK)
        low, high, choice = tl.load(fact + SEED_LOW), tl.load(fact + SEED_HIGH), tl.load(fact + CHOICE)
        token = gumbel_argmax_of(row, VOCAB, _float(fact + TEMPERATURE), low, high, position, choice, BLOCK)
    return token


@triton.jit
def _probs_of(probs, seat, j, DEPTH: tl.constexpr, VOCAB: tl.constexpr):
    """Where what draft j was drawn from begins."""
    return probs + (seat.to(tl.int64) * DEPTH + j) * VOCAB


@triton.jit
def _weight_behind(weight, p_x, q_x):
    """w_i of w_(i-1) and the probabilities of draft i: see `rejection`.  -> float32"""
    ratio = tl.math.div_rn(p_x, tl.where(q_x > 0, q_x, 1.0))
    return tl.minimum(weight * tl.where(q_x > 0, ratio, 0.0), 1.0)


@triton.jit
def _choose(
    logits,
    facts,
    drafts,
    probs,
    counts,
    edits,
    draft_seats,
    draft_depths,
    noise_key,
    FIRST: tl.constexpr,
    DEPTH: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    seat = tl.load(draft_seats + i)
    fact = facts + seat * ROW
    j = tl.zeros([], tl.int32)
    if not FIRST:
        j = tl.load(fact + DRAFTED, mask=seat >= 0, other=0)
    if (seat >= 0) & (tl.load(draft_depths + i) > j):
        row = logits + i.to(tl.int64) * VOCAB
        rule = tl.load(fact + RULE)
        length = tl.load(fact + COMPUTED) + 1
        edit_row(row, fact, seat, counts, edits, length, drafts + seat * DEPTH, j, VOCAB, BLOCK)
        token = tl.zeros([], tl.int32)
        if rule <= COUPLED:
            token = _chosen(row, fact, rule, length + j, VOCAB, BLOCK)
        else:
            q = _probs_of(probs, seat, j, DEPTH, VOCAB)
            _truncate(row, fact, VOCAB, BLOCK)
            softmax_row(row, q, VOCAB, _float(fact + TEMPERATURE), BLOCK)
            u = uniform_of(noise_key, DRAFT, seat, j)
            token = draw_from(q, q, False, 1.0, -1, False, u, VOCAB, BLOCK)
        tl.store(drafts + seat * DEPTH + j, token)
        tl.store(fact + DRAFTED, j + 1)


@triton.jit
def _evaluate(
    logits,
    choices,
    counts,
    edits,
    token_ids,
    facts,
    seats,
    is_judged,
    num_tokens,
    num_drafts,
    query_starts,
    logit_sequences,
    logit_starts,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row of logits each: the target's choice there, or what it draws from, in place.

    One logit tells whether the row holds numbers: a state that does not makes all logits of its row such.
    """
    r = tl.program_id(0)
    i = tl.load(logit_sequences + r)
    if i >= 0:
        seat = tl.load(seats + i)
        if (seat >= 0) & (tl.load(is_judged + i) != 0):
            row = logits + r.to(tl.int64) * VOCAB
            fact = facts + seat * ROW
            rule = tl.load(fact + RULE)
            choice = tl.where(tl.abs(tl.load(row)) <= HIGHEST, 0, NO_CHOICE)
            known = tl.load(num_tokens + i)
            length, before = tl.load(fact + COMPUTED) + known, r - tl.load(logit_starts + i)
            draft = token_ids + tl.load(query_starts + i) + known
            edit_row(row, fact, seat, counts, edits, length, draft, before, VOCAB, BLOCK)
            if rule <= COUPLED:
                position = length + before
                choice = tl.where(choice == 0, _chosen(row, fact, rule, position, VOCAB, BLOCK), NO_CHOICE)
            else:
                _truncate(row, fact, VOCAB, BLOCK)
                softmax_row(row, row, VOCAB, _float(fact + TEMPERATURE), BLOCK)
            tl.store(choices + r, choice)


@triton.jit
def _compare(
    logits,
    z,
    labels,
    probs,
    token_ids,
    facts,
    seats,
    is_judged,
    num_tokens,
    num_drafts,
    one_hot,
    query_starts,
    logit_sequences,
    logit_starts,
    LABELS: tl.constexpr,
    DEPTH: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row with a draft each, of those that were drawn: what of p and q the rule has to know."""
    r = tl.program_id(0)
    i = tl.load(logit_sequences + r)
    if i >= 0:
        seat = tl.load(seats + i)
        first = tl.load(logit_starts + i)
        j = r - first
        drawn = (j < tl.load(num_drafts + i)) & (tl.load(one_hot + i) == 0)
        if (seat >= 0) & (tl.load(is_judged + i) != 0) & drawn:
            rule = tl.load(facts + seat * ROW + RULE)
            if rule >= TOKEN_WISE:
                weight = tl.full([], 1.0, tl.float32)
                if rule == BLOCK_RULE:
                    draft = token_ids + tl.load(query_starts + i) + tl.load(num_tokens + i)
                    before = tl.zeros([], tl.int32)
                    while before < j:
                        token = tl.load(draft + before)
                        p_x = tl.load(logits + (first + before).to(tl.int64) * VOCAB + token)
                        q_x = tl.load(_probs_of(probs, seat, before, DEPTH, VOCAB) + token)
                        weight = _weight_behind(weight, p_x, q_x)
                        before += 1
                p_row = logits + r.to(tl.int64) * VOCAB
                q_row = _probs_of(probs, seat, j, DEPTH, VOCAB)
                # Block: where nothing of the weight is lost, nobody asks for what is left.
                if (rule == TOKEN_WISE) | (weight < 1):
                    sums = tl.zeros([BLOCK], tl.float64)
                    for start in range(0, VOCAB, BLOCK):
                        v = start + tl.arange(0, BLOCK)
                        p = tl.load(p_row + v, mask=v < VOCAB, other=0.0)
                        q = tl.load(q_row + v, mask=v < VOCAB, other=0.0)
                        if rule == TOKEN_WISE:
                            sums += tl.minimum(p, q).to(tl.float64)
                        else:
                            left = weight.to(tl.float64) * p.to(tl.float64) - q.to(tl.float64)
                            sums += tl.maximum(left, 0.0)
                    total = tl.sum(sums).to(tl.float32)
                    if rule == TOKEN_WISE:
                        tl.store(labels + i * LABELS + j, total.to(tl.int32, bitcast=True))
                    else:
                        tl.store(z + r, total)


@triton.jit
def _decide(
    logits,
    choices,
    z,
    num_accepted,
    tokens,
    labels,
    broken,
    probs,
    counts,
    token_ids,
    facts,
    seats,
    is_judged,
    num_tokens,
    num_drafts,
    num_read,
    one_hot,
    query_starts,
    logit_starts,
    noise_key,
    texts,
    texts_stride,
    LABELS: tl.constexpr,
    FIRST_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A sequence each: what of its drafts is kept, and the token behind."""
    i = tl.program_id(0)
    seat = tl.load(seats + i)
    accepted = tl.zeros([], tl.int32)
    is_broken = tl.zeros([], tl.int32)
    if (seat >= 0) & (tl.load(is_judged + i) != 0):
        fact = facts + seat * ROW
        known = tl.load(num_tokens + i)
        first = tl.load(logit_starts + i)
        depth = tl.load(num_drafts + i)
        computed = tl.load(fact + COMPUTED)
        size = computed + known
        by_model = (depth > 0) & (tl.load(one_hot + i) == 0)
        until = size - tl.where(by_model, FIRST_ROWS, 0)
        read = tl.load(fact + DRAFT_COMPUTED)
        read = tl.maximum(read, tl.minimum(read + tl.load(num_read + i), until))
        if tl.load(logit_starts + i + 1) > first:
            rule = tl.load(fact + RULE)
            draft = token_ids + tl.load(query_starts + i) + known
            label = labels + i * LABELS
            emitted = tokens + i * (LABELS + 1)
            behind = texts + seat.to(tl.int64) * texts_stride + size
            j = tl.zeros([], tl.int32)
            final = tl.zeros([], tl.int32)
            if rule <= COUPLED:
                while j < depth:
                    agrees = (accepted == j) & (tl.load(draft + j) == tl.load(choices + first + j))
                    accepted += agrees.to(tl.int32)
                    tl.store(label + j, agrees.to(tl.float32).to(tl.int32, bitcast=True))
                    j += 1
                # Some token in any case: the next step may read it before anybody hears of this one.
                final = tl.maximum(tl.load(choices + first + accepted), 0)
            else:
                drawn = tl.load(one_hot + i) == 0
                by_block = drawn & (rule == BLOCK_RULE)
                running = tl.full([], 1.0, tl.float32)
                weight = tl.full([], 1.0, tl.float32)  # of p in what is left behind the drafts that are kept
                while j < depth:
                    token = tl.load(draft + j)
                    p_x = tl.load(logits + (first + j).to(tl.int64) * VOCAB + token)
                    q_x = tl.load(_probs_of(probs, seat, j, DEPTH, VOCAB) + token, mask=drawn, other=1.0)
                    u = uniform_of(noise_key, ACCEPT, seat, j)
                    if by_block:
                        running = _weight_behind(running, p_x, q_x)
                        may = running
                        if (j + 1 < depth) & (running < 1):
                            left = tl.load(z + first + j + 1)
                            may = tl.math.div_rn(left, left + 1 - running)
                        kept = u < may.to(tl.float64)
                        accepted = tl.where(kept, j + 1, accepted)
                        weight = tl.where(kept, running, weight)
                    else:
                        # What was drawn has q above 0, unless the draft's logits were no numbers.
                        kept = (accepted == j) & (q_x > 0) & (u * q_x.to(tl.float64) < p_x.to(tl.float64))
                        accepted += kept.to(tl.int32)
                        if drawn == 0:
                            tl.store(label + j, p_x.to(tl.int32, bitcast=True))
                    j += 1
                if by_block:
                    j = tl.zeros([], tl.int32)
                    while j < depth:
                        tl.store(label + j, (j < accepted).to(tl.float32).to(tl.int32, bitcast=True))
                        j += 1
                rejected = accepted < depth
                p = logits + (first + accepted).to(tl.int64) * VOCAB
                q = _probs_of(probs, seat, tl.minimum(accepted, DEPTH - 1), DEPTH, VOCAB)
                has_q = drawn & rejected
                chosen = (drawn == 0) & rejected
                # A chosen draft that has all of p was rejected by rounding alone, and is what is drawn.
                skip = tl.load(draft + accepted, mask=chosen, other=-1).to(tl.int32)
                sure = chosen & (tl.load(p + skip, mask=chosen, other=0.0) > NEARLY_1)
                u = uniform_of(noise_key, SAMPLE, seat, 0)
                scale = tl.where(has_q, weight, 1.0)
                final = draw_from(p, q, has_q, scale, skip, has_q | sure, u, VOCAB, BLOCK)
            j = tl.zeros([], tl.int32)
            while j <= accepted:
                is_broken |= (tl.load(choices + first + j) == NO_CHOICE).to(tl.int32)
                j += 1
            j = tl.zeros([], tl.int32)
            while j < accepted:
                kept_token = tl.load(draft + j).to(tl.int32)
                tl.store(emitted + j, kept_token)
                tl.store(behind + j, kept_token)
                count_token(fact, seat, counts, kept_token, VOCAB)
                j += 1
            tl.store(emitted + accepted, final)
            tl.store(behind + accepted, final)
            count_token(fact, seat, counts, final, VOCAB)
            # Of its drafts, the draft model has not read the last.
            read = tl.where(by_model & (read >= until), size + tl.minimum(depth - 1, accepted), read)
        tl.debug_barrier()
        tl.store(fact + COMPUTED, size + accepted)
        tl.store(fact + DRAFT_COMPUTED, read)
    tl.store(num_accepted + i, accepted)
    tl.store(broken + i, is_broken)
