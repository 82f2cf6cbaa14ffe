"""A simulation from its file to its figures: the scheduler as it is, a runner that counts, and a clock without time."""

from __future__ import annotations

import gc
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np

from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.cost_model import CostModel
from paceline.core.depth_policy import DepthPolicy, FixedDepth
from paceline.core.plan import StepPlan, StepResult
from paceline.core.request import Request, RequestStats
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.core.stopping import cut_run
from paceline.errors import DeadlineExceeded, PacelineError, QuotaExceeded, Reason, ResourceExhausted, Unavailable
from paceline.sim.clock import VirtualClock
from paceline.sim.counting_runner import TOKEN, CountingRunner
from paceline.sim.order import EarliestDeadlineFirst, FirstComeFirstServed
from paceline.sim.population import DEFAULT_SPECULATION, GREEDY, REQUESTS, Population, SimulatedRequest
from paceline.sim.spec import SimulationFile

SAMPLES: Final = 400  # of queue lengths and depths over time, at most twice as many
PERCENTILES: Final = (50, 90, 99)
SHORTEST_WAIT: Final = 1e-6  # seconds; less might not move the clock
TOLD_AT_ONCE: Final = 256  # requests that have ended, to whoever watches


@dataclass(slots=True)
class TenantFigures:
    """What the requests of one tenant met; seconds."""

    weight: float = 1.0
    arrived: int = 0
    finished: int = 0
    refused: int = 0  # too late, no room in a queue, or too large
    too_large: int = 0  # of these, those that can never fit the KV blocks, the machine's or the tenant's
    in_time: int = 0  # finished, before their deadline if they had one
    prompt_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    engine_seconds: float = 0.0
    rejected_seconds: float = 0.0
    longest_run: float = 0.0  # from the first admission to the end
    first_token: array[float] = field(default_factory=lambda: array("f"))
    per_token: array[float] = field(default_factory=lambda: array("f"))  # after the first

    def summary(self) -> dict[str, Any]:
        """Plain JSON types."""
        arrays = {"time_to_first_token": self.first_token, "time_per_output_token": self.per_token}
        names = [one.name for one in fields(self) if one.name not in ("first_token", "per_token")]
        told: dict[str, Any] = {name: getattr(self, name) for name in names}
        told["service"] = self.engine_seconds / self.weight
        for name, values in arrays.items():
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
    """What happened.

    Attributes:
        seconds: simulated.
        longest_step: in seconds.
        backlogged_seconds: of the steps beside which all tenants had requests waiting.
        backlogged: engine seconds that each tenant was charged in these.
    """

    seconds: float = 0.0
    steps: int = 0
    longest_step: float = 0.0
    tenants: dict[str, TenantFigures] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    backlogged_seconds: float = 0.0
    backlogged: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def service_bound(self) -> float:
        """Seconds of service over weight by which two tenants may differ in any time in which both have requests
        waiting: twice the longest run of a request over the lowest weight.

        None of a tenant's requests is admitted while another's counter is lower. From then on it is charged no more
        than those of its requests that run already take, and all charges of a step together are the step's duration.
        """
        longest = max(tenant.longest_run for tenant in self.tenants.values())
        return 2.0 * longest / min(tenant.weight for tenant in self.tenants.values())

    def summary(self) -> dict[str, Any]:
        """Plain JSON types."""
        tokens = sum(tenant.completion_tokens for tenant in self.tenants.values())
        finished = sum(tenant.finished for tenant in self.tenants.values())
        refused = sum(tenant.refused for tenant in self.tenants.values())
        arrived = sum(tenant.arrived for tenant in self.tenants.values())
        return {
            "seconds": self.seconds,
            "steps": self.steps,
            "longest_step": self.longest_step,
            "tokens_per_second": tokens / self.seconds if self.seconds else 0.0,
            "requests_per_second": finished / self.seconds if self.seconds else 0.0,
            # Of those that have ended: what becomes of others when the time is over, nobody knows.
            "in_time": sum(tenant.in_time for tenant in self.tenants.values()) / max(1, finished + refused),
            "unfinished": arrived - finished - refused,
            "tenants": {name: tenant.summary() for name, tenant in self.tenants.items()},
            "service_bound": self.service_bound,
            "backlogged_seconds": self.backlogged_seconds,
            "backlogged_service": {
                name: seconds / self.tenants[name].weight for name, seconds in self.backlogged.items()
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
    # Nothing in here makes cycles, and to look for some would take a tenth of the time.
    collected = gc.isenabled()
    gc.disable()
    try:
        return _Simulator(file, progress).run()
    finally:
        if collected:
            gc.enable()


class _Arrivals:
    """Requests that come when they come."""

    def __init__(self, file: SimulationFile) -> None:
        self._coming = Population(file).arrivals()
        self._following = next(self._coming, None)

    @property
    def next_time(self) -> float:
        """Of the next arrival, in seconds; infinite after the last."""
        return math.inf if self._following is None else self._following.time

    def due(self, now: float) -> Iterator[tuple[float, SimulatedRequest]]:
        """Those that have come, and when."""
        while (request := self._following) is not None and request.time <= now:
            self._following = next(self._coming, None)
            yield request.time, request

    def left_queue(self, tenant: str) -> None:
        """One of the tenant's waits no more."""


class _Backlog:
    """Requests that come when another leaves the queue of its tenant."""

    next_time = math.inf

    def __init__(self, file: SimulationFile) -> None:
        self._coming = {name: Population(file, stream).backlog(name) for stream, name in enumerate(file.tenants, 1)}
        self._room = dict.fromkeys(file.tenants, file.arrivals.waiting)
        self._left = file.requests or REQUESTS

    def due(self, now: float) -> Iterator[tuple[float, SimulatedRequest]]:
        for name, coming in self._coming.items():
            while self._room[name] and self._left:
                self._room[name] -= 1
                self._left -= 1
                yield now, next(coming)

    def left_queue(self, tenant: str) -> None:
        self._room[tenant] += 1


class _Simulator:
    def __init__(self, file: SimulationFile, progress: Callable[[int], None] | None) -> None:
        self.file = file
        self.progress = progress
        self.clock = VirtualClock()
        self.ours = file.policy == "ours"
        true, known = file.machine.costs(), file.machine.costs()
        self.live: dict[int, SimulatedRequest] = {}
        self.requests: dict[int, Request] = {}  # the scheduler's, of these
        self.ended_seconds = dict.fromkeys(file.tenants, 0.0)  # that ended requests of each tenant were charged
        self.scheduler = Scheduler(
            file.engine.config(drafts=file.machine.drafts),
            SpeculationControl(_policy(file.engine.depth, known), known),
            {name: tenant.policy() for name, tenant in file.tenants.items()} if self.ours else {},
        )
        if not self.ours:
            order = FirstComeFirstServed if file.policy == "fcfs" else EarliestDeadlineFirst
            self.scheduler.deadlines = order(self.scheduler.rate, file.engine.patience)
        self.arrivals = _Backlog(file) if file.arrivals.kind == "backlog" else _Arrivals(file)
        self.queued: dict[str, set[int]] = {name: set() for name in file.tenants}  # that have never run
        self.runner = CountingRunner(true, self.clock, lambda i: self.live[i].acceptance, file.seed)
        self.study = Study(tenants={name: TenantFigures(tenant.weight) for name, tenant in file.tenants.items()})
        self._num_requests = 0
        self._backlogged = False
        self._num_ended = 0  # that nobody was told of
        self._interval = 0.0  # seconds between moments

    def run(self) -> Study:
        clock, scheduler = self.clock, self.scheduler
        end = math.inf if self.file.seconds is None else self.file.seconds
        while clock() < end:
            for time, request in self.arrivals.due(clock()):
                self._add(time, request)
            plan = scheduler.schedule(clock())
            for refused_id, _ in scheduler.take_refused():
                self._refused(refused_id)
            if plan.work:
                self._step(plan)
                continue
            upcoming = self.arrivals.next_time
            if scheduler.has_requests:
                upcoming = min(upcoming, scheduler.wake_at(clock()))
            if upcoming == math.inf:
                assert not scheduler.has_requests, "requests are left, but nothing can be planned"
                break
            clock.advance(max(SHORTEST_WAIT, upcoming - clock()))
        self._watch_backlog(False)
        self.study.seconds = clock()
        for name, seconds in self._charged().items():
            self.study.tenants[name].engine_seconds = seconds
        self._tell()
        return self.study

    def _add(self, time: float, request: SimulatedRequest) -> None:
        request_id = self._num_requests
        self._num_requests += 1
        tenant = request.tenant
        self.study.tenants[tenant].arrived += 1
        self.live[request_id] = request
        self.queued[tenant].add(request_id)
        try:
            self.requests[request_id] = self.scheduler.add(
                request_id,
                (TOKEN,) * request.prompt_tokens,
                GREEDY,
                request.stop,
                DEFAULT_SPECULATION,
                time,
                scheduling=request.scheduling(tenant if self.ours else "", time),
            )
        except (ResourceExhausted, Unavailable, DeadlineExceeded) as error:
            if _is_too_large(error):
                self.study.tenants[request.tenant].too_large += 1
            self._refused(request_id)

    def _step(self, plan: StepPlan) -> None:
        scheduler, study = self.scheduler, self.study
        for admission in plan.admitted:
            self._left_queue(admission.request_id)
        self._watch_backlog(all(self.queued.values()))
        began = self.clock()
        result = self._cut(self.runner.execute(plan))
        now = self.clock()
        study.longest_step = max(study.longest_step, now - began)
        for output in scheduler.update(plan, result, now):
            if output.stats is not None:
                self._finished(output.request_id, output.stats)
        study.steps += 1
        if not study.moments or now >= study.moments[-1].time + self._interval:
            self._look(plan, now)

    def _cut(self, result: StepResult) -> StepResult:
        """Shorten the runs that reach the end of their completion; there are no other stops."""
        requests, sequences = self.scheduler.requests, list(result.sequences)
        for index, sequence in enumerate(sequences):
            request = requests[sequence.request_id]
            if request.num_tokens + len(sequence.token_ids) >= request.max_total_tokens:
                token_ids, finish = cut_run(request, sequence.token_ids, ())
                sequences[index] = replace(sequence, token_ids=token_ids, finish=finish)
        return StepResult(result.step_id, tuple(sequences), result.times)

    def _watch_backlog(self, backlogged: bool) -> None:
        """Books are opened when the last tenant begins to have requests waiting, and closed when one has none."""
        if backlogged != self._backlogged:
            self._backlogged = backlogged
            sign = -1.0 if backlogged else 1.0
            self.study.backlogged_seconds += sign * self.clock()
            for name, seconds in self._charged().items():
                self.study.backlogged[name] += sign * seconds

    def _charged(self) -> dict[str, float]:
        """Engine seconds of each tenant so far, in whatever order its requests are served."""
        seconds = dict(self.ended_seconds)
        for request_id, request in self.requests.items():
            seconds[self.live[request_id].tenant] += request.charged_seconds
        return seconds

    def _look(self, plan: StepPlan, now: float) -> None:
        decodes = sum(work.samples and work.num_tokens == 1 for work in plan.work)
        depth = sum(work.num_drafts for work in plan.work) / max(1, decodes)
        scheduler, moments = self.scheduler, self.study.moments
        waiting = scheduler.tenants.num_waiting
        moments.append(Moment(now, len(scheduler.running), waiting, depth, scheduler.kv.num_free_blocks))
        if len(moments) >= 2 * SAMPLES:
            del moments[::2]
            self._interval = now / len(moments)

    def _left_queue(self, request_id: int) -> None:
        """It runs, or has ended, perhaps for the second time."""
        tenant = self.live[request_id].tenant
        if request_id in self.queued[tenant]:
            self.queued[tenant].remove(request_id)
            self.arrivals.left_queue(tenant)

    def _finished(self, request_id: int, stats: RequestStats) -> None:
        request = self._leave(request_id)
        figures = self.study.tenants[request.tenant]
        figures.finished += 1
        first = request.time_to_first_token
        late = (request.within is not None and stats.total_seconds > request.within) or (
            first is not None and stats.time_to_first_token > first
        )
        figures.in_time += not late
        figures.prompt_tokens += stats.prompt_tokens
        figures.completion_tokens += stats.completion_tokens
        figures.preemptions += stats.preemptions
        figures.rejected_seconds += stats.rejected_seconds
        figures.longest_run = max(figures.longest_run, stats.total_seconds - stats.queue_seconds)
        figures.first_token.append(stats.time_to_first_token)
        if stats.completion_tokens > 1:
            after = stats.total_seconds - stats.time_to_first_token
            figures.per_token.append(after / (stats.completion_tokens - 1))
        self._ended()

    def _refused(self, request_id: int) -> None:
        self._left_queue(request_id)
        self.study.tenants[self._leave(request_id).tenant].refused += 1
        self._ended()

    def _leave(self, request_id: int) -> SimulatedRequest:
        """The request has ended, or never began."""
        request = self.live.pop(request_id)
        scheduled = self.requests.pop(request_id, None)
        if scheduled is not None:
            self.ended_seconds[request.tenant] += scheduled.charged_seconds
        return request

    def _ended(self) -> None:
        self._num_ended += 1
        if self._num_ended == TOLD_AT_ONCE:
            self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self._num_ended)
        self._num_ended = 0


def _policy(depth: str, costs: CostModel) -> DepthPolicy:
    if depth == "auto":
        return AdaptiveDepth(costs)
    return FixedDepth(0 if depth == "off" else int(depth))


def _is_too_large(error: PacelineError) -> bool:
    """It is no matter of time."""
    return error.reason == Reason.EXCEEDS_KV_CACHE or (isinstance(error, QuotaExceeded) and error.limit == "max_blocks")


def _percentile(values: array[float], percent: int) -> float | None:
    return float(np.percentile(np.array(values), percent)) if values else None
