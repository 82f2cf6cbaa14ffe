"""Measures everything in turns, each figure behind its own ceiling."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.progress import track
from torch import Tensor

from paceline import demo
from paceline.bench.limits.engines import (
    STEPS,
    add_requests,
    draft_model,
    itemsize,
    kind_of,
    name_of,
    random_prompts,
    target,
)
from paceline.bench.limits.memory import measure_memory
from paceline.bench.limits.results import Figure, Limits, Passes
from paceline.bench.limits.work import prefill_operations, streamed_bytes
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.models import NativeDecoder, load_model_config
from paceline.runner import KVCache
from paceline.runner.input_batch import TokenRun, flatten
from paceline.wiring import EngineSettings, build_engine
from paceline_kernels import PagedBatch
from paceline_kernels.cpu import ceilings, decoder
from paceline_kernels.cpu.ceilings import ReadCeiling, median_seconds
from paceline_kernels.cpu.memory import zeros

BLOCK = 16  # tokens
CONTEXT = 128  # tokens of a sequence that decodes
BATCHES = (1, 4, 8, 16)  # sequences that decode together
PREFILLS = (512, 2048)  # rows
DEPTHS = (4, 8)  # draft passes in one call
ATTENTION_SEQUENCES, ATTENTION_CONTEXT, ATTENTION_ROWS = 16, 2048, 4
SERVED_LENGTH = 2048  # tokens of a request that fills KV memory


@dataclass(frozen=True, slots=True)
class _Turn:
    """A figure, and how each of its rounds is measured."""

    figure: Figure
    seconds: Callable[[], float]
    ceiling: Callable[[], float]


@torch.inference_mode()
def measure(settings: EngineSettings, rounds: int, memory: bool = True) -> Limits:
    """Everything in turns, each figure behind its own ceiling (A B A B); an unmeasured round comes first.

    Raises:
        FailedPrecondition: there is no native backend on this machine.
        InvalidArgument: a setting that the engine refuses, or no draft model.
    """
    if settings.draft in ("none", "ngram"):
        raise InvalidArgument("draft", settings.draft, "a directory, or demo: its passes are measured")
    config = load_model_config(demo.TARGET if settings.model == "demo" else Path(settings.model))
    settings = replace(
        settings,
        backend="native",
        draft_quantization="none",
        max_model_len=min(config.max_position_embeddings, SERVED_LENGTH),
        max_num_batched_tokens=BATCHES[-1] * CONTEXT,
    )
    footprint = measure_memory(settings) if memory else None
    threads = torch.get_num_threads()
    data = ceilings.buffer(ceilings.uncached_bytes())
    memory_ceiling = ReadCeiling(data, threads).measure

    turns: list[_Turn] = []
    engines = [build_engine(replace(settings, quantization=name)) for name in ("none", "int8")]
    kv_cache = _kv_cache(target(engines[0]))
    for engine in engines:
        turns += _decode_turns(engine, kv_cache, memory_ceiling)
        turns += _prefill_turns(target(engine), kv_cache, threads)
    turns.append(_attention_turn(target(engines[0]), len(data), memory_ceiling))
    draft = draft_model(engines[0])
    draft_cache = _kv_cache(draft)
    size = min(streamed_bytes(draft.config, itemsize(draft)), len(data))
    turns.append(_draft_turn(draft, draft_cache, ReadCeiling(data[:size], threads).measure))
    passes = [Passes(depth) for depth in DEPTHS]
    for number in track(range(-1, rounds), description="measuring"):
        for turn in turns:
            ceiling, seconds = turn.ceiling(), turn.seconds()
            if number >= 0:
                turn.figure.ceilings.append(ceiling)
                turn.figure.seconds.append(seconds)
        for some in passes:
            single, together = _pass_seconds(draft, draft_cache, some.depth)
            if number >= 0:
                some.single.append(single)
                some.together.append(together)
    return Limits([turn.figure for turn in turns], passes, footprint)


def _kv_cache(model: NativeDecoder) -> KVCache:
    """Room for every batch that is measured, one after the other."""
    tokens = max(BATCHES[-1] * (CONTEXT + BLOCK), *_prefills(model), CONTEXT + max(DEPTHS))
    return KVCache(model, -(-tokens // BLOCK), BLOCK)


def _decoding(model: NativeDecoder, sequences: int, ahead: int = 0) -> tuple[Tensor, PagedBatch]:
    """One row of each sequence, behind a context."""
    per_sequence = -(-(CONTEXT + ahead) // BLOCK)
    runs = [TokenRun(list(range(i * per_sequence, (i + 1) * per_sequence)), CONTEXT - 1, [i]) for i in range(sequences)]
    return flatten(runs, BLOCK, model.device, ahead)


def _decode_turns(engine: Engine, kv_cache: KVCache, ceiling: Callable[[], float]) -> Iterator[_Turn]:
    """A decode step, as the call of the model and as the whole step of the engine."""
    model = target(engine)
    size = streamed_bytes(model.config, itemsize(model))
    for sequences in BATCHES:
        name = f"{name_of(model)}, {sequences} sequences" if sequences > 1 else f"{name_of(model)}, 1 sequence"
        call = partial(model.logits_of, *_decoding(model, sequences), kv_cache)
        figure = Figure("decode, model", name, "GB/s", size)
        yield _Turn(figure, partial(median_seconds, call), ceiling)
        figure = Figure("decode, engine", name, "GB/s", size)
        yield _Turn(figure, partial(_engine_seconds, engine, sequences), ceiling)


def _engine_seconds(engine: Engine, sequences: int) -> float:
    """Median of the steps in which every sequence decodes."""
    context = min(CONTEXT, engine.scheduler.config.max_model_len) - STEPS - 1
    prompts = random_prompts(engine, sequences, context)
    add_requests(engine, prompts, max_tokens=STEPS + 1)
    engine.step()  # the prompts, all of them
    seconds = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _prefills(model: NativeDecoder) -> list[int]:
    return [rows for rows in PREFILLS if rows <= model.config.max_position_embeddings]


def _prefill_turns(model: NativeDecoder, kv_cache: KVCache, threads: int) -> Iterator[_Turn]:
    kind = kind_of(model)
    for rows in _prefills(model):
        prompt = [i % model.config.vocab_size for i in range(rows)]
        token_ids, batch = flatten([TokenRun(list(range(-(-rows // BLOCK))), 0, prompt)], BLOCK, model.device)
        figure = Figure("prefill", f"{name_of(model)}, {rows} rows", "GFLOP/s", prefill_operations(model.config, rows))
        call = partial(model.forward, token_ids, batch, kv_cache)
        yield _Turn(figure, partial(median_seconds, call), partial(ceilings.multiply_rate, kind, threads))


def _attention_turn(model: NativeDecoder, size: int, ceiling: Callable[[], float]) -> _Turn:
    """Paged attention over as many layers as `size` bytes of KV make, each read once. It includes what the operation by
    itself costs more than within a forward: a call from Python, and a copy of its small output.
    """
    config = model.config
    per_sequence = ATTENTION_CONTEXT // BLOCK
    shape = (2, ATTENTION_SEQUENCES * per_sequence, BLOCK, config.num_kv_heads, config.head_dim)
    layer = torch.randn(shape).to(model.dtype)
    layers = zeros((max(1, size // (layer.numel() * layer.itemsize)), *shape), model.dtype)
    layers.copy_(layer)
    runs = [
        TokenRun(
            list(range(i * per_sequence, (i + 1) * per_sequence)),
            ATTENTION_CONTEXT - ATTENTION_ROWS,
            [0] * ATTENTION_ROWS,
        )
        for i in range(ATTENTION_SEQUENCES)
    ]
    _, batch = flatten(runs, BLOCK, model.device)
    query = torch.randn(ATTENTION_SEQUENCES * ATTENTION_ROWS, config.num_heads, config.head_dim).to(model.dtype)

    def attend() -> None:
        for keys, values in layers:
            decoder.paged_attention(query, (keys, values), batch, config.head_dim**-0.5)

    name = f"{name_of(model)}, {ATTENTION_SEQUENCES} x {ATTENTION_CONTEXT} tokens x {ATTENTION_ROWS} rows"
    figure = Figure("paged attention", name, "GB/s", layers.numel() * layers.itemsize)
    return _Turn(figure, partial(median_seconds, attend), ceiling)


def _draft_turn(model: NativeDecoder, kv_cache: KVCache, ceiling: Callable[[], float]) -> _Turn:
    """One pass for one sequence, over weights that stay wherever so many bytes stay."""
    call = partial(model.logits_of, *_decoding(model, 1), kv_cache)
    size = streamed_bytes(model.config, itemsize(model))
    figure = Figure("draft pass", f"{name_of(model)}, 1 sequence", "GB/s", size)
    return _Turn(figure, partial(median_seconds, call), ceiling)


def _pass_seconds(model: NativeDecoder, kv_cache: KVCache, depth: int) -> tuple[float, float]:
    """Seconds of a single pass, and of `depth` in one call."""
    token_ids, batch = _decoding(model, 1, ahead=depth)
    single = median_seconds(partial(model.logits_of, token_ids, batch, kv_cache))
    return single, median_seconds(lambda: model.draft(token_ids, batch, kv_cache, [depth]))
