"""`paceline doctor`: everything found is said, and whatever is missing comes with advice."""

from __future__ import annotations

import ctypes
import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from paceline import compiled, doctor
from paceline.cli import app
from paceline.device import Gpu
from paceline.doctor import facts, rates, report
from paceline.doctor.costs import find_costs
from paceline.engine import Engine
from paceline.errors import PacelineError
from paceline.wiring import EngineSettings, build_engine
from paceline_kernels.cpu import build, ceilings, decoder, identity
from support.native import needs_compiler

NAMES = ["CPU", "cores", "instructions", "large pages", "compiler", "compiled code", "torch", "OpenMP", "backend"]


def as_json(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["doctor", "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a word about one."""
    monkeypatch.setattr(torch.version, "cuda", None)


# Of a process without our environment: where the sources are, if they are not installed, and no GPU.
ALONE = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "CUDA_VISIBLE_DEVICES": ""}


@needs_compiler
@pytest.mark.usefixtures("no_gpu")
def test_quick_measures_nothing() -> None:
    said = as_json("--quick")
    assert list(said["facts"]) == [*NAMES, "kernels", "scheduler"]
    assert said["facts"]["scheduler"]["value"] == ("compiled" if compiled.is_compiled() else "interpreted")
    assert said["measured"] is None
    assert said["facts"]["backend"] == {"value": "native", "advice": None}
    assert said["facts"]["kernels"]["value"] == ceilings.family()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "nowhere"], "nowhere"),
        (["--model", "demo", "--draft", "nowhere"], "nowhere"),
        (["--draft", "demo"], "draft = 'demo': must be given with --model"),
    ],
)
def test_what_cannot_be_served_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.setattr(report, "native_obstacle", lambda: pytest.fail("it was looked at"))
    result = CliRunner().invoke(app, ["doctor", *options])
    assert isinstance(result.exception, PacelineError)
    assert said in str(result.exception)


@needs_compiler
def test_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small things, once each: the numbers mean nothing here, but all of them are there."""
    once = partial(ceilings.median_seconds, least=0.0)
    monkeypatch.setattr(ceilings, "median_seconds", once)
    monkeypatch.setattr(rates, "median_seconds", once)
    monkeypatch.setattr(ceilings, "LEAST_SECONDS", 0.001)
    monkeypatch.setattr(ceilings, "uncached_bytes", lambda: 4 << 20)
    monkeypatch.setattr(rates, "FEATURES", 256)
    measured = as_json()["measured"]
    assert measured["read"] > 0
    assert measured["read_one_thread"] > 0
    assert list(measured["multiply"]) == ["float32", "bfloat16", "int8"]
    assert all(rate > 0 for rate in measured["multiply"].values())
    assert [(figure["kind"], figure["rows"]) for figure in measured["linear"]] == [
        (kind, rows) for kind in ("float32", "bfloat16", "int8") for rows in (1, 4, 16)
    ]
    for figure in measured["linear"]:
        assert figure["gigabytes_per_second"] > 0
        assert math.isfinite(figure["fraction"])
        assert figure["fraction"] > 0


@needs_compiler
def test_fractions_are_of_the_ceiling_of_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "uncached_bytes", lambda: 1 << 20)
    monkeypatch.setattr(rates, "FEATURES", 256)
    ceiling_rates = iter([1e9, 4e9, 2e9] * 3)
    seconds = (1 << 20) / 1e9  # each product reads at 1 GB/s
    monkeypatch.setattr(rates, "median_seconds", lambda call: seconds)
    figures = rates._measure_linear(decoder.Kind.INT8, lambda: next(ceiling_rates))
    assert [figure.fraction for figure in figures] == pytest.approx([0.5] * 3)
    assert [figure.gigabytes_per_second for figure in figures] == pytest.approx([1.0] * 3)


def test_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = [rates.Linear("int8", rows, 9.0, fraction) for rows, fraction in ((1, 0.81), (4, 0.72), (16, 0.63))]
    measured = rates.Measured(10.0, 20.0, {"int8": 30.0}, linear)
    found = [facts.Fact("a thing", "is so"), facts.Fact("another", "is not", "make it so")]
    monkeypatch.setattr(doctor, "examine", lambda *options: report.Report(found, measured))
    text = CliRunner().invoke(app, ["doctor"]).output
    for words in ("a thing", "is so", "another: make it so", "20.0 GB/s", "int8 30", "81", "72", "63"):
        assert words in text


def test_no_compiler() -> None:
    """Torch serves, so this is no failure."""
    code = "from paceline.cli import main; import sys; sys.argv = ['paceline', 'doctor', '--json']; main()"
    environment = {**ALONE, build.COMPILER_VARIABLE: "no-such-compiler", "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["measured"] is None
    assert said["facts"]["backend"]["value"].startswith("torch, because: no C++ compiler: no-such-compiler")
    assert "several times slower" in said["facts"]["backend"]["advice"]
    assert "install g++" in said["facts"]["compiler"]["advice"]


@needs_compiler
@pytest.mark.usefixtures("no_gpu")
def test_sampling_that_cannot_be_compiled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend may be native all the same."""
    load = build.load

    def refuse(name: str) -> ctypes.CDLL:
        if name == "sampling":
            raise build.BuildError("not today")
        return load(name)

    monkeypatch.setattr(build, "load", refuse)
    found = as_json("--quick")["facts"]
    assert found["backend"]["value"] == "native"
    assert found["sampling"]["value"] == "torch, because: not today"
    assert "slower" in found["sampling"]["advice"]


