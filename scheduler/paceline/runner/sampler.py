"""From logits to the distribution a request asked for, and from there to tokens. One chain for target and draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.params import SamplingParams

SMALLEST_TEMPERATURE = 1e-30  # below it, float32 would divide by 0; long before it, all mass is on the maximum


def distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply temperature, top-k and top-p, row by row.

    Args:
        logits: [rows, vocab] float32; not changed.
        params: one per row, none of them greedy.

    Returns:
        Probabilities, [rows, vocab] float32, each row summing to 1. Tokens cut away are exactly 0.
    """
    temperatures = torch.tensor([p.temperature for p in params], device=logits.device).clamp_(min=SMALLEST_TEMPERATURE)
    # Relative to the maximum, so that even the smallest temperature gives 0 and -inf, and never inf - inf.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperatures[:, None]
    cut = [row for row, p in enumerate(params) if 0 < p.top_k < logits.shape[1] or p.top_p < 1.0]
    if cut:
        logits[cut] = _truncate(logits[cut], [params[row] for row in cut])
    return logits.softmax(-1)


def _truncate(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Set logits outside top-k, and then outside the top-p of what is left, to -inf.  # [rows, vocab]"""
    vocab = logits.shape[1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], device=logits.device)
    top_p = torch.tensor([p.top_p for p in params], device=logits.device)
    ranks = torch.arange(vocab, device=logits.device)
    ordered = ordered.masked_fill(ranks >= top_k[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    # A token stays while the mass before it has not reached top_p, so the most probable one always stays.
    before = probs.cumsum(-1) - probs
    dropped = (before >= top_p[:, None]) & (ranks > 0) & (top_p < 1.0)[:, None]
    ordered = ordered.masked_fill(dropped, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row, [rows] int64, by an exponential race: argmin of noise / p. A token with p = 0 never wins.

    `probs` need not be normalised, but each row needs some mass.
    """
    noise = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / noise).argmax(-1)
