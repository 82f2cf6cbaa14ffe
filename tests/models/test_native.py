"""The native decoder on models of odd shapes: the torch decoder's numbers, and the same bits in every batch."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.models import Decoder, ModelConfig, NativeDecoder
from paceline.models.config import Llama3Scaling
from paceline_kernels import PagedBatch, reference
from paceline_kernels.ops import Ops
from support.decoding import fill, paged_logits, pages_for, random_weights, run_logits
from support.native import needs_compiler, quantized_activations, quantized_weights, threads
from support.pages import Pages

pytestmark = needs_compiler

CPU = torch.device("cpu")
FORMATS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "float32, int8": (torch.float32, True),
    "bfloat16, int8": (torch.bfloat16, True),
}
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=34,
    intermediate_size=50,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    vocab_size=77,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
    eos_token_ids=(0,),
)
SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    num_kv_heads = draw(st.integers(1, 3))
    biases = {name: draw(st.booleans()) for name in ("attention_bias", "output_bias", "mlp_bias")}
    return replace(
        CONFIG,
        hidden_size=draw(st.one_of(st.integers(1, 80), st.sampled_from([32, 64, 128, 160]))),
        intermediate_size=draw(st.integers(1, 150)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.one_of(st.integers(1, 20).map(lambda half: 2 * half), st.just(64))),
        vocab_size=draw(st.integers(2, 150)),
        rope_scaling=draw(st.sampled_from([None, SCALING])),
        tie_word_embeddings=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        **biases,
    )


def prompts_for(config: ModelConfig, seed: int) -> dict[str, list[int]]:
    choose = random.Random(seed)
    lengths = {"a": 1, "b": choose.randint(2, 20), "c": choose.randint(20, 150)}
    return {name: [choose.randrange(config.vocab_size) for _ in range(n)] for name, n in lengths.items()}


def native(config: ModelConfig, format_: str, weights: dict[str, Tensor]) -> NativeDecoder:
    dtype, int8 = FORMATS[format_]
    model = NativeDecoder(config, dtype, int8=int8)
    fill(model, weights)
    return model


def in_torch(
    config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32, ops: Ops = reference
) -> Decoder:
    model = Decoder(config, dtype, CPU, ops)
    fill(model, weights)
    return model


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> Tensor:
    """Of every logit."""
    return torch.cat([(found[name] - exact[name]).abs().flatten() for name in exact])


# ---- Against the torch decoder ----

SEEDS = st.integers(0, 999)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(config=configs(), seed=SEEDS)
def test_float32_equals_torch(config: ModelConfig, seed: int) -> None:
    weights = random_weights(NativeDecoder(config, torch.float32), seed)
    prompts = prompts_for(config, seed)
    exact = paged_logits(in_torch(config, weights), prompts, seed)
    found = paged_logits(native(config, "float32", weights), prompts, seed + 1)
    assert errors(found, exact).max() < 1e-4


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(config=configs(), seed=SEEDS)
def test_bfloat16_is_as_close_to_float32_as_torch_is(config: ModelConfig, seed: int) -> None:
    weights = {name: w.bfloat16() for name, w in random_weights(NativeDecoder(config, torch.bfloat16), seed).items()}
    prompts = prompts_for(config, seed)
    exact = paged_logits(in_torch(config, weights), prompts, seed)
    theirs = paged_logits(in_torch(config, weights, torch.bfloat16), prompts, seed)
    ours = paged_logits(native(config, "bfloat16", weights), prompts, seed)
    assert errors(ours, exact).mean() <= 1.5 * errors(theirs, exact).mean()


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(config=configs(), seed=SEEDS)
def test_int8_equals_torch_with_everything_rounded_to_8_bits(config: ModelConfig, seed: int) -> None:
    """But for values near the middle of two levels, of which a few fall to the other side."""
    weights = random_weights(NativeDecoder(config, torch.float32), seed)
    rounded = {name: _as_kept(name, weight, config.tie_word_embeddings) for name, weight in weights.items()}
    prompts = prompts_for(config, seed)
    exact = paged_logits(in_torch(config, weights), prompts, seed)
    oracle = paged_logits(in_torch(config, rounded, ops=_EightBits), prompts, seed)
    found = paged_logits(native(config, "float32, int8", weights), prompts, seed)
    assert errors(found, oracle).mean() <= 0.1 * errors(oracle, exact).mean() + 1e-5


def _as_kept(name: str, weight: Tensor, tied: bool) -> Tensor:
    """Matrices are of 8 bits, and the embedding if it is the head as well."""
    looked_up = "embed_tokens" in name and not tied
    return weight if weight.dim() == 1 or looked_up else quantized_weights(weight).values.float()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    bias = None if bias is None else bias.double()
    return reference.linear(quantized_activations(x).values, weight.double(), bias).float()


_EightBits = cast(Ops, SimpleNamespace(**{**vars(reference), "linear": _linear}))


def test_gates_of_any_size() -> None:
    """silu far out on either side, in float32."""
    config = replace(CONFIG, num_layers=1)
    weights = random_weights(NativeDecoder(config, torch.float32), seed=0)
    gates = torch.tensor([-1e30, -200.0, -100.0, -88.5, -87.0, -0.0, 0.0, 87.0, 88.5, 100.0, 1e30])
    weights["model.layers.0.mlp.gate_proj.bias"][: len(gates)] = gates
    weights["model.layers.0.mlp.up_proj.weight"][: len(gates)] = 0
    weights["model.layers.0.mlp.up_proj.bias"][: len(gates)] = 1 / gates.abs().clamp(1)
    prompts = prompts_for(config, seed=0)
    exact = paged_logits(in_torch(config, weights), prompts)
    assert errors(paged_logits(native(config, "float32", weights), prompts), exact).max() < 1e-4


# ---- The same bits in every batch ----


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, hidden_size=256, head_dim=32, tie_word_embeddings=True)])
def test_logits_do_not_depend_on_the_batch(config: ModelConfig, format_: str) -> None:
    """A prompt whole and a token at a time against random chunks, verifications of 5 rows, and 16 sequences at once."""
    model = native(config, format_, random_weights(NativeDecoder(config, torch.float32), seed=0))
    choose = random.Random(2)
    prompts = {
        str(i): [choose.randrange(config.vocab_size) for _ in range(choose.randint(60, 90))] for i in range(16)
    }
    prompt = prompts["0"]
    decodes = [1] * (len(prompt) - 50)
    alone = run_logits(model, prompt, [50, *decodes])
    assert torch.equal(run_logits(model, prompt, [len(prompt)]), alone), "whole"
    assert torch.equal(run_logits(model, prompt, [17, 3, 30, *decodes]), alone), "in chunks"
    verifications = [5] * (len(decodes) // 5)
    rest = len(decodes) - 5 * len(verifications)
    assert torch.equal(run_logits(model, prompt, [50, *verifications, *[1] * rest]), alone), "with four drafts"
    # Blocks of one size: where the positions of a block lie side by side is part of the order of additions.
    for seed in range(3):
        pages = paged_logits(model, prompts, seed)["0"]
        again = paged_logits(model, {"0": prompt}, seed)["0"]
        assert torch.equal(pages, again), "in a batch of 16"
    for count in (2, 3, 5):
        with threads(count):
            assert torch.equal(run_logits(model, prompt, [50, *decodes]), alone), f"with {count} threads"


# ---- Drafts ----


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    format_=st.sampled_from(list(FORMATS)),
    tied=st.booleans(),
    steps=st.lists(
        st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(1, 9), st.integers(0, 6)), min_size=1),
        min_size=1,
        max_size=3,
    ),
    seed=SEEDS,
)
def test_drafts_are_a_loop_of_forwards(
    format_: str, tied: bool, steps: list[dict[str, tuple[int, int]]], seed: int
) -> None:
    """Each sequence feeds some rows, and drafts as far as it likes; the pages hold the same in the end."""
    config = replace(CONFIG, tie_word_embeddings=tied)
    model = native(config, format_, random_weights(NativeDecoder(config, torch.float32), seed))
    choose = random.Random(seed)
    block_size = choose.choice([1, 5, 8, 20])
    at_once, in_passes = (pages_for(model, block_size=block_size, seed=seed) for _ in range(2))
    for step in steps:
        fed = {name: [choose.randrange(config.vocab_size) for _ in range(rows)] for name, (rows, _) in step.items()}
        depths = {name: depth for name, (_, depth) in step.items()}
        for pages in (at_once, in_passes):
            for name, ids in fed.items():
                pages.reserve(name, pages.lengths.get(name, 0) + len(ids) + depths[name])
        assert _draft(model, at_once, fed, depths) == _draft_in_passes(model, in_passes, fed, depths)
        for ours, theirs in zip(at_once.kv_cache, in_passes.kv_cache, strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine, other, atol=0, rtol=0, equal_nan=True)


def _draft(
    model: NativeDecoder, pages: Pages, fed: dict[str, list[int]], depths: dict[str, int]
) -> dict[str, list[int]]:
    drafted = model.draft(*_next(pages, fed), pages.kv_cache, torch.tensor([*depths.values()], dtype=torch.int32))
    assert drafted.shape == (len(fed), max(depths.values()))
    return {name: row[: depths[name]] for name, row in zip(fed, drafted.tolist(), strict=True)}


def _draft_in_passes(
    model: NativeDecoder, pages: Pages, fed: dict[str, list[int]], depths: dict[str, int]
) -> dict[str, list[int]]:
    drafts: dict[str, list[int]] = {name: [] for name in fed}
    lengths = {name: pages.lengths.get(name, 0) + len(ids) for name, ids in fed.items()}
    while fed:
        token_ids, batch = _next(pages, fed)
        hidden = model.forward(token_ids, batch, pages.kv_cache)
        tokens = model.logits(hidden[batch.query_starts[1:] - 1]).argmax(-1).tolist()
        for name, token in zip(fed, tokens, strict=True):
            drafts[name] += [token][: depths[name]]
        fed = {name: drafts[name][-1:] for name in fed if len(drafts[name]) < depths[name]}
    pages.lengths |= lengths
    return drafts


def _next(pages: Pages, fed: dict[str, list[int]]) -> tuple[Tensor, PagedBatch]:
    token_ids = torch.tensor([token for ids in fed.values() for token in ids])
    return token_ids, pages.batch([(name, len(ids)) for name, ids in fed.items()])
