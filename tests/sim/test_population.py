"""Simulated requests: drawn as the file says, equal for equal seeds, and traces with every mistake told."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import InvalidArgument
from paceline.sim.population import Population, SimulatedRequest
from paceline.sim.spec import SimulationFile, read_simulation


def drawn(**values: Any) -> list[SimulatedRequest]:
    return list(Population(SimulationFile.model_validate(values)).arrivals())


def gaps(requests: list[SimulatedRequest]) -> np.ndarray:
    return np.diff([request.time for request in requests])


def test_equal_seeds_draw_equally() -> None:
    assert drawn(requests=50, seed=3) == drawn(requests=50, seed=3)
    assert drawn(requests=50, seed=3) != drawn(requests=50, seed=4)


def test_more_requests_change_none_of_the_first() -> None:
    assert drawn(requests=9000)[:4096] == drawn(requests=5000)[:4096]


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 2.5), ("gamma", 0.4)])
def test_gaps(kind: str, cv: float) -> None:
    found = gaps(drawn(requests=20_000, arrivals={"kind": kind, "rate": 5.0, "cv": cv}))
    assert found.mean() == pytest.approx(0.2, rel=0.1)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.1)


def test_lengths_and_acceptance() -> None:
    table = {
        "prompt_tokens": {"mean": 512, "cv": 0.5},
        "completion_tokens": {"mean": 128, "most": 200},
        "acceptance": 0.6,
        "acceptance_spread": 0.1,
    }
    requests = drawn(requests=20_000, tenants={"a": table})
    prompts = np.array([request.prompt_tokens for request in requests])
    assert prompts.mean() == pytest.approx(512, rel=0.02)
    assert prompts.std() / prompts.mean() == pytest.approx(0.5, rel=0.05)
    assert max(request.completion_tokens for request in requests) == 200
    rates = np.array([request.acceptance for request in requests])
    assert (rates.mean(), rates.std()) == pytest.approx((0.6, 0.1), abs=0.01)


def test_lengths_fit_the_model() -> None:
    requests = drawn(requests=500, engine={"max_model_len": 300})
    assert all(request.prompt_tokens + request.completion_tokens <= 300 for request in requests)
    assert all(request.prompt_tokens >= 1 and request.completion_tokens >= 1 for request in requests)


def test_shares_and_starts() -> None:
    tenants = {"a": {"share": 3}, "b": {"share": 1}, "late": {"share": 4, "start": 50.0}}
    requests = drawn(requests=8000, arrivals={"rate": 80.0}, tenants=tenants)
    times = {name: [one.time for one in requests if one.tenant == name] for name in tenants}
    assert len(times["a"]) / len(times["b"]) == pytest.approx(3.0, rel=0.1)
    assert min(times["late"]) >= 50.0
    assert len(times["late"]) == pytest.approx(2000, rel=0.1)


def test_deadlines_in_seconds_and_as_multiples() -> None:
    machine = {"target_pass": 0.1, "free_rows": 8}
    engine = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    lengths = {"prompt_tokens": {"mean": 32, "cv": 0}, "completion_tokens": {"mean": 11, "cv": 0}}
    alone = 2 * 0.2 + 10 * 0.1  # two steps of 16 rows, and a step for each token after the first
    for given, least, most in (("deadline", 3.0, 5.0), ("slowdown", 3.0 * alone, 5.0 * alone)):
        tenants = {"a": {**lengths, given: [3, 5]}}
        wanted = [one.within for one in drawn(requests=400, machine=machine, engine=engine, tenants=tenants)]
        assert min(w for w in wanted if w is not None) == pytest.approx(least, rel=0.02)
        assert max(w for w in wanted if w is not None) == pytest.approx(most, rel=0.02)
        assert all(w is not None and least <= w <= most for w in wanted)


def test_a_backlog_has_no_end_and_streams_differ() -> None:
    file = SimulationFile.model_validate({"tenants": {"a": {}, "b": {}}})
    first, again, other = (list(itertools.islice(Population(file, stream).backlog("a"), 5000)) for stream in (1, 1, 2))
    assert first == again != other
    assert {one.tenant for one in first} == {"a"}


def trace(tmp_path: Path, lines: list[str]) -> SimulationFile:
    """A file that names a trace beside it."""
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    path = tmp_path / "sim.toml"
    path.write_text('[arrivals]\nkind = "trace"\nfile = "trace.jsonl"\n[tenants.a]\n')
    return read_simulation(path)


def line(**values: object) -> str:
    return json.dumps({"time": 1.0, "tenant": "a", "prompt": 5, "completion": 6} | values)


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    file = trace(tmp_path, [line(time=2), line(time=0.5, prompt=7), line()])
    requests = list(Population(file).arrivals())
    assert [(one.time, one.prompt_tokens, one.completion_tokens) for one in requests] == [
        (0.5, 7, 6),
        (1, 5, 6),
        (2, 5, 6),
    ]


BAD = [
    line(tenant="b"),
    line(time=-1),
    line(time=float("inf")),
    line(time=10**400),
    line(prompt=0),
    line(completion=1.5),
    line(prompt=9000),
    line(tenant=["a"]),
    "{}",
    "[1]",
    "nonsense",
]


def test_every_bad_line_of_a_trace_is_told(tmp_path: Path) -> None:
    lines = [text for bad in BAD for text in (line(), bad)]
    with pytest.raises(InvalidArgument) as caught:
        list(Population(trace(tmp_path, lines)).arrivals())
    told = str(caught.value)
    assert f"{len(BAD)} mistakes" in told
    for number in range(1, len(lines) + 1):
        assert (f"line {number} = " in told) == (number % 2 == 0), told


@pytest.mark.parametrize("lines", [[], ["", " "]])
def test_a_trace_of_nothing_is_refused(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(InvalidArgument, match=r"arrivals\.file = '.*trace.jsonl': must be a trace of at least one"):
        list(Population(trace(tmp_path, lines)).arrivals())


def test_blank_lines_of_a_trace_are_skipped_and_counted(tmp_path: Path) -> None:
    file = trace(tmp_path, ["", line(), "  ", line(time=2), line(time=3), ""])
    two = file.model_copy(update={"requests": 2})
    assert [request.time for request in Population(two).arrivals()] == [1, 2]
    with pytest.raises(InvalidArgument, match="line 3 = "):
        list(Population(trace(tmp_path, ["", "", "x"])).arrivals())


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    file = trace(tmp_path, [])
    (tmp_path / "trace.jsonl").unlink()
    with pytest.raises(InvalidArgument, match="readable file"):
        list(Population(file).arrivals())
