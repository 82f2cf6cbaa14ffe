"""What the core takes to plan a step and to book its result, beside a loop that tells how fast this Python is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from paceline.bench.console import console
from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.config import SchedulerConfig
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SchedulingParams, SpeculationParams, StopParams
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.sim.clock import VirtualClock
from paceline.sim.control import roofline
from paceline.sim.counting_runner import CountingRunner
from paceline.sim.simulation import cut_result

PROMPT_TOKENS = 64
COMPLETION_TOKENS = 400
BLOCK_SIZE = 16
FREE_ROWS = 512  # of the target's forward: drafts pay, so that depths are chosen and learned from
CALIBRATION_UPDATES = 1_000_000


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """Seconds, medians over the steps.

    Attributes:
        waiting: requests in queues.
        plan, update: of `Scheduler.schedule` and `Scheduler.update`.
        drafts: per running request and step.
        calibration: of a million updates of a dict.
    """

    waiting: int
    plan: float
    update: float
    drafts: float
    calibration: float

    @property
    def step(self) -> float:
        return self.plan + self.update

    @property
    def scaled(self) -> float:
        """On a machine on which the loop takes 50 ms."""
        return self.step * 0.050 / self.calibration


def calibrate() -> float:
    """Seconds of a million updates of a dict."""
    counts: dict[int, int] = {}
    began = time.perf_counter()
    for index in range(CALIBRATION_UPDATES):
        counts[index & 1023] = index
    return time.perf_counter() - began


def measure_core(running: int, waiting: int, tenants: int, steps: int) -> CoreTimes:
    """Time plan and update of a full batch with a queue behind it, depths chosen by the adaptive policy."""
    clock = VirtualClock()
    scheduler, runner = _loaded(running, waiting, tenants, clock)
    plans, updates, drafts = [], [], 0
    loops = [calibrate()]
    while scheduler.rate.token_seconds == 0.0 or len(scheduler.running) < running:
        _step(scheduler, runner, clock)
    for _ in range(steps):
        plan_seconds, update_seconds, drafted = _step(scheduler, runner, clock)
        plans.append(plan_seconds)
        updates.append(update_seconds)
        drafts += drafted
    loops.append(calibrate())
    queued = scheduler.tenants.num_waiting
    return CoreTimes(queued, median(plans), median(updates), drafts / running / steps, median(loops))


def merge(rounds: Sequence[CoreTimes]) -> CoreTimes:
    """Medians of rounds with one number of requests in queues."""
    return CoreTimes(
        *(
            median(getattr(one, name) for one in rounds)
            for name in ("waiting", "plan", "update", "drafts", "calibration")
        )
    )


def render_core(times: Sequence[CoreTimes], title: str) -> None:
    """Print one row for each number of requests in queues."""
    table = Table(title=title)
    for name in (
        "waiting",
        "plan ms",
        "update ms",
        "step ms",
        "x first",
        "loop ms",
        "step ms where it takes 50",
        "drafts",
    ):
        table.add_column(name, justify="right")
    for one in times:
        milliseconds = [f"{1000 * seconds:.2f}" for seconds in (one.plan, one.update, one.step)]
        ratio = f"{one.step / times[0].step:.2f}"
        loop, scaled = f"{1000 * one.calibration:.0f}", f"{1000 * one.scaled:.2f}"
        table.add_row(str(one.waiting), *milliseconds, ratio, loop, scaled, f"{one.drafts:.2f}")
    console().print(table)


def _loaded(running: int, waiting: int, tenants: int, clock: VirtualClock) -> tuple[Scheduler, CountingRunner]:
    total = PROMPT_TOKENS + COMPLETION_TOKENS
    config = SchedulerConfig(
        num_blocks=running * (total // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        max_num_seqs=running,
        max_num_batched_tokens=8 * running + 2048,
        max_model_len=total,
        max_queued=running + waiting,
        method=Method.DRAFT_MODEL,
    )
    true, known = (roofline(0.020, FREE_ROWS, 0.05) for _ in range(2))
    scheduler = Scheduler(config, SpeculationControl(AdaptiveDepth(known), known))
    for request_id in range(running + waiting):
        scheduler.add(
            request_id,
            tuple(range(request_id, request_id + PROMPT_TOKENS)),
            SamplingParams(temperature=0.0),
            StopParams(max_tokens=COMPLETION_TOKENS - request_id % 97),
            SpeculationParams(),
            clock(),
            scheduling=SchedulingParams(f"tenant {request_id % tenants}"),
        )
    acceptance: Callable[[int], float] = lambda request_id: 0.3 + 0.6 * (request_id % 7) / 6  # noqa: E731
    return scheduler, CountingRunner(true, clock, acceptance)


def _step(scheduler: Scheduler, runner: CountingRunner, clock: VirtualClock) -> tuple[float, float, int]:
    """One step: seconds of planning, seconds of booking, and drafts."""
    began = time.perf_counter()
    plan = scheduler.schedule(clock())
    planned = time.perf_counter()
    result = cut_result(scheduler, runner.execute(plan))
    executed = time.perf_counter()
    scheduler.update(plan, result, clock())
    drafts = sum(work.num_drafts for work in plan.work)
    return planned - began, time.perf_counter() - executed, drafts
