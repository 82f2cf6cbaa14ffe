"""`paceline bench throughput`: every cell is measured and said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.bench import acceptance, grammar, reproducible, sampling
from paceline.bench.throughput import Cell, Sample, parse_depths, parse_sizes
from paceline.core.params import Method, Verification
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.wiring import EngineSettings, build_engine
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


def _engine(pair: tuple[Path, Path], reproducible: bool = False) -> Engine:
    return build_engine(
        EngineSettings(model=str(pair[0]), draft=str(pair[1]), dtype="float32", reproducible=reproducible)
    )


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


def test_reproducible_compares_equal_work(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    cells = reproducible.measure(
        _engine(pair), _engine(pair, True), PROMPTS, [1, 3], parse_depths("off,2"), max_tokens=6, rounds=1
    )
    assert [(cell.streams, cell.depth) for cell in cells] == [(1, "off"), (1, "2"), (3, "off"), (3, "2")]
    assert all(cell.ratio(0) > 0 and cell.ratio(1) > 0 for cell in cells)
    reproducible.render(cells, title="a title")
    assert "x default" in capsys.readouterr().out
