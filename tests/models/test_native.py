"""The native decoder on models of odd shapes: the torch decoder's numbers, and the same bits in every batch."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import paceline_kernels as ops
from paceline.models import Decoder, ModelConfig, NativeDecoder
from paceline.models.config import Llama3Scaling
from paceline.models.weights import weight_bytes
from paceline_kernels import PagedBatch, reference
from paceline_kernels.cpu.decoder import Choice, Choices
from paceline_kernels.ops import Ops
from support.decoding import (
    assert_batches_change_nothing,
    fill,
    paged_logits,
    pages_for,
    random_weights,
    run_logits,
)
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


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("tied", [False, True])
def test_the_config_tells_what_weights_take(format: str, tied: bool) -> None:
    dtype, int8 = FORMATS[format]
    # Sizes without padding, and so large that vectors, which are float32 here, are nothing beside matrices.
    config = replace(
        CONFIG, hidden_size=256, intermediate_size=512, head_dim=64, vocab_size=2048, tie_word_embeddings=tied
    )
    weights = NativeDecoder(config, dtype, int8=int8)._weights
    matrices = [m for layer in weights.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    held = sum(matrix.nbytes for matrix in [*matrices, weights.head])
    held += 0 if weights.embedding is None else weights.embedding.nbytes
    assert weight_bytes(config, dtype, int8=int8) == pytest.approx(held, rel=0.02)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    num_kv_heads = draw(st.integers(1, 3))
    return replace(
        CONFIG,
        hidden_size=draw(st.one_of(st.integers(6, 80), st.sampled_from([32, 64, 128, 160]))),
        intermediate_size=draw(st.integers(1, 150)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.one_of(st.integers(1, 20).map(lambda half: 2 * half), st.just(64))),
        vocab_size=draw(st.integers(2, 150)),
        rope_scaling=draw(st.sampled_from([None, SCALING])),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
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
    """But for values near the middle of two levels, of which a few fall to the other side: most logits are the same. In
    more than one layer they would move others.
    """
    config = replace(config, num_layers=1, vocab_size=config.vocab_size + 20)
    weights = random_weights(NativeDecoder(config, torch.float32), seed)
    rounded = {name: _as_kept(name, weight, config.tie_word_embeddings) for name, weight in weights.items()}
    prompts = prompts_for(config, seed)
    exact = paged_logits(in_torch(config, weights), prompts, seed)
    oracle = paged_logits(in_torch(config, rounded, ops=_EightBits), prompts, seed)
    found = paged_logits(native(config, "float32, int8", weights), prompts, seed)
    assert errors(found, oracle).median() <= 0.05 * errors(oracle, exact).median()
    lost = errors(oracle, exact).mean()
    halves = errors(paged_logits(in_torch(config, weights, torch.bfloat16), prompts, seed), exact).mean()
    both = paged_logits(native(config, "bfloat16, int8", weights), prompts, seed)
    assert errors(both, exact).mean() <= 1.5 * (lost + halves)


def _as_kept(name: str, weight: Tensor, tied: bool) -> Tensor:
    """Matrices are of 8 bits, and the embedding if it is the head as well."""
    looked_up = "embed_tokens" in name and not tied
    return weight if weight.dim() == 1 or looked_up else quantized_weights(weight).values.float()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    bias = None if bias is None else bias.double()
    return reference.linear(quantized_activations(x).values, weight.double(), bias).float()


def _linear_silu_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return reference.silu_mul(_linear(x, weight, bias))


_EightBits = cast(Ops, SimpleNamespace(**{**vars(reference), "linear": _linear, "linear_silu_mul": _linear_silu_mul}))


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
    model = native(config, format_, random_weights(NativeDecoder(config, torch.float32), seed=0))
    assert_batches_change_nothing(model)


@pytest.mark.parametrize("format_", ["torch", *FORMATS])
def test_logits_go_where_they_are_wanted(format_: str) -> None:
    weights = random_weights(NativeDecoder(CONFIG, torch.float32), seed=0)
    model = in_torch(CONFIG, weights) if format_ == "torch" else native(CONFIG, format_, weights)
    hidden = torch.randn(3, CONFIG.hidden_size).to(model.dtype)
    room = torch.full((4, CONFIG.vocab_size), torch.nan)
    found = model.logits(hidden, room[:3])
    assert found.data_ptr() == room.data_ptr()
    assert torch.equal(room[:3], model.logits(hidden))
    assert room[3].isnan().all()


@pytest.mark.parametrize("format_", ["torch", *FORMATS])
@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, hidden_size=40)])
def test_logits_of_some_rows(config: ModelConfig, format_: str) -> None:
    """As many as a batch samples: other tiles of rows than those of the forward. To the bit those of two calls."""
    weights = random_weights(NativeDecoder(config, torch.float32), seed=0)
    model = in_torch(config, weights) if format_ == "torch" else native(config, format_, weights)
    pages, choose = pages_for(model, num_blocks=2048), random.Random(0)
    for sequence, lengths in enumerate([(1,), (1, 1, 1), (3, 1, 9), (20, 5), (100, 40, 1)]):
        names = [f"{sequence}{i}" for i in range(len(lengths))]
        token_ids = torch.tensor([choose.randrange(config.vocab_size) for _ in range(sum(lengths))])
        batch = pages.batch(list(zip(names, lengths, strict=True)))
        hidden = model.forward(token_ids, batch, pages.kv_cache)
        assert torch.equal(model.logits_of(token_ids, batch, pages.kv_cache), model.logits(hidden))
        for count in {0, 1, len(token_ids) // 3, len(token_ids) - 1, len(token_ids)}:
            rows = sorted(choose.sample(range(len(token_ids)), count))
            found = model.logits_of(token_ids, batch, pages.kv_cache, rows)
            assert torch.equal(found, model.logits(hidden[torch.tensor(rows, dtype=torch.int64)]))


def test_tensors_of_an_earlier_call_may_hold_something_else() -> None:
    """And go with other pages or threads: what is kept of them is where they lie."""
    weights = random_weights(NativeDecoder(CONFIG, torch.float32), seed=0)
    kept, fresh = native(CONFIG, "float32", weights), native(CONFIG, "float32", weights)
    pages, other = (pages_for(kept, seed=seed) for seed in (0, 1))
    token_ids, batch = torch.tensor([5, 6, 7]), pages.batch([("a", 2), ("b", 1)])

    def assert_same(kv_cache: list[tuple[Tensor, Tensor]]) -> None:
        found = kept.logits_of(token_ids, batch, kv_cache)
        assert torch.equal(found, fresh.logits_of(token_ids.clone(), batch, kv_cache))

    assert_same(pages.kv_cache)
    token_ids.copy_(torch.tensor([8, 9, 1]))
    assert_same(pages.kv_cache)
    before = [keys.clone().view(torch.int32) for keys, _ in pages.kv_cache]
    token_ids.copy_(torch.tensor([2, 3, 4]))
    assert_same(other.kv_cache)
    assert all(torch.equal(a, b.view(torch.int32)) for a, (b, _) in zip(before, pages.kv_cache, strict=True))
    with threads(1):
        assert_same(pages.kv_cache)
        assert kept._decoder._batch(token_ids, batch, pages.kv_cache).num_threads == 1


@pytest.mark.parametrize("format_", FORMATS)
def test_the_number_of_threads_changes_nothing(format_: str) -> None:
    config = replace(CONFIG, vocab_size=3000)
    model = native(config, format_, random_weights(NativeDecoder(config, torch.float32), seed=0))
    prompts = prompts_for(config, seed=0)
    results = []
    for count in (1, 2, 3, 5):
        with threads(count):
            results.append(paged_logits(model, prompts))
    assert all(torch.equal(result[name], results[0][name]) for result in results for name in prompts)


def test_a_single_row_takes_little_memory_for_many_threads() -> None:
    """Each has a copy of its own, but without the room for fifteen other rows."""
    config = replace(CONFIG, hidden_size=4096, num_layers=1)
    model = native(config, "float32", random_weights(NativeDecoder(config, torch.float32), seed=0))
    with threads(32):
        run_logits(model, [1, 2], [2])  # for which threads begin, and take what they always need
        before = _resident_memory()
        run_logits(model, [1], [1])
        taken = _resident_memory() - before
    copy = config.hidden_size * torch.float32.itemsize
    assert taken < 32 * 8 * copy  # of the hidden state and of what the head reads


def _resident_memory() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("format_", FORMATS)
def test_nothing_of_a_batch_is_left_to_the_next_one(format_: str) -> None:
    """Not even where rows of another number lie elsewhere in memory: what pads them meets zeros, and infinity times
    zero is no number.
    """
    weights = random_weights(NativeDecoder(CONFIG, torch.float32), seed=0)
    weights["model.embed_tokens.weight"][1] = torch.inf
    model = native(CONFIG, format_, weights)
    prompt = [2, 3, 4, 5, 6]
    expected = run_logits(model, prompt, [len(prompt)])
    assert expected.isfinite().all()
    for rows in (5, 20, 40, 70):
        assert not run_logits(model, [1] * rows, [rows]).isfinite().any()
        assert torch.equal(run_logits(model, prompt, [len(prompt)]), expected), rows


# ---- Drafts ----

KINDS = st.sampled_from(list(Choice))


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    format_=st.sampled_from(list(FORMATS)),
    tied=st.booleans(),
    steps=st.lists(
        st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(1, 9), st.integers(0, 6), KINDS), min_size=1),
        min_size=1,
        max_size=3,
    ),
    seed=SEEDS,
)
def test_drafts_are_a_loop_of_forwards(
    format_: str, tied: bool, steps: list[dict[str, tuple[int, int, Choice]]], seed: int
) -> None:
    """Each sequence feeds some rows, and drafts as far and by what it likes; the pages hold the same in the end."""
    config = replace(CONFIG, tie_word_embeddings=tied)
    model = native(config, format_, random_weights(NativeDecoder(config, torch.float32), seed))
    choose = random.Random(seed)
    block_size = choose.choice([1, 5, 8, 20])
    at_once, in_passes = (pages_for(model, block_size=block_size, seed=seed) for _ in range(2))
    for step in steps:
        fed = {name: [choose.randrange(config.vocab_size) for _ in range(step[name][0])] for name in step}
        depths = {name: depth for name, (_, depth, _) in step.items()}
        for pages in (at_once, in_passes):
            for name, ids in fed.items():
                pages.reserve(name, pages.lengths.get(name, 0) + len(ids) + depths[name])
        choices = random_choices([kind for _, _, kind in step.values()], [*depths.values()], config.vocab_size, seed)
        expected = replace(choices, probs=choices.probs.clone())
        assert _draft(model, at_once, fed, depths, choices) == _in_passes(model, in_passes, fed, depths, expected)
        torch.testing.assert_close(choices.probs, expected.probs, atol=1e-6, rtol=0)
        for ours, theirs in zip(at_once.kv_cache, in_passes.kv_cache, strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine, other, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("format_", FORMATS)
def test_weights_that_no_cache_holds_are_streamed(format_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same numbers; a system that does not tell its caches has weights kept."""
    config = replace(CONFIG, hidden_size=64, intermediate_size=128)
    weights, prompts = random_weights(NativeDecoder(config, torch.float32), seed=0), prompts_for(config, seed=0)
    logits = []
    for cache, streamed in ((0, False), (1 << 30, False), (1 << 10, True)):
        monkeypatch.setattr("paceline_kernels.cpu.decoder.largest_cache", lambda cache=cache: cache)
        model = native(config, format_, weights)
        assert {matrix.streamed for matrix in model._weights.matrices} == {streamed}
        logits.append(paged_logits(model, prompts))
    for name in prompts:
        assert torch.equal(logits[0][name], logits[1][name])
        assert torch.equal(logits[0][name], logits[2][name])


