"""What following a grammar adds to a step."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from rich.progress import track
from rich.table import Table

from paceline.bench.console import console
from paceline.bench.ratio import median_ratio
from paceline.core.grammar import GrammarKind, GrammarSpec
from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.engine import Engine, GenerationRequest

SCHEMA = {
    "type": "array",
    "minItems": 1000,  # nobody comes to the end of it while it is measured
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "value": {"type": "integer", "minimum": -1000, "maximum": 1000},
            "kind": {"enum": ["function", "class", "module"]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z_]{1,12}$"}, "maxItems": 3},
        },
        "required": ["name", "value", "kind", "tags"],
        "additionalProperties": False,
    },
}


@dataclass(slots=True)
class GrammarTimes:
    """Milliseconds of a step, by round, without a grammar and with one."""

    depth: str
    plain: list[float] = field(default_factory=list)
    constrained: list[float] = field(default_factory=list)

    @property
    def overhead(self) -> float:
        """Share that the grammar adds: median over rounds."""
        return median_ratio(self.constrained, self.plain) - 1


def measure(
    engine: Engine,
    prompts: Sequence[str | tuple[int, ...]],
    depths: dict[str, SpeculationParams],
    streams: int,
    max_tokens: int,
    rounds: int,
) -> list[GrammarTimes]:
    """The same number of streams and drafts with and without a grammar, in turns: only the masks differ."""
    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    measured = [GrammarTimes(name) for name in depths]
    batch = [prompts[i % len(prompts)] for i in range(streams)]
    for number in track(range(-1, rounds), description="measuring"):
        for times in measured:
            plain = _milliseconds(engine, batch, depths[times.depth], None, max_tokens)
            constrained = _milliseconds(engine, batch, depths[times.depth], grammar, max_tokens)
            if number >= 0:
                times.plain.append(plain)
                times.constrained.append(constrained)
    return measured


def _milliseconds(
    engine: Engine,
    prompts: Sequence[str | tuple[int, ...]],
    speculation: SpeculationParams,
    grammar: GrammarSpec | None,
    max_tokens: int,
) -> float:
    """Median time of the steps in which every stream decodes."""
    stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
    for prompt in prompts:
        engine.add(GenerationRequest(prompt, SamplingParams(seed=7), stop, speculation, grammar=grammar))
    times = []
    while engine.has_work:
        decodes = [r for r in engine.scheduler.running.values() if r.output_token_ids]
        began = time.perf_counter()
        engine.step()
        if len(decodes) == len(prompts):
            times.append(1e3 * (time.perf_counter() - began))
    return float(median(times))


def render(measured: list[GrammarTimes], title: str) -> None:
    table = Table(title=title)
    for name in ("depth", "step, ms", "with a grammar, ms", "overhead %"):
        table.add_column(name, justify="right")
    for times in measured:
        row = f"{median(times.plain):.2f}", f"{median(times.constrained):.2f}", f"{100 * times.overhead:.1f}"
        table.add_row(times.depth, *row)
    console().print(table)
