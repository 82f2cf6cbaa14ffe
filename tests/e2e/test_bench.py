"""`paceline bench throughput`: every cell is measured and said."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from paceline.bench import acceptance, backends, depth, grammar, limits, sampling, serving, synthetic
from paceline.bench.limits import Figure, Memory, Passes
from paceline.bench.throughput import Cell, Sample, parse_depths, parse_sizes
from paceline.cli import app
from paceline.core.params import Method, SamplingParams, SpeculationParams, StopParams, Verification
from paceline.engine import Engine, GenerationRequest
from paceline.errors import InvalidArgument
from paceline.models import load_model_config
from paceline.wiring import EngineSettings, build_engine
from paceline_kernels.cpu import ceilings
from support.native import needs_compiler
from support.pairs import tiny_pair


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
        (["--depth", "99", "--draft", "none"], "depth = '99': must be at most"),
    ],
)
def test_bad_options(tmp_path: Path, options: list[str], words: str) -> None:
    target, draft = tiny_pair(tmp_path)
    command = [sys.executable, "-m", "paceline", "bench", "throughput", "--model", str(target), "--draft", str(draft)]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    done = subprocess.run(
        [*command, "--prompts", str(tmp_path / "prompts.jsonl"), *options], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


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


def test_parsing() -> None:
    assert parse_sizes("1, 16") == [1, 16]
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
    return build_engine(EngineSettings(model=str(pair[0]), draft=str(pair[1]), dtype="float32", backend=backend))


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
    cell = backends.Cell(
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
    assert limits.streamed_bytes(config, 2) == 2 * sum(matrices.values())
    assert limits.matrix_elements(config) == sum(matrices.values()) - matrices["lm_head.weight"]
    rows, heads = 10, config.num_heads * config.head_dim
    products = 2 * rows * limits.matrix_elements(config)
    # Row r sees r + 1 positions; a score and a weighted value of each take a multiplication and an addition.
    attention = config.num_layers * sum(2 * 2 * heads * (row + 1) for row in range(rows))
    assert limits.prefill_operations(config, rows) == products + attention


@needs_compiler
def test_the_command_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tiny model in tiny buffers: the numbers mean nothing here, but all of them are there."""
    target, draft = tiny_pair(tmp_path, tie_word_embeddings=True)
    monkeypatch.setattr(ceilings, "uncached_bytes", lambda: 4 << 20)
    monkeypatch.setattr(limits, "median_seconds", partial(ceilings.median_seconds, least=0.0))
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
    memory = said["memory"]
    config = load_model_config(target)
    assert memory["weights"] == 2 * limits.streamed_bytes(config, 2)
    assert (7 << 20) < memory["kv"] <= (8 << 20)
    assert memory["peak"] > memory["idle"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--draft", "ngram"], "draft = 'ngram': must be"),
        (["--kv-cache-memory", "much"], "is not a size"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_bad_options_of_limits(options: list[str], words: str) -> None:
    command = [sys.executable, "-m", "paceline", "bench", "limits", *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_peak_memory_is_the_systems() -> None:
    known = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert limits.peak_memory() == pytest.approx(known, rel=0.05)


def test_depth_compares_auto_with_everything_else(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    engine = _engine(pair)
    policy = engine.scheduler.speculation.policy
    settings = depth.parse_settings("off,2,auto,realizar", Method.DRAFT_MODEL)
    cells = depth.measure(engine, PROMPTS, [1, 2], settings, 8, rounds=2, sampling=GREEDY)
    assert engine.scheduler.speculation.policy is policy
    assert [(cell.streams, cell.setting.name) for cell in cells] == [
        (size, name) for size in (1, 2) for name in ("off", "2", "auto", "realizar")
    ]
    for cell in cells:
        assert len(cell.rates) == 2
        assert min(cell.rates) > 0
    drafted = {cell.setting.name: max(cell.depths) for cell in cells}
    assert drafted["off"] == 0
    assert drafted["2"] > 1
    assert drafted["realizar"] > 1
    depth.render(cells, title="a title")
    assert "auto / best fixed" in capsys.readouterr().out


def test_the_best_is_chosen_in_other_rounds_than_it_is_compared_in() -> None:
    bounds = SpeculationParams()
    auto = depth.Cell(1, depth.Setting("auto", bounds), rates=[6.0, 1.0, 6.0, 1.0])
    lucky = depth.Cell(1, depth.Setting("1", bounds), rates=[9.0, 2.0, 9.0, 2.0])
    steady = depth.Cell(1, depth.Setting("2", bounds), rates=[4.0, 3.0, 4.0, 3.0])
    best, ratio, half = auto.best_over([lucky, steady])
    assert best is steady
    assert (ratio, half) == (1.5, 0.0)


def test_copying_and_wild_streams_are_mixed(pair: tuple[Path, Path]) -> None:
    settings = depth.parse_settings("off,auto", None)
    cells = depth.measure(_engine(pair), PROMPTS, [2], settings, 6, rounds=1, sampling=None)
    assert all(len(cell.rates) == 1 for cell in cells)


def test_unknown_depths_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="depth = 'deep': must be off, auto, a number, or one of"):
        depth.parse_settings("off,deep", None)
    with pytest.raises(InvalidArgument, match=r"synthetic = '0.5,2': must be probabilities"):
        synthetic.parse_rates("0.5,2")


def test_synthetic_acceptance_is_as_decreed(pair: tuple[Path, Path]) -> None:
    engine = _engine(pair)
    stop = StopParams(max_tokens=13, ignore_eos=True)
    synthetic.decree(engine, [1.0, 0.0])
    bounds = SpeculationParams(Method.DRAFT_MODEL, 3, 3)
    first = engine.add(GenerationRequest((5, 6, 7), GREEDY, stop, bounds))
    second = engine.add(GenerationRequest((5, 6, 7), GREEDY, stop, bounds))
    stats = {}
    while engine.has_work:
        stats |= {output.request_id: output.stats for output in engine.step() if output.stats is not None}
    lucky, unlucky = (stats[first], stats[second]) if first % 2 == 0 else (stats[second], stats[first])
    assert lucky.accepted_tokens == lucky.drafted_tokens > 0
    assert unlucky.accepted_tokens == 0 < unlucky.drafted_tokens


def test_serving_measures_every_way(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    cells = serving.measure(partial(_engine, pair), PROMPTS, [2], parse_depths("off,2"), max_tokens=5, rounds=1)
    assert [cell.depth for cell in cells] == ["off", "2"]
    for cell in cells:
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in cell.seconds.values())
        assert cell.ratio("served") > 0
    serving.render(cells, title="a title")
    assert "offline s" in capsys.readouterr().out
