"""The GPU's benchmark, on the embedded pair: all but the numbers is as on the device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.engine import Engine, GenerationRequest
from paceline.errors import FailedPrecondition
from paceline.wiring import EngineSettings, build_engine
from support.launching import LaunchingRunner

sys.path.append(str(Path(__file__).parents[2] / "loadtest" / "gpu"))  # last: its bench.py is not the only one

import drive
from drive import Step

GPU = Path(drive.__file__).parent
# What a machine that only computes may lack.
MISSING = ("llguidance", "grpc", "grpc_health", "pydantic", "prometheus_client", "uvloop")
PROGRAM = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({MISSING!r}))
sys.path.insert(0, {str(GPU)!r})
runpy.run_path({str(GPU / "bench.py")!r}, run_name="__main__")
"""
GREEDY = SamplingParams(temperature=0.0)
STREAMS = [((5, 6, 7), GREEDY), ((8, 9), GREEDY), (tuple(range(40)), GREEDY)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine(EngineSettings(draft="demo", depth="2", max_num_seqs=4, max_model_len=256))


def completions(engine: Engine) -> tuple[dict[int, list[int]], list[Step]]:
    """The tokens of each stream, and all steps."""
    stop = StopParams(max_tokens=20, ignore_eos=True)
    ids = [engine.add(GenerationRequest(prompt, sampling, stop)) for prompt, sampling in STREAMS]
    tokens: dict[int, list[int]] = {request_id - ids[0]: [] for request_id in ids}
    steps = list(drive.drive(engine))
    for step in steps:
        for output in step.outputs:
            tokens[output.request_id - ids[0]] += output.token_ids
    engine.check_invariants()
    return tokens, steps


def test_a_runner_that_launches_has_the_next_step_while_one_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, steps = completions(engine)
    assert [len(tokens) for tokens in expected.values()] == [20] * 3
    assert [step.at for step in steps] == sorted(step.at for step in steps)
    runner = LaunchingRunner(engine.runner)
    monkeypatch.setattr(engine, "runner", runner)
    assert completions(engine)[0] == expected
    assert runner.most == 2
    assert not runner.running


@pytest.mark.parametrize("launches", [False, True])
def test_a_window_has_the_steps_of_the_whole_batch(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, launches: bool
) -> None:
    if launches:
        monkeypatch.setattr(engine, "runner", LaunchingRunner(engine.runner))
    window = drive.serve(engine, STREAMS, SpeculationParams(), max_tokens=20)
    assert not engine.has_work
    assert {len(step.plan.work) for step in window.steps} == {3}
    assert all(work.samples for step in window.steps for work in step.plan.work)
    assert window.tokens == sum(len(output.token_ids) for step in window.steps for output in step.outputs)
    assert window.tokens >= 19
    assert window.counts.drafted > 0
    assert 0 < window.busy <= 1
    engine.check_invariants()


def test_a_batch_without_room_is_refused(engine: Engine) -> None:
    with pytest.raises(FailedPrecondition, match="of KV at once"):
        drive.serve(engine, STREAMS * 1000, SpeculationParams(), max_tokens=200)
    assert not engine.has_work


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, "--small", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_section_runs_without_what_only_a_server_needs(tmp_path: Path) -> None:
    sections = ["ceilings", "decode", "host", "prefill", "draft", "speculation", "company"]
    done = bench("--only", ",".join(sections), "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    assert list(results) == sections
    assert [one["streams"] for one in results["host"]["host"]] == [1, 4]
    single, four = results["speculation"]["concurrencies"]
    assert single["rates"].keys() == {"auto", "off", "2", "4"}
    assert single["allowed"] >= 1
    assert "allowed" not in four
    assert results["company"]["ratios"].keys() == {"off", "auto"}


def test_a_section_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    done = bench("--only", "speculation,ceilings", "--depths", "1,2", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 1
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["speculation"]["error"].startswith("InvalidArgument: depth = '1,2'")
    assert f"speculation FAILED: {results['speculation']['error']}" in done.stdout
    assert results["ceilings"]["bandwidth"] > 0
