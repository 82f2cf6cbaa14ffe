"""The one place where concrete classes meet: from settings to an engine that is ready to serve."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress

from paceline import cost_cache, demo
from paceline.core.adaptive_depth import MAX_DEPTH, AdaptiveDepth
from paceline.core.config import PrefixScope, SchedulerConfig
from paceline.core.cost_model import CostModel
from paceline.core.depth_policy import FixedDepth
from paceline.core.grammar import GrammarCompiler
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.core.plan import StepRunner
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.core.tenant_policy import ONE_SHARE, TenantPolicy
from paceline.device import (
    Gpu,
    Needed,
    check_head_dim,
    check_memory,
    check_utilization,
    choose_gpu,
    in_gib,
    triton_obstacle,
)
from paceline.engine import Engine, GenerationRequest
from paceline.engine.profile import profile
from paceline.engine.tokenizer import TransformersTokenizer
from paceline.errors import FailedPrecondition, InvalidArgument
from paceline.models import Decoder, Model, ModelConfig, NativeDecoder, load_model, load_model_config, load_native
from paceline.models.tokenizer import load_tokenizer
from paceline.models.weights import weight_bytes
from paceline.runner import Drafter, KVCache, ModelRunner
from paceline.runner.memory import GRAPH_RESERVE, LargestStep, drawn_bytes, kv_bytes, measure
from paceline.speculation import DraftModel, Ngram
from paceline_kernels.cpu import decoder
from paceline_kernels.cpu.memory import free_memory, total_memory
from paceline_kernels.ops import Ops

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "native", "torch", "triton")
QUANTIZATIONS = ("none", "int8")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OFF = "off"
SERVED_NAME = re.compile(r"[!-~]{1,128}")
HUB_PREFIX = "models--"  # of the directory in which the hub's cache keeps a model
PROFILE_SECONDS = 16.0  # at most, to measure what steps cost
DEFAULT_MEMORY_SHARE = 0.25  # of the memory that is free at start, for KV on a CPU
MOST_CACHED = 4  # times as many KV blocks as all running requests can use: more only keep prompts that nobody asks for


@dataclass(frozen=True)
class EngineSettings:
    """What an operator chooses; None lets the model or the machine decide.

    Attributes:
        model: a Hugging Face directory, or "demo" for the embedded target.
        draft: a directory, "demo" for the embedded draft, "ngram" or "none".
        dtype: "auto", "float32" or "bfloat16".
        device: "auto", "cpu" or "cuda"; auto is a GPU where torch finds one.
        gpu_memory_utilization: share of a GPU's memory that weights, steps and KV may take together.
        kv_cache_memory: bytes for target and draft KV together; None takes what is left of the share above, on a CPU
            a quarter of what is free.
        take_memory: all of it from the system at start, for which no step has to wait then.
        depth: "auto", "off", or a number of drafts for every request.
        min_depth: lowest depth of a request that does not ask for less.
        max_depth: highest depth of any request; None takes MAX_DEPTH, or `depth` if that is higher. 0 is off.
        tenants: what is granted to whom, by name.
        default_tenant: what everybody else is granted; None refuses them.
        backend: "auto", "native" (compiled here, CPUs only), "triton" (GPUs only) or "torch"; auto is native on a CPU
            and triton on a GPU, where that can be.
        quantization, draft_quantization: of the weights of target and draft, "none" or "int8".
        threads: that compute; None takes torch's number.
        reproducible: greedy and seeded output is the same, to the bit, whatever the batch, the chunks and the depth;
            refuse to start where that cannot be had. The native backend always works so.
        max_logprobs: alternatives that a request may ask for at each token.
        prefix_cache: whose KV is kept and found again: "tenant" (of the same tenant), "shared" (of everybody) or "off".
        watermark, long_prefill_threshold, max_step_seconds, max_slowdown, max_queued: as in `SchedulerConfig`.
        served_model_name: what clients call the model; None takes the name of its directory, or ORG/NAME of one in the
            hub's cache.
    """

    model: str = "demo"
    draft: str = "none"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    device: str = "auto"
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    take_memory: bool = False
    block_size: int = 16
    seed: int = 0
    depth: str = "auto"
    min_depth: int = 0
    max_depth: int | None = None
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict, hash=False)
    default_tenant: TenantPolicy | None = ONE_SHARE
    backend: str = "auto"
    quantization: str = "none"
    draft_quantization: str = "none"
    threads: int | None = None
    reproducible: bool = False
    max_logprobs: int = 20
    prefix_cache: str = PrefixScope.TENANT
    watermark: float = 0.01
    long_prefill_threshold: int | None = None
    max_step_seconds: float | None = None
    max_slowdown: float = 1.1
    max_queued: int = 4096
    served_model_name: str | None = None


def build_engine(settings: EngineSettings) -> Engine:
    """Load the models, size the KV cache and warm up.

    Raises:
        InvalidArgument: a setting has a value that is not allowed, or target and draft do not go together.
        FailedPrecondition: this machine cannot do what is asked for.
        ModelLoadError: a checkpoint cannot be read.
    """
    if settings.seed < 0:
        raise InvalidArgument("seed", settings.seed, "an integer >= 0")
    if settings.max_logprobs < 0:
        raise InvalidArgument("max_logprobs", settings.max_logprobs, "an integer >= 0")
    if settings.prefix_cache not in list(PrefixScope):
        raise InvalidArgument("prefix_cache", settings.prefix_cache, ", ".join(PrefixScope))
    if settings.dtype != "auto" and settings.dtype not in DTYPES:
        raise InvalidArgument("dtype", settings.dtype, "auto, float32 or bfloat16")
    if settings.served_model_name is not None and not SERVED_NAME.fullmatch(settings.served_model_name):
        allowed = "1 to 128 printable ASCII characters without blanks"
        raise InvalidArgument("served_model_name", settings.served_model_name, allowed)
    check_utilization(settings.gpu_memory_utilization)
    logger.info("loading model %s, draft %s", settings.model, settings.draft)
    gpu = choose_gpu(settings.device)
    device = torch.device("cpu" if gpu is None else "cuda")
    _set_threads(settings.threads)
    backend = _choose_backend(settings, gpu)
    dtype = _choose_dtype(settings.dtype, gpu, backend)
    method, depth, max_depth = _speculation(settings)
    model_path = _model_path(settings.model)
    draft_path = None if max_depth == 0 else _draft_path(settings.draft)
    config = load_model_config(model_path)
    draft_config = None if draft_path is None else load_model_config(draft_path)
    tokenizer = load_tokenizer(model_path)
    if draft_config is not None and draft_path is not None:
        _check_pair(settings, config, draft_config, tokenizer.get_vocab(), load_tokenizer(draft_path).get_vocab())
    max_model_len = _choose_max_model_len(settings, config)
    per_block = _bytes_per_block(settings.block_size, config, draft_config, dtype, backend)
    if backend == "triton":
        check_head_dim("model", settings.model, config.head_dim)
        if draft_config is not None:
            check_head_dim("draft", settings.draft, draft_config.head_dim)
    if gpu is not None:
        _check_gpu_memory(settings, gpu, config, draft_config, dtype, per_block, max_model_len)
    scheduler_config = SchedulerConfig(
        num_blocks=_choose_num_blocks(settings, per_block, max_model_len, gpu),
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        min_depth=settings.min_depth,
        max_depth=max_depth,
        method=method,
        hybrid=depth is None,
        eos_token_ids=config.eos_token_ids,
        prefix_cache=PrefixScope(settings.prefix_cache),
        watermark=settings.watermark,
        long_prefill_threshold=settings.long_prefill_threshold,
        max_step_seconds=settings.max_step_seconds,
        max_slowdown=settings.max_slowdown,
        max_queued=settings.max_queued,
        **({} if draft_config is None else {"max_draft_len": draft_config.max_position_embeddings}),
    )
    if settings.tenants or settings.default_tenant != ONE_SHARE:
        from paceline.config_file import check_tenants  # pydantic's, which needs no load without tenants

        check_tenants(settings.tenants, settings.default_tenant, scheduler_config)

    target = _load(model_path, dtype, device, backend, settings.quantization)
    draft = None if draft_path is None else _load(draft_path, dtype, device, backend, settings.draft_quantization)
    if backend == "triton":
        _tune([model for model in (target, draft) if isinstance(model, Decoder)])
    if gpu is not None and settings.kv_cache_memory is None:
        models = [target] if draft is None else [target, draft]
        drawn = drawn_bytes(settings.max_num_seqs, max_depth, config.vocab_size) if backend == "triton" else 0
        num_blocks = _measure_num_blocks(settings, scheduler_config, models, per_block, gpu, GRAPH_RESERVE + drawn)
        scheduler_config = replace(scheduler_config, num_blocks=num_blocks)
    num_blocks = scheduler_config.num_blocks

    def kv_cache(model: Model) -> KVCache:
        try:
            cache = KVCache(model, num_blocks, settings.block_size)
        except (OSError, torch.OutOfMemoryError) as error:
            allowed = f"a size that the system gives: of {num_blocks * per_block} bytes it says {error}"
            raise InvalidArgument("kv_cache_memory", settings.kv_cache_memory, allowed) from error
        if settings.take_memory and gpu is None:  # a GPU gives it at once
            cache.take_memory()
        return cache

    ngram = Ngram()
    drafters: dict[Method, Drafter] = {} if max_depth == 0 else {Method.NGRAM: ngram}
    if draft is not None:
        drafters[Method.DRAFT_MODEL] = DraftModel(draft, kv_cache(draft), settings.seed)
    runner = ModelRunner(target, kv_cache(target), drafters, settings.seed, scorer=ngram)
    engine = Engine(
        Scheduler(scheduler_config, SpeculationControl(FixedDepth(depth or 0))),
        _on_device(runner, scheduler_config, settings.seed) if backend == "triton" else runner,
        TransformersTokenizer(tokenizer),
        model_name=settings.served_model_name or _model_name(settings.model, model_path),
        vocab_size=config.vocab_size,
        methods=drafters,
        default_sampling=_default_sampling(config),
        grammars=_grammars(tokenizer, config),
        max_logprobs=settings.max_logprobs,
    )
    _warm_up(engine)
    if depth is None:
        key = cost_cache.key_of(
            scheduler_config,
            model_path,
            draft_path,
            dtype=str(dtype),
            quantization=settings.quantization,
            draft_quantization=settings.draft_quantization,
            backend=decoder.identity() if backend == "native" else backend,
            threads=torch.get_num_threads(),
            device="cpu" if gpu is None else gpu.name,
        )
        costs = _costs(key, engine.runner, scheduler_config, draft=Method.DRAFT_MODEL in drafters)
        engine.scheduler.speculation = SpeculationControl(AdaptiveDepth(costs, max_depth=max_depth), costs)
    # After the warm-up, whose requests are no tenant's.
    engine.scheduler.tenants.set_policies(settings.tenants, settings.default_tenant)
    computing = backend if backend == "native" else f"{backend} on {device if gpu is None else gpu.name}"
    _log_choices(engine, settings, dtype, computing, num_blocks * per_block)
    return engine


def _on_device(host: ModelRunner, config: SchedulerConfig, seed: int) -> StepRunner:
    """A runner whose steps are launched on the device of `host`, to which it leaves what cannot be."""
    from paceline.runner.device_passes import ModelAndKV  # as `_triton_ops`
    from paceline.runner.device_runner import DeviceRunner

    draft = host.drafters.get(Method.DRAFT_MODEL)
    runner = DeviceRunner(
        host,
        seed,
        draft=ModelAndKV(draft.model, draft.kv_cache) if isinstance(draft, DraftModel) else None,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        max_depth=config.max_depth,
    )
    with _progress("recording CUDA graphs") as progress:
        runner.record(progress)
    return runner


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar, on a terminal; call it with how much is done, and of how much."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _load(path: Path, dtype: torch.dtype, device: torch.device, backend: str, quantization: str) -> Model:
    int8 = quantization == "int8"
    if backend == "native":
        return load_native(path, dtype, int8=int8)
    try:
        if backend == "triton":
            return load_model(path, dtype, device, ops=_triton_ops(), int8=int8)
        return load_model(path, dtype, device)
    except torch.OutOfMemoryError as error:
        raise FailedPrecondition(f"the weights of {path} do not fit on the GPU: {error}") from error


def _tune(models: Sequence[Decoder]) -> None:
    """Find out which way of multiplying is the fastest here."""
    from paceline_kernels.triton.linear import CHOICE

    def report(rows: int, outputs: int, inputs: int, kind: str, seconds: dict[Any, float]) -> None:
        times = ", ".join(f"{way or 'cuBLAS'} {1e6 * took:.1f} us" for way, took in seconds.items())
        logger.debug("%d rows times %s [%d, %d]: %s", rows, kind, outputs, inputs, times)

    for model in models:
        CHOICE.tune([weight for weight, _ in model.linears()], report=report)


def _triton_ops() -> Ops:
    """Imported here, since there may be no Triton, and importing it takes long."""
    from paceline_kernels.triton import ops

    return ops


def _grammars(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> GrammarCompiler | None:
    """None, which refuses constraints, on a machine without llguidance: all else can be served there."""
    try:
        from paceline.structured import LLGuidanceCompiler
    except ImportError as error:
        logger.warning("no grammars are served: %s", error)
        return None
    return LLGuidanceCompiler(tokenizer, config.vocab_size, config.eos_token_ids)


def _log_choices(engine: Engine, settings: EngineSettings, dtype: torch.dtype, backend: str, kv_bytes: int) -> None:
    """What was asked for, and what it came to."""
    config = engine.scheduler.config
    chosen = {
        "model": engine.model_name,
        "dtype": str(dtype).removeprefix("torch."),
        "backend": backend,
        "threads": torch.get_num_threads(),
        "quantization": settings.quantization,
        "draft_quantization": settings.draft_quantization,
        "max_model_len": config.max_model_len,
        "kv_blocks": config.num_blocks,
        "kv_bytes": kv_bytes,
        "drafters": " ".join(method for method in Method if method in engine.methods and method is not Method.NONE),
        "default_drafter": config.method.value,
        "depth": settings.depth,
    }
    text = ", ".join(f"{name} = {value or 'none'}" for name, value in chosen.items())
    logger.info("loaded: %s", text, extra={"fields": chosen})


def _costs(key: str, runner: StepRunner, config: SchedulerConfig, *, draft: bool) -> CostModel:
    """As they were measured at an earlier start, or measured now, with a progress bar."""
    costs = cost_cache.load(key)
    if costs is None:
        with _progress("measuring what steps cost") as progress:
            costs = profile(
                runner,
                config,
                draft=draft,
                seconds=PROFILE_SECONDS,
                progress=progress,
                clock=time.perf_counter,
            )
        cost_cache.save(key, costs)
    return costs


def _choose_dtype(name: str, gpu: Gpu | None, backend: str) -> torch.dtype:
    if name == "auto":
        if gpu is not None:
            return torch.bfloat16
        capabilities = torch.cpu.get_capabilities()
        # The native backend widens what it reads: with half of the bytes, few rows take about half of the time.
        fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16")
        return torch.bfloat16 if fast or backend == "native" else torch.float32
    return DTYPES[name]


def _set_threads(threads: int | None) -> None:
    """Of torch and of the native backend alike: they share one pool."""
    if threads is None:
        return
    if threads < 1:
        raise InvalidArgument("threads", threads, "an integer >= 1")
    torch.set_num_threads(threads)


def _choose_backend(settings: EngineSettings, gpu: Gpu | None) -> str:
    """Which computes: native, triton or torch. What only the others can do is refused where they cannot run."""
    if settings.backend not in BACKENDS:
        raise InvalidArgument("backend", settings.backend, ", ".join(BACKENDS))
    for option in ("quantization", "draft_quantization"):
        if getattr(settings, option) not in QUANTIZATIONS:
            raise InvalidArgument(option, getattr(settings, option), " or ".join(QUANTIZATIONS))
    fast = "native" if gpu is None and settings.backend != "triton" else "triton"
    obstacles = {"native": _native_obstacle(settings.backend, gpu), "triton": _triton_obstacle(settings.backend, gpu)}
    asked_for = {
        "backend = native": ("native", settings.backend == "native"),
        "backend = triton": ("triton", settings.backend == "triton"),
        "quantization = int8": (fast, settings.quantization == "int8"),
        "draft_quantization = int8": (fast, settings.draft_quantization == "int8"),
        "reproducible": ("native", settings.reproducible),
    }
    for name, (needed, asked) in asked_for.items():
        if asked and obstacles[needed] is not None:
            raise FailedPrecondition(f"{name}: the {needed} backend is needed: {obstacles[needed]}")
    if obstacles[fast] is None:
        return fast
    if settings.backend == "auto":
        logger.warning("no %s backend, torch computes, several times slower: %s", fast, obstacles[fast])
    return "torch"


def _native_obstacle(backend: str, gpu: Gpu | None) -> str | None:
    """Why the native backend does not compute; None if it can."""
    if gpu is not None:
        return "it runs on CPUs only, and this server uses cuda; device = cpu has it"
    return decoder.available() if backend in ("auto", "native") else f"backend = {backend}"


def _triton_obstacle(backend: str, gpu: Gpu | None) -> str | None:
    """Why the triton backend does not compute; None if it can."""
    return triton_obstacle(gpu) if backend in ("auto", "triton") else f"backend = {backend}"


def _model_path(name: str) -> Path:
    return demo.TARGET if name == "demo" else Path(name)


def _model_name(name: str, path: Path) -> str:
    if name == "demo":
        return name
    path = path.resolve()
    home = path.parents[1].name if path.parent.name == "snapshots" else ""
    return home.removeprefix(HUB_PREFIX).replace("--", "/") if home.startswith(HUB_PREFIX) else path.name


def _draft_path(name: str) -> Path | None:
    if name in ("none", "ngram"):
        return None
    return demo.DRAFT if name == "demo" else Path(name)


def _speculation(settings: EngineSettings) -> tuple[Method, int | None, int]:
    """Who drafts unless a request says otherwise, how deep, None leaving it to the policy, and how deep at most: with 0
    nobody drafts.
    """
    if settings.depth == OFF:
        return Method.NONE, 0, 0
    if settings.depth != "auto" and not settings.depth.isdecimal():
        raise InvalidArgument("depth", settings.depth, "auto, off or an integer >= 0")
    depth = None if settings.depth == "auto" else int(settings.depth)
    max_depth = max(depth or 0, MAX_DEPTH) if settings.max_depth is None else settings.max_depth
    if depth is not None and not settings.min_depth <= depth <= max_depth:
        allowed = f"between min_depth ({settings.min_depth}) and max_depth ({max_depth})"
        raise InvalidArgument("depth", settings.depth, allowed)
    if max_depth == 0:
        return Method.NONE, 0, 0
    method = {"none": Method.NONE, "ngram": Method.NGRAM}.get(settings.draft, Method.DRAFT_MODEL)
    return method, depth, max_depth


def _check_pair(
    settings: EngineSettings,
    target: ModelConfig,
    draft: ModelConfig,
    vocab: dict[str, int],
    draft_vocab: dict[str, int],
) -> None:
    """Drafts are token ids, so both models must mean the same by every id."""
    if target.vocab_size != draft.vocab_size:
        raise InvalidArgument(
            "draft", settings.draft, f"of the target's vocabulary size, {target.vocab_size}; it has {draft.vocab_size}"
        )
    if vocab != draft_vocab:
        example = next(t for t in sorted(vocab.keys() | draft_vocab.keys()) if vocab.get(t) != draft_vocab.get(t))
        raise InvalidArgument(
            "draft",
            settings.draft,
            f"of the target's tokenizer; token {example!r} has id {vocab.get(example)} there, "
            f"{draft_vocab.get(example)} here",
        )


def _choose_max_model_len(settings: EngineSettings, config: ModelConfig) -> int:
    longest = config.max_position_embeddings
    if settings.max_model_len is None:
        return longest
    if not 2 <= settings.max_model_len <= longest:
        raise InvalidArgument("max_model_len", settings.max_model_len, f"between 2 and the model's length, {longest}")
    return settings.max_model_len


def _bytes_per_block(
    size: int, config: ModelConfig, draft: ModelConfig | None, dtype: torch.dtype, backend: str
) -> int:
    """Of target and draft KV together."""
    if size < 1:
        raise InvalidArgument("block_size", size, "an integer >= 1")
    lanes = NativeDecoder.kv_lanes if backend == "native" else 1
    return sum(KVCache.bytes_per_block(c, size, dtype, lanes) for c in (config, draft) if c is not None)


def _choose_num_blocks(settings: EngineSettings, per_block: int, max_model_len: int, gpu: Gpu | None) -> int:
    """Blocks that the KV memory holds; at least one request of full length must fit. On a GPU, unless they are set,
    no more than that: `_measure_num_blocks` tells when the weights are there.
    """
    needed = -(-max_model_len // settings.block_size)
    if settings.kv_cache_memory is None:
        if gpu is not None:
            return needed
        # Never more than every running request could use.
        return max(needed, min(needed * settings.max_num_seqs, int(free_memory() * DEFAULT_MEMORY_SHARE) // per_block))
    total = total_memory() if gpu is None else gpu.total_memory
    if settings.kv_cache_memory > total:
        allowed = f"at most {total} bytes, which is all that {_machine(gpu)} has"
        raise InvalidArgument("kv_cache_memory", settings.kv_cache_memory, allowed)
    num_blocks = settings.kv_cache_memory // per_block
    if num_blocks < needed:
        raise InvalidArgument(
            "kv_cache_memory",
            settings.kv_cache_memory,
            f"at least {needed * per_block} bytes, for one request of max_model_len = {max_model_len} tokens",
        )
    return num_blocks


def _machine(gpu: Gpu | None) -> str:
    return "this machine or its container" if gpu is None else gpu.name


def _check_gpu_memory(
    settings: EngineSettings,
    gpu: Gpu,
    config: ModelConfig,
    draft: ModelConfig | None,
    dtype: torch.dtype,
    per_block: int,
    max_model_len: int,
) -> None:
    """Before minutes are spent on loading what cannot be served."""
    needed = Needed(
        weights=weight_bytes(config, dtype, int8=settings.quantization == "int8"),
        draft_weights=0 if draft is None else weight_bytes(draft, dtype, int8=settings.draft_quantization == "int8"),
        request=-(-max_model_len // settings.block_size) * per_block,
        max_model_len=max_model_len,
    )
    check_memory(gpu, needed, settings.gpu_memory_utilization)


def _measure_num_blocks(
    settings: EngineSettings,
    config: SchedulerConfig,
    models: Sequence[Model],
    per_block: int,
    gpu: Gpu,
    reserve: int,
) -> int:
    """Blocks for what a run of the largest step leaves of the share of the GPU that is granted, and some bytes for what
    comes later.
    """
    rows = config.max_num_batched_tokens
    sampled = min(rows, config.max_num_seqs * (1 + config.max_depth))
    try:
        measured = measure(models, LargestStep(rows, sampled, config.max_model_len, config.block_size))
    except torch.OutOfMemoryError as error:
        raise FailedPrecondition(
            f"{gpu.name} is too small for a step of max_num_batched_tokens = {rows} rows beside the weights; "
            f"fewer take less: {error}"
        ) from error
    left = kv_bytes(measured, settings.gpu_memory_utilization, reserve)
    logger.info("memory: %s in the largest step, %s for KV", in_gib(measured.peak), in_gib(left))
    return gpu_blocks(left, per_block, config, settings.gpu_memory_utilization)


def gpu_blocks(left: int, per_block: int, config: SchedulerConfig, utilization: float) -> int:
    """KV blocks in so many bytes. Raises FailedPrecondition where one request of full length does not fit."""
    needed = config.blocks_for(config.max_model_len)
    if left < needed * per_block:
        raise FailedPrecondition(
            f"gpu_memory_utilization = {utilization:g} leaves {in_gib(left)} for KV beside the weights and the "
            f"largest step, and one request of max_model_len = {config.max_model_len} tokens needs "
            f"{in_gib(needed * per_block)}: shorten it, or lower max_num_batched_tokens or max_num_seqs"
        )
    return min(left // per_block, MOST_CACHED * needed * config.max_num_seqs)


def _default_sampling(config: ModelConfig) -> SamplingParams:
    """The checkpoint's recommendation, where it has one."""
    given = {name: value for name, value in asdict(config.generation).items() if value is not None}
    return SamplingParams(**given)


def _warm_up(engine: Engine) -> None:
    """Serve short requests of every kind, so that the first user does not wait for what is set up, or compiled, at
    first use; and forget what they taught.
    """
    config = engine.scheduler.config
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(top_p=0.9), SamplingParams(seed=0)):
        engine.add(
            GenerationRequest(
                prompt=(0,) * min(8, config.max_model_len - 1),
                sampling=sampling,
                stop=StopParams(max_tokens=4, ignore_eos=True),
                speculation=SpeculationParams(min_depth=min(1, config.max_depth)),
            )
        )
    while engine.has_work:
        engine.step()
    # First steps take long: estimates that begin with them would refuse what can be served.
    engine.forget()
