"""The operations of sampling as Triton kernels: the signatures of `paceline_kernels.sampling`, on contiguous float32.

One program has a row, which lies in the L2 cache: passes over it cost little beside a sort. So thresholds, which are
values, are found by bisection. What is summed for a threshold are integers, whose sums are exact: they depend neither
on the order of the vocabulary nor on how it is cut into blocks.

A NaN counts as -inf. The device functions here are what `verification` is made of too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

LARGEST_BLOCK = 4096  # values of a row that are looked at together
NUM_WARPS = 16

LOWEST = tl.constexpr(-3.4028234663852886e38)  # float32
HIGHEST = tl.constexpr(3.4028234663852886e38)
LOWEST_IMAGE = tl.constexpr(-0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits but the sign
# Masses are integers in units of 2^-43 of the largest weight, 1: those of a million tokens fit 63 bits.
UNIT = tl.constexpr(2.0**43)
NOISE_DOMAIN = tl.constexpr(0x50414345)
UNIFORM_DOMAIN = tl.constexpr(0x5041434E)
ALL_32 = tl.constexpr(0xFFFFFFFF)
# What `_rough_noise` and a score in float32 are off by, at most, where the score may be the best.
ROUGH = tl.constexpr(0.01)

# What a step ranks tokens by, and what it counts of each.
BY_RANK = tl.constexpr(0)  # the logit; 1
BY_PROBABILITY = tl.constexpr(1)  # the logit; its weight
BY_SURPRISE = tl.constexpr(2)  # how near it is to the mean; its weight


def block_of(vocab: int) -> int:
    """Values that a kernel looks at together; a power of 2, of which `gumbel_argmax_of` needs at least 4."""
    return max(4, min(LARGEST_BLOCK, 1 << (vocab - 1).bit_length()))


# --- the public operations ---


def argmax(logits: Tensor) -> Tensor:
    """[rows, vocab] -> [rows] int64."""
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _launch(_argmax_kernel, logits, out)
    return out


def truncate_(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
) -> None:
    """Mutates logits [rows, vocab]; all parameters are [rows]."""
    parameters = _per_row(logits, temperature, top_k, top_p, min_p, typical_p)
    _launch(_distribution_kernel, logits, *parameters, TRUNCATE=True, NORMALISE=False)


def softmax_(logits: Tensor, temperature: Tensor) -> None:
    """Mutates logits [rows, vocab] into probabilities at temperature [rows]."""
    (warmth,) = _per_row(logits, temperature)
    _launch(_distribution_kernel, logits, warmth, warmth, warmth, warmth, warmth, TRUNCATE=False, NORMALISE=True)


def distribution_(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
) -> None:
    """Mutates logits [rows, vocab]; all parameters are [rows]."""
    parameters = _per_row(logits, temperature, top_k, top_p, min_p, typical_p)
    _launch(_distribution_kernel, logits, *parameters, TRUNCATE=True, NORMALISE=True)


def gumbel_argmax(logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    """logits [rows, vocab], temperature [rows], keys [rows, 4] int64 -> [rows] int64."""
    assert keys.shape == (logits.shape[0], 4), tuple(keys.shape)
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _launch(_gumbel_kernel, logits, *_per_row(logits, temperature), keys.contiguous(), out)
    return out


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """weights [rows, vocab], u [rows] float64 -> [rows] int64."""
    out = torch.empty(weights.shape[0], dtype=torch.int64, device=weights.device)
    _launch(_draw_kernel, weights, *_per_row(weights, u), out)
    return out


def _per_row(logits: Tensor, *values: Tensor) -> list[Tensor]:
    assert all(x.shape == logits.shape[:1] for x in values), f"{logits.shape[0]} rows"
    return [x.contiguous() for x in values]


def _launch(kernel: Any, logits: Tensor, *arguments: Tensor, **constants: bool) -> None:
    """One program for each row of logits [rows, vocab]."""
    rows, vocab = logits.shape
    assert vocab > 0, "a distribution over nothing"
    assert logits.dtype == torch.float32, f"{logits.dtype}, where the kernels read float32"
    assert logits.is_contiguous(), "the kernels see no strides"
    if rows:
        kernel[(rows,)](logits, *arguments, **constants, VOCAB=vocab, BLOCK=block_of(vocab), num_warps=NUM_WARPS)


@triton.jit
def _argmax_kernel(logits, out, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    tl.store(out + i, argmax_of(logits + i * VOCAB, VOCAB, BLOCK))


@triton.jit
def _distribution_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    typical_p,
    TRUNCATE: tl.constexpr,
    NORMALISE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = logits + i * VOCAB
    warmth = tl.load(temperature + i)
    if TRUNCATE:
        limits = tl.load(top_p + i), tl.load(min_p + i), tl.load(typical_p + i)
        truncate_row(row, VOCAB, warmth, tl.load(top_k + i), limits[0], limits[1], limits[2], BLOCK)
    if NORMALISE:
        softmax_row(row, row, VOCAB, warmth, BLOCK)


@triton.jit
def _gumbel_kernel(logits, temperature, keys, out, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    key = keys + i * 4
    seed_low, seed_high = tl.load(key), tl.load(key + 1)
    position, choice = tl.load(key + 2), tl.load(key + 3)
    warmth = tl.load(temperature + i)
    tl.store(out + i, gumbel_argmax_of(logits + i * VOCAB, VOCAB, warmth, seed_low, seed_high, position, choice, BLOCK))


@triton.jit
def _draw_kernel(weights, u, out, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    row = weights + i * VOCAB
    tl.store(out + i, draw_from(row, row, False, 1.0, -1, False, tl.load(u + i), VOCAB, BLOCK))


# --- rows ---


@triton.jit
def load_logits(row, start, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """-inf behind the end, and for a NaN."""
    v = start + tl.arange(0, BLOCK)
    x = tl.load(row + v, mask=v < VOCAB, other=float("-inf"))
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def argmax_of(row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest id of the largest logit; 0 if all are -inf.  -> int32"""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = lanes
    for start in range(0, VOCAB, BLOCK):
        x = load_logits(row, start, VOCAB, BLOCK)
        where = tl.where(x > best, start + lanes, where)  # the first of each lane's
        best = tl.maximum(best, x)
    return tl.min(tl.where(best == tl.max(best), where, MAGNITUDE))


