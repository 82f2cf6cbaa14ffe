"""The operations of sampling, one signature each: from logits to distributions and tokens.

Every operation treats its rows alone: the result of a row depends, to the bit, on that row and its parameters, whatever
the other rows are and however many threads share them. Logits and probabilities are float32 or float64, [rows, vocab]
with vocab > 0, on any device, and parameters live there too. Contiguous float32 on the CPU runs in C++ where this
machine can compile it; on a GPU, what the steps of GPUs are made of too, in Triton where there is one; all else in
torch. A NaN among the logits gives some result, never a crash.
"""

from __future__ import annotations

import functools
import logging
from typing import Protocol

import torch
from torch import Tensor

from paceline_kernels import reference_sampling as reference
from paceline_kernels.cpu import sampling as cpu

logger = logging.getLogger(__name__)


class _Rows(Protocol):
    """The operations that every implementation has, each of which is a module."""

    def argmax(self, logits: Tensor) -> Tensor: ...

    def truncate_(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
    ) -> None: ...

    def softmax_(self, logits: Tensor, temperature: Tensor) -> None: ...

    def distribution_(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
    ) -> None: ...

    def gumbel_argmax(self, logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor: ...

    def draw(self, weights: Tensor, u: Tensor) -> Tensor: ...


def _rows(logits: Tensor) -> _Rows:
    """Who computes these."""
    if _on_gpu(logits) and logits.dtype == torch.float32 and logits.is_contiguous():
        return _triton(logits.device) or reference
    return cpu if _fast(logits) else reference


def _on_gpu(logits: Tensor) -> bool:
    return logits.is_cuda


@functools.cache
def _triton(device: torch.device) -> _Rows | None:
    """None, which is said once, where Triton is not installed, or its kernels cannot be compiled."""
    try:
        from paceline_kernels.triton import sampling as kernels

        kernels.argmax(torch.zeros(1, 1, device=device))
    except torch.OutOfMemoryError:
        raise  # which says nothing of Triton
    except Exception as error:  # of Triton, the compiler that it calls, and the driver
        logger.warning("no Triton for sampling, torch samples, which is slower: %s", error)
        return None
    return kernels


def _fast(*tensors: Tensor) -> bool:
    """Whether the C++ takes these."""
    fits = all([x.is_cpu and x.dtype == torch.float32 and x.is_contiguous() for x in tensors])
    return fits and cpu.available()


def argmax(logits: Tensor) -> Tensor:
    """The id of each row's largest logit, the lowest of several: [rows, vocab] -> [rows] int64."""
    return _rows(logits).argmax(logits)


def mask_(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Set logits[rows[i], v] to -inf where bit v of bitmask[i] is 0.

    Mutates logits [num_rows, vocab]. rows [n] int64 are different from each other and in range; bit v of bitmask [n,
    ceil(vocab / 32)] int32 is bit v % 32 of word v // 32.
    """
    if _fast(logits):
        cpu.mask_(logits, rows, bitmask)
    else:
        reference.mask_(logits, rows, bitmask)


def truncate_(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
) -> None:
    """Set the logits outside the kept set to -inf.

    Mutates logits [rows, vocab]; those kept stay as they are, not divided by the temperature. With p the softmax of
    logits / temperature over what the steps before have left, the steps are

    1. min_p: keep p >= min_p * max p;
    2. typical_p: keep the tokens with the smallest |-log p - entropy| whose mass first reaches typical_p (Meister et
       al. 2023, "Locally typical sampling");
    3. top_k: keep the k largest logits;
    4. top_p: keep the largest p whose mass first reaches top_p (Holtzman et al. 2020, "The curious case of neural text
       degeneration").

    What ties with the last kept is kept too, and at least one token stays. Thresholds are on values and not on ranks,
    so a permutation of the vocabulary permutes the result. A row with every step off is not read.

    Args:
        temperature: [rows] float32, > 0; 1e-30 is allowed.
        top_k: [rows] int64; 0 is off, as is vocab or more.
        top_p: [rows] float32 in (0, 1]; 1 is off.
        min_p: [rows] float32 in [0, 1]; 0 is off.
        typical_p: [rows] float32 in (0, 1]; 1 is off.
    """
    _rows(logits).truncate_(logits, temperature, top_k, top_p, min_p, typical_p)


def softmax_(logits: Tensor, temperature: Tensor) -> None:
    """Turn logits into probabilities, softmax(logits / temperature).

    Mutates logits [rows, vocab]; temperature [rows] float32, > 0; 1e-30 is allowed. -inf becomes exactly 0. A row of
    nothing else becomes all 0, as does one with inf; NaN makes a row all 0, or counts as -inf.
    """
    _rows(logits).softmax_(logits, temperature)


def distribution_(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
) -> None:
    """`truncate_` and `softmax_` in one: mutates logits into the probabilities of what is kept. Arguments as there."""
    _rows(logits).distribution_(logits, temperature, top_k, top_p, min_p, typical_p)


def gumbel_argmax(logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    """Sample each row by the Gumbel-max trick: argmax over v of logits[v] / temperature + G(key, v).

    So the probability of v is softmax(logits / temperature)[v], and the winner a function of the row and its key. -inf
    never wins, unless the whole row is -inf, which gives 0. The lowest id wins ties.

    The noise is that of Philox4x32-10 (Salmon et al. 2011), with key (seed low, seed high) and counter (v >> 2,
    position, choice, 0x50414345): from word v & 3 of its output, w = (word + 0.5) * 2^-32, at most 1 - 2^-24, and
    G = -log(-log1p(-w)).

    Args:
        logits: [rows, vocab].
        temperature: [rows] float32, > 0; 1e-30 is allowed.
        keys: [rows, 4] int64: the seed's low and high 32 bits, the absolute position, the choice index; the low 32
            bits of each count.

    Returns:
        [rows] int64.
    """
    return _rows(logits).gumbel_argmax(logits, temperature, keys)


def residual_mass(p: Tensor, q: Tensor, p_rows: Tensor, q_rows: Tensor, scale: Tensor) -> Tensor:
    """The sum over v of max(scale * p - q, 0), for n pairs of rows.

    Block verification (Sun et al. 2024) accepts by it; with scale 1 it is the probability of a rejection.

    Args:
        p, q: [.., vocab] of one dtype.
        p_rows, q_rows: the rows of each pair, [n] int64.
        scale: [n].

    Returns:
        [n] float64.
    """
    if _fast(p, q):
        return cpu.residual_mass(p, q, p_rows, q_rows, scale)
    return reference.residual_mass(p, q, p_rows, q_rows, scale)


def overlap(p: Tensor, q: Tensor, p_rows: Tensor, q_rows: Tensor) -> Tensor:
    """The sum over v of min(p, q), for n pairs of rows: p, q [.., vocab], p_rows, q_rows [n] int64 -> [n] float64.

    The probability that a draft from q is accepted by the target p (Leviathan et al. 2023).
    """
    if _fast(p, q):
        return cpu.overlap(p, q, p_rows, q_rows)
    return reference.overlap(p, q, p_rows, q_rows)


def residual(p: Tensor, q: Tensor, p_rows: Tensor, q_rows: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """max(scale * p - q, 0) for n pairs of rows, unnormalised; p itself where q_rows is negative, or nothing is left.

    What the token behind a rejected draft is drawn from.

    Args:
        p, q, p_rows, q_rows, scale: as for `residual_mass`.
        out: [n, vocab] of p's dtype, to be written; None for a new tensor, which costs more than what is written to it.

    Returns:
        `out`.
    """
    if out is None:
        out = p.new_empty(len(p_rows), p.shape[1])
    if _fast(p, q, out):
        return cpu.residual(p, q, p_rows, q_rows, scale, out)
    return reference.residual(p, q, p_rows, q_rows, scale, out)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Sample each row by inversion: the smallest v whose cumulative weight exceeds u * total -> [rows] int64.

    weights [rows, vocab] are >= 0 and need not sum to 1; u [rows] float64 in [0, 1). Sums are float64. A weight of 0 is
    never drawn, whatever u: should rounding carry u * total up to the total, the last positive weight is drawn. A row
    without any gives 0.
    """
    return _rows(weights).draw(weights, u)
