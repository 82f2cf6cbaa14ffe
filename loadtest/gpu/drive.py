"""Steps of an engine, one after the other, and what a batch of streams brings meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.bench.depth_names import AUTO, OFF
from paceline.bench.turns import Stream, check_room
from paceline.core.method import Method
from paceline.core.params import SpeculationParams, StopParams
from paceline.core.plan import StepPlan, StepTimes
from paceline.core.speculation_counts import SpeculationCounts
from paceline.engine import Engine, GenerationRequest, StepLoop
from paceline.engine.delta import Output

WITHOUT_DRAFTS = SpeculationParams(Method.NONE)
BOUNDS = {OFF: WITHOUT_DRAFTS, AUTO: SpeculationParams()}  # by which sections compare speculation with none


@dataclass(frozen=True, slots=True)
class Step:
    """One finished step.

    Attributes:
        at: when its outputs were there, by `time.perf_counter`.
    """

    at: float
    plan: StepPlan
    times: StepTimes
    outputs: list[Output]


def drive(engine: Engine) -> Iterator[Step]:
    """Step until no request is live; no tenant is limited. To be exhausted: a step may be under way meanwhile."""
    steps = StepLoop(engine)
    while (done := steps.step()) is not None:
        yield Step(time.perf_counter(), done.plan, done.result.times, done.outputs)


@dataclass(slots=True)
class Window:
    """A batch while it was whole: the steps behind the last first token, up to the first end of a stream.

    Attributes:
        counts: what speculation brought, from the start of each stream.
    """

    seconds: float = 0.0
    tokens: int = 0
    steps: list[Step] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def step_seconds(self) -> float:
        return self.seconds / len(self.steps)

    @property
    def busy(self) -> float:
        """Share of the time in which the device computed."""
        return sum(step.times.total for step in self.steps) / self.seconds


class Whole(NamedTuple):
    """A batch from its arrival to its last token; `busy` are the seconds in which the device computed."""

    seconds: float
    busy: float


def serve(engine: Engine, batch: Sequence[Stream], bounds: SpeculationParams, max_tokens: int) -> Window:
    """Serve a batch until its first stream ends, and leave the engine without work.

    Raises:
        FailedPrecondition: the KV pool has no room for all of it at once.
    """
    assert not engine.has_work, "the engine is this benchmark's alone"
    check_room(engine, [len(prompt) for prompt, _ in batch], 1, max_tokens)
    stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
    ids = [engine.add(GenerationRequest(prompt, sampling, stop, bounds)) for prompt, sampling in batch]
    requests = [engine.scheduler.requests[request_id] for request_id in ids]
    silent, whole, began = set(ids), True, 0.0
    window = Window()
    for step in drive(engine):
        if silent:
            silent -= {output.request_id for output in step.outputs}
            began = step.at
        elif whole:
            window.seconds = step.at - began
            window.tokens += sum(len(output.token_ids) for output in step.outputs)
            window.steps.append(step)
        if whole and any(output.finish is not None for output in step.outputs):
            whole = False
            for request_id in ids:
                engine.abort(request_id)
    for request in requests:
        window.counts.add(request.counts)
    return window


def complete(engine: Engine, batch: Sequence[Stream], bounds: SpeculationParams, max_tokens: int) -> Whole:
    """Serve a batch until every stream has all of its tokens."""
    stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
    began = at = time.perf_counter()
    for prompt, sampling in batch:
        engine.add(GenerationRequest(prompt, sampling, stop, bounds))
    busy = 0.0
    for step in drive(engine):
        at, busy = step.at, busy + step.times.total
    return Whole(at - began, busy)
