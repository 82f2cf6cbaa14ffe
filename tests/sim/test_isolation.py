"""What a tenant can learn from how fast it is answered: nothing of what others have asked."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ks_2samp

from core.harness import GREEDY, prompt_of
from core.workload import costs
from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.config import PrefixScope, SchedulerConfig
from paceline.core.method import Method
from paceline.core.params import SchedulingParams, SpeculationParams, StopParams
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.sim import SimulatedRunner, StepCost, VirtualClock
from paceline.sim.simulation import cut_result

PROMPTS = 60


class Server:
    """A scheduler and its clock, under a changing load of a third tenant."""

    def __init__(self, scope: PrefixScope) -> None:
        config = SchedulerConfig(2048, 4, 8, 256, 400, method=Method.DRAFT_MODEL, prefix_cache=scope, max_queued=100)
        self.clock = VirtualClock()
        self.scheduler = Scheduler(config, SpeculationControl(AdaptiveDepth(costs()), costs()))
        self.runner = SimulatedRunner(config.num_blocks, config.block_size, self.clock, StepCost())
        self.random = np.random.default_rng(3)
        self.count = 0

    def seconds_to_first_token(self, tenant: str, prompt: tuple[int, ...]) -> float:
        """Of a request that comes in the middle of others."""
        for _ in range(int(self.random.integers(0, 4))):
            self._add("others", prompt_of(int(self.random.integers(4, 60)), salt=10_000 + self.count))
        wanted = self._add(tenant, prompt)
        told = 0.0
        while self.scheduler.has_requests:
            plan = self.scheduler.schedule(self.clock())
            result = cut_result(self.scheduler, self.runner.execute(plan))
            for output in self.scheduler.update(plan, result, self.clock()):
                if output.request_id == wanted and output.stats is not None:
                    told = output.stats.time_to_first_token
        return told

    def _add(self, tenant: str, prompt: tuple[int, ...]) -> int:
        self.count += 1
        stop, scheduling = StopParams(max_tokens=4), SchedulingParams(tenant)
        self.scheduler.add(self.count, prompt, GREEDY, stop, SpeculationParams(), self.clock(), scheduling=scheduling)
        return self.count


def seconds(scope: PrefixScope, first: str, second: str) -> tuple[list[float], list[float]]:
    """To the first token of the second tenant: of prompts that the first has asked, and of others."""
    server = Server(scope)
    asked, cold = [], []
    for index in range(PROMPTS):
        server.seconds_to_first_token(first, prompt_of(160, salt=2 * index))
        asked.append(server.seconds_to_first_token(second, prompt_of(160, salt=2 * index)))
        cold.append(server.seconds_to_first_token(second, prompt_of(160, salt=2 * index + 1)))
    return asked, cold


def test_a_prompt_of_another_tenant_is_as_slow_as_a_cold_one() -> None:
    asked, cold = seconds(PrefixScope.TENANT, "a", "b")
    assert ks_2samp(asked, cold).pvalue > 0.05


@pytest.mark.parametrize(("scope", "first", "second"), [(PrefixScope.TENANT, "a", "a"), (PrefixScope.SHARED, "a", "b")])
def test_where_it_may_be_found_it_is_seen(scope: PrefixScope, first: str, second: str) -> None:
    """So the test above would notice."""
    asked, cold = seconds(scope, first, second)
    assert ks_2samp(asked, cold).pvalue < 1e-6
