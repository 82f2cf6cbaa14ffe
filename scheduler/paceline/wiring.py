"""The one place where concrete classes meet: from settings to an engine that is ready to serve."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import Progress

from paceline import backend, cost_cache, demo, kv_blocks
from paceline.core.adaptive_depth import MAX_DEPTH, AdaptiveDepth
from paceline.core.config import PrefixScope, SchedulerConfig
from paceline.core.cost_model import CostModel
from paceline.core.depth_policy import FixedDepth
from paceline.core.grammar import GrammarCompiler
from paceline.core.method import Method
from paceline.core.params import LogprobsParams, SamplingParams, SpeculationParams, StopParams
from paceline.core.plan import PipelinedRunner, StepRunner
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.core.tenant_policy import ONE_SHARE
from paceline.device import Gpu, Needed, check_head_dim, check_memory, choose_gpu
from paceline.engine import Engine, GenerationRequest
from paceline.engine.profile import profile
from paceline.engine.tokenizer import TransformersTokenizer
from paceline.errors import FailedPrecondition, InvalidArgument, ModelLoadError
from paceline.models import Decoder, Model, ModelConfig, load_model_config
from paceline.models.tokenizer import load_tokenizer
from paceline.runner import Drafter, KVCache, ModelRunner
from paceline.runner.graphs import StepSizes
from paceline.runner.memory import GRAPH_RESERVE, logits_bytes, table_bytes
from paceline.settings import EngineSettings
from paceline.speculation import DraftModel, Ngram
from paceline_kernels.cpu import decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["EngineSettings", "build_engine"]

logger = logging.getLogger(__name__)

OFF = "off"
HUB_PREFIX = "models--"  # of the directory in which the hub's cache keeps a model
PROFILE_SECONDS = 16.0  # at most, to measure what steps cost


def build_engine(settings: EngineSettings) -> Engine:
    """Load the models, size the KV cache and warm up.

    Raises:
        InvalidArgument: a setting has a value that is not allowed, or target and draft do not go together.
        FailedPrecondition: this machine cannot do what is asked for.
        ModelLoadError: a checkpoint cannot be read.
    """
    settings.check()
    logger.info("loading model %s, draft %s", settings.model, settings.draft)
    choices = _choose(settings)
    config = _scheduler_config(settings, choices)
    models = _load(settings, choices)
    if choices.gpu is not None and settings.kv_cache_memory is None:
        config = replace(config, num_blocks=_measured_blocks(settings, choices, config, models, choices.gpu))
    engine = Engine(
        Scheduler(config, SpeculationControl(FixedDepth(choices.depth or 0))),
        _runner(settings, choices, config, models),
        TransformersTokenizer(choices.tokenizer),
        model_name=settings.served_model_name or _model_name(settings.model, choices.path),
        vocab_size=choices.config.vocab_size,
        methods=choices.methods,
        default_sampling=choices.default_sampling,
        grammars=_grammars(choices.tokenizer, choices.config),
        max_logprobs=settings.max_logprobs,
    )
    _warm_up(engine, on_gpu=choices.gpu is not None or choices.backend == "triton")  # which may be interpreted
    if choices.depth is None:
        costs = _costs(settings, choices, engine)
        engine.scheduler.speculation = SpeculationControl(AdaptiveDepth(costs, max_depth=choices.max_depth), costs)
    # After the warm-up, whose requests are no tenant's.
    engine.scheduler.tenants.set_policies(settings.tenants, settings.default_tenant, engine.clock())
    _log_choices(engine, settings, choices)
    return engine


def check_engine(settings: EngineSettings) -> None:
    """Raises what `build_engine` would, as far as that is known before anything is loaded that takes long."""
    settings.check()
    _scheduler_config(settings, _choose(settings))


# -- what the settings come to ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the settings come to on this machine, with these checkpoints.

    Attributes:
        gpu: that computes; None on a CPU.
        method: who drafts unless a request says otherwise.
        depth: of every request; None leaves it to the policy.
        max_depth: of any request; 0 drafts nothing.
        path, draft_path: of the checkpoints; None without a draft model.
        draft_quantization: of its weights, "none" or "int8".
        default_sampling: that the checkpoint recommends.
        bytes_per_block: of target and draft KV together.
        needed: memory, at the least.
    """

    gpu: Gpu | None
    backend: str
    dtype: torch.dtype
    method: Method
    depth: int | None
    max_depth: int
    path: Path
    draft_path: Path | None
    draft_quantization: str
    default_sampling: SamplingParams
    config: ModelConfig
    draft_config: ModelConfig | None
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int
    bytes_per_block: int
    needed: Needed

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.gpu is None else "cuda")

    @property
    def methods(self) -> list[Method]:
        """Those that can be asked for, besides none."""
        if self.max_depth == 0:
            return []
        return [Method.NGRAM] if self.draft_config is None else [Method.NGRAM, Method.DRAFT_MODEL]


