"""Drives an engine as the server does, one step launched ahead, without an event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from paceline.core.plan import Pending, StepPlan
from paceline.engine import Engine
from paceline.engine.delta import Output


def drive(engine: Engine, launch: Callable[[StepPlan], Pending]) -> Iterator[list[Output]]:
    """Until no request is live; the books are checked after every step."""
    launched: deque[tuple[StepPlan, Pending]] = deque()
    while engine.has_work or launched:
        plan = engine.plan()
        if plan is not None:
            launched.append((plan, launch(plan)))
            if len(launched) == 1:
                continue
        assert launched, "nothing can be planned"
        oldest, pending = launched.popleft()
        yield engine.finish(oldest, pending.result())
        engine.check_invariants()
