"""How near the native backend comes to what the machine can do: each figure against a ceiling of the same rounds."""

from __future__ import annotations

import importlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor

from paceline import demo
from paceline.bench.console import console
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.engine import Engine, GenerationRequest
from paceline.errors import FailedPrecondition, InvalidArgument
from paceline.models import ModelConfig, NativeDecoder, load_model_config
from paceline.runner import KVCache, ModelRunner
from paceline.runner.input_batch import Run, flatten
from paceline.speculation import DraftModel
from paceline.wiring import EngineSettings, build_engine
from paceline_kernels import PagedBatch
from paceline_kernels.cpu import ceilings, decoder
from paceline_kernels.cpu.ceilings import ReadCeiling, median_seconds
from paceline_kernels.cpu.decoder import Choice, Choices, Kind
from paceline_kernels.cpu.memory import zeros

BLOCK = 16  # tokens
CONTEXT = 128  # tokens of a sequence that decodes
BATCHES = (1, 4, 8, 16)  # sequences that decode together
PREFILLS = (512, 2048)  # rows
DEPTHS = (4, 8)  # draft passes in one call
ATTENTION_SEQUENCES, ATTENTION_CONTEXT, ATTENTION_ROWS = 16, 2048, 4
STEPS = 8  # of an engine, of which the median counts
SERVED_LENGTH = 2048  # tokens of a request that fills KV memory
GREEDY = SamplingParams(temperature=0.0)
GIGA = 1e9


# ---- What is measured ----


@dataclass(slots=True)
class Figure:
    """Work per second against a ceiling.

    Attributes:
        unit: of rate and ceiling, GB/s or GFLOP/s.
        work: bytes or operations of one call.
        seconds: of a call, by round.
        ceilings: work per second, of the same rounds.
    """

    group: str
    name: str
    unit: str
    work: float
    seconds: list[float] = field(default_factory=list)
    ceilings: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """In the unit."""
        return self.work / median(self.seconds) / GIGA

    @property
    def ceiling(self) -> float:
        """In the unit."""
        return median(self.ceilings) / GIGA

    @property
    def fraction(self) -> float:
        """Median over rounds of the rate over the ceiling of that round."""
        rounds = zip(self.seconds, self.ceilings, strict=True)
        return float(median(self.work / seconds / ceiling for seconds, ceiling in rounds))


@dataclass(slots=True)
class Passes:
    """Several draft passes in one call, against as many calls of a single one. Seconds by round."""

    depth: int
    single: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)

    @property
    def overhead(self) -> float:
        """Median over rounds of the time beyond that of the single passes, as a share of theirs."""
        rounds = zip(self.single, self.together, strict=True)
        return float(median(together / (self.depth * single) - 1 for single, together in rounds))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. Idle is a process that has imported what the engine's imports, and done nothing."""

    peak: int
    idle: int
    weights: int
    kv: int

    @property
    def ratio(self) -> float:
        """What serving takes over what weights and KV have to take."""
        return (self.peak - self.idle) / (self.weights + self.kv)


@dataclass(frozen=True, slots=True)
class Limits:
    figures: list[Figure]
    passes: list[Passes]
    memory: Memory | None


@dataclass(frozen=True, slots=True)
class _Turn:
    """A figure, and how each of its rounds is measured."""

    figure: Figure
    seconds: Callable[[], float]
    ceiling: Callable[[], float]


# ---- What has to be done ----


