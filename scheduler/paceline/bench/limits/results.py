"""What is measured against the machine's limits, and how it is said."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich.table import Table

from paceline.bench.console import console
from paceline.bench.ratio import median_ratio

GIGA = 1e9


@dataclass(slots=True)
class Figure:
    """Work per second against a ceiling.

    Attributes:
        unit: of rate and ceiling, GB/s or GFLOP/s.
        work: bytes or operations of one call.
        seconds: of a call, by round.
        ceilings: work per second, of the same rounds.
    """

    group: str
    name: str
    unit: str
    work: float
    seconds: list[float] = field(default_factory=list)
    ceilings: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """The median over rounds, in the unit."""
        return self.work / median(self.seconds) / GIGA

    @property
    def ceiling(self) -> float:
        """The median over rounds, in the unit."""
        return median(self.ceilings) / GIGA

    @property
    def fraction(self) -> float:
        """Median over rounds of the rate over the ceiling of that round."""
        rounds = zip(self.seconds, self.ceilings, strict=True)
        return float(median(self.work / seconds / ceiling for seconds, ceiling in rounds))


@dataclass(slots=True)
class Passes:
    """Several draft passes in one call, against as many calls of a single one. Seconds by round."""

    depth: int
    single: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)

    @property
    def overhead(self) -> float:
        """Median over rounds of the time beyond that of the single passes, as a share of theirs."""
        return median_ratio(self.together, self.single) / self.depth - 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. Idle is a process that has imported what the engine's imports, and done nothing."""

    peak: int
    idle: int
    weights: int
    kv: int

    @property
    def ratio(self) -> float:
        """What serving takes over what weights and KV have to take."""
        return (self.peak - self.idle) / (self.weights + self.kv)


@dataclass(frozen=True, slots=True)
class Limits:
    figures: list[Figure]
    passes: list[Passes]
    memory: Memory | None


def render(limits: Limits, title: str) -> None:
    table = Table(title=title)
    for name in ("what", "of", "measured", "ceiling", "%"):
        table.add_column(name, justify="left" if name in ("what", "of") else "right")
    for figure in limits.figures:
        table.add_row(
            figure.group,
            figure.name,
            f"{figure.rate:.1f} {figure.unit}",
            f"{figure.ceiling:.1f} {figure.unit}",
            f"{100 * figure.fraction:.0f}",
        )
    out = console()
    out.print(table)
    for some in limits.passes:
        milliseconds = 1e3 * median(some.single)
        out.print(f"{some.depth} draft passes cost {some.depth} x {milliseconds:.3f} ms {100 * some.overhead:+.1f} %")
    if limits.memory is not None:
        memory = limits.memory
        out.print(
            f"memory: serving took {(memory.peak - memory.idle) / 2**20:.0f} MiB beyond an idle process, "
            f"{memory.ratio:.2f} x weights ({memory.weights / 2**20:.0f} MiB) and KV ({memory.kv / 2**20:.0f} MiB)"
        )


def to_json(limits: Limits, settings: dict[str, Any]) -> dict[str, Any]:
    memory = limits.memory
    return {
        "settings": settings,
        "figures": [
            {**asdict(figure), "rate": figure.rate, "ceiling": figure.ceiling, "fraction": figure.fraction}
            for figure in limits.figures
        ],
        "draft_passes": [{**asdict(some), "overhead": some.overhead} for some in limits.passes],
        "memory": None if memory is None else {**asdict(memory), "ratio": memory.ratio},
    }
