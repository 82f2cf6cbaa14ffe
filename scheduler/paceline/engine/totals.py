"""What an engine has done since it was made, for benchmarks and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.plan import StepTimes


@dataclass(slots=True)
class Totals:
    """Counts and seconds. Mutated by the engine only; take differences of copies (`dataclasses.replace`) to measure a
    span.

    Attributes:
        steps: steps finished.
        tokens: completion tokens emitted.
        draft, verify, sample: as the runner reports them.
        python: planning, finishing, and what `execute` spent on anything else.
    """

    steps: int = 0
    tokens: int = 0
    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    python: float = 0.0

    def add_step(self, times: StepTimes, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.draft += times.draft
        self.verify += times.verify
        self.sample += times.sample
        self.python += max(0.0, times.total - times.draft - times.verify - times.sample)
