"""The steps of an engine, one after the other, without an event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.core.plan import Done, Pending, StepPlan, StepResult
from paceline.engine.delta import Output
from paceline.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that is through."""

    plan: StepPlan
    result: StepResult
    outputs: list[Output]


class StepLoop:
    """Steps an engine as `AsyncEngine` does: a runner that launches steps gets the next one while one runs.

    Requests may be added and aborted between two calls. Nobody else steps the engine from the first call until one has
    returned None, or until `drain`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._start = engine.launch or self._execute
        self._lag = int(engine.launch is not None)
        self._under_way: deque[tuple[StepPlan, Pending]] = deque()

    def step(self) -> Finished | None:
        """The next step that is through; None if nothing is under way and nothing can be planned. Then, where every
        request waits for its tenant's tokens, they were waited for.

        Once a step has raised, whatever it was, the engine is dead.
        """
        finished = self.step_at_once()
        if finished is None:
            self._engine.wait_for_turns()
        return finished

    def step_at_once(self) -> Finished | None:
        """`step`, which leaves it to the caller to wait for tokens: see `Engine.wait_for_turns`."""
        with self._fatal():
            while self._engine.has_work:
                plan = self._engine.plan()
                if plan is None:
                    break
                self._under_way.append((plan, self._start(plan)))
                if len(self._under_way) > self._lag:
                    break
            if self._under_way:
                return self._finish()
            return None

    def drain(self) -> list[Finished]:
        """Finish what is under way, and plan nothing. What it raises is the end, too."""
        with self._fatal():
            return [self._finish() for _ in range(len(self._under_way))]

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """Whatever is raised within leaves plans that nobody can finish any more."""
        try:
            yield
        except BaseException:
            self._engine.fail()
            self._under_way.clear()
            raise

    def _finish(self) -> Finished:
        plan, pending = self._under_way.popleft()
        result = pending.result()
        return Finished(plan, result, self._engine.finish(plan, result))

    def _execute(self, plan: StepPlan) -> Pending:
        return Done(self._engine.runner.execute(plan))
