"""Checkpoints that are damaged or not what their config says: the error names file, tensor and expectation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import ModelLoadError
from paceline.models import load_model
from paceline.models.tokenizer import load_tokenizer
from support.checkpoints import END_OF_TEXT_ID, tiny_checkpoint

CPU = torch.device("cpu")
NAME = "model.layers.1.self_attn.k_proj.weight"


def edit(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as error:
        load_model(path, torch.float32, CPU)
    return str(error.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path)


def test_a_wrong_shape(path: Path) -> None:
    message = refusal(edit(path, lambda tensors: tensors.update({NAME: torch.zeros(32, 65)})))
    assert message == f"{path}/model.safetensors: {NAME}: found shape [32, 65], expected [32, 64]"


def test_a_missing_tensor(path: Path) -> None:
    message = refusal(edit(path, lambda tensors: tensors.pop(NAME)))
    assert message == f"{path}: {NAME}: found in no file, expected a tensor of shape [32, 64]"


def test_an_unexpected_tensor(path: Path) -> None:
    message = refusal(edit(path, lambda tensors: tensors.update({"model.layers.2.x": torch.zeros(1)})))
    assert message.startswith(f"{path}/model.safetensors: model.layers.2.x: unexpected")


def test_an_unknown_dtype(path: Path) -> None:
    message = refusal(edit(path, lambda tensors: tensors.update({NAME: torch.zeros(32, 64).to(torch.float8_e4m3fn)})))
    assert message == f"{path}/model.safetensors: {NAME}: found dtype F8_E4M3, expected one of F32, F16, BF16"


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file(path: Path, kept: int) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert refusal(path).startswith(f"{file}: cannot be read as safetensors")


def test_no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").touch()
    assert refusal(path).startswith(f"{path}: found neither model.safetensors nor model.safetensors.index.json")


def test_a_missing_shard(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, max_shard_size="60KB")
    shard = max(path.glob("model-*.safetensors"))
    shard.unlink()
    assert refusal(path).startswith(f"{shard}: cannot be read as safetensors: No such file")


@pytest.mark.parametrize("content", [{}, {"weight_map": []}, {"weight_map": {"model.norm.weight": 1}}])
def test_a_malformed_index(path: Path, content: dict[str, Any]) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps(content))
    assert "model.safetensors.index.json: weight_map" in refusal(path)


def test_leftovers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    clean = load_model(path, torch.float32, CPU).checkpoint_views()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": torch.ones(320, 64)}
    edited = load_model(edit(path, lambda tensors: tensors.update(extra)), torch.float32, CPU).checkpoint_views()
    assert clean.keys() == edited.keys()
    assert all(torch.equal(clean[name], edited[name]) for name in clean)


def test_an_untied_head_must_be_there(path: Path) -> None:
    assert "lm_head.weight: found in no file" in refusal(edit(path, lambda tensors: tensors.pop("lm_head.weight")))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_weights_are_converted_to_the_dtype_asked_for(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    path = tiny_checkpoint(tmp_path, dtype=stored)
    tensors = load_file(path / "model.safetensors")
    views = load_model(path, wanted, CPU).checkpoint_views()
    assert views.keys() == tensors.keys()
    for name, view in views.items():
        assert torch.equal(view, tensors[name].to(wanted)), name


def test_the_tokenizer_round_trips_and_has_a_chat_template(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    text = "naïve  cyclists\n\t\U0001f6b2 follow"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("cyclists")) < len("cyclists")  # merges are learned
    assert tokenizer.eos_token_id == END_OF_TEXT_ID
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "user: hi\n"


@pytest.mark.parametrize("vocab_size", [2, 16, 257, 320])
def test_tiny_vocabularies_fit_their_model(tmp_path: Path, vocab_size: int) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint(tmp_path, vocab_size=vocab_size))
    assert len(tokenizer) == vocab_size
    ids = tokenizer.encode("the line of others")
    assert ids
    assert max(ids) < vocab_size


def test_tokenizers_that_cannot_be_loaded(path: Path) -> None:
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="the tokenizer cannot be loaded"):
        load_tokenizer(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no tokenizer: expected one of tokenizer\.json"):
        load_tokenizer(path)
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        load_tokenizer(path / "nowhere")


@pytest.mark.parametrize("template", ["{% raise %}", "{% if %}"])
def test_a_chat_template_that_cannot_be_read(path: Path, template: str) -> None:
    (path / "chat_template.jinja").write_text("{{ messages }}\n" + template)
    with pytest.raises(ModelLoadError, match=r"the chat template cannot be read: .*, line 2"):
        load_tokenizer(path)
    assert load_tokenizer(path, chats=False)
    assert load_tokenizer(path, chats=False).chat_template


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('two, please') }}", "{{ 1 / 0 }}", "{% generation %}{% endgeneration %}"]
)
def test_a_chat_template_may_want_other_messages(path: Path, template: str) -> None:
    (path / "chat_template.jinja").write_text(template)
    assert load_tokenizer(path).chat_template == template
