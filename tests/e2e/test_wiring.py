"""Settings that do not go together are refused in words, before anything is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from paceline.errors import InvalidArgument, ModelLoadError
from paceline.wiring import EngineSettings, build_engine
from support.checkpoints import tiny_checkpoint
from support.pairs import tiny_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = tiny_pair(tmp_path_factory.mktemp("pair"))
    return str(target), str(draft)


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"dtype": "int3"}, "dtype", "auto, float32 or bfloat16"),
        ({"depth": "deep"}, "depth", "auto, off or an integer"),
        ({"depth": "-1"}, "depth", "auto, off or an integer"),
        ({"max_model_len": 513}, "max_model_len", "between 2 and the model's length, 512"),
        ({"max_model_len": 1}, "max_model_len", "between 2 and"),
        ({"max_num_seqs": 0}, "max_num_seqs", ">= 1"),
        ({"block_size": 0}, "block_size", ">= 1"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens", "at least max_num_seqs (64)"),
        ({"kv_cache_memory": 1000}, "kv_cache_memory", "for one request of max_model_len = 512"),
    ],
)
def test_settings(pair: tuple[str, str], settings: dict[str, object], field: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        build_engine(EngineSettings(model=pair[0], draft=pair[1], **settings))  # type: ignore[arg-type]
    assert caught.value.field == field
    assert words in str(caught.value)
    assert repr(next(iter(settings.values()))) in str(caught.value)


@pytest.mark.parametrize("field", ["model", "draft"])
def test_unknown_path(pair: tuple[str, str], field: str) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        build_engine(EngineSettings(**{"model": pair[0], field: "nowhere"}))


def test_another_vocabulary_size(pair: tuple[str, str], tmp_path: Path) -> None:
    draft = tiny_checkpoint(tmp_path / "draft", vocab_size=300)
    with pytest.raises(InvalidArgument, match="vocabulary size, 320; it has 300"):
        build_engine(EngineSettings(model=pair[0], draft=str(draft)))


def test_another_tokenizer(pair: tuple[str, str], tmp_path: Path) -> None:
    """Same sizes, but two ids mean each other's token."""
    draft = shutil.copytree(pair[1], tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidArgument, match="tokenizer; token 'a'"):
        build_engine(EngineSettings(model=pair[0], draft=str(draft)))


def test_kv_memory_becomes_blocks(pair: tuple[str, str]) -> None:
    # 2 layers x (K, V) x 16 tokens x 2 heads x 16 dims x 4 bytes = 8 KiB a block, for target and draft each.
    engine = build_engine(
        EngineSettings(model=pair[0], draft=pair[1], dtype="float32", kv_cache_memory=40 * 16384 + 100)
    )
    assert engine.scheduler.config.num_blocks == 40
