"""The figures of a simulation for a person: tables, and a plot over time."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.errors import InvalidArgument
from paceline.sim.study import Study
from paceline.whole_file import result_file

FILE_WIDTH = 160  # where the output is no terminal and has no width of its own
COLUMNS = (
    "tenant", "weight", "arrived", "finished", "in time", "refused", "tokens", "ttft s p50", "p99", "tpot ms p50",
    "p99", "engine s", "/ weight", "rejected s", "preempted",
)  # fmt: skip


def render(study: Study, title: str) -> None:
    """Print a row for each tenant, and the totals below."""
    table = Table(title=title)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "tenant" else "right")
    for name, figures in study.tenants.items():
        told = figures.summary()
        first, after = told["time_to_first_token"], told["time_per_output_token"]
        table.add_row(
            name,
            f"{figures.weight:g}",
            *(str(told[key]) for key in ("arrived", "finished", "in_time", "refused", "completion_tokens")),
            *(_seconds(first[key]) for key in ("p50", "p99")),
            *(_seconds(after[key], 1000.0) for key in ("p50", "p99")),
            *(f"{told[key]:.1f}" for key in ("engine_seconds", "service", "rejected_seconds")),
            str(figures.preemptions),
        )
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table)
    summary = study.summary()
    console.print(
        f"{study.seconds:.1f} s, {study.steps} steps of {study.longest_step:.3f} s at most, "
        f"{summary['tokens_per_second']:.0f} tokens/s, {summary['requests_per_second']:.2f} requests/s, "
        f"in time {100.0 * summary['in_time']:.1f} % of those that ended, {summary['unfinished']} not ended"
    )
    for name, figures in study.tenants.items():
        if figures.too_large:
            console.print(
                f"{name}: {figures.too_large} of {figures.arrived} requests were refused since they can never fit: "
                "num_blocks of the engine, or max_blocks of the tenant, is less than a request may fill"
            )
    service, bound = summary["backlogged_service"], study.service_bound
    if len(service) > 1 and study.backlogged_seconds > bound and min(service.values()) > 0.0:
        shares = ", ".join(f"{name} {seconds:.1f}" for name, seconds in service.items())
        console.print(
            f"All had requests waiting for {study.backlogged_seconds:.0f} s, {study.backlogged_seconds / bound:.0f} "
            f"times the bound of {bound:.1f} s. Seconds of service over weight meanwhile: {shares}; largest over "
            f"smallest {max(service.values()) / min(service.values()):.3f}"
        )


def require_plots(path: Path) -> None:
    """Raises InvalidArgument without matplotlib."""
    if find_spec("matplotlib") is None:
        raise InvalidArgument("plot", path, "left out, unless paceline[plots] is installed")


def plot(study: Study, title: str, path: Path) -> None:
    """Write a PNG: requests running and waiting, drafts per decode, and free blocks over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    figure.suptitle(title)
    panels: Any = figure.subplots(3, 1, sharex=True)
    times = [moment.time for moment in study.moments]
    for name in ("running", "waiting"):
        panels[0].plot(times, [getattr(moment, name) for moment in study.moments], label=name)
    panels[0].legend()
    panels[0].set_ylabel("requests")
    panels[1].plot(times, [moment.depth for moment in study.moments])
    panels[1].set_ylabel("drafts per decode")
    panels[2].plot(times, [moment.free_blocks for moment in study.moments])
    panels[2].set_ylabel("free blocks")
    panels[2].set_xlabel("seconds")
    with result_file(path) as file:
        figure.savefig(file, format="png")


def _seconds(value: float | None, factor: float = 1.0) -> str:
    return "" if value is None else f"{factor * value:.2f}"
