"""What `paceline doctor` finds out, and how it is said."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.device import Gpu, find_gpu
from paceline.doctor.costs import CONTEXT, DEPTHS, Costs, find_costs
from paceline.doctor.facts import Fact, find_facts, native_obstacle
from paceline.doctor.rates import ROWS, GpuMeasured, Measured, measure, measure_gpu
from paceline.errors import InvalidArgument
from paceline.wiring import EngineSettings, build_engine, check_engine


@dataclass(slots=True)
class Report:
    facts: list[Fact]
    measured: Measured | None = None  # None where nothing was measured
    gpu: GpuMeasured | None = None  # None without one, too
    costs: Costs | None = None  # None without a model


def examine(quick: bool = False, model: str | None = None, draft: str = "none") -> Report:
    """Find out everything; unless `quick`, measure too, which takes about a minute. With a model, what its steps cost.

    Raises:
        PacelineError: whatever `build_engine` refuses; a draft without a model.
    """
    settings = None if model is None else EngineSettings(model=model, draft=draft)
    if settings is not None:
        check_engine(settings)
    elif draft != "none":
        raise InvalidArgument("draft", draft, "given with --model: without one, nobody drafts")
    missing, gpu = native_obstacle(), find_gpu()
    report = Report(find_facts(missing, gpu))
    if missing is None and not quick:
        report.measured = measure()
    if isinstance(gpu, Gpu) and not quick:
        report.gpu = measure_gpu()
    if settings is not None:
        report.costs = find_costs(build_engine(settings))
    return report


def render(report: Report) -> None:
    console = Console()
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")
    for fact in report.facts:
        table.add_row(fact.name, fact.value)
    console.print(table)
    if report.measured is not None:
        _render_measured(report.measured, console)
    if report.gpu is not None:
        console.print(
            f"\nthe GPU copies {report.gpu.copy:.0f} GB/s (read and written together) and multiplies "
            f"{report.gpu.multiply:.0f} TFLOP/s in bf16"
        )
    if report.costs is not None:
        _render_costs(report.costs, console)
    console.print()
    for fact in report.facts:
        if fact.advice is not None:
            console.print(f"[bold]{fact.name}[/bold]: {fact.advice}", highlight=False)


def _render_measured(measured: Measured, console: Console) -> None:
    console.print(f"\nreads {measured.read:.1f} GB/s, with one thread {measured.read_one_thread:.1f} GB/s")
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in measured.multiply.items())
    console.print(f"computes in registers, GFLOP/s: {rates}")
    console.print("products read their weights, at so many % of that:")
    table = Table(box=None)
    table.add_column("")
    for rows in ROWS:
        table.add_column("1 row" if rows == 1 else f"{rows} rows", justify="right")
    for kind in dict.fromkeys(figure.kind for figure in measured.linear):
        table.add_row(kind, *(f"{100 * figure.fraction:.0f}" for figure in measured.linear if figure.kind == kind))
    console.print(table)


def _render_costs(costs: Costs, console: Console) -> None:
    console.print(f"\na step of sequences with {CONTEXT} tokens each, ms:")
    table = Table(box=None)
    for heading in ("sequences", *(f"depth {depth}" for depth in DEPTHS), "one more draft pass"):
        table.add_column(heading, justify="right")
    for step in costs.steps:
        cells = [f"{milliseconds:.2f}" for milliseconds in step.steps.values()]
        table.add_row(str(step.sequences), *cells, f"{step.draft_pass:.2f}")
    console.print(table)
    for kind, error in costs.errors.items():
        console.print(
            f"{kind} steps: predicted within {100 * error.median:.0f} % (median of {error.count}); the same step "
            f"taken again differs by {100 * error.repeatability:.0f} %",
            highlight=False,
        )


def to_json(report: Report) -> dict[str, Any]:
    """`facts` by name; `measured`, `gpu` and `costs`, null where there are none."""
    return {
        "facts": {fact.name: {"value": fact.value, "advice": fact.advice} for fact in report.facts},
        "measured": None if report.measured is None else asdict(report.measured),
        "gpu": None if report.gpu is None else asdict(report.gpu),
        "costs": None if report.costs is None else asdict(report.costs),
    }
