"""How many drafts each verification rule keeps, on the same pair and prompts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from rich.table import Table

from paceline.bench.console import console
from paceline.bench.number_lists import parse_numbers
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, StopParams, Verification
from paceline.core.plan import StepPlan, StepResult, StepRunner
from paceline.engine import Engine, GenerationRequest

RULES = (Verification.COUPLED, Verification.TOKEN_WISE, Verification.BLOCK)
RESAMPLES = 2000


def parse_temperatures(text: str) -> list[float]:
    """ "0.7,1" -> [0.7, 1.0]. Raises InvalidArgument: greedy drafts are kept under every rule alike."""
    allowed = "finite numbers above 0, separated by commas"
    return parse_numbers("temperatures", text, lambda value: 0.0 < value < math.inf, allowed)


@dataclass(slots=True)
class Tally:
    """One request's verify steps.

    Attributes:
        bounds: sum of (1 - TV) / (1 + TV) over the reached drafts, where the rule tells 1 - TV.
    """

    steps: int = 0
    accepted: int = 0
    reached: int = 0
    bounds: float = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(slots=True)
class Trial:
    """One rule at one temperature, with a tally of each request."""

    rule: Verification
    temperature: float
    tallies: list[Tally] = field(default_factory=list)

    def per_step(self) -> Interval:
        """Accepted drafts per verify step."""
        return self._ratio([t.accepted for t in self.tallies], [t.steps for t in self.tallies])

    def per_draft(self) -> Interval:
        """Accepted drafts per draft that was reached: one behind a rejection was not."""
        return self._ratio([t.accepted for t in self.tallies], [t.reached for t in self.tallies])

    def bound(self) -> Interval:
        """Least acceptance of coupled drafts, (1 - TV) / (1 + TV), at the drafts that were reached."""
        return self._ratio([t.bounds for t in self.tallies], [t.reached for t in self.tallies])

    @staticmethod
    def _ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
        """Bootstrap over requests, whose steps depend on each other."""
        above: NDArray[np.float64] = np.array(numerators, np.float64)
        below: NDArray[np.float64] = np.array(denominators, np.float64)
        chosen = np.random.default_rng(0).integers(len(above), size=(RESAMPLES, len(above)))
        ratios = above[chosen].sum(1) / below[chosen].sum(1)
        low, high = np.quantile(ratios, [0.025, 0.975])
        return Interval(float(above.sum() / below.sum()), float(low), float(high))


class Recorder:
    """Implements `StepRunner` by another one, and tallies what its verification decided."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.tallies: dict[int, Tally] = defaultdict(Tally)

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._runner.execute(plan)
        for sequence in result.sequences:
            if sequence.num_drafted:
                tally = self.tallies[sequence.request_id]
                tally.steps += 1
                tally.accepted += sequence.num_accepted
                tally.reached += min(sequence.num_accepted + 1, sequence.num_drafted)
                tally.bounds += sum(overlap / (2 - overlap) for overlap in sequence.acceptance)
        return result


@contextmanager
def recording(engine: Engine) -> Iterator[Recorder]:
    """Meanwhile the engine's verify steps are tallied."""
    own = engine.runner
    recorder = Recorder(own)
    engine.runner = recorder
    try:
        yield recorder
    finally:
        engine.runner = own


def measure(
    engine: Engine,
    prompts: Sequence[str | tuple[int, ...]],
    temperatures: Sequence[float],
    depth: int,
    max_tokens: int,
    samples: int,
) -> list[Trial]:
    """Complete every prompt `samples` times under each rule."""
    trials = [Trial(rule, temperature) for temperature in temperatures for rule in RULES]
    for trial in track(trials, description="measuring"):
        fill(trial, engine, prompts, depth, max_tokens, samples)
    return trials


def fill(
    trial: Trial, engine: Engine, prompts: Sequence[str | tuple[int, ...]], depth: int, max_tokens: int, samples: int
) -> None:
    """Complete every prompt `samples` times by the trial's rule, and tally all; seeds, where the rule has them,
    differ.
    """
    with recording(engine) as recorder:
        for sample in range(samples):
            for index, prompt in enumerate(prompts):
                engine.add(_request(prompt, trial, depth, max_tokens, seed=sample * len(prompts) + index))
            while engine.has_work:
                engine.step()
    trial.tallies = list(recorder.tallies.values())


def _request(prompt: str | tuple[int, ...], trial: Trial, depth: int, max_tokens: int, seed: int) -> GenerationRequest:
    coupled = trial.rule is Verification.COUPLED
    return GenerationRequest(
        prompt,
        SamplingParams(temperature=trial.temperature, seed=seed if coupled else None),
        StopParams(max_tokens=max_tokens, ignore_eos=True),
        SpeculationParams(Method.DRAFT_MODEL, depth, depth, trial.rule),
    )


def render(trials: list[Trial], title: str) -> None:
    table = Table(title=title)
    for name in ("temperature", "rule", "accepted per step", "accepted per reached draft", "(1 - TV) / (1 + TV)"):
        table.add_column(name, justify="right")
    for trial in trials:
        bound = str(trial.bound()) if trial.rule is Verification.TOKEN_WISE else ""
        table.add_row(str(trial.temperature), trial.rule, str(trial.per_step()), str(trial.per_draft()), bound)
    console().print(table)
