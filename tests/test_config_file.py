"""Files of tenants: what they say, and every mistake in them at once."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

import pytest

from paceline import wiring
from paceline.cli import main
from paceline.config_file import TenantsFile, check_tenants, read_tenants, replaced
from paceline.core.config import SchedulerConfig
from paceline.core.method import Method
from paceline.core.params import SpeculationBounds
from paceline.core.tenant_policy import TenantPolicy
from paceline.errors import InvalidArgument
from paceline.sim.spec import SimulationFile

DOCS = Path(__file__).parents[1] / "docs"
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

KEY = "paceline_" + "k" * 43
HASH = "sha256:" + 64 * "a"
OTHER_HASH = "sha256:" + 64 * "b"

# A file, and the beginning of a line for each of its mistakes.
BAD = {
    "unknown = 'maybe'": "unknown = 'maybe': must be 'serve' or 'refuse'",
    "colour = 'red'": "colour = 'red': unknown key; known: unknown, default, tenants, gateways, admins",
    "default.weight = 0": "default.weight = 0: must be greater than or equal to 0.0001",
    "tenants.a.weight = -1.5": "tenants.a.weight = -1.5: must be greater than or equal to 0.0001",
    "tenants.b.weight = 1e300": "tenants.b.weight = 1e+300: must be less than or equal to 10000",
    "tenants.f.weight = nan": "tenants.f.weight = nan: must be ",
    "tenants.a.wieght = 1": "tenants.a.wieght = 1: unknown key; known: keys, common_names, weight, max_running, ",
    "tenants.a.speculation.depth = 1": (
        "tenants.a.speculation.depth = 1: unknown key; known: methods, min_depth, max_depth"
    ),
    "tenants.a.max_running = true": "tenants.a.max_running = True: must be a valid integer",
    "tenants.a.max_queued = '3'": "tenants.a.max_queued = '3': must be a valid integer",
    "tenants.a.max_blocks = 0": "tenants.a.max_blocks = 0: must be greater than or equal to 1",
    "tenants.a.burst_tokens = 9": "tenants.a.burst_tokens = 9: must be set together with tokens_per_second",
    "tenants.b.tokens_per_second = inf": "tenants.b.tokens_per_second = inf: must be a finite number",
    "tenants.f.tokens_per_second = 0": "tenants.f.tokens_per_second = 0: must be greater than or equal to 0.000000001",
    "tenants.b.burst_tokens = nan": "tenants.b.burst_tokens = nan: must be a finite number",
    "tenants.b.max_priority = -1": "tenants.b.max_priority = -1: must be greater than or equal to 0",
    "tenants.b.speculation.methods = ['guess']": "tenants.b.speculation.methods.0 = 'guess': must be 'none'",
    "tenants.b.speculation.min_depth = 3\ntenants.b.speculation.max_depth = 2": (
        "tenants.b.speculation.max_depth = 2: must be at least min_depth (3)"
    ),
    "tenants.'two words'.weight = 1": "tenants.two words.[key] = 'two words': must match",
    "tenants.c = 7": "tenants.c = 7: must be a table",
    "tenants.d.models = []": "tenants.d.models = []: must have at least 1 item",
    "tenants.e.models = 'demo'": "tenants.e.models = 'demo': must be a list",
    "tenants.e.common_names = 'e'": "tenants.e.common_names = 'e': must be a list",
    "tenants.d.common_names = ['']": "tenants.d.common_names.0 = '': must have at least 1 character",
    f"tenants.d.keys = ['{HASH}', 'sha256:a']": "tenants.d.keys.1: must match pattern '^sha256:",
    f"admins.a.keys = ['{HASH}']": "admins.a.keys.0: stands at tenants.d.keys.0 as well",
    "gateways.g.common_names = ['g', 'g']": "gateways.g.common_names.1: stands at gateways.g.common_names.0 as well",
    "admins.b.tenant = 'a'": "admins.b.tenant: unknown key; known: keys, common_names",
    "default.keys = []": "default.keys: unknown key; known: weight, ",
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
    granted = read_tenants(file)
    bounds = SpeculationBounds(frozenset({Method.NGRAM}), 1, 4)
    assert granted.policies == {
        "gold": TenantPolicy(3.0, None, 10, 100, 500.0, 2000.5, 5, bounds),
        "a.b@c": TenantPolicy(),
    }
    assert granted.default_policy == TenantPolicy(max_running=2)


def test_an_empty_file_serves_everybody(file: Path) -> None:
    file.write_text("")
    granted = read_tenants(file)
    assert (granted.policies, granted.default_policy) == ({}, TenantPolicy())
    assert granted == TenantsFile()
    assert not granted.has_credentials
    assert granted.models_of("anybody") is None


def test_others_may_be_refused(file: Path) -> None:
    file.write_text('unknown = "refuse"\n[tenants.a]')
    granted = read_tenants(file)
    assert (granted.policies, granted.default_policy) == ({"a": TenantPolicy()}, None)


def test_every_mistake_is_told_at_once(file: Path) -> None:
    file.write_text("\n".join(BAD))
    first, *lines = refused(file).splitlines()
    assert first == f"{file} has {len(BAD)} mistakes:"
    for told in BAD.values():
        assert sum(line.startswith(f"  {told}") for line in lines) == 1, told
    assert len(lines) == len(BAD)


@pytest.mark.parametrize("text", [text for text in BAD if not text.startswith("admins.a.keys")])
def test_one_mistake_is_told_alone(file: Path, text: str) -> None:
    file.write_text(text)
    first, line = refused(file).splitlines()
    assert first == f"{file} has 1 mistake:"
    assert line.startswith(f"  {BAD[text]}")


def test_who_shows_what(file: Path) -> None:
    file.write_text(
        f"""
        default.models = ["small"]
        tenants.a = {{keys = ["{HASH}", "{OTHER_HASH}"], common_names = ["a.example"], models = ["small", "large"]}}
        tenants.b = {{weight = 2}}
        gateways.front.common_names = ["front.example"]
        admins.ops.keys = ["sha256:{64 * "c"}"]
        """
    )
    granted = read_tenants(file)
    assert granted.has_credentials
    shown = {f"{kind}.{name}": (len(holder.keys), holder.common_names) for kind, name, holder in granted.holders}
    assert shown == {
        "tenants.a": (2, ("a.example",)),
        "tenants.b": (0, ()),
        "gateways.front": (0, ("front.example",)),
        "admins.ops": (1, ()),
    }
    assert granted.models_of("a") == {"small", "large"}
    assert granted.models_of("b") is None
    assert granted.models_of("unnamed") == {"small"}


def test_the_example_in_the_docs(file: Path) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", (DOCS / "security.md").read_text(), re.DOTALL)
    file.write_text(example)
    granted = read_tenants(file)
    assert {f"{kind}.{name}" for kind, name, _ in granted.holders} == {
        "tenants.chat",
        "tenants.batch",
        "gateways.openai",
        "admins.ops",
    }
    assert granted.default_policy is None
    assert granted.policies["chat"].weight == 3.0


@pytest.mark.parametrize(
    "text",
    [
        f"tenants.a.keys = ['{KEY}']",
        f"tenants.a.keys = '{KEY}'",
        f"tenants.a.key = ['{KEY}']",
        f"tenants.a = '{KEY}'",
        f"tenants = '{KEY}'",
        f"key = '{KEY}'",
        "tenants.a.keys = ['of my own']",
        "admins.ops = 'of my own'",
    ],
)
def test_mistakes_tell_no_key(file: Path, text: str) -> None:
    """Errors go into logs."""
    file.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        read_tenants(file)
    told = "".join(traceback.format_exception(caught.value))
    assert "has 1 mistake" in told
    assert KEY not in told
    assert "of my own" not in told


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": -1}, "seed = -1: must be greater than or equal to 0"),
        ({"policy": "lifo"}, "policy = 'lifo': must be 'ours', 'fcfs' or 'edf'"),
        (
            {"speed": 1},
            "speed = 1: unknown key; known: seed, requests, seconds, policy, machine, engine, arrivals, tenants",
        ),
    ],
)
def test_a_value_that_replaces_another(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        replaced(SimulationFile(), **changes)
    assert str(caught.value) == said


def test_tenants_without_room_are_told_together() -> None:
    config = SchedulerConfig(num_blocks=64, block_size=1)
    policies = {name: TenantPolicy(max_blocks=blocks) for name, blocks in [("a", 1), ("b", 2), ("c", 1)]}
    with pytest.raises(InvalidArgument) as caught:
        check_tenants(policies, None, config)
    assert str(caught.value).splitlines() == [
        "max_blocks of tenant 'a' = 1: must be at least 2, for the shortest request in blocks of 1",
        "  max_blocks of tenant 'c' = 1: must be at least 2, for the shortest request in blocks of 1",
    ]
    check_tenants({"b": policies["b"]}, TenantPolicy(), config)


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
    assert text.startswith(f"tenants = {str(file)!r}: must be ")
    assert said in text


def test_a_long_path_is_told_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / ("folder" * 20) / "tenants.toml"
    assert refused(file).startswith(f"tenants = {str(file)!r}: must be a readable file")


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
