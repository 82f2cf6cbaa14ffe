"""`paceline bench throughput`: every cell is measured and said."""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from paceline.bench import (
    acceptance,
    backends,
    calibration,
    depth,
    grammar,
    report,
    sampling,
    serving,
    swing,
)
from paceline.bench.depth_names import parse_depths
from paceline.bench.limits import measuring, memory
from paceline.bench.limits.results import Figure, Memory, Passes
from paceline.bench.limits.work import prefill_operations, streamed_bytes
from paceline.bench.number_lists import parse_sizes
from paceline.bench.setting import parse_settings
from paceline.bench.throughput import Cell, Sample
from paceline.cli import app, main
from paceline.core.calibration import Calibration
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, StopParams, Verification
from paceline.engine import Engine, GenerationRequest
from paceline.errors import InvalidArgument, NotWritten
from paceline.models import load_model_config
from paceline.models.weights import matrix_elements
from paceline.wiring import EngineSettings, build_engine
from paceline_kernels.cpu import ceilings
from support import quick_start
from support.native import device_of, needs_compiler
from support.pairs import tiny_pair


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a benchmark says that is refused by its options."""

    def run(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["paceline", "bench", *options])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        return capsys.readouterr().err

    return run


def test_the_command(tmp_path: Path) -> None:
    target, draft = tiny_pair(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "A paceline is"}\n{"prompt_token_ids": [5, 6, 7]}\n')
    command = [
        *(sys.executable, "-m", "paceline", "bench", "throughput", "--model", str(target), "--draft", str(draft)),
        *("--concurrency", "1,3", "--depth", "off,2,auto", "--max-tokens", "8", "--rounds", "2"),
        *("--prompts", str(prompts), "--json", str(tmp_path / "out.json")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "decode tok/s" in done.stdout
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert [(cell["concurrency"], cell["depth"]) for cell in cells] == [
        (size, depth) for size in (1, 3) for depth in ("off", "2", "auto")
    ]
    for cell in cells:
        assert [sample["tokens"] for sample in cell["samples"]] == [8 * cell["concurrency"]] * 2
        assert cell["tokens_per_second"] > 0
        shares = [cell[f"{name}_share"] for name in ("draft", "verify", "sample", "python")]
        assert sum(shares) == pytest.approx(1.0)
        if cell["depth"] == "off":
            assert (cell["ratio"], cell["mean_depth"], cell["acceptance_length"]) == (1.0, 0.0, 1.0)
        if cell["depth"] == "2":
            assert 0 < cell["mean_depth"] <= 2
            assert cell["acceptance_length"] >= 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--concurrency", "0"], "concurrency = '0': must be integers >= 1"),
        (["--depth", "off,deep"], "depth = 'off,deep': must be off, auto or integers"),
        (["--prompts", "nowhere.jsonl"], "prompts = 'nowhere.jsonl': must be a readable file"),
    ],
)
def test_bad_options(refused: Callable[..., str], tmp_path: Path, options: list[str], words: str) -> None:
    target, draft = tiny_pair(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    command = ["throughput", "--model", str(target), "--draft", str(draft)]
    assert words in refused(*command, "--prompts", str(tmp_path / "prompts.jsonl"), *options)


def test_completions_that_are_too_long_are_named(refused: Callable[..., str], tmp_path: Path) -> None:
    target, draft = tiny_pair(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [5, 6, 7]}')
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", "100000"]
    said = refused("throughput", "--model", str(target), "--draft", str(draft), *options)
    assert "max_tokens = 100000: must be at most 509, beside the longest prompt of 3 tokens" in said


def test_rates() -> None:
    """Decode alone leaves out the first token of each stream, and the time it took."""
    off = Sample(2, 1.0, 5.0, 18, 16, 0, 0.0, 3.0, 0.5)
    fast = Sample(2, 1.0, 3.0, 18, 8, 16, 1.0, 1.0, 0.5)
    cell = Cell(2, "2", [fast, fast], [off, off])
    assert off.decode_rate == 4.0
    assert cell.ratio("decode_rate") == 2.0
    assert cell.ratio("rate") == pytest.approx(5 / 3)
    assert cell.share("draft") == pytest.approx(1 / 3)
    assert (cell.acceptance_length, cell.mean_depth) == (2.0, 2.0)


def test_a_run_shorter_than_its_prefill_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """But for that of the whole run."""
    off = Sample(2, 1.0, 5.0, 18, 16, 0, 0.0, 3.0, 0.5)
    short = Sample(2, 1.0, 1.0, 18, 8, 16, 0.2, 0.2, 0.5)
    cell = Cell(2, "2", [off, short], [off, off])
    assert short.decode_rate is None
    told = report.summary(cell)
    assert (told["decode_tokens_per_second"], told["decode_ratio"]) == (None, None)
    assert told["ratio"] == pytest.approx(3.0)
    assert json.loads(json.dumps(report.to_json([cell], {})))["cells"][0]["decode_ratio"] is None
    report.render([cell], "title")
    assert "None" not in capsys.readouterr().out


def test_parsing() -> None:
    assert parse_sizes("1, 16") == [1, 16]
    assert parse_sizes("0,5", "waiting", least=0) == [0, 5]
    depths = parse_depths("off,2,auto")
    assert depths["off"].method is Method.NONE
    assert (depths["2"].min_depth, depths["2"].max_depth) == (2, 2)
    assert (depths["auto"].method, depths["auto"].max_depth) == (None, None)
    with pytest.raises(InvalidArgument):
        parse_depths("")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair(tmp_path_factory.mktemp("bench"), vocab_size=320)


def _engine(pair: tuple[Path, Path], backend: str = "auto") -> Engine:
    settings = EngineSettings(str(pair[0]), str(pair[1]), dtype="float32", backend=backend, device=device_of(backend))
    return build_engine(settings)


GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13)]


def test_sampling_measures_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    costs = sampling.measure(requests=3, depth=2, vocab=200, rounds=2)
    assert [cost.case for cost in costs] == list(sampling.CASES)
    assert all(len(cost.verify) == len(cost.read) == 2 and cost.reads > 0 for cost in costs)
    sampling.render(costs, title="a title")
    assert "seeded" in capsys.readouterr().out


def test_acceptance_tallies_every_rule(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    engine = _engine(pair)
    runner = engine.runner
    cells = acceptance.measure(engine, PROMPTS, [0.7], depth=3, max_tokens=12, samples=2)
    assert engine.runner is runner
    assert [cell.rule for cell in cells] == list(acceptance.RULES)
    for cell in cells:
        assert len(cell.tallies) == 6
        for tally in cell.tallies:
            assert 0 <= tally.accepted <= tally.reached <= 3 * tally.steps
        step = cell.per_step()
        assert 0 <= step.low <= step.mean <= step.high <= 3
        if cell.rule is Verification.TOKEN_WISE:
            assert 0 < cell.bound().mean <= 1
    acceptance.render(cells, title="a title")
    assert "token_wise" in capsys.readouterr().out


def test_a_recording_that_fails_leaves_the_engine_as_it_was(pair: tuple[Path, Path]) -> None:
    engine = _engine(pair)
    runner = engine.runner
    with pytest.raises(ZeroDivisionError), acceptance.recording(engine) as recorder:  # noqa: PT012
        assert engine.runner is recorder
        raise ZeroDivisionError
    assert engine.runner is runner


def test_grammar_compares_equal_streams(capsys: pytest.CaptureFixture[str]) -> None:
    engine = build_engine(EngineSettings(model="demo", draft="ngram", dtype="float32"))
    cells = grammar.measure(engine, PROMPTS, parse_depths("off,2"), streams=4, max_tokens=6, rounds=1)
    assert [(cell.depth, len(cell.plain), len(cell.constrained)) for cell in cells] == [("off", 1, 1), ("2", 1, 1)]
    grammar.render(cells, title="a title")
    assert "overhead" in capsys.readouterr().out


@needs_compiler
def test_backends_compares_equal_work(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    cells = backends.measure(
        _engine(pair, "torch"), _engine(pair, "native"), PROMPTS, [1, 3], parse_depths("off,2"), max_tokens=6, rounds=1
    )
    assert [(cell.streams, cell.depth) for cell in cells] == [(1, "off"), (1, "2"), (3, "off"), (3, "2")]
    assert all(len(cell.torch) == len(cell.native) == 1 for cell in cells)
    backends.render(cells, title="a title")
    assert "x torch" in capsys.readouterr().out


def test_a_speedup_is_the_median_of_rounds() -> None:
    cell = backends.BackendTimes(
        1, "off", torch=[(2.0, 6.0), (9.0, 9.0), (4.0, 8.0)], native=[(1.0, 2.0), (1.0, 9.0), (4.0, 4.0)]
    )
    assert (cell.speedup(0), cell.speedup(1)) == (2.0, 2.0)


# -- limits -----------------------------------------------------------------------------------------------------------


def test_the_arithmetic_of_limits() -> None:
    figure = Figure("decode", "a step", "GB/s", 2e9, seconds=[1.0, 0.5, 0.25], ceilings=[4e9, 8e9, 32e9])
    assert (figure.rate, figure.ceiling) == (4.0, 8.0)
    assert figure.fraction == 0.5, "each round by its own ceiling"
    assert Passes(4, single=[1.0, 2.0, 1.0], together=[4.4, 8.0, 5.0]).overhead == pytest.approx(0.1)
    assert Memory(peak=1500, idle=300, weights=900, kv=100).ratio == pytest.approx(1.2)


def test_what_limits_count(pair: tuple[Path, Path]) -> None:
    """Against the checkpoint itself: every matrix is read once in a step, and multiplied once for each row."""
    config = load_model_config(pair[0])
    tensors = load_file(pair[0] / "model.safetensors")
    matrices = {name: t.numel() for name, t in tensors.items() if t.dim() == 2 and "embed" not in name}
    assert streamed_bytes(config, 2) == 2 * sum(matrices.values())
    assert matrix_elements(config) == sum(matrices.values()) - matrices["lm_head.weight"]
    rows, heads = 10, config.num_heads * config.head_dim
    products = 2 * rows * matrix_elements(config)
    # Row r sees r + 1 positions; a score and a weighted value of each take a multiplication and an addition.
    attention = config.num_layers * sum(2 * 2 * heads * (row + 1) for row in range(rows))
    assert prefill_operations(config, rows) == products + attention


@needs_compiler
def test_the_command_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tiny model in tiny buffers: the numbers mean nothing here, but all of them are there."""
    target, draft = tiny_pair(tmp_path, tie_word_embeddings=True)
    monkeypatch.setattr(ceilings, "uncached_bytes", lambda: 4 << 20)
    once = partial(ceilings.median_seconds, least=0.0)
    monkeypatch.setattr(ceilings, "median_seconds", once)
    monkeypatch.setattr(measuring, "median_seconds", once)
    called = memory._in_new_process
    monkeypatch.setattr(memory, "_in_new_process", lambda f, argument: called(partial(quick_start.call, f), argument))
    monkeypatch.setattr(ceilings, "LEAST_SECONDS", 0.001)
    command = ["bench", "limits", "--model", str(target), "--draft", str(draft), "--rounds", "2"]
    options = ["--dtype", "bfloat16", "--kv-cache-memory", "8MiB", "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    assert "4 draft passes cost" in result.output
    said = json.loads((tmp_path / "out.json").read_text())
    assert list(said) == ["settings", "figures", "draft_passes", "memory"]
    batches = ("1 sequence", "4 sequences", "8 sequences", "16 sequences")
    for kind in ("bfloat16", "int8"):
        for group in ("decode, model", "decode, engine"):
            found = [f["name"] for f in said["figures"] if f["group"] == group and kind in f["name"]]
            assert found == [f"{kind}, {batch}" for batch in batches]
    others = [(f["group"], f["name"]) for f in said["figures"] if not f["group"].startswith("decode")]
    assert others == [
        ("prefill", "bfloat16, 512 rows"),  # the model has no more positions
        ("prefill", "int8, 512 rows"),
        ("paged attention", "bfloat16, 16 x 2048 tokens x 4 rows"),
        ("draft pass", "bfloat16, 1 sequence"),
    ]
    for figure in said["figures"]:
        assert len(figure["seconds"]) == len(figure["ceilings"]) == 2
        assert min(figure["rate"], figure["ceiling"], figure["fraction"]) > 0
    assert [(some["depth"], len(some["together"])) for some in said["draft_passes"]] == [(4, 2), (8, 2)]
    taken = said["memory"]
    config = load_model_config(target)
    assert taken["weights"] == 2 * streamed_bytes(config, 2)
    assert (7 << 20) < taken["kv"] <= (8 << 20)
    assert taken["peak"] > taken["idle"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["limits", "--draft", "ngram"], "draft = 'ngram': must be"),
        (["limits", "--kv-cache-memory", "much"], "is not a size"),
        (["limits", "--model", "nowhere"], "nowhere"),
        (["acceptance", "--draft", "ngram"], "draft = 'ngram': must be a directory or demo"),
        (["acceptance", "--draft", "none"], "draft = 'none': must be a directory or demo"),
        (["acceptance", "--temperatures", "0"], "temperatures = '0': must be finite numbers above 0"),
        (["acceptance", "--temperatures", "1,x"], "temperatures = '1,x': must be finite numbers above 0"),
        (["acceptance", "--depth", "99"], "depth = 99: must be at most 8"),
        (["acceptance", "--max-tokens", "2"], "Invalid value for '--max-tokens'"),
        (["quantization", "--max-tokens", "2"], "Invalid value for '--max-tokens'"),
        (["quantization", "--depth", "99"], "depth = 99: must be at most 8"),
        (["grammar", "--depth", "auto,99"], "depth = 99: must be at most 8"),
        (["throughput", "--depth", "99"], "depth = 99: must be at most 8"),
        (["depth", "--depth", "off,auto,99"], "depth = 99: must be at most 8"),
        (["throughput", "--temperature", "-1"], "temperature = -1.0: must be a finite number >= 0"),
        (["swing", "--temperature", "nan"], "temperature = nan: must be a finite number >= 0"),
        (["core", "--waiting", "few"], "waiting = 'few': must be integers >= 0"),
        (["core", "--waiting", "-1"], "waiting = '-1': must be integers >= 0"),
        (["core", "--waiting", "1000000000"], "waiting = '1000000000': must be integers >= 0, at most 1000000"),
        (["policy", "--concurrency", "1,1000000000"], "concurrency = '1,1000000000': must be integers >= 1, at most"),
        (["backends", "--dtype", "auto"], "dtype = 'auto': must be float32 or bfloat16"),
        (["depth", "--model", "nowhere", "--synthetic", "2"], "synthetic = '2': must be probabilities"),
        (["swing", "--synthetic", "0.9,0.3"], "synthetic = '0.9,0.3': must be one probability here"),
    ],
)
def test_bad_options_are_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, options: list[str], words: str
) -> None:
    if "nowhere" not in words:
        monkeypatch.setattr("paceline.wiring.build_engine", lambda *_: pytest.fail("an engine was built"))
    assert words in refused(*options)


