"""Completions token by token, by transformers' logits and the float64 oracle of the chain: slow and plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.core.params import Constraints, SamplingParams
from support.chain import ChainState, Mask, Row, distribution, process

NEAR_TIE = 1e-4  # scores closer than this may change places with the order of additions, in fp32
LOW_32 = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class Asked:
    """A greedy or seeded request in the oracle's words.

    Attributes:
        constraints: bad words and minimum length; the grammar is in `allows`.
        ends: ids that end the completion, as its last token.
        allows: the grammar's mask behind an output.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams(temperature=0.0)
    constraints: Constraints = Constraints()
    ends: tuple[int, ...] = ()
    allows: Callable[[tuple[int, ...]], Mask] | None = None


@dataclass
class Completed:
    """`margins` has, for each token, how far its score is above the next one's."""

    token_ids: list[int]
    margins: list[float]


@torch.inference_mode()
def complete(model: torch.nn.Module, requests: Sequence[Asked], rows: int = 32) -> list[Completed]:
    """What each request must be completed with, whatever else is in its batch.

    Args:
        rows: sequences that the model sees at a time.
    """
    completions = [Completed([], []) for _ in requests]
    going = list(range(len(requests)))
    while going:
        for start in range(0, len(going), rows):
            some = going[start : start + rows]
            texts = [[*requests[i].prompt, *completions[i].token_ids] for i in some]
            longest = max(map(len, texts))
            # Attention is causal: what pads the end is not seen by the rows before.
            batch = model(torch.tensor([text + [0] * (longest - len(text)) for text in texts])).logits
            for i, text, logits in zip(some, texts, batch, strict=True):
                _add_token(requests[i], completions[i], logits[len(text) - 1].double().numpy())
        going = [i for i in going if not _is_whole(requests[i], completions[i])]
    return completions


def same_but_for_near_ties(found: Sequence[int], expected: Completed) -> bool:
    """Whether they are the same; False if they part at a near-tie, behind which nothing is comparable.

    Raises AssertionError where they part elsewhere.
    """
    if list(found) == expected.token_ids:
        return True
    pairs = enumerate(zip(found, expected.token_ids, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(found), len(expected.token_ids)))
    assert at < len(expected.token_ids), f"goes on behind its end: {list(found)} for {expected.token_ids}"
    assert expected.margins[at] < NEAR_TIE, (
        f"differs at {at}, by {expected.margins[at]}: {list(found)} for {expected.token_ids}"
    )
    return False


def gumbel(seed: int, position: int, choice: int, vocab: int) -> Row:
    """The noise of a seeded request's token at an absolute position, [vocab]: Philox4x32-10 (Salmon et al. 2011).

    The key is the seed, low word first, and the counter (token // 4, position, choice, "PACE").
    """
    group = np.arange(-(-vocab // 4), dtype=np.uint64)
    a, b, c, d = (np.broadcast_to(np.uint64(w), group.shape) for w in (group, position, choice, 0x50414345))
    left, right = np.uint64(seed) & LOW_32, np.uint64(seed) >> np.uint64(32)
    for _ in range(10):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (
            (second >> np.uint64(32)) ^ b ^ left,
            second & LOW_32,
            (first >> np.uint64(32)) ^ d ^ right,
            first & LOW_32,
        )
        left, right = (left + np.uint64(0x9E3779B9)) & LOW_32, (right + np.uint64(0xBB67AE85)) & LOW_32
    words = np.stack([a, b, c, d], axis=1).reshape(-1)[:vocab]
    uniform = np.minimum((words + 0.5) * 2.0**-32, 1 - 2.0**-24)
    noise: Row = -np.log(-np.log1p(-uniform))
    return noise


def _add_token(asked: Asked, completion: Completed, logits: Row) -> None:
    output = tuple(completion.token_ids)
    state = ChainState(asked.prompt, output)
    allowed = None if asked.allows is None else asked.allows(output)
    scores = process(logits, asked.sampling, asked.constraints, state, allowed)
    if not asked.sampling.greedy:
        assert asked.sampling.seed is not None
        with np.errstate(divide="ignore"):
            scores = np.log(distribution(scores, asked.sampling))
        scores = scores + gumbel(asked.sampling.seed, len(asked.prompt) + len(output), 0, len(scores))
    second, first = np.sort(scores)[-2:]
    assert np.isfinite(first), "no token is left"
    completion.token_ids.append(int(np.argmax(scores)))
    completion.margins.append(float(first - second))


def _is_whole(asked: Asked, completion: Completed) -> bool:
    return len(completion.token_ids) == asked.max_tokens or completion.token_ids[-1] in asked.ends