def _choose(settings: EngineSettings) -> _Choices:
    """Refuses what cannot be before anything is loaded that takes long."""
    gpu = choose_gpu(settings.device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)  # of the native backend, too: they share one pool
    chosen = backend.choose_backend(settings, gpu)
    dtype = backend.choose_dtype(settings.dtype, gpu, chosen)
    method, depth, max_depth = _speculation(settings)
    path, draft_path = _model_path(settings.model), None if max_depth == 0 else _draft_path(settings.draft)
    config, draft_config = load_model_config(path), None if draft_path is None else load_model_config(draft_path)
    draft_quantization = "none"
    if draft_path is not None:
        draft_quantization = backend.choose_draft_quantization(settings.draft_quantization, chosen, dtype)
    tokenizer = load_tokenizer(path)
    if draft_config is not None and draft_path is not None:
        _check_pair(
            settings, config, draft_config, tokenizer.get_vocab(), load_tokenizer(draft_path, chats=False).get_vocab()
        )
    max_model_len = _choose_max_model_len(settings, config)
    if chosen == "triton":
        check_head_dim("model", settings.model, config.head_dim)
        if draft_config is not None:
            check_head_dim("draft", settings.draft, draft_config.head_dim)
    per_block = kv_blocks.bytes_per_block(settings.block_size, config, draft_config, dtype, chosen)
    needed = kv_blocks.needed_memory(
        settings, config, draft_config, draft_quantization, dtype, per_block, max_model_len
    )
    if gpu is not None:
        check_memory(gpu, needed, settings.gpu_memory_utilization)
    return _Choices(
        gpu=gpu,
        backend=chosen,
        dtype=dtype,
        method=method,
        depth=depth,
        max_depth=max_depth,
        path=path,
        draft_path=draft_path,
        draft_quantization=draft_quantization,
        default_sampling=_default_sampling(path, config),
        config=config,
        draft_config=draft_config,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        bytes_per_block=per_block,
        needed=needed,
    )


def _scheduler_config(settings: EngineSettings, choices: _Choices) -> SchedulerConfig:
    draft = choices.draft_config
    config = SchedulerConfig(
        num_blocks=kv_blocks.choose_num_blocks(settings, choices.bytes_per_block, choices.needed, choices.gpu),
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=choices.max_model_len,
        min_depth=settings.min_depth,
        max_depth=choices.max_depth,
        method=choices.method,
        hybrid=choices.depth is None,
        eos_token_ids=choices.config.eos_token_ids,
        prefix_cache=PrefixScope(settings.prefix_cache),
        watermark=settings.watermark,
        long_prefill_threshold=settings.long_prefill_threshold,
        max_step_seconds=settings.max_step_seconds,
        max_slowdown=settings.max_slowdown,
        max_queued=settings.max_queued,
        **({} if draft is None else {"max_draft_len": draft.max_position_embeddings}),
    )
    if settings.tenants or settings.default_tenant != ONE_SHARE:
        from paceline.config_file import check_tenants  # pydantic's, which needs no load without tenants

        check_tenants(settings.tenants, settings.default_tenant, config)
    return config


# -- models, KV and who runs steps ------------------------------------------------------------------------------------


def _load(settings: EngineSettings, choices: _Choices) -> list[Model]:
    """The target, and the draft model if there is one."""
    device, chosen = choices.device, choices.backend
    models = [backend.load(choices.path, choices.dtype, device, chosen, settings.quantization)]
    if choices.draft_path is not None:
        models.append(backend.load(choices.draft_path, choices.dtype, device, chosen, choices.draft_quantization))
    if chosen == "triton":
        backend.tune([model for model in models if isinstance(model, Decoder)])
    return models


def _measured_blocks(
    settings: EngineSettings, choices: _Choices, config: SchedulerConfig, models: Sequence[Model], gpu: Gpu
) -> int:
    reserve = GRAPH_RESERVE
    if choices.backend == "triton":
        vocab, draws = choices.config.vocab_size, choices.draft_path is not None
        reserve += table_bytes(config.max_num_seqs, config.max_depth, config.max_model_len, vocab, draws=draws)
        sizes = StepSizes(config.max_num_seqs, config.max_depth)
        reserve += logits_bytes(sizes.most_logits, sizes.most if draws else 0, vocab)
    return kv_blocks.measure_num_blocks(settings, config, models, choices.bytes_per_block, gpu, reserve)