@triton.jit
def _highest(row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit, clamped, so that nothing less it is NaN."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        best = tl.maximum(best, load_logits(row, start, VOCAB, BLOCK))
    return tl.maximum(tl.max(best), LOWEST)


@triton.jit
def _inverse(temperature):
    """1 / temperature, clamped: times 0, of the largest logit, it is 0."""
    return tl.minimum(tl.math.div_rn(tl.full([], 1.0, tl.float32), temperature), HIGHEST)


# --- truncate ---


@triton.jit
def _image(x):
    """float32 to integers in the same order.  -> int64"""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & MAGNITUDE)).to(tl.int64)


@triton.jit
def _value(image):
    """The float32 of an image."""
    bits = image.to(tl.int32)
    return (bits ^ ((bits >> 31) & MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def _distance(x, highest, centre):
    """How far logits are from the mean, which is `centre` above the largest.  -> float32"""
    return tl.abs(x.to(tl.float64) - highest.to(tl.float64) - centre).to(tl.float32)


@triton.jit
def _key(x, highest, centre, KIND: tl.constexpr):
    return -_distance(x, highest, centre) if KIND == BY_SURPRISE else x


@triton.jit
def _mass(x, highest, inverse, KIND: tl.constexpr):
    if KIND == BY_RANK:
        mass = tl.where(x > float("-inf"), 1, 0)  # int32
    else:
        mass = (tl.exp((x - highest) * inverse) * UNIT).to(tl.int64)
    return mass


@triton.jit
def _threshold(row, VOCAB: tl.constexpr, target, highest, inverse, centre, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """The largest t such that what has keys >= t has at least a target mass; the lowest float32 if there is none."""
    DTYPE: tl.constexpr = tl.int32 if KIND == BY_RANK else tl.int64
    low = tl.zeros([], tl.int64) + LOWEST_IMAGE
    high = _image(tl.zeros([], tl.float32) if KIND == BY_SURPRISE else highest) + 1
    # What is >= low reaches the target, what is >= high does not. Each pass takes two bits.
    while high - low > 1:
        step = tl.maximum((high - low) >> 2, 1)
        first, second, third = _value(low + step), _value(low + 2 * step), _value(low + 3 * step)
        above_first = tl.zeros([BLOCK], DTYPE)
        above_second = tl.zeros([BLOCK], DTYPE)
        above_third = tl.zeros([BLOCK], DTYPE)
        for start in range(0, VOCAB, BLOCK):
            x = load_logits(row, start, VOCAB, BLOCK)
            key, mass = _key(x, highest, centre, KIND), _mass(x, highest, inverse, KIND)
            above_first += tl.where(key >= first, mass, 0)
            above_second += tl.where(key >= second, mass, 0)
            above_third += tl.where(key >= third, mass, 0)
        reached = (tl.sum(above_first) >= target).to(tl.int64)
        reached += (tl.sum(above_second) >= target).to(tl.int64)
        reached += (tl.sum(above_third) >= target).to(tl.int64)
        high = tl.where(reached == 3, high, low + (reached + 1) * step)
        low += reached * step
    return _value(low)


@triton.jit
def _share_of(row, VOCAB: tl.constexpr, share, highest, inverse, BLOCK: tl.constexpr):
    """The mass that reaches a share of the whole, at least 1: a share may round to 0.  -> int64"""
    masses = tl.zeros([BLOCK], tl.int64)
    for start in range(0, VOCAB, BLOCK):
        masses += _mass(load_logits(row, start, VOCAB, BLOCK), highest, inverse, BY_PROBABILITY)
    target = tl.ceil(share.to(tl.float64) * tl.sum(masses).to(tl.float64)).to(tl.int64)
    return tl.maximum(target, 1)


@triton.jit
def _keep(row, VOCAB: tl.constexpr, least, highest, centre, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """-inf where the key is below `least`. Nobody reads the row before all is written."""
    tl.debug_barrier()
    for start in range(0, VOCAB, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = load_logits(row, start, VOCAB, BLOCK)
        tl.store(row + v, tl.where(_key(x, highest, centre, KIND) >= least, x, float("-inf")), mask=v < VOCAB)
    tl.debug_barrier()


@triton.jit
def _keep_min_p(row, VOCAB: tl.constexpr, temperature, min_p, highest, BLOCK: tl.constexpr):
    least = tl.log(min_p.to(tl.float64))
    warmth = temperature.to(tl.float64)
    tl.debug_barrier()
    for start in range(0, VOCAB, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = load_logits(row, start, VOCAB, BLOCK)
        scaled = (x.to(tl.float64) - highest.to(tl.float64)) / warmth
        tl.store(row + v, tl.where(scaled >= least, x, float("-inf")), mask=v < VOCAB)
    tl.debug_barrier()


@triton.jit
def _mean(row, VOCAB: tl.constexpr, temperature, highest, BLOCK: tl.constexpr):
    """The mean of the logits less the largest, by their probabilities.  -> float64"""
    warmth = temperature.to(tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    moment = tl.zeros([BLOCK], tl.float64)
    for start in range(0, VOCAB, BLOCK):
        x = load_logits(row, start, VOCAB, BLOCK).to(tl.float64) - highest.to(tl.float64)
        weight = tl.exp(x / warmth)
        total += weight
        moment += weight * tl.where(weight > 0, x, 0.0)
    return tl.sum(moment) / tl.maximum(tl.sum(total), 1.0)  # less than the largest weight, 1, is nothing


@triton.jit
def truncate_row(row, VOCAB: tl.constexpr, temperature, top_k, top_p, min_p, typical_p, BLOCK: tl.constexpr):
    """The steps of `sampling.truncate_`, each of which leaves -inf in the row; one that is off costs nothing."""
    cuts = (top_k > 0) & (top_k < VOCAB)
    if cuts | (top_p < 1) | (min_p > 0) | (typical_p < 1):
        inverse = _inverse(temperature)
        highest = _highest(row, VOCAB, BLOCK)
        none = tl.zeros([], tl.float64)
        if min_p > 0:
            _keep_min_p(row, VOCAB, temperature, min_p, highest, BLOCK)
        if typical_p < 1:
            centre = _mean(row, VOCAB, temperature, highest, BLOCK)
            target = _share_of(row, VOCAB, typical_p, highest, inverse, BLOCK)
            nearest = _threshold(row, VOCAB, target, highest, inverse, centre, BY_SURPRISE, BLOCK)
            _keep(row, VOCAB, nearest, highest, centre, BY_SURPRISE, BLOCK)
            highest = _highest(row, VOCAB, BLOCK)  # which may be gone
        if cuts:
            least = _threshold(row, VOCAB, top_k, highest, inverse, none, BY_RANK, BLOCK)
            _keep(row, VOCAB, least, highest, none, BY_RANK, BLOCK)
        if top_p < 1:
            target = _share_of(row, VOCAB, top_p, highest, inverse, BLOCK)
            least = _threshold(row, VOCAB, target, highest, inverse, none, BY_PROBABILITY, BLOCK)
            _keep(row, VOCAB, least, highest, none, BY_PROBABILITY, BLOCK)


# --- softmax ---


@triton.jit
def softmax_row(row, out, VOCAB: tl.constexpr, temperature, BLOCK: tl.constexpr):
    """Probabilities of a row of logits, to where they are wanted, which may be the row itself; 0 if one is infinite."""
    inverse = _inverse(temperature)
    highest = _highest(row, VOCAB, BLOCK)
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, VOCAB, BLOCK):
        sums += tl.exp((load_logits(row, start, VOCAB, BLOCK) - highest) * inverse).to(tl.float64)
    total = tl.sum(sums)
    scale = (1 / tl.maximum(total, 1.0)).to(tl.float32)  # less than the largest weight, 1, is nothing
    tl.debug_barrier()
    for start in range(0, VOCAB, BLOCK):
        v = start + tl.arange(0, BLOCK)
        weight = tl.exp((load_logits(row, start, VOCAB, BLOCK) - highest) * inverse)
        tl.store(out + v, tl.where(total == total, weight * scale, 0.0), mask=v < VOCAB)
    tl.debug_barrier()


# --- Gumbel noise ---


@triton.jit
def philox(a, b, c, d, left, right):
    """Philox4x32-10 of a counter and a key, the low 32 bits of each.  -> four uint32"""
    a, b, c, d = a.to(tl.uint32), b.to(tl.uint32), c.to(tl.uint32), d.to(tl.uint32)
    return philox_impl(a, b, c, d, left.to(tl.uint32), right.to(tl.uint32), 10)


@triton.jit
def _noise(words):
    """-log(-log1p(-w)), float64. w is a multiple of 2^-33, so that 1 - w is exact, and its logarithm too."""
    w = tl.minimum((words.to(tl.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -tl.log(-tl.log(1 - w))


@triton.jit
def _rough_noise(words):
    """The same in float32, off by less than 1e-3."""
    w = (words.to(tl.float32) + 0.5) * 2.0**-32
    rest = tl.maximum(((words ^ ALL_32).to(tl.float32) + 0.5) * 2.0**-32, 2.0**-24)
    small = w * (1 + w * (0.5 + w * (1 / 3 + w * 0.25)))
    return -tl.log(tl.where(w < 0.0625, small, -tl.log(rest)))


@triton.jit
def gumbel_argmax_of(row, VOCAB: tl.constexpr, temperature, seed_low, seed_high, position, choice, BLOCK: tl.constexpr):
    """float64 logarithms are dear: only blocks that may hold the winner, by a look in float32, have them.  -> int32"""
    highest = _highest(row, VOCAB, BLOCK)
    inverse = _inverse(temperature)
    warmth = temperature.to(tl.float64)
    domain = tl.zeros([], tl.uint32) + NOISE_DOMAIN
    best = tl.full([], float("-inf"), tl.float64)
    winner = tl.zeros([], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        x = load_logits(row, start, VOCAB, BLOCK)
        groups = start // 4 + tl.arange(0, BLOCK // 4)
        a, b, c, d = philox(groups, position, choice, domain, seed_low, seed_high)
        words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
        rough = tl.max((x - highest) * inverse + _rough_noise(words))
        if rough.to(tl.float64) + ROUGH >= best:
            score = (x.to(tl.float64) - highest.to(tl.float64)) / warmth + _noise(words)
            here = tl.max(score)
            first = tl.min(tl.where(score == here, start + tl.arange(0, BLOCK), MAGNITUDE))
            winner = tl.where(here > best, first, winner)
            best = tl.maximum(best, here)
    return winner


# --- draws ---


@triton.jit
def uniform_of(noise_key, stream, seat, j):
    """The random number of a step's stream, sequence and draft, in [0, 1).  -> float64"""
    step, low, high = tl.load(noise_key + 2), tl.load(noise_key), tl.load(noise_key + 1)
    domain = tl.zeros([], tl.uint32) + UNIFORM_DOMAIN
    number = tl.zeros([], tl.int32) + j + stream * 65536
    first, second, _, _ = philox(seat, step, number, domain, low, high)
    return ((first >> 5).to(tl.float64) * 67108864.0 + (second >> 6).to(tl.float64)) * 2.0**-53


@triton.jit
def _left(p, q, has_q, scale, skip, start, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """max(scale * p - q, 0), and 0 at the token `skip`; without q: scale * p.  -> float32"""
    v = start + tl.arange(0, BLOCK)
    some = tl.load(p + v, mask=v < VOCAB, other=0.0)
    less = tl.load(q + v, mask=(v < VOCAB) & has_q, other=0.0)
    left = scale * some - less
    return tl.where((left > 0) & (v != skip), left, 0.0)


@triton.jit
def _total(p, q, has_q, scale, skip, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Summed as `draw_from` does, to the bit."""
    total = tl.zeros([], tl.float64)
    for start in range(0, VOCAB, BLOCK):
        total += tl.sum(_left(p, q, has_q, scale, skip, start, VOCAB, BLOCK).to(tl.float64))
    return total


@triton.jit
def draw_from(p, q, has_q, scale, skip, or_p, u, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """`sampling.draw` from max(scale * p - q, 0) without the token `skip`, or from p where `or_p` and nothing is left.

    Args:
        p, q: rows; q is not read unless has_q.
        skip: -1 for none.

    Returns:
        int32.
    """
    total = _total(p, q, has_q, scale, skip, VOCAB, BLOCK)
    alone = or_p & (total == 0)
    has_q = has_q & (alone == 0)
    scale = tl.where(alone, 1.0, scale)
    skip = tl.where(alone, -1, skip)
    if alone:
        total = _total(p, q, has_q, scale, skip, VOCAB, BLOCK)
    target = u * total
    before = tl.zeros([], tl.float64)
    last = tl.zeros([], tl.int32)  # with any weight
    found = tl.full([], -1, tl.int32)
    start = tl.zeros([], tl.int32)
    while (start < VOCAB) & (found < 0):
        v = start + tl.arange(0, BLOCK)
        weights = _left(p, q, has_q, scale, skip, start, VOCAB, BLOCK).to(tl.float64)
        behind = before + tl.sum(weights)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, v, -1)))
        if behind > target:
            reached = (weights > 0) & (before + tl.cumsum(weights, 0) > target)
            first = tl.min(tl.where(reached, v, MAGNITUDE))
            found = tl.where(first < VOCAB, first, last)  # none: the two sums are rounded otherwise
        before = behind
        start += BLOCK
    return tl.where(found < 0, last, found)