def matrix_elements(config: ModelConfig) -> int:
    """Weights that the matrices of all layers hold, without the head."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (heads + 2 * kv) + heads * config.hidden_size
    layer += 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * layer


def streamed_bytes(config: ModelConfig, itemsize: int) -> int:
    """Weights that a decode step reads: every matrix and the head; without embeddings, norms, scales and padding."""
    return (matrix_elements(config) + config.vocab_size * config.hidden_size) * itemsize


def prefill_operations(config: ModelConfig, rows: int) -> int:
    """Of a forward over the first `rows` tokens of a sequence, causal attention included, the head not."""
    attention = config.num_layers * config.num_heads * config.head_dim * 2 * rows * (rows + 1)
    return 2 * rows * matrix_elements(config) + attention


# ---- Measuring ----


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
    footprint = _memory(settings) if memory else None
    threads = torch.get_num_threads()
    data = ceilings.buffer(ceilings.uncached_bytes())
    memory_ceiling = ReadCeiling(data, threads).measure

    turns: list[_Turn] = []
    engines = [build_engine(replace(settings, quantization=name)) for name in ("none", "int8")]
    kv_cache = _kv_cache(_target(engines[0]))
    for engine in engines:
        turns += _decode_turns(engine, kv_cache, memory_ceiling)
        turns += _prefill_turns(_target(engine), kv_cache, threads)
    turns.append(_attention_turn(_target(engines[0]), len(data), memory_ceiling))
    draft = _draft(engines[0])
    draft_cache = _kv_cache(draft)
    size = min(streamed_bytes(draft.config, _itemsize(draft)), len(data))
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


def _target(engine: Engine) -> NativeDecoder:
    assert isinstance(engine.runner, ModelRunner)
    assert isinstance(engine.runner.model, NativeDecoder)
    return engine.runner.model


def _draft(engine: Engine) -> NativeDecoder:
    assert isinstance(engine.runner, ModelRunner)
    drafter = engine.runner.drafters[Method.DRAFT_MODEL]
    assert isinstance(drafter, DraftModel)
    assert isinstance(drafter.model, NativeDecoder)
    return drafter.model


def _kind(model: NativeDecoder) -> Kind:
    if model.int8:
        return Kind.INT8
    return Kind.BFLOAT16 if model.dtype == torch.bfloat16 else Kind.FLOAT32


def _name(model: NativeDecoder) -> str:
    return _kind(model).name.lower()


def _itemsize(model: NativeDecoder) -> int:
    return 1 if model.int8 else model.dtype.itemsize


def _kv_cache(model: NativeDecoder) -> KVCache:
    """Room for every batch that is measured, one after the other."""
    tokens = max(BATCHES[-1] * (CONTEXT + BLOCK), *_prefills(model), CONTEXT + max(DEPTHS))
    return KVCache(model, -(-tokens // BLOCK), BLOCK)


def _decoding(model: NativeDecoder, sequences: int, ahead: int = 0) -> tuple[Tensor, PagedBatch]:
    """One row of each sequence, behind a context."""
    per_sequence = -(-(CONTEXT + ahead) // BLOCK)
    runs = [Run(list(range(i * per_sequence, (i + 1) * per_sequence)), CONTEXT - 1, [i]) for i in range(sequences)]
    return flatten(runs, BLOCK, model.device, ahead)


def _forward_and_logits(model: NativeDecoder, token_ids: Tensor, batch: PagedBatch, kv_cache: KVCache) -> None:
    model.logits(model.forward(token_ids, batch, kv_cache))


def _decode_turns(engine: Engine, kv_cache: KVCache, ceiling: Callable[[], float]) -> Iterator[_Turn]:
    """A decode step, as the two calls of the model and as the whole step of the engine."""
    model = _target(engine)
    size = streamed_bytes(model.config, _itemsize(model))
    for sequences in BATCHES:
        name = f"{_name(model)}, {sequences} sequences" if sequences > 1 else f"{_name(model)}, 1 sequence"
        call = partial(_forward_and_logits, model, *_decoding(model, sequences), kv_cache)
        figure = Figure("decode, model", name, "GB/s", size)
        yield _Turn(figure, partial(median_seconds, call), ceiling)
        figure = Figure("decode, engine", name, "GB/s", size)
        yield _Turn(figure, partial(_engine_seconds, engine, sequences), ceiling)


def _engine_seconds(engine: Engine, sequences: int) -> float:
    """Median of the steps in which every sequence decodes."""
    context = min(CONTEXT, engine.scheduler.config.max_model_len) - STEPS - 1
    prompts = _prompts(engine, sequences, context)
    _add(engine, prompts, max_tokens=STEPS + 1)
    engine.step()  # the prompts, all of them
    seconds = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _prompts(engine: Engine, count: int, length: int) -> list[tuple[int, ...]]:
    """Random, so that none begins like another."""
    return [tuple(random.choices(range(engine.vocab_size), k=length)) for _ in range(count)]


def _add(engine: Engine, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> None:
    stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
    for prompt in prompts:
        engine.add(GenerationRequest(prompt, GREEDY, stop, SpeculationParams(method=Method.NONE)))


def _prefills(model: NativeDecoder) -> list[int]:
    return [rows for rows in PREFILLS if rows <= model.config.max_position_embeddings]


def _prefill_turns(model: NativeDecoder, kv_cache: KVCache, threads: int) -> Iterator[_Turn]:
    kind = _kind(model)
    for rows in _prefills(model):
        prompt = [i % model.config.vocab_size for i in range(rows)]
        token_ids, batch = flatten([Run(list(range(-(-rows // BLOCK))), 0, prompt)], BLOCK, model.device)
        figure = Figure("prefill", f"{_name(model)}, {rows} rows", "GFLOP/s", prefill_operations(model.config, rows))
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
        Run(
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

    name = f"{_name(model)}, {ATTENTION_SEQUENCES} x {ATTENTION_CONTEXT} tokens x {ATTENTION_ROWS} rows"
    figure = Figure("paged attention", name, "GB/s", layers.numel() * layers.itemsize)
    return _Turn(figure, partial(median_seconds, attend), ceiling)


def _draft_turn(model: NativeDecoder, kv_cache: KVCache, ceiling: Callable[[], float]) -> _Turn:
    """One pass for one sequence, over weights that stay wherever so many bytes stay."""
    call = partial(_forward_and_logits, model, *_decoding(model, 1), kv_cache)
    figure = Figure("draft pass", f"{_name(model)}, 1 sequence", "GB/s", streamed_bytes(model.config, _itemsize(model)))
    return _Turn(figure, partial(median_seconds, call), ceiling)


def _pass_seconds(model: NativeDecoder, kv_cache: KVCache, depth: int) -> tuple[float, float]:
    """Of a single pass, and of `depth` in one call."""
    token_ids, batch = _decoding(model, 1, ahead=depth)
    single = median_seconds(partial(_forward_and_logits, model, token_ids, batch, kv_cache))
    depths, choices = torch.tensor([depth], dtype=torch.int32), _greedy(depth, model.config.vocab_size)
    return single, median_seconds(lambda: model.draft(token_ids, batch, kv_cache, depths, choices))


def _greedy(depth: int, vocab_size: int) -> Choices:
    """The most probable token of every pass, for one sequence."""
    zero, one = torch.zeros(1), torch.ones(1)
    return Choices(
        kinds=torch.tensor([Choice.MOST_PROBABLE], dtype=torch.int32),
        temperatures=zero,
        top_k=zero.long(),
        top_p=one,
        min_p=zero,
        typical_p=one,
        keys=torch.zeros(1, 4, dtype=torch.int64),
        uniforms=torch.zeros(1, depth, dtype=torch.float64),
        first_rows=zero.long(),
        probs=torch.empty(0, vocab_size),
    )


# ---- Memory, in processes of its own ----


def _memory(settings: EngineSettings) -> Memory:
    peak, weights, kv, modules = _in_new_process(_serve, settings)
    return Memory(peak, _in_new_process(_import, modules), weights, kv)


def _in_new_process(function: Callable[..., Any], argument: object) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, argument).result()


def _serve(settings: EngineSettings) -> tuple[int, int, int, list[str]]:
    """Requests that write to all of the KV memory. Peak, bytes of weights and KV, and what was imported."""
    engine = build_engine(settings)
    config = engine.scheduler.config
    length = config.max_model_len
    _add(engine, _prompts(engine, -(-config.num_blocks * config.block_size // length), length - STEPS), STEPS)
    while engine.has_work:
        engine.step()
    models = [_target(engine), _draft(engine)]
    weights = sum(_resident_weights(model) for model in models)
    kv = config.num_blocks * sum(_block_bytes(model, config.block_size) for model in models)
    return peak_memory(), weights, kv, list(sys.modules)


def _resident_weights(model: NativeDecoder) -> int:
    config = model.config
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * model.dtype.itemsize
    return streamed_bytes(config, _itemsize(model)) + table


def _block_bytes(model: NativeDecoder, block_size: int) -> int:
    return KVCache.bytes_per_block(model.config, block_size, model.dtype, model.kv_lanes)


def _import(modules: list[str]) -> int:
    for module in modules:
        with suppress(Exception):  # parts of others, which cannot be imported by themselves
            importlib.import_module(module)
    return peak_memory()


def peak_memory() -> int:
    """Bytes that this process has had at most.

    Raises FailedPrecondition where the system does not say.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError as error:
        raise FailedPrecondition(f"memory: no /proc/self/status here: {error}") from error
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