def random_choices(kinds: list[Choice], depths: list[int], vocab: int, seed: int) -> Choices:
    generator = torch.Generator().manual_seed(seed)
    count = len(kinds)

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    rows = [depth if kind is Choice.DRAWN else 0 for kind, depth in zip(kinds, depths, strict=True)]
    return Choices(
        kinds=torch.tensor(kinds, dtype=torch.int32),
        temperatures=between(0.5, 1.5),
        top_k=torch.randint(1, vocab + 1, (count,), generator=generator),
        top_p=between(0.7, 1.0),
        min_p=between(0.0, 0.1),
        typical_p=between(0.8, 1.0),
        keys=torch.randint(0, 1 << 31, (count, 4), generator=generator),
        uniforms=torch.rand(count, max(depths), generator=generator, dtype=torch.float64),
        first_rows=torch.tensor([0, *rows]).cumsum(0)[:-1],
        probs=torch.full((sum(rows), vocab), torch.nan),
    )


def _draft(
    model: NativeDecoder, pages: Pages, fed: dict[str, list[int]], depths: dict[str, int], choices: Choices
) -> dict[str, list[int]]:
    greedy = bool((choices.kinds == Choice.MOST_PROBABLE).all())  # which needs no choices
    drafted = model.draft(*_next(pages, fed), pages.kv_cache, [*depths.values()], None if greedy else choices)
    assert drafted.shape == (len(fed), max(depths.values()))
    return {name: row[: depths[name]] for name, row in zip(fed, drafted.tolist(), strict=True)}


