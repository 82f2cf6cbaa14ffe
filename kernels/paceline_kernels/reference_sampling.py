"""The operations of sampling in plain torch: the oracle for every other backend, and the path where there is none.

Sums and exponentials are float64. What enters a threshold is summed in sorted order and by `cumsum`, whose order is
fixed: `sum` splits long rows between threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOISE_ELEMENTS = 1 << 22  # logits whose noise is made at a time, which bounds the memory it takes

# Philox4x32-10 of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW_32 = 0xFFFFFFFF
NOISE_DOMAIN = 0x50414345  # the last word of the counter, which sets this noise apart from other uses of the key


def argmax(logits: Tensor) -> Tensor:
    """[rows, vocab] -> [rows] int64."""
    return logits.argmax(-1)


def mask_(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Mutates logits [num_rows, vocab] at rows [n] int64; bitmask [n, ceil(vocab / 32)] int32."""
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bitmask[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]] != 0  # [n, vocab]
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def truncate_(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
) -> None:
    """Mutates logits [rows, vocab]; all parameters are [rows]."""
    limited = (top_k > 0) & (top_k < logits.shape[1])
    cut = (limited | (top_p < 1) | (min_p > 0) | (typical_p < 1)).nonzero().flatten()
    if not len(cut):
        return
    kept = logits[cut]  # [cut, vocab], a copy
    temperature = temperature[cut]
    x = _scaled(kept, temperature)
    kept = kept.masked_fill(x < min_p[cut, None].double().log(), -torch.inf)
    kept = _typical(kept, temperature, typical_p[cut])
    kept = _top_k(kept, top_k[cut].where(limited[cut], logits.shape[1]))
    logits[cut] = _top_p(kept, temperature, top_p[cut])


def distribution_(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
) -> None:
    """Mutates logits [rows, vocab]; all parameters are [rows]."""
    truncate_(logits, temperature, top_k, top_p, min_p, typical_p)
    softmax_(logits, temperature)


def _typical(logits: Tensor, temperature: Tensor, typical_p: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2023).

    |-log p - entropy| is |x - E[x]|, for log p = x - log Z and entropy = log Z - E[x].
    """
    x = _scaled(logits, temperature)
    ordered = x.sort(dim=-1).values  # the sums below must not depend on the order of the vocabulary
    probs = ordered.softmax(-1)
    mean = (probs * ordered).masked_fill(probs == 0, 0).cumsum(-1)[:, -1:]
    surprise, order = (ordered - mean).abs().sort(dim=-1)
    limit = surprise.gather(-1, _first_reaching(probs.gather(-1, order), typical_p))
    return logits.masked_fill((x - mean).abs() > limit, -torch.inf)


def _top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """top_k [rows] in 1..vocab."""
    smallest = logits.sort(dim=-1, descending=True).values.gather(-1, top_k[:, None] - 1)
    return logits.masked_fill(logits < smallest, -torch.inf)


def _top_p(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    ordered = logits.sort(dim=-1, descending=True).values
    probs = _scaled(ordered, temperature).softmax(-1)
    smallest = ordered.gather(-1, _first_reaching(probs, top_p))
    return logits.masked_fill(logits < smallest, -torch.inf)


def _first_reaching(probs: Tensor, share: Tensor) -> Tensor:
    """Where the running sum of probs [rows, vocab] first reaches its share [rows] of the whole -> [rows, 1].

    At a share of 1 this is the last position, since the running sum may reach the whole before tiny probs come.
    """
    mass = probs.cumsum(-1)
    last = probs.shape[1] - 1
    reached = (mass < share[:, None].double() * mass[:, -1:]).sum(-1, keepdim=True)
    return reached.clamp(max=last).masked_fill(share[:, None] >= 1, last)


def softmax_(logits: Tensor, temperature: Tensor) -> None:
    """Mutates logits [rows, vocab] into probabilities at temperature [rows]."""
    logits.copy_(_scaled(logits, temperature).softmax(-1).nan_to_num(0))


def gumbel_argmax(logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    """logits [rows, vocab], temperature [rows], keys [rows, 4] int64 -> [rows] int64."""
    piece = max(1, NOISE_ELEMENTS // logits.shape[1])
    winners = [
        (_scaled(some, warmth) + _gumbel(key, logits.shape[1])).argmax(-1)
        for some, warmth, key in zip(*(torch.split(x, piece) for x in (logits, temperature, keys)), strict=True)
    ]
    return torch.cat(winners)


def _gumbel(keys: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise of every token id: keys [rows, 4] -> [rows, vocab] float64."""
    seed_low, seed_high, position, choice = keys[:, :, None].unbind(1)  # [rows, 1] each
    group = torch.arange((vocab + 3) // 4, device=keys.device)
    counter = (group, position, choice, torch.full_like(position, NOISE_DOMAIN))
    words = torch.stack(philox(counter, (seed_low, seed_high)), dim=-1).flatten(1)[:, :vocab]
    uniform = ((words.double() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four random words for each counter; 32-bit words in int64 tensors of shapes that broadcast."""
    a, b, c, d = (word & LOW_32 for word in counter)
    left, right = (word & LOW_32 for word in key)
    for _ in range(PHILOX_ROUNDS):
        # int64 products wrap, but all 64 bits are there.
        first, second = a * PHILOX_MULTIPLIERS[0], c * PHILOX_MULTIPLIERS[1]
        a, b, c, d = (
            ((second >> 32) & LOW_32) ^ b ^ left,
            second & LOW_32,
            ((first >> 32) & LOW_32) ^ d ^ right,
            first & LOW_32,
        )
        left, right = (left + PHILOX_KEY_STEPS[0]) & LOW_32, (right + PHILOX_KEY_STEPS[1]) & LOW_32
    return a, b, c, d


def residual_mass(p: Tensor, q: Tensor, p_rows: Tensor, q_rows: Tensor, scale: Tensor) -> Tensor:
    """p, q [.., vocab]; p_rows, q_rows [n] int64, scale [n] -> [n] float64."""
    left = p[p_rows].double().mul_(scale[:, None].double()).sub_(q[q_rows])
    return left.clamp_(min=0).cumsum(-1)[:, -1]


def overlap(p: Tensor, q: Tensor, p_rows: Tensor, q_rows: Tensor) -> Tensor:
    """p, q [.., vocab]; p_rows, q_rows [n] int64 -> [n] float64."""
    return torch.minimum(p[p_rows], q[q_rows]).double().cumsum(-1)[:, -1]


def residual(p: Tensor, q: Tensor, p_rows: Tensor, q_rows: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """p, q [.., vocab]; p_rows, q_rows [n] int64, scale [n] -> out [n, vocab]."""
    whole = p[p_rows]
    left = (scale[:, None].to(p.dtype) * whole - q[q_rows.clamp(min=0)]).clamp_(min=0)
    return out.copy_(torch.where(((q_rows >= 0) & (left.amax(-1) > 0))[:, None], left, whole))


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """weights [rows, vocab], u [rows] float64 -> [rows] int64."""
    cumulative = weights.double().cumsum(-1)
    positive = weights > 0
    drawn = positive & (cumulative > u[:, None] * cumulative[:, -1:])
    last = weights.shape[1] - 1 - positive.byte().flip(-1).argmax(-1)  # of those with any weight
    return torch.where(drawn.any(-1), drawn.byte().argmax(-1), last.masked_fill(~positive.any(-1), 0))


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - max) / temperature, float64: 0 at the maximum and never NaN, not even in a row of -inf."""
    highest = logits.amax(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
    return (logits.double() - highest.double()) / temperature[:, None].double()
