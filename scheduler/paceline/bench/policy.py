"""Rules for the depth against the best that any stationary rule could earn, under true chances and true prices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import track
from rich.table import Table

from paceline.bench.baselines import BASELINES
from paceline.bench.console import console
from paceline.bench.number_lists import parse_numbers
from paceline.core.acceptance import AcceptanceModel
from paceline.core.adaptive_depth import MAX_DEPTH, AdaptiveDepth
from paceline.core.cost_model import CostModel
from paceline.core.depth_policy import DepthPolicy, FixedDepth
from paceline.sim.control import Population, best_stationary, roofline, simulate_control
from paceline.whole_file import result_file

TARGET_PASS = 0.020  # seconds; only ratios of rates are shown
MOST_RATIO = 1000  # of a draft pass over a target pass
ADAPTIVE = "adaptive"  # the rule that `auto` is in an engine
LEAST_OF_BEST = 0.97  # of the best rate, that the adaptive rule has to earn in the long run
MOST_REGRET = 0.02  # of the rate without speculation, that it may lose while it learns

Rates = tuple[float, ...]


def parse_rates(text: str) -> list[Rates]:
    """ "0.3,0.5/0.9" -> [(0.3,), (0.5, 0.9)]: one rate for all requests, or for each class. Raises InvalidArgument."""
    allowed = "numbers from 0 to 1, separated by commas, or by / where classes differ"
    classes = (parse_numbers("acceptance", part, lambda rate: 0 <= rate <= 1, allowed, "/") for part in text.split(","))
    return list(map(tuple, classes))


def parse_ratios(text: str) -> list[float]:
    """ "0.02,0.1" -> [0.02, 0.1]. Raises InvalidArgument."""
    allowed = f"numbers above 0, at most {MOST_RATIO}, separated by commas"
    return parse_numbers("ratio", text, lambda ratio: 0 < ratio <= MOST_RATIO, allowed)


@dataclass(frozen=True, slots=True)
class Score:
    """How one policy does in one cell.

    Attributes:
        share: of the best stationary rate, over the second half of the steps.
        regret: share of the rate without speculation that is lost over all steps, from the first on; below 0: gained.
        mean_depth: drafts per decode, over all steps.
    """

    share: float
    regret: float
    mean_depth: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid.

    Attributes:
        acceptance: by class, the same at every position.
        ratio: a draft pass over a target pass.
        best_rate, off_rate: tokens per second of the best stationary depths, and without drafts.
        best_depth: drafts per decode of the best.
        scores: by policy.
    """

    acceptance: Rates
    concurrency: int
    ratio: float
    best_rate: float
    off_rate: float
    best_depth: float
    scores: dict[str, Score]

    @property
    def name(self) -> str:
        """Acceptance, streams, ratio."""
        return f"{label(self.acceptance)}, {self.concurrency}, {self.ratio:g}"


def label(acceptance: Rates) -> str:
    return "/".join(f"{rate:g}" for rate in acceptance)


def unpriced(start: Callable[[], DepthPolicy]) -> Callable[[CostModel], DepthPolicy]:
    """A policy that asks no prices, made like one that does."""
    return lambda known: start()


# What makes each policy anew, from the prices that it may ask.
POLICIES: dict[str, Callable[[CostModel], DepthPolicy]] = {
    ADAPTIVE: lambda known: AdaptiveDepth(known, max_depth=MAX_DEPTH),
    "fixed-4": unpriced(lambda: FixedDepth(4)),
    **{name: unpriced(start) for name, start in BASELINES.items()},
}


def profiled(costs: CostModel) -> CostModel:
    """What a profile of these prices would know: tables at the usual buckets, inexact if a ridge lies between two."""
    return CostModel.from_functions(
        target=lambda rows: costs.target(rows, 0),
        draft_pass=lambda sequences: costs.draft_pass(1, sequences),
        per_draft_row=costs.draft_rows(1),
    )


def measure(
    acceptances: Sequence[Rates],
    sizes: Sequence[int],
    ratios: Sequence[float],
    free_rows: int,
    steps: int,
    tokens: int | None = None,
    seed: int = 0,
) -> list[Cell]:
    """Every policy in every cell, under the same draws.

    Args:
        free_rows: rows of a target pass that cost no more than one.
        tokens: after which a request ends and a new one comes; None: nobody ends.
    """
    grid = list(itertools.product(sizes, acceptances, ratios))
    return [
        _measure_cell(acceptance, size, ratio, free_rows, steps, tokens, seed)
        for size, acceptance, ratio in track(grid, description="simulating")
    ]


