"""What steps of a model cost on this machine, by the cost model, and how well that is predicted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from paceline.core.cost_model import CostModel, Error, StepShape
from paceline.core.params import SamplingParams, StopParams
from paceline.engine import Engine, GenerationRequest

SEQUENCES = (1, 4, 16, 64)
DEPTHS = (0, 2, 4)
CONTEXT = 256  # tokens of each sequence, where steps are told
SERVED = (1, 4, 16)  # requests, by which predictions are judged; one comes some steps behind the other
STEPS_APART = 3
SERVED_TOKENS = 64  # of each
SHORT, LONG = 32, 300  # tokens of prompts: one in four is long, and of more rows than the profile may have had time for


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds, by the cost model, of a step of so many sequences with `CONTEXT` tokens each.

    Attributes:
        steps: by the depth at which all of them draft.
        draft_pass: one pass of the draft model behind the first; 0 without a draft model.
    """

    sequences: int
    steps: dict[int, float]
    draft_pass: float


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps of a model cost, and how well that was predicted over some requests, by kind of step."""

    steps: list[StepCost]
    errors: dict[str, Error]


def find_costs(engine: Engine) -> Costs:
    """As predicted at first, and the errors over requests that are served now."""
    costs = engine.scheduler.speculation.costs
    assert costs is not None, "depths are chosen by cost"
    limit = engine.scheduler.config.max_num_seqs
    steps = [_step_cost(costs, count) for count in SEQUENCES if count <= limit]
    stop = StopParams(max_tokens=SERVED_TOKENS, ignore_eos=True)
    room = engine.scheduler.config.max_model_len - SERVED_TOKENS
    numbers = itertools.count(1)
    for count in SERVED:
        for number in itertools.islice(numbers, min(count, limit)):
            length = max(1, min(SHORT if number % 4 else LONG, room))
            # No two begin alike, so that none is found in the cache.
            prompt = (number % engine.vocab_size,) * length
            engine.add(GenerationRequest(prompt, SamplingParams(temperature=0.0), stop))
            for _ in range(STEPS_APART):
                engine.step()
        while engine.has_work:
            engine.step()
    return Costs(steps, costs.errors())


def _step_cost(costs: CostModel, count: int) -> StepCost:
    def shape(depth: int) -> StepShape:
        has_model = costs.draft_pass(1, 1) > 0
        passes = (count,) * depth if has_model else ()
        return StepShape(count * (1 + depth), count * CONTEXT, passes, sequences=count)

    steps = {depth: 1e3 * costs.step(shape(depth)) for depth in DEPTHS}
    return StepCost(count, steps, 1e3 * costs.draft_pass(1, count))