def test_without_torch_nothing_can_be_served(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    code = "from paceline.cli import main; import sys; sys.argv = ['paceline', 'doctor']; main()"
    path = os.pathsep.join([str(tmp_path), ALONE["PYTHONPATH"]])
    environment = {**ALONE, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no torch here" in done.stderr
    assert "Traceback" not in done.stderr


def test_advice_where_something_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = tmp_path / "enabled"
    for chosen, advised in (("never", True), ("madvise", False), ("always", False)):
        words = ("always", "madvise", "never")
        pages.write_text(" ".join(f"[{word}]" if word == chosen else word for word in words) + "\n")
        monkeypatch.setattr(facts, "LARGE_PAGES", pages)
        fact = facts._large_pages()
        assert (fact.value, fact.advice is not None) == (chosen, advised)
    monkeypatch.setattr(facts, "_quota", lambda: 0.5)
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    assert "--threads 1" in str(facts._cores().advice)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "file" / "below"))
    assert "cannot be written" in facts._cache().value
    assert build.CACHE_VARIABLE in str(facts._cache().advice)
    (tmp_path / "cpuinfo").write_text("model name : Old\nflags : sse2 fma\n")
    monkeypatch.setattr(identity, "CPU_INFO", tmp_path / "cpuinfo")
    machine = {fact.name: fact for fact in facts._machine()}
    assert machine["CPU"].value == "Old"
    assert machine["instructions"].value == "fma"
    assert machine["instructions"].advice is not None
    runtimes = [Path("/a/libgomp.so.1"), Path("/b/libiomp5.so")]
    monkeypatch.setattr(facts, "openmp_runtimes", lambda: runtimes)
    assert facts._torch()[1].advice is not None


@pytest.mark.parametrize(
    ("path", "is_runtime"),
    [
        ("/x/torch/lib/libgomp.so.1", True),
        ("/x/torch/lib/libgomp-a34b3233.so.1.0.0", True),
        ("/usr/lib/llvm/libomp.so.5", True),
        ("/x/intel/libiomp5.so", True),
        ("/x/libompi.so", False),
        ("/x/libtorch_cpu.so", False),
    ],
)
def test_runtimes_by_name(path: str, is_runtime: bool) -> None:
    assert (facts.OPENMP.search(path) is not None) == is_runtime


@needs_compiler
def test_costs_of_a_model() -> None:
    costs = as_json("--quick", "--model", "demo", "--draft", "demo")["costs"]
    assert [step["sequences"] for step in costs["steps"]] == [1, 4, 16, 64]
    for step in costs["steps"]:
        without, *drafting = step["steps"].values()
        assert 0 < without < min(drafting)
        assert step["draft_pass"] > 0
    assert costs["errors"].keys() <= {"decode", "verify", "mixed"}
    assert all(error["count"] > 0 and math.isfinite(error["median"]) for error in costs["errors"].values())


def test_predictions_are_judged_by_long_prompts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the model takes them."""
    engines = [build_engine(EngineSettings("demo", device="cpu", max_model_len=length)) for length in (200, 1024)]
    lengths: list[int] = []
    add = Engine.add
    monkeypatch.setattr(
        Engine, "add", lambda engine, request: (lengths.append(len(request.prompt)), add(engine, request))[1]
    )
    for engine, longest in zip(engines, (200 - 64, 300), strict=True):
        assert find_costs(engine).errors["mixed"].count > 0
        assert (len(lengths), lengths.count(longest), lengths.count(32)) == (21, 5, 16)
        lengths.clear()


def test_without_a_model_no_costs() -> None:
    assert as_json("--quick")["costs"] is None


H100 = Gpu("NVIDIA H100", (9, 0), 80 << 30, 79 << 30, "12.8")


def test_a_gpu_is_told_with_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_gpu", lambda: H100)
    monkeypatch.setattr(report, "measure", lambda: None)
    monkeypatch.setattr(report, "measure_gpu", lambda: rates.GpuMeasured(2800.0, 700.0))
    monkeypatch.setattr(facts, "triton_obstacle", lambda gpu: None)
    text = " ".join(CliRunner().invoke(app, ["doctor"]).output.split())
    for words in (
        "NVIDIA H100, compute capability 9.0, 80.00 GiB, 79.00 GiB",
        "triton on NVIDIA H100",
        "2800 GB/s",
        "700",
    ):
        assert words in text
    found = as_json()
    assert found["gpu"] == {"copy": 2800.0, "multiply": 700.0}
    monkeypatch.setattr(facts, "triton_obstacle", lambda gpu: "triton is not installed")
    found = as_json("--quick")
    assert found["gpu"] is None
    assert found["facts"]["backend"]["value"] == "torch on NVIDIA H100, because: triton is not installed"


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    [fact] = facts._gpu(Gpu("Tesla V100", (7, 0), 32 << 30, 31 << 30))
    assert "compute capability 8.0 is needed" in str(fact.advice)
    assert facts._backend(None, Gpu("Tesla V100", (7, 0), 32 << 30, 31 << 30))[0].value == "native"
    assert facts._gpu("no driver") == []
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    [fact] = facts._gpu("no driver")
    assert (fact.value, fact.advice) == ("none", "if there is one: no driver")


def test_gpu_seconds_are_the_median_of_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 11.0, 13.0])  # ms

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert rates._gpu_seconds(lambda: None, rounds=3) == pytest.approx(2e-3)
