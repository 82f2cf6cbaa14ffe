"""Logits against transformers, through pages, in pieces, for every kind of checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline import demo
from paceline.models import Decoder, load_model, load_model_config
from paceline_kernels import invariant
from support.checkpoints import LLAMA3_ROPE, tiny_checkpoint
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


def paged_logits(model: Decoder, prompts: dict[str, list[int]], seed: int = 0) -> dict[str, Tensor]:
    """All logits of all prompts, computed in random runs over random mixes: prefill chunks beside single tokens."""
    config, choose = model.config, random.Random(seed)
    pages = Pages(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=choose.choice([1, 4, 16]),
        num_blocks=2048,
        dtype=model.dtype,
        seed=seed,
    )
    parts: dict[str, list[Tensor]] = {name: [] for name in prompts}
    done = dict.fromkeys(prompts, 0)
    while unfinished := [name for name in prompts if done[name] < len(prompts[name])]:
        chosen = choose.sample(unfinished, choose.randint(1, len(unfinished)))
        runs = [(name, min(choose.choice([1, 5, 40]), len(prompts[name]) - done[name])) for name in chosen]
        ids = [token for name, rows in runs for token in prompts[name][done[name] : done[name] + rows]]
        with torch.inference_mode():
            hidden = model.forward(torch.tensor(ids), pages.batch(runs), pages.kv_cache)
            logits = model.logits(hidden)
        assert hidden.dtype == model.dtype
        assert logits.dtype == torch.float32
        for (name, rows), part in zip(runs, torch.split(logits, [rows for _, rows in runs]), strict=True):
            parts[name].append(part)
            done[name] += rows
    return {name: torch.cat(part) for name, part in parts.items()}


def random_prompts(vocab_size: int) -> dict[str, list[int]]:
    choose = random.Random(1)
    return {name: [choose.randrange(vocab_size) for _ in range(n)] for name, n in {"a": 1, "b": 33, "c": 110}.items()}


@torch.inference_mode()
def transformers_logits(path: Path, prompts: dict[str, list[int]], dtype: torch.dtype) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return {name: model(torch.tensor([ids])).logits[0].float() for name, ids in prompts.items()}


@pytest.mark.parametrize("path", [demo.TARGET, demo.DRAFT], ids=["target", "draft"])
def test_embedded_pair_equals_transformers(path: Path) -> None:
    prompts = random_prompts(4096)
    theirs = transformers_logits(path, prompts, torch.float32)
    ours = paged_logits(load_model(path, torch.float32, CPU), prompts)
    for name in prompts:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_logits_equal_transformers(tmp_path: Path, family: str, variant: str) -> None:
    path = tiny_checkpoint(tmp_path, family, **VARIANTS[variant])
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == ("sharded" in variant)
    prompts = random_prompts(320)
    theirs = transformers_logits(path, prompts, torch.float32)
    ours = paged_logits(load_model(path, torch.float32, CPU), prompts)
    for name in prompts:
        assert theirs[name].std() > 1  # else the tolerance would mean nothing
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "biases"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {"attention_bias": True})],
)
def test_logits_equal_transformers_with_every_bias(tmp_path: Path, family: str, biases: dict[str, Any]) -> None:
    path = tiny_checkpoint(tmp_path, family, **biases)
    prompts = random_prompts(320)
    theirs = transformers_logits(path, prompts, torch.float32)
    ours = paged_logits(load_model(path, torch.float32, CPU), prompts)
    for name in prompts:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=0)


def test_bfloat16_is_as_close_to_fp32_as_transformers_is(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    prompts = random_prompts(320)
    exact = transformers_logits(path, prompts, torch.float32)["c"]
    theirs = (transformers_logits(path, prompts, torch.bfloat16)["c"] - exact).abs().mean()
    ours = (paged_logits(load_model(path, torch.bfloat16, CPU), prompts)["c"] - exact).abs().mean()
    assert 0 < ours < 1.2 * theirs


def test_the_size_of_runs_and_blocks_changes_nothing(tmp_path: Path) -> None:
    model = load_model(tiny_checkpoint(tmp_path), torch.float32, CPU)
    prompts = random_prompts(320)
    first, second = paged_logits(model, prompts, seed=1), paged_logits(model, prompts, seed=2)
    for name in prompts:
        torch.testing.assert_close(first[name], second[name], atol=1e-4, rtol=0)


COMPILED = pytest.mark.skipif(invariant.available() is not None, reason="no C++ compiler")
INVARIANT_CASES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"num_key_value_heads": 4}),
    ("qwen3", {"num_key_value_heads": 1, "head_dim": 32}),
]


@COMPILED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "overrides"), INVARIANT_CASES)
def test_invariant_operations_give_the_logits_of_the_reference(
    tmp_path: Path, family: str, overrides: dict[str, Any], dtype: torch.dtype
) -> None:
    path = tiny_checkpoint(tmp_path, family, **overrides)
    prompts = random_prompts(320)
    exact = paged_logits(load_model(path, torch.float32, CPU), prompts)
    theirs = paged_logits(load_model(path, dtype, CPU), prompts)
    ours = paged_logits(load_model(path, dtype, CPU, invariant), prompts)
    for name in prompts:
        error, allowed = (ours[name] - exact[name]).abs().mean(), (theirs[name] - exact[name]).abs().mean()
        assert error < max(1e-5, 1.5 * allowed)


@COMPILED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "overrides"), INVARIANT_CASES)
def test_invariant_logits_do_not_depend_on_the_batch(
    tmp_path: Path, family: str, overrides: dict[str, Any], dtype: torch.dtype
) -> None:
    """A prompt whole and a token at a time against random chunks, verifications of 5 rows, and 16 sequences at once."""
    model = load_model(tiny_checkpoint(tmp_path, family, **overrides), dtype, CPU, invariant)
    choose = random.Random(2)
    prompts = {str(i): [choose.randrange(320) for _ in range(choose.randint(60, 90))] for i in range(16)}
    prompt = prompts["0"]
    decodes = [1] * (len(prompt) - 50)
    alone = run_logits(model, prompt, [50, *decodes])
    assert torch.equal(run_logits(model, prompt, [len(prompt)]), alone), "whole"
    assert torch.equal(run_logits(model, prompt, [17, 3, 30, *decodes]), alone), "in chunks"
    verifications = [5] * (len(decodes) // 5)
    rest = len(decodes) - 5 * len(verifications)
    assert torch.equal(run_logits(model, prompt, [50, *verifications, *[1] * rest]), alone), "with four drafts"
    for seed in range(3):
        assert torch.equal(paged_logits(model, prompts, seed)["0"], alone), "in a batch of 16"


def run_logits(model: Decoder, prompt: list[int], runs: list[int]) -> Tensor:
    """All logits of one prompt alone, computed in runs of these many rows."""
    assert sum(runs) == len(prompt)
    config = model.config
    pages = Pages(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
    )
    parts = []
    for ids in torch.split(torch.tensor(prompt), runs):
        with torch.inference_mode():
            hidden = model.forward(ids, pages.batch([("prompt", len(ids))]), pages.kv_cache)
            parts.append(model.logits(hidden))
    return torch.cat(parts)


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
