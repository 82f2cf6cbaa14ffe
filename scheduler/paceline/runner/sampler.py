"""From logits to the distribution a request asked for, at every position with that position's state.

One chain for target, draft and verification. Order and meaning are those of vLLM's sampler, with typical-p where
transformers has it, behind min-p:

    edit_       grammar and allowed tokens, bad words, minimum length, bias, penalties: these change greedy output too
    truncate_   temperature, min-p, typical-p, top-k, top-p: tokens that are cut away become -inf
    softmax_    the distribution

A row without a feature takes no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import paceline_kernels as ops
from paceline.core.grammar import WORD, Mask, mask_of
from paceline.core.params import SamplingParams
from paceline.runner.input_batch import row_bounds
from paceline.runner.positions import Positions

# Beyond these float32 would divide by 0 or infinity; long before them, all mass is on the maximum, or on all alike.
SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-30, 1e30
# Beyond these a repetition penalty would be 0 or infinity in float32, and 0 times infinity is no number.
SMALLEST_REPETITION, LARGEST_REPETITION = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def edit_(logits: Tensor, batch: Seq[Positions]) -> list[int]:
    """Forbid, bias and penalise, in place.

    Args:
        logits: [rows, vocab] float32, the rows of each element of `batch` one after the other.

    Returns:
        Rows at which no token is allowed any more. They hold no distribution.
    """
    *firsts, _ = row_bounds(map(len, batch))
    edited = [(row, p) for row, p in zip(firsts, batch, strict=True) if p.params.edits_logits]
    if not edited:
        return []
    dead = _restrict(logits, edited)
    _add_bias(logits, edited)
    _penalise(logits, edited)
    return dead


def truncate_(logits: Tensor, batch: Seq[Positions]) -> None:
    """Set to -inf, in place, what temperature, min-p, typical-p, top-k and top-p leave out.  # [rows, vocab]"""
    if _any_truncated(batch):
        ops.truncate_(logits, *limits(batch, logits.shape[1], logits.device))


def distribution_(logits: Tensor, batch: Seq[Positions]) -> Tensor:
    """Edited logits of sampled sequences to the probabilities that tokens are drawn from, in place.

    Returns:
        `logits`, [rows, vocab]: each row sums to 1, and is exactly 0 where a token was cut away.
    """
    if _any_truncated(batch):
        ops.distribution_(logits, *limits(batch, logits.shape[1], logits.device))
    else:
        ops.softmax_(logits, temperatures(batch, logits.device))
    return logits


def temperature_of(sampling: SamplingParams) -> float:
    """What logits are divided by; 1 for greedy sequences, at which nothing changes."""
    return 1.0 if sampling.greedy else min(max(sampling.temperature, SMALLEST_TEMPERATURE), LARGEST_TEMPERATURE)


def repetition_of(sampling: SamplingParams) -> float:
    """What logits of tokens in the text are divided by, or multiplied where they are negative."""
    return min(max(sampling.repetition_penalty, SMALLEST_REPETITION), LARGEST_REPETITION)


def temperatures(batch: Seq[Positions], device: torch.device) -> Tensor:
    """The temperature of every row, [rows] float32: see `temperature_of`."""
    values: list[float] = []
    for positions in batch:
        values.extend([temperature_of(positions.params.sampling)] * len(positions))
    return torch.tensor(values, dtype=torch.float32, device=device)


def _any_truncated(batch: Seq[Positions]) -> bool:
    return any(p.params.sampling.truncated for p in batch)


