"""Acceptance by decree, for benchmarks alone: drafts are kept with given probabilities, and the text means nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.bench.host import host_runner
from paceline.bench.number_lists import parse_numbers
from paceline.engine import Engine
from paceline.runner.verification import Run, Verdict, Verifier


class SyntheticVerifier(Verifier):
    """Pays for the real verification, then keeps draft j with probability `rate_of(request id, j)`, j from 0, if those
    before it were kept.

    The same seed keeps the same drafts of a request, whatever runs beside it.
    """

    def __init__(self, rate_of: Callable[[int, int], float], seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        self._rate_of = rate_of
        self._seed = seed

    def verify(self, logits: Tensor, runs: Sequence[Run]) -> list[Verdict]:
        return [self._decree(run, verdict) for run, verdict in zip(runs, super().verify(logits, runs), strict=True)]

    def _decree(self, run: Run, verdict: Verdict) -> Verdict:
        sequence = run.positions.sequence
        generator = np.random.Generator(np.random.Philox(key=[self._seed, sequence.request_id], counter=len(sequence)))
        rates = [self._rate_of(sequence.request_id, j) for j in range(run.depth)]
        kept = next((j for j, rate in enumerate(rates) if generator.random() >= rate), run.depth)
        reached = rates[: kept + 1]
        return Verdict([*run.draft.token_ids[:kept], verdict.token_ids[-1]], kept, reached)


def parse_rates(text: str) -> list[float]:
    """ "0.9,0.3" -> [0.9, 0.3]. Raises InvalidArgument."""
    return parse_numbers("synthetic", text, lambda rate: 0 <= rate <= 1, "probabilities, separated by commas")


def decree(engine: Engine, rates: Sequence[float]) -> None:
    """From now on the engine keeps drafts with these probabilities, requests in turn; its text means nothing."""
    runner = host_runner(engine, "drafts that are kept by decree")
    runner.verifier = SyntheticVerifier(lambda request_id, _: rates[request_id % len(rates)], 0, runner.model.device)
