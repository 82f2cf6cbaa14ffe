"""The compiled scheduler does what its sources say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import compiled

ROOT = Path(__file__).resolve().parents[2]
WHICH = "import paceline.compiled; print(paceline.compiled.is_compiled())"
FILE = """
requests = 300
seconds = 20
[engine]
max_num_seqs = 16
num_blocks = 600
[machine]
free_rows = 64
[arrivals]
rate = 40
[tenants.one]
weight = 3
deadline = [1.0, 5.0]
[tenants.two]
acceptance = 0.95
"""


def run(arguments: list[str], is_compiled: bool) -> str:
    environment = os.environ | {compiled.VARIABLE: "1" if is_compiled else "0"}
    done = subprocess.run([sys.executable, *arguments], env=environment, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def _build() -> None:
    compiled.build()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_it_is_used_unless_told_otherwise(is_compiled: bool) -> None:
    assert run(["-c", WHICH], is_compiled) == f"{is_compiled}\n"


def test_a_simulation_comes_out_the_same(tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text(FILE)
    told = []
    for is_compiled in (True, False):
        out = tmp_path / f"{is_compiled}.json"
        run(["-m", "paceline", "sim", str(tmp_path / "file.toml"), "--json", str(out)], is_compiled)
        told.append(json.loads(out.read_text()))
    assert told[0]["steps"] > 100
    assert told[0] == told[1]


def test_other_sources_are_interpreted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    assert len(compiled.path_of("core", ["sources"])) == 2
    for module in ("compiled.py", *compiled.MODULES):
        (tmp_path / module).parent.mkdir(exist_ok=True)
        (tmp_path / module).write_bytes((compiled.SOURCES / module).read_bytes())
    monkeypatch.setattr(compiled, "SOURCES", tmp_path)
    assert len(compiled.path_of("core", ["sources"])) == 2
    (tmp_path / compiled.MODULES[0]).write_text("# changed")
    assert compiled.path_of("core", ["sources"]) == ["sources"]
