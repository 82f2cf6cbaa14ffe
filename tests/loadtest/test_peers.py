"""The comparison with other engines, on scripted workers: none of the engines is installed for it."""

from __future__ import annotations

import json
import os
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline import demo

# Scripts beside each other, not a package: the workers run in environments without Paceline.
sys.path.insert(0, str(Path(__file__).parents[2] / "loadtest" / "peers"))

import compare
import protocol
from cells import Cell, Ratio, Sample, ratios, same_text
from engines import AUTO, OFF, OURS, Engine, find_engines
from protocol import Load
from report import print_tables
from worker import Worker, WorkerFailed

# Each stream repeats the last token of its prompt. The first argument is a log of the loads, the second lists
# [depth, streams] of runs that fail.
SCRIPTED = """
import json, os, sys, time
import protocol

class Scripted:
    def load(self, load):
        self.depth = load.depth
        print("noise on stdout")
        with open(sys.argv[1], "a") as log:
            print(os.getpid(), load.depth, load.streams, load.length, file=log)
        return "Scripted 1.0"

    def run(self, prompts, max_tokens):
        if [self.depth, len(prompts)] in json.loads(sys.argv[2]):
            sys.exit("out of memory")
        time.sleep(1e-3 * max_tokens)
        return [prompt[-1:] * max_tokens for prompt in prompts]

protocol.serve(Scripted())
"""
LOAD = Load("target", "draft", depth=3, streams=2, length=10)