def _measure_cell(
    acceptance: Rates, size: int, ratio: float, free_rows: int, steps: int, tokens: int | None, seed: int
) -> Cell:
    population = Population(size, tuple((rate,) * MAX_DEPTH for rate in acceptance), tokens)
    costs = roofline(TARGET_PASS, free_rows, ratio)
    best = best_stationary(population.survivals(), costs)
    off_rate = size / costs.target(size, 0, size)
    scores = {}
    for name, start in POLICIES.items():
        # Baselines look at no estimate, so none is kept for them.
        estimator = AcceptanceModel() if name == ADAPTIVE else None
        known = profiled(costs)
        trace = simulate_control(population, costs, start(known), steps, estimator, known, seed)
        share = trace.expected_rate(steps // 2) / best.rate
        scores[name] = Score(share, 1.0 - trace.expected_rate() / off_rate, trace.mean_depth)
    return Cell(acceptance, size, ratio, best.rate, off_rate, sum(best.depths) / size, scores)


def missed(cells: list[Cell]) -> list[Cell]:
    """Where the adaptive rule earns too little in the long run or loses too much while it learns."""
    return [
        cell
        for cell in cells
        if cell.scores[ADAPTIVE].share < LEAST_OF_BEST or cell.scores[ADAPTIVE].regret > MOST_REGRET
    ]


def render(cells: list[Cell], title: str) -> None:
    """Print the median and the worst cells of each policy, then the cells where the adaptive rule misses a bound."""
    out = console()
    out.print(_by_policy(cells, title))
    table = _misses(missed(cells))
    out.print(table if table.row_count else f"{ADAPTIVE}: within both bounds in every cell")


def _by_policy(cells: list[Cell], title: str) -> Table:
    table = Table(title=f"{title}; cells by acceptance, streams, ratio")
    table.add_column("policy")
    for name in ("of best, median %", "worst %", "at", "lost to off, most %", "at"):
        table.add_column(name, justify="right")
    for name in cells[0].scores:
        worst = min(cells, key=lambda cell: cell.scores[name].share)
        losing = max(cells, key=lambda cell: cell.scores[name].regret)
        middle = median(cell.scores[name].share for cell in cells)
        share, regret = worst.scores[name].share, losing.scores[name].regret
        table.add_row(name, _percent(middle), _percent(share), worst.name, _percent(regret), losing.name)
    return table


def _misses(cells: list[Cell]) -> Table:
    bounds = f"below {_percent(LEAST_OF_BEST)} % of best or over {_percent(MOST_REGRET)} % lost to off"
    table = Table(title=f"{ADAPTIVE}: {bounds}")
    for name in ("cell", "of best %", "lost to off %", "depth", "best depth"):
        table.add_column(name, justify="right")
    for cell in cells:
        score = cell.scores[ADAPTIVE]
        depths = f"{score.mean_depth:.2f}", f"{cell.best_depth:.2f}"
        table.add_row(cell.name, _percent(score.share), _percent(score.regret), *depths)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:z.1f}"


def to_json(cells: list[Cell], settings: dict[str, Any]) -> dict[str, Any]:
    return {"settings": settings, "cells": [asdict(cell) for cell in cells]}


def plot(cells: list[Cell], title: str, path: Path) -> None:
    """Write a PNG: for each policy and number of streams, the share of the best rate by acceptance and ratio."""
    from matplotlib.figure import Figure

    names = list(cells[0].scores)
    sizes, acceptances, ratios = (
        list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("concurrency", "acceptance", "ratio")
    )
    shares = {(cell.concurrency, cell.acceptance, cell.ratio): cell.scores for cell in cells}
    figure = Figure(figsize=(2 + 2.4 * len(sizes), 1 + 2.0 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), len(sizes), squeeze=False, sharex=True, sharey=True)
    for name, row in zip(names, panels, strict=True):
        for size, panel in zip(sizes, row, strict=True):
            grid = [[shares[size, rates, ratio][name].share for ratio in ratios] for rates in acceptances]
            image = panel.imshow(grid, vmin=0.5, vmax=1.0, cmap="RdYlGn", aspect="auto", origin="lower")
            for y, x in itertools.product(range(len(acceptances)), range(len(ratios))):
                panel.text(x, y, f"{100 * grid[y][x]:.0f}", ha="center", va="center", fontsize=7)
            panel.set_title(f"{name}, {size} streams", fontsize=8)
            panel.set_xticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios], fontsize=7)
            panel.set_yticks(range(len(acceptances)), [label(rates) for rates in acceptances], fontsize=7)
    figure.colorbar(image, ax=panels, label="rate over the best stationary", shrink=0.5)
    figure.supxlabel("draft pass over target pass")
    figure.supylabel("acceptance")
    figure.suptitle(title)
    with result_file(path) as file:
        figure.savefig(file, dpi=120, format="png")
