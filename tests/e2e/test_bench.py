"""`paceline bench throughput`: every cell is measured and said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.bench.throughput import Cell, Sample, parse_depths, parse_sizes
from paceline.core.params import Method
from paceline.errors import InvalidArgument
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