def _runner(
    settings: EngineSettings, choices: _Choices, config: SchedulerConfig, models: Sequence[Model]
) -> StepRunner:
    def kv_cache(model: Model) -> KVCache:
        try:
            cache = KVCache(model, config.num_blocks, config.block_size)
        except (OSError, torch.OutOfMemoryError) as error:
            needed = config.num_blocks * choices.bytes_per_block
            allowed = f"a size that the system gives: of {needed} bytes it says {error}"
            raise InvalidArgument("kv_cache_memory", settings.kv_cache_memory, allowed) from error
        if settings.take_memory and choices.gpu is None:  # a GPU gives it at once
            cache.take_memory()
        return cache

    target, *drafts = models
    ngram = Ngram()
    by_model = [DraftModel(draft, kv_cache(draft), settings.seed) for draft in drafts]
    if not all(draft.computes_numbers() for draft in by_model):
        # Served, it would harm nobody: no draft of it would ever be kept.
        raise FailedPrecondition(
            f"the draft model {settings.draft} is of no use: it computes logits that are not finite (NaN or infinite), "
            "so its weights are damaged, or numbers of its dtype cannot hold what it computes"
        )
    drafters: dict[Method, Drafter] = dict(zip(choices.methods, [ngram, *by_model], strict=False))
    runner = ModelRunner(target, kv_cache(target), drafters, settings.seed, scorer=ngram)
    return _on_device(runner, config, settings.seed) if choices.backend == "triton" else runner


def _on_device(host: ModelRunner, config: SchedulerConfig, seed: int) -> PipelinedRunner:
    """A runner whose steps are launched on the device of `host`, to which it leaves what cannot be."""
    from paceline.runner.device_passes import ModelAndKV  # which import Triton
    from paceline.runner.device_runner import DeviceRunner

    draft = host.drafters.get(Method.DRAFT_MODEL)
    what = "the table of running sequences"
    try:
        runner = DeviceRunner(
            host,
            seed,
            draft=ModelAndKV(draft.model, draft.kv_cache) if isinstance(draft, DraftModel) else None,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            max_depth=config.max_depth,
        )
        what = "what CUDA graphs are recorded over"
        with _progress("recording CUDA graphs") as progress:
            runner.record(progress)
    except torch.OutOfMemoryError as error:
        raise FailedPrecondition(
            f"{what} does not fit on the GPU beside weights and KV: a smaller kv_cache_memory or "
            f"gpu_memory_utilization leaves more, and a lower max_num_seqs (now {config.max_num_seqs}) or max_depth "
            f"(now {config.max_depth}) takes less: {error}"
        ) from error
    return runner


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar, on a terminal; call it with how much is done, and of how much."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _grammars(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> GrammarCompiler | None:
    """None, which refuses constraints, on a machine without llguidance: all else can be served there."""
    try:
        from paceline.structured import LLGuidanceCompiler
    except ImportError as error:
        logger.warning("no grammars are served: %s", error)
        return None
    return LLGuidanceCompiler(tokenizer, config.vocab_size, config.eos_token_ids)


def _log_choices(engine: Engine, settings: EngineSettings, choices: _Choices) -> None:
    """What was asked for, and what it came to."""
    config = engine.scheduler.config
    where = choices.device if choices.gpu is None else choices.gpu.name
    chosen = {
        "model": engine.model_name,
        "dtype": str(choices.dtype).removeprefix("torch."),
        "backend": choices.backend if choices.backend == "native" else f"{choices.backend} on {where}",
        "threads": torch.get_num_threads(),
        "quantization": settings.quantization,
        "draft_quantization": choices.draft_quantization,
        "max_model_len": config.max_model_len,
        "kv_blocks": config.num_blocks,
        "kv_bytes": config.num_blocks * choices.bytes_per_block,
        "drafters": " ".join(method for method in Method if method in engine.methods and method is not Method.NONE),
        "default_drafter": config.method.value,
        "depth": settings.depth,
    }
    text = ", ".join(f"{name} = {value or 'none'}" for name, value in chosen.items())
    logger.info("loaded: %s", text, extra={"fields": chosen})


def _costs(settings: EngineSettings, choices: _Choices, engine: Engine) -> CostModel:
    """As they were measured at an earlier start, or measured now, with a progress bar."""
    config = engine.scheduler.config
    key = cost_cache.key_of(
        config,
        choices.path,
        choices.draft_path,
        dtype=str(choices.dtype),
        quantization=settings.quantization,
        draft_quantization=choices.draft_quantization,
        backend=_identity(choices.backend),
        threads=torch.get_num_threads(),
        device="cpu" if choices.gpu is None else choices.gpu.name,
    )
    costs = cost_cache.load(key, drafts=choices.draft_path is not None)
    if costs is None:
        with _progress("measuring what steps cost") as progress:
            costs = profile(
                engine.runner,
                config,
                draft=choices.draft_path is not None,
                first_rows=_first_rows(choices.backend),
                seconds=PROFILE_SECONDS,
                progress=progress,
                clock=time.perf_counter,
            )
        cost_cache.save(key, costs)
    return costs


