"""What one request that asks for more than the model's own logits costs all who share its steps."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from drive import BOUNDS, serve
from rig import GREEDY, Rig

from paceline.bench.depth import workload
from paceline.bench.ratio import median_ratio

# The device penalises by itself; where there are bad words, the host chooses the tokens.
COMPANY = {"a penalty": replace(GREEDY, frequency_penalty=0.1), "bad words": replace(GREEDY, bad_words=("qzx",))}


def company(rig: Rig) -> dict[str, Any]:
    """A batch among itself, and the same where one of its streams asks for more, in turns within each round."""
    streams = rig.scale.company
    (batch,) = workload(rig.held_out(), streams, 1, GREEDY)
    batches = {"none": batch} | {who: [(batch[0][0], asked), *batch[1:]] for who, asked in COMPANY.items()}
    rates: dict[str, dict[str, list[float]]] = {name: {who: [] for who in batches} for name in BOUNDS}
    for _ in rig.rounds(least=3):
        for name, bounds in BOUNDS.items():
            for who, streamed in batches.items():
                rates[name][who].append(serve(rig.engine, streamed, bounds, rig.scale.max_tokens).rate)
    rows, ratios = [], {}
    for name, by_batch in rates.items():
        alone = by_batch["none"][1:]  # the first round meets the shapes
        ratios[name] = {who: median_ratio(by_batch[who][1:], alone) for who in COMPANY}
        rows.append((name, f"{median(alone):.1f}", *(f"{ratio:.3f}" for ratio in ratios[name].values())))
    columns = "speculation", "tok/s", *(f"with {who}" for who in COMPANY)
    rig.table(f"one of {streams} asks for more", columns, rows)
    return {"streams": streams, "rates": rates, "ratios": ratios}
