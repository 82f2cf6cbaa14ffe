"""The one place where concrete classes meet: from settings to an engine that is ready to serve."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

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
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.core.tenant_policy import ONE_SHARE, TenantPolicy
from paceline.engine import Engine, GenerationRequest
from paceline.engine.profile import profile
from paceline.engine.tokenizer import TransformersTokenizer
from paceline.errors import FailedPrecondition, InvalidArgument
from paceline.models import Model, ModelConfig, NativeDecoder, load_model, load_model_config, load_native
from paceline.models.tokenizer import load_tokenizer
from paceline.runner import Drafter, KVCache, ModelRunner
from paceline.speculation import DraftModel, Ngram
from paceline_kernels.cpu import decoder
from paceline_kernels.cpu.memory import free_memory, total_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "native", "torch")
QUANTIZATIONS = ("none", "int8")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OFF = "off"
SERVED_NAME = re.compile(r"[!-~]{1,128}")
HUB_PREFIX = "models--"  # of the directory in which the hub's cache keeps a model
PROFILE_SECONDS = 16.0  # at most, to measure what steps cost
DEFAULT_MEMORY_SHARE = 0.25  # of the memory that is free at start, for KV


@dataclass(frozen=True)
class EngineSettings:
    """What an operator chooses; None lets the model or the machine decide.

    Attributes:
        model: a Hugging Face directory, or "demo" for the embedded target.
        draft: a directory, "demo" for the embedded draft, "ngram" or "none".
        dtype: "auto", "float32" or "bfloat16".
        kv_cache_memory: bytes for target and draft KV together.
        take_memory: all of it from the system at start, for which no step has to wait then.
        depth: "auto", "off", or a number of drafts for every request.
        min_depth: lowest depth of a request that does not ask for less.
        max_depth: highest depth of any request; None takes MAX_DEPTH, or `depth` if that is higher. 0 is off.
        tenants: what is granted to whom, by name.
        default_tenant: what everybody else is granted; None refuses them.
        backend: "auto", "native" (compiled here, CPUs only) or "torch"; auto is native where that can be.
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
    logger.info("loading model %s, draft %s", settings.model, settings.draft)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _set_threads(settings.threads)
    native = _choose_native(settings, device)
    dtype = _choose_dtype(settings.dtype, device, native)
    method, depth, max_depth = _speculation(settings)
    model_path = _model_path(settings.model)
    draft_path = None if max_depth == 0 else _draft_path(settings.draft)
    config = load_model_config(model_path)
    draft_config = None if draft_path is None else load_model_config(draft_path)
    tokenizer = load_tokenizer(model_path)
    if draft_config is not None and draft_path is not None:
        _check_pair(settings, config, draft_config, tokenizer.get_vocab(), load_tokenizer(draft_path).get_vocab())
    max_model_len = _choose_max_model_len(settings, config)
    per_block = _bytes_per_block(settings.block_size, config, draft_config, dtype, native)
    num_blocks = _choose_num_blocks(settings, per_block, max_model_len, device)
    scheduler_config = SchedulerConfig(
        num_blocks=num_blocks,
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

    def load(path: Path, quantization: str) -> Model:
        return load_native(path, dtype, int8=quantization == "int8") if native else load_model(path, dtype, device)

    def kv_cache(model: Model) -> KVCache:
        try:
            cache = KVCache(model, num_blocks, settings.block_size)
        except (OSError, torch.OutOfMemoryError) as error:
            allowed = f"a size that the system gives: of {num_blocks * per_block} bytes it says {error}"
            raise InvalidArgument("kv_cache_memory", settings.kv_cache_memory, allowed) from error
        if settings.take_memory:
            cache.take_memory()
        return cache

    target = load(model_path, settings.quantization)
    ngram = Ngram()
    drafters: dict[Method, Drafter] = {} if max_depth == 0 else {Method.NGRAM: ngram}
    if draft_path is not None and draft_config is not None:
        draft = load(draft_path, settings.draft_quantization)
        drafters[Method.DRAFT_MODEL] = DraftModel(draft, kv_cache(draft), settings.seed)
    runner = ModelRunner(target, kv_cache(target), drafters, settings.seed, scorer=ngram)
    engine = Engine(
        Scheduler(scheduler_config, SpeculationControl(FixedDepth(depth or 0))),
        runner,
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
            backend=decoder.identity() if native else "torch",
            threads=torch.get_num_threads(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        )
        costs = _costs(key, runner, scheduler_config)
        engine.scheduler.speculation = SpeculationControl(AdaptiveDepth(costs, max_depth=max_depth), costs)
    # After the warm-up, whose requests are no tenant's.
    engine.scheduler.tenants.set_policies(settings.tenants, settings.default_tenant)
    backend = "native" if native else f"torch on {device}"
    _log_choices(engine, settings, dtype, backend, num_blocks * per_block)
    return engine


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


def _costs(key: str, runner: ModelRunner, config: SchedulerConfig) -> CostModel:
    """As they were measured at an earlier start, or measured now, with a progress bar."""
    costs = cost_cache.load(key)
    if costs is None:
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("measuring what steps cost")
            costs = profile(
                runner,
                config,
                draft=Method.DRAFT_MODEL in runner.drafters,
                seconds=PROFILE_SECONDS,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
                clock=time.perf_counter,
            )
        cost_cache.save(key, costs)
    return costs


def _choose_dtype(name: str, device: torch.device, native: bool) -> torch.dtype:
    if name == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
        capabilities = torch.cpu.get_capabilities()
        # The native backend widens what it reads: with half of the bytes, few rows take about half of the time.
        fast = native or capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16")
        return torch.bfloat16 if fast else torch.float32
    return DTYPES[name]


def _set_threads(threads: int | None) -> None:
    """Of torch and of the native backend alike: they share one pool."""
    if threads is None:
        return
    if threads < 1:
        raise InvalidArgument("threads", threads, "an integer >= 1")
    torch.set_num_threads(threads)


def _choose_native(settings: EngineSettings, device: torch.device) -> bool:
    """Whether the native backend computes. What only it can do is refused where it cannot run."""
    if settings.backend not in BACKENDS:
        raise InvalidArgument("backend", settings.backend, ", ".join(BACKENDS))
    for option in ("quantization", "draft_quantization"):
        if getattr(settings, option) not in QUANTIZATIONS:
            raise InvalidArgument(option, getattr(settings, option), " or ".join(QUANTIZATIONS))
    if settings.backend == "torch":
        obstacle: str | None = "backend = torch"
    elif device.type != "cpu":
        obstacle = f"it runs on CPUs only, and this server uses {device}"
    else:
        obstacle = decoder.available()
    if obstacle is None:
        return True
    asked_for = {
        "backend = native": settings.backend == "native",
        "quantization = int8": settings.quantization == "int8",
        "draft_quantization = int8": settings.draft_quantization == "int8",
        "reproducible": settings.reproducible,
    }
    for name, asked in asked_for.items():
        if asked:
            raise FailedPrecondition(f"{name}: the native backend is needed: {obstacle}")
    if settings.backend == "auto" and device.type == "cpu":
        logger.warning("no native backend, torch computes, several times slower: %s", obstacle)
    return False


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
    size: int, config: ModelConfig, draft: ModelConfig | None, dtype: torch.dtype, native: bool
) -> int:
    """Of target and draft KV together."""
    if size < 1:
        raise InvalidArgument("block_size", size, "an integer >= 1")
    lanes = NativeDecoder.kv_lanes if native else 1
    return sum(KVCache.bytes_per_block(c, size, dtype, lanes) for c in (config, draft) if c is not None)


def _choose_num_blocks(settings: EngineSettings, per_block: int, max_model_len: int, device: torch.device) -> int:
    """Blocks that the KV memory holds; at least one request of full length must fit."""
    needed = -(-max_model_len // settings.block_size)
    if settings.kv_cache_memory is None:
        # Never more than every running request could use.
        return max(
            needed, min(needed * settings.max_num_seqs, int(_free_memory(device) * DEFAULT_MEMORY_SHARE) // per_block)
        )
    if settings.kv_cache_memory > (total := _total_memory(device)):
        allowed = f"at most {total} bytes, which is all that this machine or its container has"
        raise InvalidArgument("kv_cache_memory", settings.kv_cache_memory, allowed)
    num_blocks = settings.kv_cache_memory // per_block
    if num_blocks < needed:
        raise InvalidArgument(
            "kv_cache_memory",
            settings.kv_cache_memory,
            f"at least {needed * per_block} bytes, for one request of max_model_len = {max_model_len} tokens",
        )
    return num_blocks


def _free_memory(device: torch.device) -> int:
    """Bytes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def _total_memory(device: torch.device) -> int:
    """Bytes, held or not."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else total_memory()


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
