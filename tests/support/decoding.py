"""Logits of whole models, computed run by run over pages full of NaN."""

from __future__ import annotations

import random
from typing import Protocol

import torch
from torch import Tensor

from paceline.models import Model
from paceline.models.model import Slot
from support.pages import Pages


class Fillable(Protocol):
    def slots(self) -> dict[str, Slot]: ...


def random_weights(model: Fillable, seed: int) -> dict[str, Tensor]:
    """For every tensor of a checkpoint, so large that logits spread over several units."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, slot in model.slots().items():
        noise = torch.randn(slot.shape, generator=generator)
        weights[name] = 1 + 0.2 * noise if "norm" in name else noise * slot.shape[-1] ** -0.5
    return weights


def fill(model: Fillable, weights: dict[str, Tensor]) -> None:
    for name, slot in model.slots().items():
        slot.fill(weights[name])


def pages_for(model: Model, *, block_size: int = 8, num_blocks: int = 128, seed: int = 0) -> Pages:
    config = model.config
    return Pages(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=model.dtype,
        lanes=model.kv_lanes,
        seed=seed,
    )


def random_prompts(vocab_size: int) -> dict[str, list[int]]:
    choose = random.Random(1)
    return {name: [choose.randrange(vocab_size) for _ in range(n)] for name, n in {"a": 1, "b": 33, "c": 110}.items()}


def paged_logits(model: Model, prompts: dict[str, list[int]], seed: int = 0) -> dict[str, Tensor]:
    """All logits of all prompts, computed in random runs over random mixes: prefill chunks beside single tokens."""
    choose = random.Random(seed)
    pages = pages_for(model, block_size=choose.choice([1, 4, 16]), num_blocks=2048, seed=seed)
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


def run_logits(model: Model, prompt: list[int], runs: list[int]) -> Tensor:
    """All logits of one prompt alone, computed in runs of these many rows."""
    assert sum(runs) == len(prompt)
    pages = pages_for(model)
    parts = []
    for ids in torch.split(torch.tensor(prompt), runs):
        with torch.inference_mode():
            hidden = model.forward(ids, pages.batch([("prompt", len(ids))]), pages.kv_cache)
            parts.append(model.logits(hidden))
    return torch.cat(parts)


def assert_batches_change_nothing(model: Model) -> None:
    """A prompt whole and a token at a time against random chunks, verifications of 5 rows, and 16 sequences at once:
    the same logits to the bit.
    """
    choose = random.Random(2)
    vocab = model.config.vocab_size
    prompts = {str(i): [choose.randrange(vocab) for _ in range(choose.randint(60, 90))] for i in range(16)}
    prompt = prompts["0"]
    decodes = [1] * (len(prompt) - 50)
    alone = run_logits(model, prompt, [50, *decodes])
    assert torch.equal(run_logits(model, prompt, [len(prompt)]), alone), "whole"
    assert torch.equal(run_logits(model, prompt, [17, 3, 30, *decodes]), alone), "in chunks"
    verifications = [5] * (len(decodes) // 5)
    rest = len(decodes) - 5 * len(verifications)
    assert torch.equal(run_logits(model, prompt, [50, *verifications, *[1] * rest]), alone), "with four drafts"
    for seed in range(3):  # each has a size of blocks, which may have bits of its own
        by_itself = paged_logits(model, {"0": prompt}, seed)["0"]
        assert torch.equal(paged_logits(model, prompts, seed)["0"], by_itself), "in a batch of 16"
