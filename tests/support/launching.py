"""A runner whose steps are launched: any that executes plans, made a `PipelinedRunner`."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from paceline.core.plan import StepPlan, StepResult, StepRunner


class LaunchingRunner:
    """A step runs when its result is asked for, or when the next one is launched.

    Attributes:
        running: launched, and without a result that somebody has.
        most: of those, at any time.
    """

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self.running: deque[Launched] = deque()
        self.most = 0
        self._lock = threading.Lock()

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> Launched:
        with self._lock:
            for before in self.running:
                self._run(before)
            launched = Launched(self, plan)
            self.running.append(launched)
            self.most = max(self.most, len(self.running))
            return launched

    def collect(self, launched: Launched) -> StepResult:
        with self._lock:
            assert launched is self.running[0], "results are asked for in the order of plans"
            self._run(launched)
            self.running.popleft()
            assert launched.step is not None
            return launched.step

    def _run(self, launched: Launched) -> None:
        launched.step = launched.step or self.runner.execute(launched.plan)


@dataclass
class Launched:
    runner: LaunchingRunner
    plan: StepPlan
    step: StepResult | None = None

    def result(self) -> StepResult:
        return self.runner.collect(self)
