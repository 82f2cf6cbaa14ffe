"""A simulation from its file to its figures: the scheduler as it is, a runner that counts, and a clock without time."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.cost_model import CostModel
from paceline.core.depth import DepthPolicy, FixedDepth
from paceline.core.params import SchedulingParams
from paceline.core.plan import StepPlan
from paceline.core.request import RequestStats
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable
from paceline.sim.clock import VirtualClock
from paceline.sim.counting_runner import CountingRunner
from paceline.sim.order import EarliestDeadlineFirst, FirstComeFirstServed
from paceline.sim.population import DEFAULT_SPECULATION, GREEDY, SimulatedRequest, draw_requests
from paceline.sim.simulation import cut_result
from paceline.sim.spec import SimulationFile

SAMPLES = 400  # of queue lengths and depths over time, at most twice as many
PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class TenantFigures:
    """What the requests of one tenant met; seconds."""

    weight: float = 1.0
    arrived: int = 0
    finished: int = 0
    refused: int = 0  # too late, or no room in a queue
    in_time: int = 0  # finished, before their deadline if they had one
    prompt_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    engine_seconds: float = 0.0
    rejected_seconds: float = 0.0
    first_token: array[float] = field(default_factory=lambda: array("f"))
    per_token: array[float] = field(default_factory=lambda: array("f"))  # after the first

    def summary(self) -> dict[str, Any]:
        """Plain JSON types."""
        names = ("weight", "arrived", "finished", "refused", "in_time", "prompt_tokens", "completion_tokens")
        told: dict[str, Any] = {name: getattr(self, name) for name in names}
        told |= {"preemptions": self.preemptions, "engine_seconds": self.engine_seconds}
        told |= {"service": self.engine_seconds / self.weight, "rejected_seconds": self.rejected_seconds}
        for name, values in (("time_to_first_token", self.first_token), ("time_per_output_token", self.per_token)):
            told[name] = {f"p{p}": _percentile(values, p) for p in PERCENTILES}
        return told


@dataclass(frozen=True, slots=True)
class Moment:
    """One look at the engine."""

    time: float
    running: int
    waiting: int
    depth: float  # drafts per decode of the step
    free_blocks: int


@dataclass(slots=True)
class Study:
    """Attributes:
    seconds: simulated.
    backlogged: seconds and each tenant's engine seconds, when for the last time all tenants had requests waiting.
    """

    seconds: float = 0.0
    steps: int = 0
    tenants: dict[str, TenantFigures] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    backlogged: tuple[float, dict[str, float]] = (0.0, {})

    def summary(self) -> dict[str, Any]:
        """Plain JSON types."""
        tokens = sum(tenant.completion_tokens for tenant in self.tenants.values())
        return {
            "seconds": self.seconds,
            "steps": self.steps,
            "tokens_per_second": tokens / self.seconds if self.seconds else 0.0,
            "tenants": {name: tenant.summary() for name, tenant in self.tenants.items()},
            "backlogged_seconds": self.backlogged[0],
            "backlogged_service": {
                name: seconds / self.tenants[name].weight for name, seconds in self.backlogged[1].items()
            },
            "moments": [[m.time, m.running, m.waiting, m.depth, m.free_blocks] for m in self.moments],
        }


def run_study(file: SimulationFile, progress: Callable[[int], None] | None = None) -> Study:
    """Simulate until every request has ended, or the time is over.

    Args:
        progress: is told of requests that have ended.

    Raises:
        InvalidArgument: what the file asks for cannot be.
    """
    return _Simulator(file, progress).run()


class _Simulator:
    def __init__(self, file: SimulationFile, progress: Callable[[int], None] | None) -> None:
        self.file = file
        self.progress = progress
        self.clock = VirtualClock()
        true, known = file.machine.costs(), file.machine.costs()
        self.scheduler = Scheduler(
            file.engine.config(drafts=file.machine.file is not None or file.machine.draft_pass is not None),
            SpeculationControl(_policy(file.engine.depth, known), known),
            {name: tenant.policy() for name, tenant in file.tenants.items()} if file.policy == "ours" else {},
        )
        if file.policy != "ours":
            order = FirstComeFirstServed if file.policy == "fcfs" else EarliestDeadlineFirst
            self.scheduler.deadlines = order(self.scheduler.rate, file.engine.patience)
        self.live: dict[int, SimulatedRequest] = {}
        self.runner = CountingRunner(true, self.clock, lambda i: self.live[i].acceptance, file.seed)
        self.study = Study(tenants={name: TenantFigures(tenant.weight) for name, tenant in file.tenants.items()})
        self._interval = 0.0  # seconds between moments
        self._prompts: dict[int, tuple[int, ...]] = {}  # by length

    def run(self) -> Study:
        coming = draw_requests(self.file)
        following = next(coming, None)
        clock, scheduler, study = self.clock, self.scheduler, self.study
        request_id = 0
        while clock() < self.file.seconds:
            while following is not None and following.time <= clock():
                self._add(request_id, following)
                request_id += 1
                following = next(coming, None)
            plan = scheduler.schedule(clock())
            for refused_id, _ in scheduler.take_refused():
                self._refused(self.live.pop(refused_id))
            if plan.work:
                self._step(plan)
                continue
            upcoming = min(math.inf if following is None else following.time, scheduler.wake_at(clock()))
            if upcoming == math.inf:
                assert not scheduler.has_requests, "requests are left, but nothing can be planned"
                break
            clock.advance(max(0.0, upcoming - clock()))
        study.seconds = clock()
        for name, figures in study.tenants.items():
            if self.file.policy == "ours" and name in self.scheduler.tenants:
                figures.engine_seconds = self.scheduler.tenants[name].charged_seconds
        return study

    def _add(self, request_id: int, request: SimulatedRequest) -> None:
        figures = self.study.tenants[request.tenant]
        figures.arrived += 1
        scheduling = request.scheduling
        if self.file.policy != "ours":  # to which all requests are of one tenant
            scheduling = SchedulingParams("", 0, scheduling.deadline, None, scheduling.time_to_first_token)
        self.live[request_id] = request
        try:
            self.scheduler.add(
                request_id,
                self._prompt(request.prompt_tokens),
                GREEDY,
                request.stop,
                DEFAULT_SPECULATION,
                self.clock(),
                scheduling=scheduling,
            )
        except (ResourceExhausted, Unavailable, DeadlineExceeded):
            self._refused(self.live.pop(request_id))
        except InvalidArgument as error:
            if error.field != "scheduling.deadline":
                raise
            self._refused(self.live.pop(request_id))  # it was over before the step in which it came

    def _prompt(self, length: int) -> tuple[int, ...]:
        prompt = self._prompts.get(length)
        if prompt is None:
            prompt = self._prompts[length] = (0,) * length
        return prompt

    def _step(self, plan: StepPlan) -> None:
        scheduler, study = self.scheduler, self.study
        result = cut_result(scheduler, self.runner.execute(plan))
        now = self.clock()
        for output in scheduler.update(plan, result, now):
            if output.stats is not None:
                self._finished(self.live.pop(output.request_id), output.stats, now)
        study.steps += 1
        if not study.moments or now >= study.moments[-1].time + self._interval:
            self._look(plan, now)

    def _look(self, plan: StepPlan, now: float) -> None:
        decodes = sum(work.samples and work.num_tokens == 1 for work in plan.work)
        depth = sum(work.num_drafts for work in plan.work) / max(1, decodes)
        scheduler, moments = self.scheduler, self.study.moments
        waiting = scheduler.tenants.num_waiting
        moments.append(Moment(now, len(scheduler.running), waiting, depth, scheduler.kv.num_free_blocks))
        if len(moments) >= 2 * SAMPLES:
            del moments[::2]
            self._interval = 2.0 * now / len(moments) / 2.0
        if self.file.policy == "ours" and len(list(scheduler.tenants.waiting)) == len(self.file.tenants):
            accounts = {name: scheduler.tenants[name].charged_seconds for name in self.file.tenants}
            self.study.backlogged = now, accounts

    def _finished(self, request: SimulatedRequest, stats: RequestStats, now: float) -> None:
        figures = self.study.tenants[request.tenant]
        figures.finished += 1
        first = request.time_to_first_token
        late = (request.deadline is not None and now > request.deadline) or (
            first is not None and stats.time_to_first_token > first
        )
        figures.in_time += not late
        figures.prompt_tokens += stats.prompt_tokens
        figures.completion_tokens += stats.completion_tokens
        figures.preemptions += stats.preemptions
        figures.engine_seconds += stats.engine_seconds
        figures.rejected_seconds += stats.rejected_seconds
        figures.first_token.append(stats.time_to_first_token)
        if stats.completion_tokens > 1:
            after = stats.total_seconds - stats.time_to_first_token
            figures.per_token.append(after / (stats.completion_tokens - 1))
        if self.progress is not None:
            self.progress(1)

    def _refused(self, request: SimulatedRequest) -> None:
        self.study.tenants[request.tenant].refused += 1
        if self.progress is not None:
            self.progress(1)


def _policy(depth: str, costs: CostModel) -> DepthPolicy:
    if depth == "auto":
        return AdaptiveDepth(costs)
    return FixedDepth(0 if depth == "off" else int(depth))


def _percentile(values: array[float], percent: int) -> float | None:
    return float(np.percentile(np.array(values), percent)) if values else None