# ---- Saying it ----


def render(limits: Limits, title: str) -> None:
    table = Table(title=title)
    for name in ("what", "of", "measured", "ceiling", "%"):
        table.add_column(name, justify="left" if name in ("what", "of") else "right")
    for figure in limits.figures:
        table.add_row(
            figure.group,
            figure.name,
            f"{figure.rate:.1f} {figure.unit}",
            f"{figure.ceiling:.1f} {figure.unit}",
            f"{100 * figure.fraction:.0f}",
        )
    out = console()
    out.print(table)
    for some in limits.passes:
        milliseconds = 1e3 * median(some.single)
        out.print(f"{some.depth} draft passes cost {some.depth} x {milliseconds:.3f} ms {100 * some.overhead:+.1f} %")
    if limits.memory is not None:
        memory = limits.memory
        out.print(
            f"memory: serving took {(memory.peak - memory.idle) / 2**20:.0f} MiB beyond an idle process, "
            f"{memory.ratio:.2f} x weights ({memory.weights / 2**20:.0f} MiB) and KV ({memory.kv / 2**20:.0f} MiB)"
        )


def to_json(limits: Limits, settings: dict[str, Any]) -> dict[str, Any]:
    memory = limits.memory
    return {
        "settings": settings,
        "figures": [
            {**asdict(figure), "rate": figure.rate, "ceiling": figure.ceiling, "fraction": figure.fraction}
            for figure in limits.figures
        ],
        "draft_passes": [{**asdict(some), "overhead": some.overhead} for some in limits.passes],
        "memory": None if memory is None else {**asdict(memory), "ratio": memory.ratio},
    }