def _in_passes(
    model: NativeDecoder, pages: Pages, fed: dict[str, list[int]], depths: dict[str, int], choices: Choices
) -> dict[str, list[int]]:
    """The same by one forward for each pass; writes `choices.probs` too."""
    drafts: dict[str, list[int]] = {name: [] for name in fed}
    lengths = {name: pages.lengths.get(name, 0) + len(ids) for name, ids in fed.items()}
    index = {name: row for row, name in enumerate(fed)}
    while fed:
        token_ids, batch = _next(pages, fed)
        hidden = model.forward(token_ids, batch, pages.kv_cache)
        logits = model.logits(hidden[batch.query_starts[1:] - 1])
        for name, row in zip(fed, logits.unsqueeze(1), strict=True):
            if len(drafts[name]) < depths[name]:
                drafts[name].append(_choose(choices, index[name], len(drafts[name]), row))
        fed = {name: drafts[name][-1:] for name in fed if len(drafts[name]) < depths[name]}
    pages.lengths |= lengths
    return drafts


def _choose(choices: Choices, index: int, number: int, logits: Tensor) -> int:
    """A draft of a sequence from its logits, [1, vocab], by the operations of sampling."""
    mine = slice(index, index + 1)
    kind = Choice(int(choices.kinds[index]))
    limits = [getattr(choices, name)[mine] for name in ("temperatures", "top_k", "top_p", "min_p", "typical_p")]
    if kind is Choice.MOST_PROBABLE:
        chosen = ops.argmax(logits)
    elif kind is Choice.BY_KEY:
        ops.truncate_(logits, *limits)
        chosen = ops.gumbel_argmax(logits, limits[0], choices.keys[mine] + torch.tensor([0, 0, number, 0]))
    else:
        ops.distribution_(logits, *limits)
        choices.probs[choices.first_rows[index] + number] = logits[0]
        chosen = ops.draw(logits, choices.uniforms[mine, number])
    return int(chosen)


def _next(pages: Pages, fed: dict[str, list[int]]) -> tuple[Tensor, PagedBatch]:
    token_ids = torch.tensor([token for ids in fed.values() for token in ids])
    return token_ids, pages.batch([(name, len(ids)) for name, ids in fed.items()])
