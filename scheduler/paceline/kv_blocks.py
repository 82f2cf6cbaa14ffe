"""How many blocks the KV pool has."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from paceline.core.config import SchedulerConfig
from paceline.device import Gpu, Needed, in_gib
from paceline.errors import FailedPrecondition, InvalidArgument
from paceline.models import Model, ModelConfig, NativeDecoder
from paceline.models.weights import weight_bytes
from paceline.runner import KVCache
from paceline.runner.memory import LargestStep, kv_bytes, measure
from paceline.settings import EngineSettings
from paceline_kernels.cpu.memory import free_memory, total_memory

logger = logging.getLogger(__name__)

DEFAULT_MEMORY_SHARE = 0.25  # of the memory that weights leave free, for KV on a CPU
MOST_CACHED = 4  # times as many KV blocks as all running requests can use: more only keep prompts that nobody asks for


def bytes_per_block(size: int, config: ModelConfig, draft: ModelConfig | None, dtype: torch.dtype, backend: str) -> int:
    """Bytes of a block, target and draft KV together."""
    lanes = NativeDecoder.kv_lanes if backend == "native" else 1
    return sum(KVCache.bytes_per_block(c, size, dtype, lanes) for c in (config, draft) if c is not None)


def choose_num_blocks(settings: EngineSettings, per_block: int, needed: Needed, gpu: Gpu | None) -> int:
    """Blocks that the KV memory holds; at least one request of full length must fit. On a GPU, unless they are set,
    no more than that: `measure_num_blocks` tells when the weights are there. On a CPU they are told by what is free
    before weights are loaded.

    Raises:
        InvalidArgument: the memory that is set is more than there is, or less than one request takes.
        FailedPrecondition: weights and one request do not fit into what is free.
    """
    least = needed.request // per_block
    if settings.kv_cache_memory is None:
        if gpu is not None:
            return least
        free = free_memory()
        needed.check(free, _machine(gpu), "are free")
        share = int((free - needed.weights - needed.draft_weights) * DEFAULT_MEMORY_SHARE)
        # Never more than every running request could use.
        return max(least, min(least * settings.max_num_seqs, share // per_block))
    total = total_memory() if gpu is None else gpu.total_memory
    if settings.kv_cache_memory > total:
        allowed = f"at most {total} bytes, which is all that {_machine(gpu)} has"
        raise InvalidArgument("kv_cache_memory", settings.kv_cache_memory, allowed)
    num_blocks = settings.kv_cache_memory // per_block
    if num_blocks < least:
        raise InvalidArgument(
            "kv_cache_memory",
            settings.kv_cache_memory,
            f"at least {needed.request} bytes, for one request of max_model_len = {needed.max_model_len} tokens",
        )
    return num_blocks


def measure_num_blocks(
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


def needed_memory(
    settings: EngineSettings,
    config: ModelConfig,
    draft: ModelConfig | None,
    draft_quantization: str,
    dtype: torch.dtype,
    per_block: int,
    max_model_len: int,
) -> Needed:
    """Told before minutes are spent on loading what cannot be served."""
    return Needed(
        weights=weight_bytes(config, dtype, int8=settings.quantization == "int8"),
        draft_weights=0 if draft is None else weight_bytes(draft, dtype, int8=draft_quantization == "int8"),
        request=-(-max_model_len // settings.block_size) * per_block,
        max_model_len=max_model_len,
    )


def _machine(gpu: Gpu | None) -> str:
    return "this machine or its container" if gpu is None else gpu.name