def test_a_refusal_is_one_line_of_a_process_too() -> None:
    command = [sys.executable, "-m", "paceline", "bench", "swing", "--synthetic", "0.9,0.3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: synthetic = '0.9,0.3': must be one probability here")
    assert done.stderr.count("\n") == 1


COMMANDS = ("throughput", "depth", "swing", "calibration", "policy", "limits", "quantization", "core")
OUTPUTS = [(command, "--json") for command in COMMANDS] + [("calibration", "--plot"), ("policy", "--plot")]


@pytest.mark.parametrize(("command", "option"), OUTPUTS)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: str
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("it was measured")

    for name in ("wiring.build_engine", "bench.policy.measure", "bench.core.measure_core", "bench.limits.measure"):
        monkeypatch.setattr(f"paceline.{name}", measured)
    monkeypatch.setattr("paceline.bench.quantization.measure_acceptance", measured)
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "nowhere" / "out", "No such file or directory")):
        said = refused(command, option, str(path))
        assert said == (
            f"paceline: {option[2:]} = '{path}': must be a file in a folder that is there and can be written ({why})\n"
        )


def test_a_full_disk_does_not_end_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.wiring.build_engine", lambda *_: None)
    for name, made in {"measure": iter("ab"), "describe": "a line", "render": None, "to_json": {}}.items():
        monkeypatch.setattr(depth, name, lambda *_, made=made, **__: made)
    result = CliRunner().invoke(app, ["bench", "depth", "--json", "/dev/full"])
    assert result.output.count("a line") == 2
    assert isinstance(result.exception, NotWritten)


