"""The runner of an engine, for benchmarks that change what it does on the host."""

from __future__ import annotations

from paceline.engine import Engine
from paceline.errors import FailedPrecondition
from paceline.runner import ModelRunner


def host_runner(engine: Engine, what: str) -> ModelRunner:
    """Raises FailedPrecondition where steps are launched on a device, which would not notice.

    Args:
        what: is asked for, as errors call it.
    """
    if not isinstance(engine.runner, ModelRunner):
        raise FailedPrecondition(f"{what}: on the host alone; device = cpu or backend = torch has it")
    return engine.runner
