"""`paceline sim`: the same file, the same figures; bad files; and small versions of what docs/simulating.md shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config_file import replaced
from paceline.errors import InvalidArgument
from paceline.sim import report
from paceline.sim.spec import SimulationFile, read_simulation
from paceline.sim.study import Study, run_study

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SHORT = {"prompt_tokens": {"mean": 40, "cv": 0.5}, "completion_tokens": {"mean": 12, "cv": 0.5}}
SMALL = {
    "requests": 60,
    "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512},
    "arrivals": {"rate": 20.0},
    "tenants": {"a": SHORT, "b": {**SHORT, "weight": 2.0, "deadline": [0.5, 3.0]}},
}


def simulated(**values: Any) -> SimulationFile:
    return SimulationFile.model_validate(SMALL | values)


def example(name: str, **changes: object) -> SimulationFile:
    return replaced(read_simulation(EXAMPLES / name), **changes)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# -- the same file, the same figures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["ours", "fcfs", "edf"])
def test_equal_files_and_seeds_give_equal_figures(policy: str) -> None:
    first, again, other = (run_study(simulated(policy=policy, seed=seed)).summary() for seed in (1, 1, 2))
    assert first == again
    assert first["tenants"] != other["tenants"]


def test_figures_do_not_depend_on_the_order_of_hashes(tmp_path: Path) -> None:
    """Two processes that hash names differently."""
    told = []
    for seed in ("1", "2"):
        out = tmp_path / f"{seed}.json"
        command = [sys.executable, "-m", "paceline", "sim", str(EXAMPLES / "flood.toml"), "--json", str(out)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([*command, "--requests", "80"], env=environment, check=True, capture_output=True, timeout=120)
        told.append(json.loads(out.read_text()))
    for one in told:
        del one["settings"]
    assert told[0] == told[1]


# -- the books --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["ours", "fcfs", "edf"])
def test_every_request_is_accounted_for(policy: str) -> None:
    told = 0

    def progress(count: int) -> None:
        nonlocal told
        told += count

    study = run_study(simulated(policy=policy, arrivals={"rate": 60.0}), progress)
    figures = study.tenants.values()
    assert sum(one.arrived for one in figures) == 60 == told
    assert all(one.arrived == one.finished + one.refused for one in figures)
    assert all(one.in_time <= one.finished for one in figures)
    assert study.tenants["a"].in_time == study.tenants["a"].finished, "no deadline, no delay"
    assert study.tenants["b"].refused > 0, "more than the machine can do: somebody is too late"


def test_charges_are_the_time_of_the_steps() -> None:
    """All at once, so that no step has to wait for an arrival."""
    study = run_study(simulated(arrivals={"kind": "backlog"}))
    assert sum(one.engine_seconds for one in study.tenants.values()) == pytest.approx(study.seconds)
    assert study.longest_step * study.steps >= study.seconds


def test_it_ends_when_the_time_is_over() -> None:
    study = run_study(simulated(seconds=1.0, arrivals={"rate": 60.0}))
    assert 1.0 <= study.seconds <= 1.0 + study.longest_step
    assert sum(one.finished for one in study.tenants.values()) < sum(one.arrived for one in study.tenants.values())


def test_what_still_waits_when_the_time_is_over_is_not_late() -> None:
    study = run_study(simulated(seconds=1.0, arrivals={"rate": 60.0}, tenants={"a": SHORT}))
    figures = study.tenants["a"]
    assert figures.finished + figures.refused < figures.arrived
    assert study.summary()["in_time"] == 1.0


def test_a_backlog_keeps_everybody_waiting() -> None:
    study = run_study(simulated(requests=300, arrivals={"kind": "backlog", "waiting": 8}))
    assert study.backlogged_seconds > 0.8 * study.seconds
    assert max(moment.waiting for moment in study.moments) <= 16
    assert study.moments[0].waiting >= 8


def test_time_to_the_first_token_counts_from_the_arrival() -> None:
    """A request that comes while a step runs waits for its end."""
    alone = {"prompt_tokens": {"mean": 4, "cv": 0}, "completion_tokens": {"mean": 200, "cv": 0}}
    study = run_study(simulated(requests=40, engine={"depth": "off"}, arrivals={"rate": 1.0}, tenants={"a": alone}))
    first = study.tenants["a"].first_token
    assert all(seconds >= 0.02 - 1e-6 for seconds in first), "a step of 20 ms reads the prompt"
    assert max(first) > 0.03, "and most come while another one runs"


def test_targets_for_the_first_token_count() -> None:
    table = {**SHORT, "time_to_first_token": 1e-6}
    figures = run_study(simulated(tenants={"a": table}, policy="fcfs")).tenants["a"]
    assert figures.arrived == 60
    assert figures.in_time == 0


def test_many_moments_are_thinned_out() -> None:
    study = run_study(simulated(requests=400, engine={"max_num_seqs": 1, "depth": "off"}))
    assert study.steps > 2000
    assert 400 <= len(study.moments) <= 800
    times = [moment.time for moment in study.moments]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(study.seconds, rel=0.02)


# -- the command ------------------------------------------------------------------------------------------------------


def test_what_is_printed_and_written(tmp_path: Path) -> None:
    trace = [{"time": 0.1 * index, "tenant": "a", "prompt": 20, "completion": 5} for index in range(10)]
    write(tmp_path / "trace.jsonl", "\n".join(map(json.dumps, trace)))
    costs = {"costs": SimulationFile().machine.costs().as_dict()}
    write(tmp_path / "costs.json", json.dumps(costs))
    text = '[machine]\nfile = "costs.json"\n[arrivals]\nkind = "trace"\nfile = "trace.jsonl"\n[tenants.a]\n'
    path = write(tmp_path / "sim.toml", text)
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["sim", str(path), "--policy", "edf", "--seed", "5", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "edf: sim.toml, seed 5" in result.output
    assert "in time 100.0 % of those that ended" in result.output
    told = json.loads(out.read_text())
    assert told["settings"]["seed"] == 5
    assert told["tenants"]["a"]["completion_tokens"] == 50


BAD = """
requests = 0
polcy = "ours"
[machine]
target_pass = -1
[engine]
max_num_seqs = 4096
depth = "deep"
[arrivals]
kind = "trace"
[tenants.a]
weight = -2
deadline = [3, 1]
[tenants.b]
burst_tokens = 5
[tenants.c]
deadline = [1, 2]
slowdown = [1, 2]
speculation = { min_depth = 4, max_depth = 2 }
"""
TOO_MUCH = """
[machine]
target_pass = 1e300
draft_pass = 1e-300
[engine]
num_blocks = 1000000000000
block_size = 1000000000000
max_num_seqs = 1000000000000
max_num_batched_tokens = 1000000000000
max_model_len = 1
[arrivals]
kind = "gamma"
rate = 1e-300
cv = 1e200
waiting = 1000000000000
[tenants.a]
share = 1e308
tokens_per_second = 1e-300
prompt_tokens = { mean = 1e300 }
time_to_first_token = 1e300
deadline = [1, 1e300]
"""
MISTAKES = (
    "requests = 0", "polcy = 'ours'", "machine.target_pass = -1", "engine.max_num_batched_tokens = 2048",
    "engine.depth = 'deep'", "arrivals.file = None", "tenants.a.weight = -2", "tenants.a.deadline = [3, 1]",
    "tenants.b.burst_tokens = 5", "tenants.c.slowdown = [1, 2]", "tenants.c.speculation.max_depth = 2",
)  # fmt: skip


def test_every_mistake_of_a_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_simulation(write(tmp_path / "bad.toml", BAD))
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + len(MISTAKES), lines
    for mistake in MISTAKES:
        assert any(one.strip().startswith(f"{mistake}: ") for one in lines), mistake


def test_what_cannot_be_computed_is_told_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_simulation(write(tmp_path / "bad.toml", TOO_MUCH))
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + TOO_MUCH.count(" = ") - 2, lines  # not the kind, and one in two places
    assert "must be greater than or equal to 2" in next(line for line in lines if "max_model_len" in line)


def test_arithmetic_that_never_binds() -> None:
    """However many rows are free."""
    few, many = (run_study(simulated(machine={"free_rows": rows})).summary() for rows in (2**20, 10**30))
    assert few["tenants"] == many["tenants"]


@pytest.mark.parametrize("option", ["--seed", "--requests"])
def test_options_out_of_range_are_told(option: str) -> None:
    result = CliRunner().invoke(app, ["sim", option, "-1"])
    assert isinstance(result.exception, InvalidArgument)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("machine.flops = 1", "machine.flops = 1: unknown key; known: file, target_pass, free_rows, draft_pass"),
        ("tenants.a.prompt_tokens = {mean = 1, x = 2}", "tenants.a.prompt_tokens.x = 2: unknown key; known: mean, cv"),
        ("tenants.a.prompt_tokens = {cv = 1}", "tenants.a.prompt_tokens.mean: must be given"),
        ("tenants.a.prompt_tokens = 3", "tenants.a.prompt_tokens = 3: must be a table"),
        ("tenants.a.deadline = 3", "tenants.a.deadline = 3: must be a list"),
        ("tenants.a.deadline = [1]", "tenants.a.deadline.1: must be given"),
        ("tenants.a.deadline = [1, 2, 3]", "tenants.a.deadline = [1, 2, 3]: must have at most 2 items"),
        ("arrivals.file = 3", "arrivals.file = 3: must be a path"),
    ],
)
def test_mistakes_are_told_in_the_words_of_toml(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_simulation(write(tmp_path / "bad.toml", text))
    [_, line] = str(caught.value).splitlines()
    assert line.strip().startswith(said)


@pytest.mark.parametrize(("text", "told"), [(None, "readable file"), ("{}", "a cost model"), ("?", "a cost model")])
def test_a_machine_that_is_none(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        write(tmp_path / "costs.json", text)
    file = read_simulation(write(tmp_path / "sim.toml", '[machine]\nfile = "costs.json"\n'))
    with pytest.raises(InvalidArgument, match=told):
        run_study(file)


@pytest.mark.parametrize("name", ["json", "plot"])
def test_what_cannot_be_written_is_told_before_anything_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("paceline.sim.study.run_study", lambda *_: pytest.fail("it was simulated"))
    result = CliRunner().invoke(app, ["sim", f"--{name}", str(tmp_path / "missing" / "file")])
    assert isinstance(result.exception, InvalidArgument)
    assert "directory" in str(result.exception)


def test_a_full_disk_loses_nothing_of_what_was_printed() -> None:
    command = [sys.executable, "-m", "paceline", "sim", "--requests", "5", "--json", "/dev/full"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "5" in done.stdout
    assert "requests/s" in done.stdout
    assert done.stderr == "paceline: /dev/full cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_without_matplotlib_nothing_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.sim.study.run_study", lambda *_: pytest.fail("it was simulated"))
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["sim", "--plot", str(tmp_path / "plot.png")])
    assert isinstance(result.exception, InvalidArgument)
    assert "paceline[plots]" in str(result.exception)


def test_the_figures_of_the_page_are_those_of_the_code() -> None:
    """One of its rows. Who changes what is planned runs docs/examples anew, and writes all figures down."""
    study = run_study(example("alone.toml"))
    told = study.tenants["steady"].summary()
    first, after = told["time_to_first_token"], told["time_per_output_token"]
    row = (
        f"| alone | {first['p50']:.2f} s | {first['p99']:.2f} s | {1000 * after['p50']:.0f} ms | "
        f"{1000 * after['p99']:.0f} ms | {study.longest_step:.2f} s |"
    )
    assert row in (EXAMPLES.parent / "simulating.md").read_text().splitlines()


# -- small versions of the figures ------------------------------------------------------------------------------------


def service_ratio(study: Study) -> float:
    """Of the tenant that was served most over the one that was served least, by weight, while all had requests."""
    service = study.summary()["backlogged_service"]
    return float(max(service.values()) / min(service.values()))


def test_backlogged_tenants_are_served_by_weight() -> None:
    """Within 5 %, although the time is but some times the bound."""
    ours = run_study(example("shares.toml", requests=1200))
    assert ours.backlogged_seconds > 4.0 * ours.service_bound
    assert service_ratio(ours) < 1.05
    first = run_study(example("shares.toml", requests=300, policy="fcfs"))
    assert service_ratio(first) > 5.0


def test_a_flood_does_not_drown_others() -> None:
    alone = run_study(example("alone.toml", requests=150)).tenants["steady"].summary()["time_to_first_token"]["p99"]
    found = {}
    for policy in ("ours", "fcfs"):
        study = run_study(example("flood.toml", seconds=20.0, policy=policy))
        found[policy] = study.tenants["steady"].summary()["time_to_first_token"]["p99"]
        assert study.tenants["flood"].arrived > 15 * study.tenants["steady"].arrived
    assert found["ours"] <= 2.0 * alone + 2.0 * study.longest_step
    assert found["fcfs"] > 5.0 * found["ours"]


def test_more_deadlines_are_met_than_by_other_orders() -> None:
    """At 1.3 times what a backlog shows that the machine can serve."""
    engine = {"max_num_seqs": 16, "max_num_batched_tokens": 128}
    machine = {"target_pass": 0.02, "free_rows": 64}
    lengths = {"prompt_tokens": {"mean": 512}, "completion_tokens": {"mean": 64, "most": 512}}
    kinds = {"engine": engine, "machine": machine}
    backlog = {"kind": "backlog", "waiting": 32}
    study = run_study(simulated(**kinds, requests=10_000, seconds=30.0, arrivals=backlog, tenants={"a": lengths}))
    arrivals = {"rate": 1.3 * study.summary()["requests_per_second"]}
    tenants = {"a": {**lengths, "slowdown": [2, 10]}}
    met = {
        policy: run_study(
            simulated(**kinds, requests=400, arrivals=arrivals, tenants=tenants, policy=policy)
        ).summary()["in_time"]
        for policy in ("ours", "fcfs", "edf")
    }
    # After so short a time little waits yet; docs/simulating.md has the figures of a longer one.
    assert met["ours"] > 1.2 * met["fcfs"], met
    assert met["ours"] > met["edf"], met


@pytest.mark.parametrize("where", [{"tenants": {"a": {**SHORT, "max_blocks": 1}}}, {"engine": {"num_blocks": 1}}])
def test_requests_that_can_never_fit_are_told(where: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    study = run_study(simulated(**({"tenants": {"a": SHORT}} | where)))
    assert study.tenants["a"].too_large > 0
    report.render(study, "small")
    assert f"a: {study.tenants['a'].too_large} of 60 requests were refused" in capsys.readouterr().out
