"""What one request that the host has to sample costs all who share its steps."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from common import GREEDY, Bench
from drive import serve

from paceline.bench.depth import workload
from paceline.bench.throughput import AUTO, OFF
from paceline.core.method import Method
from paceline.core.params import SpeculationParams

BOUNDS = {OFF: SpeculationParams(Method.NONE), AUTO: SpeculationParams()}
PENALIZED = replace(GREEDY, frequency_penalty=0.1)  # of tokens that the host counts


def company(bench: Bench) -> dict[str, Any]:
    """A batch among itself and the same with a penalty for one of its streams, in turns within each round."""
    streams = bench.scale.company
    (batch,) = workload(bench.held_out(), streams, 1, GREEDY)
    batches = {"none": batch, "one": [(batch[0][0], PENALIZED), *batch[1:]]}
    rates: dict[str, dict[str, list[float]]] = {name: {who: [] for who in batches} for name in BOUNDS}
    for _ in bench.rounds(least=3):
        for name, bounds in BOUNDS.items():
            for who, streamed in batches.items():
                rates[name][who].append(serve(bench.engine, streamed, bounds, bench.scale.max_tokens).rate)
    rows, ratios = [], {}
    for name, by_batch in rates.items():
        alone, beside = by_batch["none"][1:], by_batch["one"][1:]  # the first round meets the shapes
        ratios[name] = median(mine / its for mine, its in zip(beside, alone, strict=True))
        rows.append((name, f"{median(alone):.1f}", f"{median(beside):.1f}", f"{ratios[name]:.3f}"))
    columns = "speculation", "tok/s", "with a penalty", "with it / without"
    bench.table(f"one penalized among {streams}", columns, rows)
    return {"streams": streams, "rates": rates, "ratios": ratios}
