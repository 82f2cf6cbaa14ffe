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
class Cell:
    """Milliseconds of a step, by round, without a grammar and with one."""

    depth: str
    plain: list[float] = field(default_factory=list)
    constrained: list[float] = field(default_factory=list)

    @property
    def overhead(self) -> float:
        """Share that the grammar adds: median over rounds."""
        return float(median(b / a - 1 for a, b in zip(self.plain, self.constrained, strict=True)))


def measure(
    engine: Engine,
    prompts: Sequence[str | tuple[int, ...]],
    depths: dict[str, SpeculationParams],
    streams: int,
    max_tokens: int,
    rounds: int,
) -> list[Cell]:
    """The same number of streams and drafts with and without a grammar, in turns: only the masks differ."""
    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    cells = [Cell(name) for name in depths]
    batch = [prompts[i % len(prompts)] for i in range(streams)]
    for number in track(range(-1, rounds), description="measuring"):
        for cell in cells:
            plain = _milliseconds(engine, batch, depths[cell.depth], None, max_tokens)
            constrained = _milliseconds(engine, batch, depths[cell.depth], grammar, max_tokens)
            if number >= 0:
                cell.plain.append(plain)
                cell.constrained.append(constrained)
    return cells


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


def render(cells: list[Cell], title: str) -> None:
    table = Table(title=title)
    for name in ("depth", "step, ms", "with a grammar, ms", "overhead %"):
        table.add_column(name, justify="right")
    for cell in cells:
        row = f"{median(cell.plain):.2f}", f"{median(cell.constrained):.2f}", f"{100 * cell.overhead:.1f}"
        table.add_row(cell.depth, *row)
    console().print(table)