@pytest.fixture
def scripted(tmp_path: Path) -> Any:
    """Makes engines; closes them all."""
    script = tmp_path / "scripted.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(Path(protocol.__file__).parent)!r})\n" + SCRIPTED)
    made = []

    def make(name: str, depths: tuple[str, ...] = (OFF, "3"), failing: Any = (), **options: Any) -> Engine:
        loads = tmp_path / f"{name}.loads"
        command: list[str | Path] = [sys.executable, script, loads, json.dumps(failing)]
        made.append(Engine(name, command, tmp_path / f"{name}.log", depths, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def loads(tmp_path: Path, name: str) -> list[list[str]]:
    return [line.split() for line in (tmp_path / f"{name}.loads").read_text().splitlines()]


def cell(engine: str, depth: str, rates: list[float], concurrency: int = 1, text: int = 7, **options: Any) -> Cell:
    """A cell of samples that decode 10 tokens at the given rates, after 2 s of prefill."""
    samples = [Sample(2.0, 2.0 + 10 / rate, [[text] * 11]) for rate in rates]
    return Cell(engine, depth, concurrency, samples, **options)


# -- workers ----------------------------------------------------------------------------------------------------------


def test_a_worker_answers_and_loads_once(scripted: Any, tmp_path: Path) -> None:
    engine = scripted("a")
    for _ in range(2):
        seconds, token_ids = engine.run(LOAD, [[1, 2], [3]], 4)
        assert token_ids == [[2] * 4, [3] * 4]
        assert seconds >= 0
    assert engine.description == "Scripted 1.0"
    assert [load[1:] for load in loads(tmp_path, "a")] == [["3", "2", "10"]]


def test_a_worker_is_stopped_between_its_turns_and_gone_after_close(scripted: Any, tmp_path: Path) -> None:
    engine = scripted("a")
    engine.run(LOAD, [[1]], 1)
    pid = int(loads(tmp_path, "a")[0][0])
    stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    assert stopped is not None
    assert stopped.si_pid == pid
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_crash_is_told_in_the_workers_last_words_and_the_next_run_starts_anew(scripted: Any, tmp_path: Path) -> None:
    engine = scripted("a", failing=[[3, 2]])
    with pytest.raises(WorkerFailed, match=r"^exit status 1: out of memory$"):
        engine.run(LOAD, [[1], [2]], 4)
    assert engine.run(LOAD, [[1]], 4)[1] == [[1] * 4]
    pids = [load[0] for load in loads(tmp_path, "a")]
    assert len(set(pids)) == 2


def test_silence_ends_in_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.QUIT_SECONDS", 0.0)
    worker = Worker([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
    with pytest.raises(WorkerFailed, match="no answer in 0 s"):
        worker.ask({"run": {}}, timeout=0.0)
    worker.close()


def test_an_engine_that_stops_early_is_a_failure(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted("a")
    monkeypatch.setattr(Worker, "ask", lambda *_: {"engine": "", "seconds": 1.0, "token_ids": [[5, 5]]})
    with pytest.raises(WorkerFailed, match="not 3 tokens for each of 1 prompts"):
        engine.run(LOAD, [[1]], 3)


def test_a_run_no_longer_than_its_first_tokens_tells_nothing(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted("slow at first")
    monkeypatch.setattr(engine, "run", lambda load, prompts, max_tokens: (1.0, [[7] * max_tokens for _ in prompts]))
    with pytest.raises(WorkerFailed, match=r"^no time is left for decode: 1\.000 s, first tokens 1\.000 s$"):
        compare._measure_once(engine, LOAD, [[1]], 3)


def test_a_model_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    (tmp_path / "environment").mkdir()
    source = tmp_path / "model"
    source.mkdir()
    (source / "weights").write_text("1")
    calls = []

    def convert(source: Path, destination: Path) -> None:
        calls.append(source)
        destination.mkdir()
        if len(calls) == 1:
            raise RuntimeError("half done")

    with pytest.raises(RuntimeError, match="half done"):
        protocol.converted(str(source), convert)
    monkeypatch.setattr(os, "getpid", lambda: 0)  # another process
    first = protocol.converted(str(source), convert)
    assert protocol.converted(str(source), convert) == first
    assert len(calls) == 2
    (source / "weights").write_text("12")
    assert protocol.converted(str(source), convert) != first


# -- measuring --------------------------------------------------------------------------------------------------------


def test_engines_take_turns_with_the_same_prompts_and_other_prompts_each_round(scripted: Any, tmp_path: Path) -> None:
    engines = [scripted(OURS, (OFF, "3", AUTO)), scripted("peer", speculating_streams=1)]
    prompts = [[i] for i in range(6)]
    rounds = compare.measure(engines, prompts, [1, 2], [OFF, "3", AUTO], 4, 2, Path("t"), Path("d"))
    assert [len(cells[0].samples) for cells in map(list, rounds)] == [1, 2]
    (*_, cells) = compare.measure(engines, prompts, [1, 2], [OFF, "3", AUTO], 4, 2, Path("t"), Path("d"))
    assert [(c.depth, c.concurrency, c.engine) for c in cells] == [
        (OFF, 1, OURS),
        (OFF, 1, "peer"),
        (OFF, 2, OURS),
        (OFF, 2, "peer"),
        ("3", 1, OURS),
        ("3", 1, "peer"),
        ("3", 2, OURS),
        (AUTO, 1, OURS),
        (AUTO, 2, OURS),
    ]
    for c in cells:
        firsts = [[stream[0] for stream in sample.token_ids] for sample in c.samples]
        assert firsts == ([[0], [1]] if c.concurrency == 1 else [[0, 1], [2, 3]])
    # Each depth is loaded once a round, for the most streams and the longest one.
    assert [load[1:] for load in loads(tmp_path, OURS)][:3] == [["0", "2", "5"], ["3", "2", "5"], ["None", "2", "5"]]
    assert len(loads(tmp_path, "peer")) == 2 * 2 * 2


def test_a_failed_cell_is_not_tried_again_and_the_rest_goes_on(scripted: Any, tmp_path: Path) -> None:
    engines = [scripted(OURS), scripted("peer", failing=[[3, 1]])]
    (*_, cells) = compare.measure(engines, [[1], [2]], [1, 2], [OFF, "3"], 4, 2, Path("t"), Path("d"))
    failed = [c for c in cells if c.error is not None]
    assert [(c.engine, c.depth, c.concurrency, c.error) for c in failed] == [
        ("peer", "3", 1, "exit status 1: out of memory")
    ]
    assert all(len(c.samples) == 2 for c in cells if c.error is None)
    # Round 1: off, 3 which crashes, 3 anew for 2 streams. Round 2: off and 3.
    assert [load[1] for load in loads(tmp_path, "peer")] == ["0", "3", "3", "0", "3"]


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_decode_leaves_out_the_first_tokens_and_their_time() -> None:
    sample = Sample(prefill_seconds=2.0, seconds=5.0, token_ids=[[1] * 4, [2] * 4])
    assert sample.decode_rate == 2.0
    assert sample.rate == 8 / 5


def test_ratios_are_medians_within_rounds() -> None:
    # The machine doubled its speed after round 1: medians alone would give 20 / 30.
    ratio = Ratio(1, OFF, cell(OURS, OFF, [20.0, 40.0, 8.0]), cell("peer", OFF, [10.0, 30.0, 40.0]))
    assert ratio.value == pytest.approx(40 / 30)


def test_ratios_pick_the_fastest_peer_for_each_kind_of_speculation() -> None:
    cells = [
        cell(OURS, OFF, [10.0]),
        cell(OURS, "3", [30.0]),
        cell(OURS, AUTO, [24.0]),
        cell("a", OFF, [5.0]),
        cell("a", "3", [12.0]),
        cell("b", OFF, [8.0]),
        cell("b", "3", [6.0]),
        cell("c", OFF, [99.0], error="crashed in round 2"),
        cell(OURS, OFF, [4.0], concurrency=4),
        cell("a", OFF, [8.0], concurrency=4),
    ]
    found = [
        (r.concurrency, r.speculation, r.ours.depth, r.peer.engine, r.peer.depth, pytest.approx(r.value))
        for r in ratios(cells)
    ]
    assert found == [
        (1, OFF, OFF, "b", OFF, 10 / 8),
        (1, "best", "3", "a", "3", 30 / 12),
        (1, AUTO, AUTO, "a", "3", 24 / 12),
        (4, OFF, OFF, "a", OFF, 4 / 8),
        (4, "best", OFF, "a", OFF, 4 / 8),
    ]


def test_same_text_counts_streams_against_the_first_engine() -> None:
    cells = [cell(OURS, OFF, [1.0, 1.0]), cell("a", "3", [1.0, 1.0]), cell("b", OFF, [1.0, 1.0], text=8)]
    assert [same_text(cells, c) for c in cells] == [(2, 2), (2, 2), (0, 2)]


# -- the command ------------------------------------------------------------------------------------------------------


def test_engines_that_are_not_set_up_are_named(tmp_path: Path) -> None:
    (tmp_path / "transformers" / "bin").mkdir(parents=True)
    (tmp_path / "transformers" / "bin" / "python").touch()
    engines, missing = find_engines([OURS, "vllm", "transformers"], tmp_path, tmp_path, [OFF, "3", AUTO])
    assert missing == ["vllm"]
    assert [engine.name for engine in engines] == [OURS, "transformers"]
    assert [engine.supports(AUTO, 1) for engine in engines] == [True, False]
    assert [engine.supports("3", 2) for engine in engines] == [True, False]
    for engine in engines:
        assert Path(engine.command[1]).exists()


def test_the_command_prints_tables_and_writes_json(
    scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = [scripted(OURS, (OFF, "3", AUTO)), scripted("peer", failing=[[3, 1]])]
    monkeypatch.setattr(compare, "find_engines", lambda *_: (engines, ["vllm"]))
    monkeypatch.setattr(compare, "read_bandwidth", lambda: 20e9)
    monkeypatch.setattr(compare, "Console", lambda: Console(width=100))
    output = tmp_path / "all.json"
    compare.main(
        demo.TARGET,
        demo.DRAFT,
        envs=tmp_path,
        engines="paceline,peer,vllm",
        concurrency="1,2",
        depths="off,3,auto",
        max_tokens=4,
        rounds=2,
        prompts=None,
        output=output,
    )
    printed = capsys.readouterr().out
    for text in ("vllm is not set up", "peer: Scripted 1.0", "20.0 GB/s", "2 streams", "failed", "2/2", "4/4"):
        assert text in printed
    written = json.loads(output.read_text())
    assert written["engines"] == {OURS: "Scripted 1.0", "peer": "Scripted 1.0"}
    assert written["bytes_per_second"] == [20e9] * 3
    peer = {(c["depth"], c["concurrency"]): c for c in written["cells"] if c["engine"] == "peer"}
    assert peer["3", 1]["error"] == "exit status 1: out of memory"
    assert len(peer["3", 2]["decode_rate"]) == 2
    assert peer["3", 2]["same_text"] == [4, 4]
    assert [(r["concurrency"], r["speculation"]) for r in written["ratios"]] == [
        (n, kind) for n in (1, 2) for kind in (OFF, "best", AUTO)
    ]


def test_the_best_fixed_depth_of_each_engine_stands_out() -> None:
    cells = [cell("a", depth, [rate]) for depth, rate in ((OFF, 9.0), ("1", 3.0), ("3", 5.0))]
    text = StringIO()
    print_tables(Console(file=text, force_terminal=True, width=100), cells, [1e9])
    bold = [line for line in text.getvalue().split("\n") if "\x1b[1m" in line and "a " in line]
    assert len(bold) == 1
    assert "5.0" in bold[0]
