"""A step runner that counts tokens and knows none, for simulations of millions of requests.

It draws how many drafts are kept, lets the clock pass by what the cost model says, and checks nothing: that every slot
holds the right token is for the scripted runner to see.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from paceline.core.cost_model import CostModel, StepShape
from paceline.core.method import Method
from paceline.core.plan import SequenceResult, SequenceWork, StepPlan, StepResult, StepTimes
from paceline.sim.clock import VirtualClock

TOKEN: Final = 0  # of every text


class _Mirror:
    """A sequence without its tokens.

    Attributes:
        num_tokens, num_computed, num_draft_computed: as in `core/sequence.py`.
        log_rate: logarithm of the chance that a draft is kept if all before it were.
    """

    __slots__ = ("log_rate", "num_computed", "num_draft_computed", "num_tokens")

    def __init__(self, num_tokens: int, num_computed: int, num_draft_computed: int, rate: float) -> None:
        self.num_tokens = num_tokens
        self.num_computed = num_computed
        self.num_draft_computed = num_draft_computed
        self.log_rate = math.log(rate) if rate > 0.0 else -math.inf


class CountingRunner:
    """Implements `StepRunner`.

    Args:
        costs: the true prices, by which the clock passes; only read.
        acceptance: request id -> chance that a draft is kept if all before it were, at every position.
        seed: equal seeds and plans draw equally.
    """

    def __init__(
        self, costs: CostModel, clock: VirtualClock, acceptance: Callable[[int], float], seed: int = 0
    ) -> None:
        self.costs = costs
        self.clock = clock
        self.acceptance = acceptance
        self._random = np.random.Generator(np.random.Philox(seed))
        self._mirrors: dict[int, _Mirror] = {}
        self._runs: list[tuple[int, ...]] = []  # of 1, 2, ... tokens

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            self._mirrors.pop(request_id, None)
        for admission in plan.admitted:
            self._mirrors[admission.request_id] = _Mirror(
                len(admission.token_ids),
                admission.num_computed,
                admission.num_draft_computed,
                self.acceptance(admission.request_id),
            )
        mirrors = [self._mirrors[work.request_id] for work in plan.work]
        times = self._times(plan.work, mirrors)
        draws = np.log1p(-self._random.random(len(plan.work))).tolist()  # finite: of (0, 1]
        results = [self._result(work, mirror, draw) for work, mirror, draw in zip(plan.work, mirrors, draws)]
        return StepResult(plan.step_id, tuple(results), times)

    def _times(self, works: tuple[SequenceWork, ...], mirrors: list[_Mirror]) -> StepTimes:
        """As the cost model says; the clock moves on by them."""
        rows = context = read = 0
        depths: list[int] = []
        for work, mirror in zip(works, mirrors):
            rows += work.num_tokens + work.num_drafts
            context += mirror.num_computed + work.num_tokens
            read += work.rows_read(self.costs.first_rows)
            if work.num_drafts and work.method is Method.DRAFT_MODEL:
                depths.append(work.num_drafts)
        counts = np.bincount(depths)[1:] if depths else np.zeros(0, np.int64)
        passes = tuple(np.cumsum(counts[::-1])[::-1].tolist())
        shape = StepShape(rows, context, passes, read, sequences=len(works))
        total = self.costs.step(shape)
        target = self.costs.target(rows, context, len(works))
        self.clock.advance(total)
        return StepTimes(draft=total - target, verify=target, total=total)

    def _result(self, work: SequenceWork, mirror: _Mirror, draw: float) -> SequenceResult:
        end = mirror.num_computed + work.num_tokens
        if work.draft_catch_up:
            mirror.num_draft_computed = min(end, mirror.num_draft_computed + work.draft_catch_up)
        if not work.samples:
            mirror.num_computed = end
            return SequenceResult(work.request_id, num_draft_computed=mirror.num_draft_computed)
        depth, accepted = work.num_drafts, 0
        labels: tuple[float, ...] = ()
        if depth:
            # That j are kept has the chance rate ** j: one draw tells how many.
            if draw <= depth * mirror.log_rate:
                accepted, labels = depth, (1.0,) * depth
            else:
                accepted = min(int(draw / mirror.log_rate), depth - 1)
                labels = (1.0,) * accepted + (0.0,)
            if work.method is Method.DRAFT_MODEL:
                # The last draft is proposed and not read.
                mirror.num_draft_computed = mirror.num_tokens + min(accepted, depth - 1)
        mirror.num_tokens += accepted + 1
        mirror.num_computed = mirror.num_tokens - 1
        return SequenceResult(
            work.request_id, self._run(accepted + 1), depth, accepted, labels, mirror.num_draft_computed
        )

    def _run(self, length: int) -> tuple[int, ...]:
        """So many tokens."""
        while len(self._runs) < length:
            self._runs.append((TOKEN,) * (len(self._runs) + 1))
        return self._runs[length - 1]
