"""Several settings at once, in one engine, which take turns by steps; the same batch by all of them.

Whatever the machine does meanwhile to its memory or its clock, it does to all of them: they are never further apart
than a few steps. Each has requests, policy, prices and estimates of its own; they share the weights, the KV pool, and
the prompts in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple, ParamSpec, TypeAlias, TypeVar
from unittest.mock import patch

from paceline.bench.console import num_streams
from paceline.bench.setting import steered
from paceline.core.batch import Batch
from paceline.core.config import PrefixScope
from paceline.core.depth import Chosen, Decision, DepthCandidate, Outcome, StepLoad
from paceline.core.depth_policy import DepthPolicy
from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.core.request import Request
from paceline.core.speculation import SpeculationControl
from paceline.core.speculation_counts import SpeculationCounts
from paceline.core.standing import Standing
from paceline.core.tenants import Tenants
from paceline.engine import Engine, GenerationRequest
from paceline.engine.delta import Output
from paceline.errors import FailedPrecondition

Args = ParamSpec("Args")
Result = TypeVar("Result")

Stream: TypeAlias = tuple[tuple[int, ...], SamplingParams]  # a prompt, and how it is sampled


class Served(NamedTuple):
    """A batch while it was whole: from the last first token to the first end of any setting's stream.

    Attributes:
        control_seconds: of `seconds`, those for planning and booking; detokenizing is among them.
        policy_seconds: of those, what the policy took to choose depths, and to follow what time earns. What it chooses
            among is put together before, and acceptance and prices are learned beside it: they are not in it.
        counts: what speculation brought, from the start of each stream.
    """

    tokens: int
    seconds: float
    control_seconds: float
    policy_seconds: float
    counts: SpeculationCounts


class Track:
    """What a setting has of its own in an engine that several share: what chooses depths, and a batch, which is the
    scheduler's only while it is taken.

    Attributes:
        control: of the setting.
        batch: its requests.
    """

    def __init__(self, engine: Engine, control: SpeculationControl) -> None:
        self.control = control
        self._engine = engine
        self.batch = Batch(engine.scheduler.config, engine.scheduler.kv, Tenants({}))

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Meanwhile the engine is this setting's. Changes the scheduler, and changes it back."""
        scheduler = self._engine.scheduler
        other, scheduler.batch = scheduler.batch, self.batch
        try:
            with steered(self._engine, self.control):
                yield
        finally:
            scheduler.batch = other


class Lane:
    """A batch as one setting serves it, on a track of its own.

    Args:
        control, bounds: of the setting.

    Attributes:
        tokens, seconds, control_seconds, policy_seconds: since the last first token.
    """

    def __init__(self, engine: Engine, control: SpeculationControl, bounds: SpeculationParams) -> None:
        self._engine = engine
        self._track = Track(engine, control)
        self._bounds = bounds
        self._requests: list[Request] = []
        self.tokens = 0
        self.seconds = 0.0
        self.control_seconds = 0.0
        self.policy_seconds = 0.0

    def start(self, batch: Sequence[Stream], stop: StopParams) -> None:
        """Serve the batch until all have their first token."""
        with self._track.taken():
            for prompt, sampling in batch:
                request_id = self._engine.add(GenerationRequest(prompt, sampling, stop, self._bounds))
                self._requests.append(self._engine.scheduler.requests[request_id])
            silent = {request.request_id for request in self._requests}
            while silent:
                silent -= {output.request_id for output in self._engine.step()}

    def step(self, watch: Watch) -> bool:
        """One step of the batch. Whether it is whole afterwards."""
        control, policy, began = watch.control.seconds, watch.policy.seconds, perf_counter()
        outputs = self._step(watch)
        self.seconds += perf_counter() - began
        self.control_seconds += watch.control.seconds - control
        self.policy_seconds += watch.policy.seconds - policy
        self.tokens += sum(len(output.token_ids) for output in outputs)
        whole = all(output.finish is None for output in outputs)
        assert not whole or len(self._track.batch.running) == len(self._requests), "room was made for all before"
        return whole

    def _step(self, watch: Watch) -> list[Output]:
        control = self._track.control
        policy = control.policy
        with self._track.taken():
            control.policy = TimedPolicy(policy, watch.policy)
            try:
                return self._engine.step()
            finally:
                control.policy = policy

    def served(self) -> Served:
        counts = SpeculationCounts()
        for request in self._requests:
            counts.add(request.counts)
        return Served(self.tokens, self.seconds, self.control_seconds, self.policy_seconds, counts)

    def end(self) -> None:
        with self._track.taken():
            for request in self._requests:
                self._engine.abort(request.request_id)