def limits(batch: Seq[Positions], vocab: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `ops.truncate_` asks for besides the logits: temperature, top-k, top-p, min-p and typical-p, [rows] each."""
    sampling = [p.params.sampling for p in batch for _ in range(len(p))]
    return (
        temperatures(batch, device),
        torch.tensor([min(s.top_k, vocab) for s in sampling], device=device),
        torch.tensor([s.top_p for s in sampling], dtype=torch.float32, device=device),
        torch.tensor([s.min_p for s in sampling], dtype=torch.float32, device=device),
        torch.tensor([s.typical_p for s in sampling], dtype=torch.float32, device=device),
    )


# -- edits ------------------------------------------------------------------------------------------------------------


def _restrict(logits: Tensor, edited: list[tuple[int, Positions]]) -> list[int]:
    """Forbidden tokens become -inf. Returns the rows that have none left."""
    vocab, device = logits.shape[1], logits.device
    mask_rows: list[int] = []
    masks: list[Mask] = []  # [n, words] each
    ban_rows: list[int] = []
    banned: list[int] = []
    dead: list[int] = []
    for first_row, positions in edited:
        rows = range(first_row, first_row + len(positions))
        bans = [_bans(positions, j) for j in range(len(positions))] if _may_ban(positions) else []
        mask = _allowed(positions, vocab)
        if mask is not None:
            mask_rows.extend(rows)
            masks.append(_without(mask, bans) if any(bans) else mask)
            continue
        for row, some in zip(rows, bans, strict=False):
            ban_rows.extend([row] * len(some))
            banned.extend(some)
            if len(some) >= vocab and len(set(some)) == vocab:
                dead.append(row)
    if masks:
        bits = np.concatenate(masks)
        dead.extend(mask_rows[i] for i in np.flatnonzero(~bits.any(axis=1)))
        ops.mask_(logits, torch.tensor(mask_rows, device=device), torch.from_numpy(bits).to(device))
    if banned:
        logits[torch.tensor(ban_rows, device=device), torch.tensor(banned, device=device)] = -torch.inf
    return sorted(dead)


def _allowed(positions: Positions, vocab: int) -> Mask | None:
    """What the grammar and the list of allowed tokens leave at every row, [rows, words]; None without either."""
    sequence, allowed = positions.sequence, positions.params.sampling.allowed_token_ids
    if not allowed:
        return positions.masks
    if sequence.allowed is None:
        sequence.allowed = mask_of(allowed, vocab)
    own = sequence.allowed
    return np.broadcast_to(own, (len(positions), len(own))) if positions.masks is None else positions.masks & own


def _may_ban(positions: Positions) -> bool:
    constraints = positions.params.constraints
    return bool(constraints.bad_words or constraints.min_tokens)


def _bans(positions: Positions, row: int) -> list[int]:
    """Single tokens that may not stand at a row: they would complete a bad word, or end the completion too early."""
    constraints, behind = positions.params.constraints, positions.behind(row)
    bans: list[int] = []
    if positions.sequence.num_output + len(behind) < constraints.min_tokens:
        bans.extend(constraints.stop_token_ids)
    if (words := positions.sequence.bad_words) is not None:
        bans.extend(words.completing(positions.sequence.last_output(words.longest) + behind))
    return bans


def _without(masks: Mask, bans: list[list[int]]) -> Mask:
    """The masks with some tokens of each row forbidden besides; the masks themselves stay as they are."""
    bits = masks.view(np.uint32).copy()
    for row, token_ids in enumerate(bans):
        for token in token_ids:
            word, bit = divmod(token, WORD)
            bits[row, word] &= ~np.uint32(1 << bit)
    return bits.view(np.int32)


def _add_bias(logits: Tensor, edited: list[tuple[int, Positions]]) -> None:
    rows: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for first_row, positions in edited:
        bias = positions.params.sampling.logit_bias
        for row in range(first_row, first_row + len(positions)) if bias else ():
            rows.extend([row] * len(bias))
            tokens.extend(token for token, _ in bias)
            values.extend(value for _, value in bias)
    if rows:
        device = logits.device
        where = torch.tensor(rows, device=device), torch.tensor(tokens, device=device)
        logits.index_put_(where, torch.tensor(values, dtype=logits.dtype, device=device), accumulate=True)


def _penalise(logits: Tensor, edited: list[tuple[int, Positions]]) -> None:
    """Repetition, then frequency and presence, of the tokens that stand before each row."""
    rows: list[NDArray[np.int64]] = []
    tokens: list[NDArray[np.int64]] = []
    counts: list[NDArray[np.float32]] = []
    penalties: list[NDArray[np.float32]] = []  # repetition, frequency, presence of every entry
    for first_row, positions in edited:
        sampling = positions.params.sampling
        if positions.sequence.counts is None:
            continue
        values = [repetition_of(sampling), sampling.frequency_penalty, sampling.presence_penalty]
        for j in range(len(positions)):
            token_ids, count = positions.sequence.counts.behind(positions.behind(j))
            rows.append(np.full(len(token_ids), first_row + j))
            tokens.append(token_ids)
            counts.append(count)
            penalties.append(np.broadcast_to(np.array(values, np.float32)[:, None], (3, len(token_ids))))
    if not rows:
        return
    device = logits.device
    where = torch.from_numpy(np.concatenate(rows)).to(device), torch.from_numpy(np.concatenate(tokens)).to(device)
    times = torch.from_numpy(np.concatenate(counts)).to(device)
    divisor, frequency, presence = torch.from_numpy(np.concatenate(penalties, axis=1)).to(device)
    before = logits[where]
    x = torch.where(before > 0, before / divisor, before * divisor)
    x = x - frequency * times - presence * (times > 0)
    # However extreme the penalty, it makes no logit infinite and forbids no token.
    largest = torch.finfo(x.dtype).max
    logits[where] = torch.where(before == -torch.inf, before, x.clamp(-largest, largest))
