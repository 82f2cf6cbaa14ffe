"""A report for people (a table) and for programs (JSON with the keys of `vllm bench serve`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline_loadtest.metrics import Report, SpeculationTotals

_ROWS: Final = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "icl": "inter-message latency",
    "e2el": "end to end",
    "arrival_ttft": "first token, from planned arrival",
    "arrival_e2el": "end to end, from planned arrival",
}


def to_json(report: Report, *, date: datetime, metadata: Mapping[str, str] | None = None) -> dict[str, object]:
    """The report as JSON values.

    Keys and units are those of `vllm bench serve`: statistics in ms, lists in seconds with one entry per request (0 or
    empty where it failed), `spec_decode_acceptance_rate` in percent and absent, as its fellows, when nothing was
    drafted. `start_times` are seconds after the start. Where the run was `interrupted`, lists have an entry per request
    that had ended. `metadata` is merged in, but replaces nothing.
    """
    config, options, records = report.config, report.config.options, report.records
    result: dict[str, object] = {
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "num_prompts": config.num_prompts,
        "request_rate": _finite(config.request_rate),
        "burstiness": _finite(config.burstiness),
        "max_concurrency": config.max_concurrency,
        "num_warmups": config.num_warmups,
        "max_tokens": list(config.max_tokens),
        "seed": config.seed,
        **{name: _finite(value) for name, value in asdict(options).items()},
        "interrupted": report.interrupted,
        "duration": report.duration,
        "completed": report.completed,
        "failed": report.failed,
        "total_input_tokens": report.total_input_tokens,
        "total_output_tokens": report.total_output_tokens,
        "request_throughput": report.request_throughput,
        "output_throughput": report.output_throughput,
        "total_token_throughput": report.total_token_throughput,
        "max_concurrent_requests": report.max_concurrent_requests,
        "errors_by_code": dict(report.errors_by_code),
        "input_lens": [record.input_tokens for record in records],
        "output_lens": [record.output_tokens if record.completed else 0 for record in records],
        "ttfts": [record.ttft if record.completed else 0.0 for record in records],
        "itls": [list(record.itls) if record.completed else [] for record in records],
        "latencies": [record.latency if record.completed else 0.0 for record in records],
        "arrival_times": [record.arrival for record in records],
        "start_times": [record.sent for record in records],
        "errors": [record.error if record.completed else f"{record.error_code}: {record.error}" for record in records],
    }
    for name, distribution in report.distributions.items():
        result |= {f"{statistic}_{name}_ms": value for statistic, value in asdict(distribution).items()}
    if report.speculation is not None:
        result |= _speculation_json(report.speculation)
    return dict(metadata or {}) | result


def _finite(value: object) -> object:
    """JSON has no infinity."""
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def _speculation_json(totals: SpeculationTotals) -> dict[str, object]:
    return {
        "spec_decode_acceptance_rate": 100 * totals.acceptance_rate,
        "spec_decode_acceptance_length": totals.acceptance_length,
        "spec_decode_num_drafts": totals.num_drafts,
        "spec_decode_draft_tokens": totals.draft_tokens,
        "spec_decode_accepted_tokens": totals.accepted_tokens,
        "spec_decode_per_position_acceptance_rates": list(totals.per_position),
        "spec_decode_mean_depth": totals.mean_depth,
    }


def render(report: Report) -> RenderableType:
    """The report as tables for a terminal."""
    parts = [_totals(report), _latencies(report)]
    if report.errors_by_code:
        parts.append(_errors(report))
    return Group(*parts)


def _totals(report: Report) -> Table:
    table = Table("requests and tokens", "")
    table.columns[1].justify = "right"
    if report.interrupted:
        table.add_row("interrupted", f"after {len(report.records)} of {report.config.num_prompts} requests")
    table.add_row("completed / failed", f"{report.completed} / {report.failed}")
    table.add_row("duration", f"{report.duration:.2f} s")
    table.add_row("most requests at once", str(report.max_concurrent_requests))
    table.add_row("input / output tokens", f"{report.total_input_tokens} / {report.total_output_tokens}")
    table.add_row("requests per second", f"{report.request_throughput:.2f}")
    table.add_row("output tokens per second", f"{report.output_throughput:.1f}")
    table.add_row("all tokens per second", f"{report.total_token_throughput:.1f}")
    if (totals := report.speculation) is not None:
        positions = " ".join(f"{rate:.2f}" for rate in totals.per_position)
        table.add_section()
        table.add_row("acceptance rate", f"{100 * totals.acceptance_rate:.1f} %")
        table.add_row("acceptance length", f"{totals.acceptance_length:.2f}")
        table.add_row("mean depth", f"{totals.mean_depth:.2f}")
        table.add_row("acceptance by position", positions)
    return table


def _latencies(report: Report) -> Table:
    statistics = ("mean", "std", "p50", "p90", "p99")
    table = Table("latency in ms", *statistics)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, label in _ROWS.items():
        # In a closed loop nothing is planned to arrive: the two rows would repeat others.
        if report.config.closed_loop and name.startswith("arrival_"):
            continue
        values = asdict(report.distributions[name])
        table.add_row(label, *(f"{values[statistic]:.1f}" for statistic in statistics))
    return table


def _errors(report: Report) -> Table:
    table = Table("error", "requests", "first message")
    for code, count in report.errors_by_code.items():
        first = next(record.error for record in report.records if record.error_code == code)
        table.add_row(code, str(count), Text(first))  # a server's words, not markup
    return table
