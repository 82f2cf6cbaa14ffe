"""What steps of a model cost on this machine, by the cost model, and how well that is predicted."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.cost_model import CostModel, Error, StepShape
from paceline.core.params import SamplingParams, StopParams
from paceline.engine import Engine, GenerationRequest

SEQUENCES = (1, 4, 16, 64)
DEPTHS = (0, 2, 4)
CONTEXT = 256  # tokens of each sequence, where steps are told
SERVED = (1, 4, 16)  # requests at once, by which predictions are judged
SERVED_TOKENS = 64  # of each


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
    for count in SERVED:
        for index in range(min(count, limit)):
            engine.add(GenerationRequest((index % engine.vocab_size,) * 32, SamplingParams(temperature=0.0), stop))
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
