"""The native backend against torch, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from rich.progress import track
from rich.table import Table

from paceline.bench.console import console
from paceline.bench.prompts import encode
from paceline.bench.throughput import run
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.engine import Engine

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class BackendTimes:
    """Seconds by round, of the torch engine and of the native one."""

    streams: int
    depth: str
    torch: list[tuple[float, float]] = field(default_factory=list)  # (prefill, whole run)
    native: list[tuple[float, float]] = field(default_factory=list)

    def speedup(self, part: int) -> float:
        """Median over rounds of torch's time over the native backend's: 0 is the prefill, 1 the whole run."""
        rounds = zip(self.torch, self.native, strict=True)
        return float(median(torch[part] / native[part] for torch, native in rounds))


def measure(
    torch: Engine,
    native: Engine,
    prompts: Sequence[str | tuple[int, ...]],
    sizes: Sequence[int],
    depths: dict[str, SpeculationParams],
    max_tokens: int,
    rounds: int,
) -> list[BackendTimes]:
    """The same greedy streams on both engines, one after the other."""
    encoded = encode(torch, prompts)
    measured = [BackendTimes(size, name) for size in sizes for name in depths]
    for number in track(range(-1, rounds), description="measuring"):
        for times in measured:
            batch = [encoded[i % len(encoded)] for i in range(times.streams)]
            for engine, seconds in ((torch, times.torch), (native, times.native)):
                # The first time for whatever the last engine left in the caches.
                _, (prefill, _), (whole, _) = (
                    run(engine, batch, tokens, depths[times.depth], GREEDY) for tokens in (1, 1, max_tokens)
                )
                if number >= 0:
                    seconds.append((prefill, whole))
    return measured


def render(measured: list[BackendTimes], title: str) -> None:
    table = Table(title=title)
    for name in ("streams", "depth", "prefill, x torch", "whole run, x torch"):
        table.add_column(name, justify="right")
    for times in measured:
        table.add_row(str(times.streams), times.depth, f"{times.speedup(0):.2f}", f"{times.speedup(1):.2f}")
    console().print(table)
