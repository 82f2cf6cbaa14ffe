"""Are drafts accepted as often as the engine expects? Predicted before each step, observed after it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rich.table import Table

from paceline.bench.console import console, verdict
from paceline.bench.prompts import encode
from paceline.bench.throughput import run
from paceline.core.calibration import Calibration
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, Verification
from paceline.engine import Engine
from paceline.whole_file import result_file

MOST_GAP = 0.03  # between what was predicted and what was observed
MIN_COUNT = 200  # drafts that a position needs before its gap counts

Calibrations: TypeAlias = dict[tuple[Method, Verification], Calibration]


def measure(
    engine: Engine, prompts: Sequence[str | tuple[int, ...]], max_tokens: int, sampling: SamplingParams
) -> Calibrations:
    """Serve every prompt, as many at once as the engine takes; what was predicted and observed by each drafter that
    drafted.
    """
    encoded = encode(engine, prompts)
    run(engine, encoded, max_tokens, SpeculationParams(), sampling)
    control = engine.scheduler.speculation
    every = {key: control.calibration(*key) for key in itertools.product(Method, Verification)}
    return {key: calibration for key, calibration in every.items() if calibration.by_position()}


def missed(calibrations: Calibrations) -> list[str]:
    """Each drafter with a gap that is too large, in words."""
    gaps = {key: calibration.largest_gap(MIN_COUNT) for key, calibration in calibrations.items()}
    return [
        f"{_name(*key)}: a gap of {gap:.3f} at a position with {MIN_COUNT} drafts or more, above {MOST_GAP}"
        for key, gap in gaps.items()
        if gap > MOST_GAP
    ]


def _name(method: Method, rule: Verification) -> str:
    return f"{method}, {rule}"


def render(calibrations: Calibrations, title: str) -> None:
    out = console()
    table = Table(title=title)
    for column in ("drafter", "position", "drafts", "predicted", "observed", "gap", ""):
        table.add_column(column, justify="right")
    for key, calibration in calibrations.items():
        for position, reached in enumerate(calibration.by_position(), 1):
            rates = f"{reached.predicted:.3f}", f"{reached.observed:.3f}", f"{reached.gap:+.3f}"
            wrong = reached.drafts >= MIN_COUNT and abs(reached.gap) > MOST_GAP
            table.add_row(_name(*key), str(position), str(reached.drafts), *rates, "!" if wrong else "")
        table.add_section()
    out.print(table)
    for line in verdict(missed(calibrations)):
        out.print(line, highlight=False)


def to_json(calibrations: Calibrations, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "settings": settings,
        "drafters": [
            {
                "method": method,
                "rule": rule,
                "by_position": [reached._asdict() for reached in calibration.by_position()],
                "by_bin": [reached._asdict() for reached in calibration.by_bin()],
                "largest_gap": calibration.largest_gap(MIN_COUNT),
            }
            for (method, rule), calibration in calibrations.items()
        ],
        "missed": missed(calibrations),
    }


def plot(calibrations: Calibrations, title: str, path: Path) -> None:
    """Write a PNG: observed over predicted, and both by position."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_bin, by_position = figure.subplots(1, 2)
    by_bin.plot([0, 1], [0, 1], color="grey", linewidth=1)
    for number, (key, calibration) in enumerate(calibrations.items()):
        bins, positions = calibration.by_bin(), calibration.by_position()
        places, color = range(1, len(positions) + 1), f"C{number}"
        by_bin.plot([b.predicted for b in bins], [b.observed for b in bins], "o-", color=color, label=_name(*key))
        predicted, observed = ([getattr(p, name) for p in positions] for name in ("predicted", "observed"))
        by_position.plot(places, predicted, "s--", color=color, label=f"{_name(*key)}: predicted")
        by_position.plot(places, observed, "o-", color=color, label="observed")
    by_bin.set(xlabel="predicted", ylabel="observed", xlim=(0, 1.02), ylim=(0, 1.02))
    by_position.set(xlabel="position", ylabel="acceptance", ylim=(0, 1.02))
    for panel in (by_bin, by_position):
        panel.legend(fontsize=8)
    figure.suptitle(title)
    with result_file(path) as file:
        figure.savefig(file, dpi=120, format="png")
