"""Logits against transformers, through pages, in pieces, for every kind of checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline import demo
from paceline.models import Decoder, Model, load_model, load_model_config, load_native
from paceline_kernels import Int8Weight
from support.backends import DEVICE, OnDevice, backend
from support.checkpoints import LLAMA3_ROPE, tiny_checkpoint
from support.decoding import assert_batches_change_nothing, paged_logits, random_prompts
from support.native import needs_compiler
from support.pages import Pages

CPU = torch.device("cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_parameters": LLAMA3_ROPE},
    "sharded": {"max_shard_size": "60KB"},
    "tied, llama3, sharded": {
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3_ROPE,
        "max_shard_size": "60KB",
    },
    "wide heads": {"head_dim": 32, "num_key_value_heads": 1},
    "no sharing": {"num_key_value_heads": 4},
}
CASES = [(family, variant) for family in ("llama", "qwen2", "qwen3") for variant in VARIANTS]


Load = Callable[[Path, torch.dtype], Model]


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_compiler)])
def load(request: pytest.FixtureRequest) -> Load:
    """Both backends."""
    return load_native if request.param == "native" else partial(load_model, device=CPU)


@torch.inference_mode()
def transformers_logits(path: Path, prompts: dict[str, list[int]], dtype: torch.dtype) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return {name: model(torch.tensor([ids])).logits[0].float() for name, ids in prompts.items()}


@pytest.mark.parametrize("path", [demo.TARGET, demo.DRAFT], ids=["target", "draft"])
def test_embedded_pair_equals_transformers(path: Path, load: Load) -> None:
    prompts = random_prompts(4096)
    theirs = transformers_logits(path, prompts, torch.float32)
    ours = paged_logits(load(path, torch.float32), prompts)
    for name in prompts:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_logits_equal_transformers(tmp_path: Path, family: str, variant: str, load: Load) -> None:
    path = tiny_checkpoint(tmp_path, family, **VARIANTS[variant])
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == ("sharded" in variant)
    prompts = random_prompts(320)
    theirs = transformers_logits(path, prompts, torch.float32)
    ours = paged_logits(load(path, torch.float32), prompts)
    for name in prompts:
        assert theirs[name].std() > 1  # else the tolerance would mean nothing
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "biases"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {"attention_bias": True})],
)
def test_logits_equal_transformers_with_every_bias(
    tmp_path: Path, family: str, biases: dict[str, Any], load: Load
) -> None:
    path = tiny_checkpoint(tmp_path, family, **biases)
    prompts = random_prompts(320)
    theirs = transformers_logits(path, prompts, torch.float32)
    ours = paged_logits(load(path, torch.float32), prompts)
    for name in prompts:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=0)


def test_bfloat16_is_as_close_to_fp32_as_transformers_is(tmp_path: Path, load: Load) -> None:
    path = tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    prompts = random_prompts(320)
    exact = transformers_logits(path, prompts, torch.float32)["c"]
    theirs = (transformers_logits(path, prompts, torch.bfloat16)["c"] - exact).abs().mean()
    ours = (paged_logits(load(path, torch.bfloat16), prompts)["c"] - exact).abs().mean()
    assert 0 < ours < 1.2 * theirs


def test_the_size_of_runs_and_blocks_changes_nothing(tmp_path: Path, load: Load) -> None:
    model = load(tiny_checkpoint(tmp_path), torch.float32)
    prompts = random_prompts(320)
    first, second = paged_logits(model, prompts, seed=1), paged_logits(model, prompts, seed=2)
    for name in prompts:
        torch.testing.assert_close(first[name], second[name], atol=1e-4, rtol=0)


NATIVE_CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"num_key_value_heads": 4}),
    ("qwen3", {"num_key_value_heads": 1, "head_dim": 32}),
]


@needs_compiler
@pytest.mark.parametrize(("family", "overrides"), NATIVE_CASES)
def test_native_bfloat16_is_as_close_to_fp32_as_torch_is(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    path = tiny_checkpoint(tmp_path, family, **overrides)
    prompts = random_prompts(320)
    exact = paged_logits(load_model(path, torch.float32, CPU), prompts)
    theirs = paged_logits(load_model(path, torch.bfloat16, CPU), prompts)
    ours = paged_logits(load_native(path, torch.bfloat16), prompts)
    for name in prompts:
        error, allowed = (ours[name] - exact[name]).abs().mean(), (theirs[name] - exact[name]).abs().mean()
        assert 0 < error < 1.5 * allowed


@needs_compiler
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "overrides"), NATIVE_CASES)
def test_native_logits_do_not_depend_on_the_batch(
    tmp_path: Path, family: str, overrides: dict[str, Any], dtype: torch.dtype, int8: bool
) -> None:
    """A prompt whole and a token at a time against random chunks, verifications of 5 rows, and 16 sequences at once."""
    assert_batches_change_nothing(load_native(tiny_checkpoint(tmp_path, family, **overrides), dtype, int8=int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "overrides"), NATIVE_CASES)
def test_int8_logits_are_those_of_the_rounded_weights(
    tmp_path: Path, family: str, overrides: dict[str, Any], dtype: torch.dtype
) -> None:
    """Every matrix and the head, but not the embedding, tied to it or not."""
    path = tiny_checkpoint(tmp_path, family, **overrides)
    rounded, plain = load_model(path, dtype, CPU, int8=True), load_model(path, dtype, CPU)
    assert rounded.num_parameters == plain.num_parameters
    own = plain.checkpoint_views()
    for name, view in rounded.checkpoint_views().items():
        is_matrix = "proj.weight" in name or name == "lm_head.weight"
        assert isinstance(view, Int8Weight) == is_matrix, name
        if isinstance(view, Int8Weight):
            assert (view.dequantized(torch.float32) - own[name].float()).abs().max() < 0.01
            own[name].copy_(view.dequantized(dtype))
        else:
            assert torch.equal(view, own[name])
    # A tied head is not among the views, and the embedding stays as it is.
    head = rounded.linears()[-1][0].dequantized(dtype)
    assert (head - plain.linears()[-1][0]).abs().max() < 0.01
    prompts = random_prompts(320)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "_head", head)
        expected = paged_logits(plain, prompts)
    found = paged_logits(rounded, prompts)
    assert all(torch.equal(found[name], expected[name]) for name in prompts)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("family", "overrides"), [NATIVE_CASES[1], NATIVE_CASES[3]])
def test_kernels_for_gpus_compute_the_same(tmp_path: Path, family: str, overrides: dict[str, Any], int8: bool) -> None:
    """All but attention; as near as another rounding of sums is."""
    path = tiny_checkpoint(tmp_path, family, **overrides)
    prompts = {name: ids[:20] for name, ids in random_prompts(320).items()}
    exact = paged_logits(load_model(path, torch.float32, CPU, int8=int8), prompts)
    theirs = paged_logits(load_model(path, torch.bfloat16, CPU, int8=int8), prompts)
    ours = paged_logits(OnDevice(load_model(path, torch.bfloat16, DEVICE, backend("triton"), int8=int8)), prompts)
    for name in prompts:
        error, allowed = (ours[name] - exact[name]).abs().mean(), (theirs[name] - exact[name]).abs().mean()
        assert 0 < error < 1.5 * allowed


def test_angles_are_kept_for_the_positions_asked_for(tmp_path: Path) -> None:
    config = load_model_config(tiny_checkpoint(tmp_path))
    pages = Pages(num_layers=2, num_kv_heads=2, head_dim=16)
    model = Decoder(config, torch.float32, CPU, max_positions=3)
    for view in model.checkpoint_views().values():
        view.zero_()
    model.forward(torch.zeros(3, dtype=torch.long), pages.batch([("x", 3)]), pages.kv_cache)
    with pytest.raises(IndexError):
        model.forward(torch.zeros(1, dtype=torch.long), pages.batch([("x", 1)]), pages.kv_cache)


@pytest.mark.parametrize("tied", [True, False])
def test_num_parameters_counts_a_tied_head_once(tmp_path: Path, tied: bool) -> None:
    path = tiny_checkpoint(tmp_path, "qwen3", tie_word_embeddings=tied)
    model = load_model(path, torch.float32, CPU)
    assert model.num_parameters == AutoModelForCausalLM.from_pretrained(path).num_parameters()
    assert (model.dtype, model.device) == (torch.float32, CPU)
