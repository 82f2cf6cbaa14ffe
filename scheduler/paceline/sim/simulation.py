"""Arrivals in, trace out: the step loop without threads, with or without a plan outstanding."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.core.plan import StepPlan, StepResult, StepRunner
from paceline.core.request import RequestStats
from paceline.core.scheduler import Scheduler
from paceline.core.stopping import cut_run
from paceline.sim.clock import VirtualClock


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the second at which it comes."""

    time: float
    request_id: int
    prompt_token_ids: tuple[int, ...]
    stop: StopParams = StopParams(max_tokens=16)
    speculation: SpeculationParams = SpeculationParams()
    sampling: SamplingParams = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Simulation:
    """What happened: equal for equal arrivals, seeds and lag.

    Attributes:
        plans: every plan, in order.
        outputs: emitted tokens per request id.
        finished: the account of each request that ended.
    """

    plans: list[StepPlan] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, RequestStats] = field(default_factory=dict)


def cut_result(scheduler: Scheduler, result: StepResult) -> StepResult:
    """Shorten each run where stop ids or lengths end its completion, as the engine does before `update`."""
    cut = []
    for sequence in result.sequences:
        request = scheduler.requests.get(sequence.request_id)
        if request is not None and sequence.token_ids:
            token_ids, finish = cut_run(request, sequence.token_ids, scheduler.config.eos_token_ids)
            sequence = replace(sequence, token_ids=token_ids, finish=finish)
        cut.append(sequence)
    return replace(result, sequences=tuple(cut))


def simulate(
    scheduler: Scheduler,
    runner: StepRunner,
    arrivals: Sequence[Arrival],
    clock: VirtualClock,
    lag: int = 0,
    check: bool = False,
    max_steps: int = 1_000_000,
) -> Simulation:
    """Run until every arrival has ended.

    Args:
        lag: plans made ahead of the results that they follow, 0 or 1.
        check: verify the scheduler's invariants after every change.
    """
    trace = Simulation()
    coming = deque(sorted(arrivals, key=lambda arrival: arrival.time))
    outstanding: deque[StepPlan] = deque()
    for _ in range(max_steps):
        while coming and coming[0].time <= clock():
            _add(scheduler, coming.popleft(), clock())
        plan = scheduler.schedule(clock())
        if plan.work:
            trace.plans.append(plan)
            outstanding.append(plan)
        if outstanding and (len(outstanding) > lag or not plan.work):
            oldest = outstanding.popleft()
            result = cut_result(scheduler, runner.execute(oldest))
            _book(trace, scheduler, oldest, result, clock())
        elif not plan.work:
            if not coming:
                assert not scheduler.has_requests, "requests are left, but nothing can be planned"
                return trace
            clock.advance(max(0.0, coming[0].time - clock()))
        if check:
            scheduler.check_invariants()
    raise AssertionError(f"not finished after {max_steps} steps")


def _add(scheduler: Scheduler, arrival: Arrival, now: float) -> None:
    scheduler.add(
        arrival.request_id, arrival.prompt_token_ids, arrival.sampling, arrival.stop, arrival.speculation, now
    )


def _book(trace: Simulation, scheduler: Scheduler, plan: StepPlan, result: StepResult, now: float) -> None:
    for output in scheduler.update(plan, result, now):
        trace.outputs.setdefault(output.request_id, []).extend(output.token_ids)
        if output.stats is not None:
            trace.finished[output.request_id] = output.stats
