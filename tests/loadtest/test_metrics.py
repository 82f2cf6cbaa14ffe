"""Metrics by hand: every expected number below was computed on paper."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from paceline_loadtest import LoadConfig, RequestOptions, RequestRecord, summarize
from paceline_loadtest.clients import Outcome, SpeculationCounts
from paceline_loadtest.metrics import Distribution, SpeculationTotals, describe, percentile
from paceline_loadtest.report import render, to_json

# Sent 0.5 s late. First token 1 s after sending; 5 tokens in 3 messages; over 4 s after sending.
FAST = RequestRecord(
    index=0,
    arrival=0.5,
    sent=1.0,
    ended=5.0,
    chunk_times=(2.0, 3.0, 5.0),
    chunk_tokens=(2, 1, 2),
    outcome=Outcome(10, 5, "eos", SpeculationCounts(3, 6, 2, (2, 0))),
)
# On time, one token, no drafts.
SHORT = RequestRecord(
    index=1,
    arrival=2.0,
    sent=2.0,
    ended=5.0,
    chunk_times=(4.5,),
    chunk_tokens=(1,),
    outcome=Outcome(20, 1, "max_tokens", SpeculationCounts(1, 2, 2, (1, 0, 1))),
)
FAILED = RequestRecord(
    index=2,
    arrival=3.0,
    sent=5.0,
    ended=10.0,
    chunk_times=(6.0,),
    chunk_tokens=(4,),
    error_code="UNAVAILABLE",
    error="[bold]engine lost",
)
CONFIG = LoadConfig(num_prompts=3, request_rate=1.0, seed=9)


def test_one_request() -> None:
    assert (FAST.latency, FAST.ttft, FAST.input_tokens, FAST.output_tokens) == (4.0, 1.0, 10, 5)
    assert FAST.tpot == (4.0 - 1.0) / (5 - 1)
    assert FAST.icls == (1.0, 2.0)
    assert FAST.itls == (1.0, 1.0, 1.0)  # 1 s for one token, then 2 s for two


def test_one_token_has_no_time_per_token() -> None:
    assert (SHORT.tpot, SHORT.itls, SHORT.icls) == (0.0, (), ())


def test_no_token_at_all() -> None:
    empty = RequestRecord(index=0, arrival=0.0, sent=0.0, ended=1.0)
    assert (empty.ttft, empty.tpot, empty.output_tokens) == (0.0, 0.0, 0)
    distributions = summarize(CONFIG, [empty]).distributions
    assert distributions["ttft"] == Distribution()  # and not a TTFT of zero, which would flatter
    assert distributions["e2el"].mean == 1000.0


def test_without_an_outcome_received_tokens_count() -> None:
    assert (FAILED.output_tokens, FAILED.input_tokens) == (4, 0)


def test_totals_are_those_of_completed_requests() -> None:
    report = summarize(CONFIG, [FAST, SHORT, FAILED])
    assert (report.completed, report.failed, report.duration) == (2, 1, 10.0)
    assert (report.total_input_tokens, report.total_output_tokens) == (30, 6)
    assert (report.request_throughput, report.output_throughput, report.total_token_throughput) == (0.2, 0.6, 3.6)
    assert report.errors_by_code == {"UNAVAILABLE": 1}
    assert report.max_concurrent_requests == 2  # the failed one starts as the others end


def test_latencies_start_at_sending_and_at_the_planned_arrival() -> None:
    distributions = summarize(CONFIG, [FAST, SHORT, FAILED]).distributions
    means = {name: distribution.mean for name, distribution in distributions.items()}
    assert means == {
        "ttft": 1750.0,  # 1, 2.5
        "tpot": 750.0,  # 0.75; SHORT has none
        "itl": 1000.0,
        "icl": 1500.0,
        "e2el": 3500.0,  # 4, 3
        "arrival_ttft": 2000.0,  # 1.5, 2.5
        "arrival_e2el": 3750.0,  # 4.5, 3
    }


def test_speculation() -> None:
    totals = summarize(CONFIG, [FAST, SHORT, FAILED]).speculation
    assert totals == SpeculationTotals(4, 8, 4, (0.75, 0.0, 0.25))
    assert (totals.acceptance_rate, totals.acceptance_length, totals.mean_depth) == (0.5, 2.0, 2.0)


def test_nothing_drafted_is_no_speculation() -> None:
    silent = RequestRecord(0, 0.0, 0.0, 1.0, outcome=Outcome(1, 1, "eos", SpeculationCounts(0, 0, 0, ())))
    assert summarize(CONFIG, [silent]).speculation is None


def test_statistics() -> None:
    assert asdict(describe([0.004, 0.001, 0.003, 0.002])) == pytest.approx(
        {"mean": 2.5, "median": 2.5, "std": math.sqrt(1.25), "p50": 2.5, "p90": 3.7, "p99": 3.97}
    )
    assert describe([]) == Distribution()


@pytest.mark.parametrize(("percent", "expected"), [(0, 10.0), (25, 15.0), (50, 20.0), (75, 35.0), (100, 50.0)])
def test_percentiles_are_interpolated(percent: float, expected: float) -> None:
    assert percentile([10.0, 20.0, 50.0], percent) == expected


def test_percentile_of_one() -> None:
    assert percentile([3.0], 99) == 3.0


def test_nothing_completed() -> None:
    report = summarize(CONFIG, [FAILED])
    assert (report.completed, report.output_throughput) == (0, 0.0)
    assert report.distributions["ttft"] == Distribution()
    assert summarize(CONFIG, []).duration == 0.0


def report_json(config: LoadConfig = CONFIG) -> dict[str, Any]:
    report = summarize(config, [FAST, SHORT, FAILED])
    date = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    result = to_json(report, date=date, metadata={"gpu": "none", "completed": "never"})
    return dict(json.loads(json.dumps(result, allow_nan=False)))


def test_json_has_the_keys_of_vllm_bench_serve() -> None:
    result = report_json()
    statistics = ("mean", "median", "std", "p50", "p90", "p99")
    expected = {f"{statistic}_{name}_ms" for statistic in statistics for name in ("ttft", "tpot", "itl", "e2el")}
    expected |= {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"}
    expected |= {"output_throughput", "total_token_throughput", "max_concurrent_requests", "date", "num_prompts"}
    expected |= {"request_rate", "burstiness", "max_concurrency", "input_lens", "output_lens", "ttfts", "itls"}
    expected |= {"start_times", "errors", "spec_decode_acceptance_rate", "spec_decode_acceptance_length"}
    expected |= {"spec_decode_num_drafts", "spec_decode_draft_tokens", "spec_decode_accepted_tokens"}
    expected |= {"spec_decode_per_position_acceptance_rates"}
    assert expected <= result.keys()


def test_json_values() -> None:
    result = report_json()
    assert (result["date"], result["seed"], result["temperature"]) == ("20260102-030405", 9, 0.0)
    assert (result["completed"], result["gpu"]) == (2, "none"), "metadata replaces nothing"
    assert (result["input_lens"], result["output_lens"]) == ([10, 20, 0], [5, 1, 0])
    assert (result["ttfts"], result["itls"]) == ([1.0, 2.5, 0.0], [[1.0, 1.0, 1.0], [], []])
    assert (result["latencies"], result["start_times"]) == ([4.0, 3.0, 0.0], [1.0, 2.0, 5.0])
    assert (result["errors"], result["errors_by_code"]) == (
        ["", "", "UNAVAILABLE: [bold]engine lost"],
        {"UNAVAILABLE": 1},
    )
    assert (result["spec_decode_acceptance_rate"], result["spec_decode_acceptance_length"]) == (50.0, 2.0)
    assert result["spec_decode_per_position_acceptance_rates"] == [0.75, 0.0, 0.25]


def test_json_has_no_infinity() -> None:
    result = report_json(LoadConfig(num_prompts=3, burstiness=math.inf, options=RequestOptions(timeout=math.inf)))
    assert (result["request_rate"], result["burstiness"], result["timeout"]) == ("inf", "inf", "inf")


def rendered(config: LoadConfig) -> str:
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(render(summarize(config, [FAST, SHORT, FAILED])))
    return capture.get()


def test_table() -> None:
    text = rendered(CONFIG)
    assert "2 / 1" in text
    assert "acceptance length" in text
    assert "from planned arrival" in text
    assert "[bold]engine lost" in text, "a server's words are not markup"


def test_a_closed_loop_has_no_planned_arrivals() -> None:
    assert "from planned arrival" not in rendered(LoadConfig(num_prompts=3, max_concurrency=1))
