"""Files of tenants: what they say, and every mistake in them at once."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from paceline import wiring
from paceline.cli import main
from paceline.config_file import read_tenants
from paceline.core.params import Method, SpeculationBounds
from paceline.core.tenants import TenantPolicy
from paceline.errors import InvalidArgument

GOOD = """
[default]
max_running = 2

[tenants.gold]
weight = 3
max_queued = 10
max_blocks = 100
tokens_per_second = 500
burst_tokens = 2000.5
max_priority = 5
speculation = {methods = ["ngram"], min_depth = 1, max_depth = 4}

[tenants."a.b@c"]
"""

# A file, and the beginning of a line for each of its mistakes.
BAD = {
    "unknown = 'maybe'": "unknown = 'maybe': Input should be 'serve' or 'refuse'",
    "colour = 'red'": "colour = 'red': ",
    "default.weight = 0": "default.weight = 0: Input should be greater than 0",
    "tenants.a.weight = -1.5": "tenants.a.weight = -1.5: Input should be greater than 0",
    "tenants.a.wieght = 1": "tenants.a.wieght = 1: ",
    "tenants.a.max_running = true": "tenants.a.max_running = True: Input should be a valid integer",
    "tenants.a.max_queued = '3'": "tenants.a.max_queued = '3': Input should be a valid integer",
    "tenants.a.max_blocks = 0": "tenants.a.max_blocks = 0: Input should be greater than or equal to 1",
    "tenants.a.burst_tokens = 9": "tenants.a.burst_tokens = 9: must be set together with tokens_per_second",
    "tenants.b.tokens_per_second = inf": "tenants.b.tokens_per_second = inf: Input should be a finite number",
    "tenants.b.burst_tokens = nan": "tenants.b.burst_tokens = nan: Input should be a finite number",
    "tenants.b.max_priority = -1": "tenants.b.max_priority = -1: Input should be greater than or equal to 0",
    "tenants.b.speculation.methods = ['guess']": "tenants.b.speculation.methods.0 = 'guess': Input should be 'none'",
    "tenants.b.speculation.min_depth = 3\ntenants.b.speculation.max_depth = 2": (
        "tenants.b.speculation.max_depth = 2: must be at least min_depth (3)"
    ),
    "tenants.'two words'.weight = 1": "tenants.two words.[key] = 'two words': String should match",
    "tenants.c = 7": "tenants.c = 7: ",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tenants.toml"


def refused(file: Path) -> str:
    with pytest.raises(InvalidArgument) as caught:
        read_tenants(file)
    return str(caught.value)


def test_what_a_file_grants(file: Path) -> None:
    file.write_text(GOOD)
    policies, default = read_tenants(file)
    bounds = SpeculationBounds(frozenset({Method.NGRAM}), 1, 4)
    assert policies == {
        "gold": TenantPolicy(3.0, None, 10, 100, 500.0, 2000.5, 5, bounds),
        "a.b@c": TenantPolicy(),
    }
    assert default == TenantPolicy(max_running=2)


def test_an_empty_file_serves_everybody(file: Path) -> None:
    file.write_text("")
    assert read_tenants(file) == ({}, TenantPolicy())


def test_others_may_be_refused(file: Path) -> None:
    file.write_text('unknown = "refuse"\n[tenants.a]')
    assert read_tenants(file) == ({"a": TenantPolicy()}, None)


def test_every_mistake_is_told_at_once(file: Path) -> None:
    file.write_text("\n".join(BAD))
    first, *lines = refused(file).splitlines()
    assert first == f"{file} has {len(BAD)} mistakes:"
    for told in BAD.values():
        assert sum(line.startswith(f"  {told}") for line in lines) == 1, told
    assert len(lines) == len(BAD)


@pytest.mark.parametrize("text", BAD)
def test_one_mistake_is_told_alone(file: Path, text: str) -> None:
    file.write_text(text)
    first, line = refused(file).splitlines()
    assert first == f"{file} has 1 mistake:"
    assert line.startswith(f"  {BAD[text]}")


def test_a_long_value_is_cut(file: Path) -> None:
    file.write_text(f"unknown = '{'x' * 1000}'")
    assert re.search(r"x{60,80}\.\.\.: ", refused(file))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "a readable file (No such file or directory)"),
        (b"[tenants.a\n", "TOML in UTF-8 (Expected ']'"),
        (b"a = 1\na = 2\n", "TOML in UTF-8 (Cannot overwrite a value"),
        (b"a = '\xff'\n", "TOML in UTF-8 ('utf-8' codec"),
    ],
    ids=["missing", "broken", "twice", "not UTF-8"],
)
def test_what_is_no_file_of_ours(file: Path, data: bytes | None, said: str) -> None:
    if data is not None:
        file.write_bytes(data)
    text = refused(file)
    assert text.startswith(f"file = {str(file)!r}: must be ")
    assert said in text


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "a readable file (Is a directory)" in refused(tmp_path)


@pytest.mark.parametrize("command", [["serve"], ["generate", "hello"]])
def test_the_command_line_tells_them_before_a_model_is_loaded(
    command: list[str], file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(settings: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(wiring, "build_engine", load)
    file.write_text("\n".join(BAD))
    monkeypatch.setattr(sys, "argv", ["paceline", *command, "--tenants", str(file)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"paceline: {file} has {len(BAD)} mistakes:\n")
    assert all(told in shown for told in BAD.values())
