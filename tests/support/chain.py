"""The sampler chain of one row by its definitions, in float64: what every faster version is measured against.

The order is vLLM V1's (the docstring of its `Sampler`), with typical sampling in front of top-k. `process` holds the
steps that also change greedy output, `distribution` those that only matter when sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # only names of attributes are shared with the engine, no code
    from paceline.core.params import Constraints, SamplingParams

Row = NDArray[np.float64]  # [vocab]
Mask = NDArray[np.bool_]  # [vocab]


@dataclass(frozen=True)
class ChainState:
    """What stands before the position being sampled; the output includes drafts before it."""

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]


def process(
    logits: Row, params: SamplingParams, constraints: Constraints, state: ChainState, allowed: Mask | None = None
) -> Row:
    """Logits [vocab] after everything that also changes greedy output. `allowed` is the grammar's mask, if any.

    The argument is left as it is. A token that may not be sampled becomes -inf.
    """
    x = np.array(logits, dtype=np.float64)
    output = state.output_token_ids

    if allowed is not None:
        x[~allowed] = -np.inf
    if params.allowed_token_ids:
        x[[token for token in range(len(x)) if token not in params.allowed_token_ids]] = -np.inf
    for word in constraints.bad_words:
        *prefix, last = word
        if list(output[len(output) - len(prefix) :]) == prefix:
            x[last] = -np.inf
    if len(output) < constraints.min_tokens:
        x[list(constraints.stop_token_ids)] = -np.inf

    for token, bias in params.logit_bias:
        x[token] += bias

    for token in set(state.prompt_token_ids + output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token)
        x[token] -= params.presence_penalty
    return x


def greedy(processed: Row) -> int:
    """The token with the highest logit; the lowest id on ties."""
    return int(np.argmax(processed))


def distribution(processed: Row, params: SamplingParams) -> Row:
    """Probabilities [vocab] of a row that `process` returned; tokens cut away have exactly 0. Needs temperature > 0."""
    assert np.isfinite(processed.max()), "no token is left"
    # The maximum goes first: at a temperature near 0 the quotients alone could overflow.
    x = (processed - processed.max()) / params.temperature
    if params.min_p > 0:
        x = keep(x, at_least_min_p(x, params.min_p))
    if params.typical_p < 1:
        x = keep(x, typical(x, params.typical_p))
    if 0 < params.top_k < len(x):
        x = keep(x, among_top_k(x, params.top_k))
    if params.top_p < 1:
        x = keep(x, within_top_p(x, params.top_p))
    return softmax(x)


def log_softmax(x: Row) -> Row:
    shifted = x - np.max(x)
    return shifted - math.log(np.sum(np.exp(shifted)))


def softmax(x: Row) -> Row:
    return np.exp(log_softmax(x))


def keep(x: Row, kept: Mask) -> Row:
    return np.where(kept, x, -np.inf)


def at_least_min_p(x: Row, min_p: float) -> Mask:
    """Tokens at least `min_p` times as probable as the most probable one (Nguyen et al. 2024)."""
    p = softmax(x)
    return p >= min_p * np.max(p)


def typical(x: Row, typical_p: float) -> Mask:
    """Tokens whose surprise is nearest the entropy, up to the mass `typical_p` (Meister et al. 2022).

    Ties with the last one kept stay, as in transformers' TypicalLogitsWarper.
    """
    surprise = -log_softmax(x)
    p = np.exp(-surprise)
    entropy = (p[p > 0] * surprise[p > 0]).sum()
    distance = np.abs(surprise - entropy)
    mass, farthest = 0.0, 0.0
    for token in np.argsort(distance, kind="stable"):
        if mass >= typical_p:
            break
        mass += p[token]
        farthest = distance[token]
    kept: Mask = distance <= farthest
    return kept


def among_top_k(x: Row, k: int) -> Mask:
    """Tokens not below the k-th largest; ties with it stay."""
    return x >= float(np.sort(x)[-k])


def within_top_p(x: Row, top_p: float) -> Mask:
    """Tokens in descending order while the mass before them is below `top_p`; ties with the last one kept stay."""
    p = softmax(x)
    mass, lowest = 0.0, np.inf
    for token in np.argsort(-x, kind="stable"):
        if mass >= top_p:
            break
        mass += p[token]
        lowest = x[token]
    return x >= lowest