def _identity(backend: str) -> str:
    """What computes, by a name that changes with its kernels."""
    if backend == "native":
        return decoder.identity()
    if backend == "triton":
        from paceline_kernels.triton.identity import identity  # which imports Triton

        return identity()
    return backend


def _first_rows(backend: str) -> int:
    """Rows of each sequence in the first pass of its draft model."""
    if backend != "triton":
        return 1
    from paceline_kernels.triton.state import FIRST_PASS_ROWS  # which imports Triton

    return FIRST_PASS_ROWS


def _model_path(name: str | Path) -> Path:
    return demo.TARGET if name == "demo" else Path(name)


def _model_name(name: str | Path, path: Path) -> str:
    if name == "demo":
        return "demo"
    path = path.resolve()
    home = path.parents[1].name if path.parent.name == "snapshots" else ""
    return home.removeprefix(HUB_PREFIX).replace("--", "/") if home.startswith(HUB_PREFIX) else path.name


def _draft_path(name: str | Path) -> Path | None:
    if name in ("none", "ngram"):
        return None
    return demo.DRAFT if name == "demo" else Path(name)


def _speculation(settings: EngineSettings) -> tuple[Method, int | None, int]:
    """Who drafts unless a request says otherwise, how deep, None leaving it to the policy, and how deep at most: with 0
    nobody drafts.
    """
    if settings.depth == OFF:
        return Method.NONE, 0, 0
    if settings.depth != "auto" and not str(settings.depth).isdecimal():
        raise InvalidArgument("depth", settings.depth, "auto, off or an integer >= 0")
    depth = None if settings.depth == "auto" else int(settings.depth)
    max_depth = max(depth or 0, MAX_DEPTH) if settings.max_depth is None else settings.max_depth
    if depth is not None and not settings.min_depth <= depth <= max_depth:
        allowed = f"between min_depth ({settings.min_depth}) and max_depth ({max_depth})"
        raise InvalidArgument("depth", settings.depth, allowed)
    if max_depth == 0:
        return Method.NONE, 0, 0
    methods: dict[str | Path, Method] = {"none": Method.NONE, "ngram": Method.NGRAM}  # a path is a directory's
    return methods.get(settings.draft, Method.DRAFT_MODEL), depth, max_depth


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


def _default_sampling(path: Path, config: ModelConfig) -> SamplingParams:
    """The checkpoint's recommendation, where it has one."""
    given = {name: value for name, value in asdict(config.generation).items() if value is not None}
    try:
        return SamplingParams(**given)
    except InvalidArgument as error:
        raise ModelLoadError(f"{path / 'generation_config.json'}: {error}") from error


def _warm_up(engine: Engine, *, on_gpu: bool) -> None:
    """Serve short requests of every kind, so that the first user does not wait for what is set up, or compiled, at
    first use; and forget what they taught.

    Args:
        on_gpu: there the host samples by kernels that are compiled at first use, for cuts and softmax in one or each
            alone; and steps are the host's only with who wants to see logits, if there are others.
    """
    kinds = [SamplingParams(temperature=0.0), SamplingParams(top_p=0.9), SamplingParams(seed=0)]
    _serve(engine, kinds, LogprobsParams())
    if on_gpu:
        alone = [SamplingParams(), SamplingParams(seed=0, top_p=0.9)]
        for some in (kinds, alone):
            _serve(engine, some, LogprobsParams(completion=0))
    # First steps take long: estimates that begin with them would refuse what can be served.
    engine.forget()


def _serve(engine: Engine, kinds: Sequence[SamplingParams], logprobs: LogprobsParams) -> None:
    config = engine.scheduler.config
    waiting = [
        GenerationRequest(
            prompt=(0,) * min(8, config.max_model_len - 1),
            sampling=sampling,
            stop=StopParams(max_tokens=4, ignore_eos=True),
            speculation=SpeculationParams(min_depth=min(1, config.max_depth)),
            logprobs=logprobs,
        )
        for sampling in kinds
    ]
    while waiting or engine.has_work:
        while waiting and engine.has_room_for(waiting[-1]):
            engine.add(waiting.pop())
        engine.step()
        for _, error in engine.take_refused():  # as all others would, in every step
            raise FailedPrecondition(f"the model cannot be served, its first request fails: {error}") from error
