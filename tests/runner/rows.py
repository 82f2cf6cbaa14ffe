"""Sequences with all kinds of parameters, and the state that the oracle of `support.chain` sees in them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.grammar import Mask
from paceline.core.params import (
    Constraints,
    LogprobsParams,
    SamplingParams,
    SequenceParams,
    SpeculationParams,
    Verification,
)
from paceline.core.plan import Admission
from paceline.core.sequence import Sequence
from paceline.runner.positions import Positions
from support.chain import ChainState

Allowed = NDArray[np.bool_]


def make_sequence(
    prompt: Seq[int] = (0,),
    output: Seq[int] = (),
    *,
    constraints: Constraints = Constraints(),
    logprobs: LogprobsParams = LogprobsParams(),
    verification: Verification | None = None,
    choice: int = 0,
    request_id: int = 0,
    **sampling: Any,
) -> Sequence:
    own = SamplingParams(**sampling)
    rule = SpeculationParams(verification=verification).rule_for(own)
    params = SequenceParams(own, constraints, logprobs, rule, choice)
    return Sequence(Admission(request_id, (*prompt, *output), len(prompt), params))


class Following:
    """Implements `Grammar` and `Matcher`: token t may stand behind token s where table[s, t]; any token comes first."""

    def __init__(self, table: Allowed, last: int | None = None) -> None:
        self._table = table  # [vocab, vocab]
        self._last = last

    failure = None
    ended = False

    def matcher(self) -> Following:
        return Following(self._table, self._last)

    def advance(self, token_ids: Seq[int]) -> bool:
        self._last = token_ids[-1] if token_ids else self._last
        return True

    def forced(self, limit: int) -> list[int]:
        return []

    def allowed(self, drafts: Seq[int]) -> Allowed:
        """[len(drafts) + 1, vocab]"""
        before = [self._last, *drafts]
        everything = np.ones(len(self._table), np.bool_)
        return np.stack([everything if last is None else self._table[last] for last in before])

    def mask(self, drafts: Seq[int]) -> Mask:
        last: Mask = self.masks(drafts)[-1]
        return last

    def masks(self, drafts: Seq[int]) -> Mask:
        bits = np.packbits(self.allowed(drafts), axis=-1, bitorder="little")
        return np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4))).view(np.int32)


def positions_of(sequence: Sequence, drafts: Seq[int] = ()) -> Positions:
    """Of every draft and the token behind them, with the grammar's masks."""
    masks = None if sequence.matcher is None else sequence.matcher.masks(drafts)
    return Positions(sequence, list(drafts), masks=masks)


def state_of(positions: Positions, row: int) -> tuple[ChainState, Allowed | None]:
    """What the oracle has to know of a row: the text before it, and what the grammar allows there."""
    sequence, behind = positions.sequence, positions.drafts[: positions.first + row]
    state = ChainState(tuple(sequence.prompt), (*sequence.output, *behind))
    matcher = sequence.matcher
    assert matcher is None or isinstance(matcher, Following)
    return state, None if matcher is None else matcher.allowed(behind)[-1]


def random_sequence(rng: np.random.Generator, vocab: int, **fixed: Any) -> Sequence:
    """One in five has no feature at all; of the others, each feature has even odds. All values are exact in float32.

    Args:
        fixed: sampling parameters that are not left to chance.
    """
    prompt = rng.integers(0, vocab, rng.integers(1, 9)).tolist()
    output = rng.integers(0, vocab, rng.integers(0, 9)).tolist()
    if rng.random() < 0.2:
        return make_sequence(prompt, output, **fixed)

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    def some(most: int) -> tuple[int, ...]:
        return tuple(rng.choice(vocab, rng.integers(1, min(most, vocab)), replace=False).tolist())

    def eighth(low: int, high: int) -> float:
        return float(rng.integers(low, high)) / 8

    words = [tuple(rng.integers(0, vocab, rng.integers(1, 4)).tolist()) for _ in range(5)]
    words += [(*output[len(output) - n :], int(rng.integers(vocab))) for n in (1, 2) if len(output) >= n]
    grammar = Following(rng.random((vocab, vocab)) < 0.7)
    constraints = Constraints(
        bad_words=maybe(tuple(words), ()),
        min_tokens=maybe(int(rng.integers(1, 12)), 0),
        stop_token_ids=some(4),
        grammar=maybe(grammar, None),
    )
    sampling = {
        "temperature": float(rng.choice([0.0, 0.5, 0.75, 1.0, 1.5])),
        "top_k": maybe(int(rng.integers(1, vocab + 4)), 0),
        "top_p": maybe(eighth(1, 8), 1.0),
        "min_p": maybe(eighth(0, 3), 0.0),
        "typical_p": maybe(eighth(1, 8), 1.0),
        "repetition_penalty": maybe(eighth(4, 16), 1.0),
        "presence_penalty": maybe(eighth(-8, 8), 0.0),
        "frequency_penalty": maybe(eighth(-8, 8), 0.0),
        "logit_bias": tuple((token, eighth(-20, 20)) for token in maybe(some(6), ())),
        "allowed_token_ids": maybe(some(vocab), ()),
    }
    return make_sequence(prompt, output, constraints=constraints, **sampling | fixed)
