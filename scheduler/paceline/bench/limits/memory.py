"""What serving takes of memory, by processes of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from paceline.bench.limits.engines import STEPS, add_requests, draft_model, itemsize, random_prompts, target
from paceline.bench.limits.results import Memory
from paceline.bench.limits.work import streamed_bytes
from paceline.errors import FailedPrecondition
from paceline.models import NativeDecoder
from paceline.runner import KVCache
from paceline.wiring import EngineSettings, build_engine


def measure_memory(settings: EngineSettings) -> Memory:
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
    count = -(-config.num_blocks * config.block_size // length)
    add_requests(engine, random_prompts(engine, count, length - STEPS), STEPS)
    while engine.has_work:
        engine.step()
    models = [target(engine), draft_model(engine)]
    weights = sum(_resident_weights(model) for model in models)
    kv = config.num_blocks * sum(_block_bytes(model, config.block_size) for model in models)
    return peak_memory(), weights, kv, list(sys.modules)


def _resident_weights(model: NativeDecoder) -> int:
    config = model.config
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * model.dtype.itemsize
    return streamed_bytes(config, itemsize(model)) + table


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
