"""Costs that were measured once are found again, and nothing else is taken for them."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import cost_cache
from paceline.core.config import SchedulerConfig
from paceline.core.cost_model import CostModel
from paceline_kernels.cpu.build import CACHE_VARIABLE

COSTS = CostModel([1, 8], [0.01, 0.02], 1e-6, [1, 2], [0.001, 0.002])
KEY = "0123456789abcdef" * 4
CONFIG = SchedulerConfig(num_blocks=100)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where costs are kept; not there yet."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_saved_is_loaded(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert cost_cache.load(KEY, drafts=True) is None
    cost_cache.save(KEY, COSTS)
    found = cost_cache.load(KEY, drafts=True)
    assert found is not None
    assert found.as_dict() == COSTS.as_dict()
    assert [path.name for path in cache.iterdir()] == ["costs-0123456789abcdef.json"]
    assert not caplog.records


def test_a_newer_model_takes_the_place_of_an_older() -> None:
    cost_cache.save(KEY, COSTS)
    cost_cache.save(KEY, CostModel([1], [0.5]))
    found = cost_cache.load(KEY, drafts=False)
    assert found is not None
    assert found.target(1, 0) == 0.5


def test_those_that_were_used_last_are_kept(cache: Path) -> None:
    keys = [f"{number:064x}"[::-1] for number in range(cost_cache.MOST_KEPT + 1)]
    for age, key in enumerate(keys[:-1]):
        cost_cache.save(key, COSTS)
        os.utime(cache / f"costs-{key[:16]}.json", (1000 + age, 1000 + age))
    (cache / "decoder.so").touch()
    assert cost_cache.load(keys[0], drafts=True) is not None
    cost_cache.save(keys[-1], COSTS)
    assert [key for key in keys if cost_cache.load(key, drafts=True) is None] == [keys[1]]
    assert (cache / "decoder.so").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        json.dumps({"key": KEY}).encode(),
        json.dumps({"key": KEY[:-1] + "0", "costs": COSTS.as_dict()}).encode(),
        json.dumps({"key": KEY, "costs": {**COSTS.as_dict(), "per_context": float("nan")}}).encode(),
        json.dumps({"key": KEY, "costs": {}}).encode(),
        json.dumps({"key": KEY, "costs": {**COSTS.as_dict(), "rows": [], "seconds": []}}).encode(),
        json.dumps({"key": KEY, "costs": CostModel([1, 8], [0.01, 0.02]).as_dict()}).encode(),
    ],
)
def test_a_file_that_is_of_no_use_is_ignored_with_a_warning(
    cache: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cost_cache.save(KEY, COSTS)
    (path,) = cache.iterdir()
    path.write_bytes(content)
    assert cost_cache.load(KEY, drafts=True) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()


def test_a_folder_that_cannot_be_written_is_said_once(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("not a folder")
    cost_cache.save(KEY, COSTS)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_without_a_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cost_cache, "cache_folder", lambda: None)
    cost_cache.save(KEY, COSTS)
    assert cost_cache.load(KEY, drafts=True) is None
    assert len(caplog.records) == 1


def test_a_write_that_fails_leaves_what_was_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cost_cache.save(KEY, COSTS)

    def fail(self: Path, target: Path) -> Path:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fail)
    cost_cache.save(KEY, CostModel([1], [0.5]))
    found = cost_cache.load(KEY, drafts=False)
    assert found is not None
    assert found.as_dict() == COSTS.as_dict()
    assert len(list(cache.iterdir())) == 1, "nothing half written stays"


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model")


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def key(model: Path, draft: Path | None = None, config: SchedulerConfig = CONFIG, **changes: Any) -> str:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "quantization": "none",
        "draft_quantization": "none",
        "backend": "native",
        "threads": 2,
        "device": "cpu",
    }
    return cost_cache.key_of(config, model, draft, **(settings | changes))


def test_the_same_has_the_same_key(model: Path) -> None:
    assert key(model) == key(model)
    assert key(model) == key(model, config=replace(CONFIG, num_blocks=7)), "memory comes and goes"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "bfloat16"),
        ("quantization", "int8"),
        ("draft_quantization", "int8"),
        ("backend", "torch"),
        ("threads", 1),
        ("device", "cuda"),
    ],
)
def test_settings_are_in_the_key(model: Path, name: str, value: object) -> None:
    assert key(model, **{name: value}) != key(model)


@pytest.mark.parametrize("name", ["block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_depth"])
def test_limits_are_in_the_key(model: Path, name: str) -> None:
    changed = replace(CONFIG, **{name: getattr(CONFIG, name) + 1})
    assert key(model, config=changed) != key(model)


def test_checkpoints_are_in_the_key(model: Path, tmp_path: Path) -> None:
    keys = [key(model), key(model, checkpoint(tmp_path / "draft"))]
    (model / "config.json").write_text('{"hidden_size": 9}')
    keys.append(key(model))
    (model / "model.safetensors").write_bytes(b"more weights")
    keys.append(key(model))
    os.utime(model / "model.safetensors", (1, 1))
    keys.append(key(model))
    assert len(set(keys)) == 5


@pytest.mark.parametrize(("name", "value"), [("__version__", "99"), ("FORMAT", 99), ("cpu_name", lambda: "another")])
def test_machine_and_version_are_in_the_key(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    before = key(model)
    monkeypatch.setattr(cost_cache, name, value)
    assert key(model) != before
