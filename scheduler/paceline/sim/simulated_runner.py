"""A scripted runner with a price for every step and a chance for every draft."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.core.method import Method
from paceline.core.plan import StepPlan, StepTimes
from paceline.sim.clock import VirtualClock
from paceline.sim.scripted_runner import ScriptedRunner


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds per step: memory-bound up to `free_rows`, then linear; one draft pass per level of depth.

    Attributes:
        overhead: of any step.
        target_pass: a target forward of up to `free_rows` rows.
        target_row: each row beyond.
        draft_pass: one pass of the draft model.
    """

    overhead: float = 0.0005
    target_pass: float = 0.020
    free_rows: int = 8
    target_row: float = 0.0015
    draft_pass: float = 0.002

    def times(self, plan: StepPlan) -> StepTimes:
        depth = max((w.num_drafts for w in plan.work if w.method is Method.DRAFT_MODEL), default=0)
        draft = depth * self.draft_pass
        verify = self.target_pass + max(0, plan.num_rows - self.free_rows) * self.target_row
        return StepTimes(draft=draft, verify=verify, total=self.overhead + draft + verify)


class SimulatedRunner(ScriptedRunner):
    """Accepts each draft with its request's probability and lets the clock pass by the cost of each step.

    Args:
        acceptance: request id -> probability that a draft is right; ids not in it have `default_acceptance`.
        seed: the same seed draws the same drafts right, whatever the batch or the order of steps.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        clock: VirtualClock,
        cost: StepCost,
        acceptance: dict[int, float] | None = None,
        default_acceptance: float = 0.7,
        seed: int = 0,
    ) -> None:
        rates = acceptance or {}

        def draft_is_right(request_id: int, position: int) -> bool:
            draw = np.random.Generator(np.random.Philox(key=[seed, request_id], counter=position)).random()
            return bool(draw < rates.get(request_id, default_acceptance))

        super().__init__(num_blocks, block_size, draft_is_right)
        self.clock = clock
        self.cost = cost

    def times(self, plan: StepPlan) -> StepTimes:
        times = self.cost.times(plan)
        self.clock.advance(times.total)
        return times
