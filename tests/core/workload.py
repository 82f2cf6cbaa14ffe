"""One fixed mix of arrivals, and a digest of the trace that it gives: equal wherever and whenever it is computed."""

from __future__ import annotations

import hashlib

import numpy as np

from core.harness import prompt_of
from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.config import SchedulerConfig
from paceline.core.cost_model import CostModel
from paceline.core.method import Method
from paceline.core.params import SpeculationParams, StopParams
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.sim import Arrival, SimulatedRunner, Simulation, StepCost, VirtualClock, simulate

EOS = tuple(range(20))


def arrivals(count: int = 24, method: Method | None = None) -> list[Arrival]:
    """Poisson arrivals of all methods, or of one, with prompts and completions of many lengths."""
    rng = np.random.default_rng(7)
    times = np.cumsum(rng.exponential(0.03, size=count))
    methods = [None, *Method]
    return [
        Arrival(
            time=float(times[index]),
            request_id=index,
            prompt_token_ids=prompt_of(int(rng.integers(1, 25)), salt=index),
            stop=StopParams(max_tokens=int(rng.integers(1, 30)), ignore_eos=index % 3 == 0),
            speculation=SpeculationParams(method or methods[index % len(methods)]),
        )
        for index in range(count)
    ]


def costs() -> CostModel:
    """Of the simulated runner's own steps."""
    cost = StepCost()

    def target(rows: int) -> float:
        return cost.overhead + cost.target_pass + max(0, rows - cost.free_rows) * cost.target_row

    return CostModel.from_functions(target, lambda sequences: cost.draft_pass)


def run(
    lag: int = 0,
    num_blocks: int = 24,
    budget: int = 20,
    method: Method | None = None,
    seed: int = 1,
) -> Simulation:
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        max_model_len=56,
        max_depth=6,
        method=Method.DRAFT_MODEL,
        eos_token_ids=EOS,
    )
    clock = VirtualClock()
    runner = SimulatedRunner(config.num_blocks, config.block_size, clock, StepCost(), {2: 0.95, 3: 0.1}, seed=seed)
    return simulate(
        Scheduler(config, SpeculationControl(AdaptiveDepth(costs()), costs())),
        runner,
        arrivals(method=method),
        clock,
        lag,
        check=True,
    )


def digest(lag: int) -> str:
    """A fingerprint of everything that happened: plans, tokens, times."""
    return hashlib.sha256(repr(run(lag)).encode()).hexdigest()