def test_no_queue_is_a_size_too(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = ["bench", "core", "--running", "2", "--waiting", "0,3", "--tenants", "1", "--steps", "2", "--rounds", "1"]
    result = CliRunner().invoke(app, [*command, "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert [one["waiting"] for one in json.loads(out.read_text())] == [0, 3]


def test_peak_memory_is_the_systems() -> None:
    known = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert memory.peak_memory() == pytest.approx(known, rel=0.05)


# -- swing ------------------------------------------------------------------------------------------------------------


def _phase(*depths: int, seconds: float = 0.25) -> swing.Phase:
    """One stream; a step with one decode of each depth, a token each."""
    steps = [swing.Step(i * seconds, (i + 1) * seconds, 1, depth, 1) for i, depth in enumerate(depths)]
    return swing.Phase(1, steps)


def test_depth_over_time() -> None:
    phase = _phase(0, 2, 2, 4, 4, 4, 4, 4)
    assert phase.rate == 4.0
    assert phase.depth_by_second() == [2.0, 4.0]
    # Means over half a second: 0, 1, 2, 3, 4, 4, 4, 4. The level is 3.5, and near it is from 2.625 on.
    assert phase.settled() == (3.5, 0.75)


def test_a_depth_settles_where_it_stays() -> None:
    """A moment near the level is not enough, and what a later request needs does not count against the swing."""
    assert _phase(4, 4, 0, 0, *[4] * 8).settled() == (4.0, 1.25)
    assert _phase(*[4] * 8, 0, 0, 4, 4).settled() == (4.0, 0.0)
    assert _phase(*[0, 0, 0, 8, 8, 8] * 4).settled()[1] is None
    prefill = swing.Phase(1, [swing.Step(0.0, 0.25, 0, 0, 0), *_phase(2, 2, 2).steps])
    assert prefill.settled()[0] == 2.0, "a step without decodes has no depth"
    assert swing.Phase(1, [swing.Step(0.0, 1.0, 1, 0, 0)]).settled() == (0.0, None)


@pytest.mark.parametrize(("drafts", "settled"), [(0, 0.0), (4, 3.0)])
def test_a_depth_settles_as_its_step_begins(drafts: int, settled: float) -> None:
    """One that reads many prompts beside a decode lasts for long, right or wrong."""
    steps = [swing.Step(0.0, 3.0, 1, drafts, 1), *(swing.Step(3.0 + i, 4.0 + i, 32, 0, 32) for i in range(5))]
    assert swing.Phase(32, steps).settled() == (0.0, settled)


def test_a_closed_loop_keeps_the_number_of_streams(pair: tuple[Path, Path]) -> None:
    engine = _engine(pair)
    stop = StopParams(max_tokens=3, ignore_eos=True)
    added = itertools.count()
    requests = (GenerationRequest((5, 6, 7), GREEDY, stop, SpeculationParams(Method.NONE)) for _ in added)
    loop = swing.ClosedLoop(engine, engine.scheduler.speculation, requests)
    ticks = itertools.count()
    engine.clock = lambda: next(ticks) * 0.001  # a millisecond every time that somebody looks
    (up,) = swing.run_phase([loop], 3, 0.05)
    assert up.streams == 3
    assert next(added) > 3, "those that end are replaced"
    assert max(step.tokens for step in up.steps) == 3
    assert up.steps[-1].began < 0.05 <= up.steps[-1].ended
    loop.resize(3)
    oldest = min(engine.scheduler.requests)
    loop.resize(1)
    assert list(engine.scheduler.requests) == [oldest]
    (down,) = swing.run_phase([loop], 1, 0.05)
    assert {step.tokens for step in down.steps} == {1}
    loop.resize(0)
    assert not engine.has_work


def test_settings_take_turns_with_requests_of_their_own(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has all of its phase's time, and no step waits for what another has queued: one prompt fills a step."""
    engine = build_engine(
        EngineSettings(
            model=str(pair[0]), draft=str(pair[1]), dtype="float32", max_num_seqs=3, max_num_batched_tokens=3
        )
    )
    stop = StopParams(max_tokens=3, ignore_eos=True)
    settings = parse_settings("off,2,auto", Method.DRAFT_MODEL, None)

    def loop(setting: depth.Setting) -> swing.ClosedLoop:
        requests = (GenerationRequest((5, 6, 7), GREEDY, stop, setting.bounds) for _ in itertools.count())
        return swing.ClosedLoop(engine, setting.control(engine), requests)

    loops = [loop(setting) for setting in settings]
    ticks = itertools.count()
    engine.clock = lambda: next(ticks) * 0.001
    stepped: list[swing.ClosedLoop] = []
    step = swing.ClosedLoop.step

    def noted(self: swing.ClosedLoop, streams: int) -> None:
        stepped.append(self)
        step(self, streams)

    monkeypatch.setattr(swing.ClosedLoop, "step", noted)
    for streams in (2, 1, 2):
        stepped.clear()
        phases = swing.run_phase(loops, streams, 0.05)
        assert set(stepped[:3]) == set(stepped[3:6]) == set(loops), "in turns"
        for phase in phases:
            assert phase.steps[-1].began < 0.05 <= phase.steps[-1].ended
            assert max(step.decodes for step in phase.steps) == streams
        off, fixed, _ = (sum(step.drafts for step in phase.steps) for phase in phases)
        assert (off, fixed > 0) == (0, True)
    for each in loops:
        each.resize(0)
    assert not engine.has_work
    engine.scheduler.check_invariants()


def test_auto_is_compared_with_the_best_depth_of_each_phase() -> None:
    def ride(name: str, *seconds: float) -> swing.Ride:
        """Four tokens a phase."""
        phases = [_phase(*[2] * 4, seconds=each) for each in seconds]
        return swing.Ride(depth.Setting(name, SpeculationParams()), phases)

    rides = [ride("off", 0.25, 1.0), ride("2", 1.0, 0.5), ride("auto", 0.5, 0.5)]
    comparisons = swing.compare(rides)
    assert [(c.best, c.best_rate, c.ratio) for c in comparisons] == [("off", 4.0, 0.5), ("2", 2.0, 1.0)]
    assert swing.share_of_best(comparisons) == pytest.approx(4 / 6)
    assert swing.missed(comparisons) == ["auto emits 0.667 x the best fixed depth of each phase, below 0.95"]
    lost = swing.Comparison(_phase(*[0, 0, 0, 8, 8, 8] * 4), "2", 4.0)
    late = swing.Comparison(_phase(*[0] * 11, *[4] * 20), "2", 4.0)
    assert swing.missed([lost, late]) == [
        "phase 1, 1 stream: depth settled after never, not 2.0 s",
        "phase 2, 1 stream: depth settled after 3.0 s, not 2.0 s",
    ]


def test_the_command_swing(tmp_path: Path) -> None:
    target, draft = tiny_pair(tmp_path, max_position_embeddings=4096)
    command = ["bench", "swing", "--model", str(target), "--draft", str(draft), "--low", "1", "--high", "3"]
    options = ["--seconds", "0.2", "--swings", "2", "--depth", "off,2,auto", "--prompt-tokens", "5"]
    options += ["--synthetic", "0.5"]
    result = CliRunner().invoke(app, [*command, *options, "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    assert "auto / best fixed depth of each phase" in result.output
    assert "SYNTHETIC" in result.output
    said = json.loads((tmp_path / "out.json").read_text())
    assert [run["depth"] for run in said["depths"]] == ["off", "2", "auto"]
    for run in said["depths"]:
        assert [phase["streams"] for phase in run["phases"]] == [1, 3, 1, 3]
        assert all(phase["rate"] > 0 for phase in run["phases"])
    off, two = said["depths"][:2]
    assert all(set(phase["depth_by_second"]) == {0.0} for phase in off["phases"])
    assert all(max(phase["depth_by_second"]) <= 2.0 for phase in two["phases"])


# -- calibration ------------------------------------------------------------------------------------------------------


def _calibration(*rows: tuple[float, float, int]) -> Calibration:
    """By position: predicted, observed, and how many drafts."""
    made = Calibration()
    for position, (predicted, observed, drafts) in enumerate(rows):
        made.record(np.full(drafts, position), np.full(drafts, predicted), np.full(drafts, observed))
    return made


def test_calibration_flags_gaps_that_count(capsys: pytest.CaptureFixture[str]) -> None:
    key, other = (Method.DRAFT_MODEL, Verification.GREEDY), (Method.NGRAM, Verification.GREEDY)
    good = _calibration((0.8, 0.81, 300), (0.5, 0.9, 199))  # too few to count
    bad = _calibration((0.8, 0.84, 200))
    assert calibration.missed({key: good}) == []
    assert calibration.missed({key: good, other: bad}) == [
        "ngram, greedy: a gap of 0.040 at a position with 200 drafts or more, above 0.03"
    ]
    calibration.render({key: good, other: bad}, title="a title")
    out = capsys.readouterr().out
    assert [line.split()[-2] for line in out.splitlines() if "!" in line] == ["!"]
    assert "-0.040" in out
    said = calibration.to_json({key: good, other: bad}, {})
    assert [(d["method"], d["rule"], d["largest_gap"]) for d in said["drafters"]] == [
        ("draft_model", "greedy", pytest.approx(0.01)),
        ("ngram", "greedy", pytest.approx(0.04)),
    ]
    assert said["drafters"][0]["by_position"][1] == {
        "drafts": 199,
        "predicted": pytest.approx(0.5),
        "observed": pytest.approx(0.9),
    }


def test_the_command_calibration(tmp_path: Path) -> None:
    target, draft = tiny_pair(tmp_path, max_position_embeddings=4096)
    command = ["bench", "calibration", "--model", str(target), "--draft", str(draft), "--streams", "4"]
    options = ["--max-tokens", "8", "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    drafters = json.loads((tmp_path / "out.json").read_text())["drafters"]
    assert {drafter["rule"] for drafter in drafters} == {"greedy"}
    for drafter in drafters:
        assert drafter["by_position"][0]["drafts"] > 0
        for reached in drafter["by_position"]:
            assert 0 <= reached["observed"] <= 1
            assert 0 < reached["predicted"] < 1


def test_serving_measures_every_way(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    cells = serving.measure(partial(_engine, pair), PROMPTS, [2], parse_depths("off,2"), max_tokens=5, rounds=1)
    assert [cell.depth for cell in cells] == ["off", "2"]
    for cell in cells:
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in cell.seconds.values())
        assert cell.ratio("served") > 0
    serving.render(cells, title="a title")
    assert "offline s" in capsys.readouterr().out