def serve_batch(
    engine: Engine,
    batch: Sequence[Stream],
    settings: Sequence[tuple[SpeculationControl, SpeculationParams]],
    max_tokens: int,
    first: int = 0,
) -> list[Served]:
    """Serve a batch by each setting, until the first stream of any has ended, but for a step at least. The next step is
    always of the one that has the fewest tokens, so that all come through the same text at the same time.

    Args:
        settings: what chooses depths, and bounds of every request.
        first: the setting, modulo their number, that goes first wherever several could.

    Raises:
        InvalidArgument, FailedPrecondition: a setting that the engine refuses, or more than its KV pool has room for.
    """
    assert not engine.has_work, "the engine is this benchmark's alone"
    check_room(engine, [len(prompt) for prompt, _ in batch], len(settings), max_tokens)
    stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
    lanes = [Lane(engine, control, bounds) for control, bounds in settings]
    first %= len(lanes)
    in_turn = lanes[first:] + lanes[:first]
    try:
        for lane in in_turn:
            lane.start(batch, stop)
        with stopwatch(engine) as watch:
            whole = all([lane.step(watch) for lane in in_turn])
            while whole:
                whole = min(in_turn, key=lambda lane: lane.tokens).step(watch)
        return [lane.served() for lane in lanes]
    finally:
        for lane in lanes:
            lane.end()


def check_room(engine: Engine, prompts: Sequence[int], lanes: int, max_tokens: int) -> None:
    """Raise FailedPrecondition if streams with prompts of these lengths may not have room in the KV pool at once, in so
    many lanes, which share the full blocks of prompts if there is a prefix cache.
    """
    config = engine.scheduler.config
    needed = len(prompts) + math.ceil(config.watermark * config.num_blocks)  # which the scheduler keeps back
    for tokens in prompts:
        blocks = config.blocks_for(min(tokens + max_tokens, config.max_model_len))
        shared = (tokens - 1) // config.block_size if config.prefix_cache is not PrefixScope.OFF else 0
        needed += shared + lanes * (blocks - shared)
    if needed > config.num_blocks:
        wanted = f"{lanes} settings with {num_streams(len(prompts))} need {needed} blocks of KV at once"
        raise FailedPrecondition(f"{wanted}, and there are {config.num_blocks}")


@dataclass(slots=True)
class Timer:
    seconds: float = 0.0

    def time(self, call: Callable[[], Result]) -> Result:
        """Its result. Nothing but the call itself is timed: a context manager would add a microsecond to each."""
        began = perf_counter()
        try:
            return call()
        finally:
            self.seconds += perf_counter() - began

    def timed(self, function: Callable[Args, Result]) -> Callable[Args, Result]:
        """The same function, timed."""
        return lambda *args, **kwargs: self.time(partial(function, *args, **kwargs))


class Watch(NamedTuple):
    """What adds up the parts of a step.

    Attributes:
        control: planning and booking, control of speculation among the rest, which may be compiled.
        policy: the policy alone, as in `Served`.
    """

    control: Timer
    policy: Timer


class TimedPolicy(DepthPolicy):
    """Another policy, timed: its calls alone. Where steps are short, what Python does around them would be a good part
    of the figure.
    """

    def __init__(self, policy: DepthPolicy, timer: Timer) -> None:
        self._policy = policy
        self._timer = timer

    @property
    def decision(self) -> Decision | None:
        return self._policy.decision

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        choose, began = self._policy.choose, perf_counter()
        chosen = choose(candidates, load, slot_price=slot_price)
        self._timer.seconds += perf_counter() - began
        return chosen

    def standing(self, load: StepLoad, *, slot_price: float = 0.0) -> Standing | None:
        standing, began = self._policy.standing, perf_counter()
        stands = standing(load, slot_price=slot_price)
        self._timer.seconds += perf_counter() - began
        return stands

    def join(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        join, began = self._policy.join, perf_counter()
        chosen = join(candidates, load, slot_price=slot_price)
        self._timer.seconds += perf_counter() - began
        return chosen

    def reads_along(self, unread: int, tokens: float, survival: float, sequences: int, context: int) -> bool:
        reads_along, began = self._policy.reads_along, perf_counter()
        reads = reads_along(unread, tokens, survival, sequences, context)
        self._timer.seconds += perf_counter() - began
        return reads

    def observe(self, outcome: Outcome) -> None:
        observe, began = self._policy.observe, perf_counter()
        observe(outcome)
        self._timer.seconds += perf_counter() - began

    def forget(self, request_id: int) -> None:
        self._policy.forget(request_id)


@contextmanager
def stopwatch(engine: Engine) -> Iterator[Watch]:
    watch = Watch(Timer(), Timer())
    timed = watch.control.timed
    with patch.multiple(engine, plan=timed(engine.plan), finish=timed(engine.finish)):
        yield watch
