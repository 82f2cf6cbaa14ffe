"""How large the engine is that random load is put on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.backend import choose_backend, choose_dtype
from paceline.core.adaptive_depth import MAX_DEPTH
from paceline.device import choose_gpu
from paceline.kv_blocks import bytes_per_block
from paceline.models import load_model_config
from paceline.wiring import EngineSettings


@dataclass(frozen=True, slots=True)
class Size:
    """How large the engine is: so little KV that a third of the streams fill it, and long prompts that take several
    steps.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: int
    max_queued: int


WHOLE = Size(max_num_seqs=64, max_model_len=1024, max_num_batched_tokens=512, num_blocks=256, max_queued=128)
SMALL = Size(max_num_seqs=8, max_model_len=256, max_num_batched_tokens=64, num_blocks=24, max_queued=24)


def settings(size: Size, pair: tuple[Path, Path], device: str, memory: float, backend: str = "auto") -> EngineSettings:
    """The settings of an engine with just so many blocks."""
    wanted = EngineSettings(
        model=str(pair[0]),
        draft=str(pair[1]),
        device=device,
        backend=backend,
        gpu_memory_utilization=memory,
        max_num_seqs=size.max_num_seqs,
        max_model_len=size.max_model_len,
        max_num_batched_tokens=size.max_num_batched_tokens,
        max_depth=MAX_DEPTH,
        max_queued=size.max_queued,
    )
    gpu = choose_gpu(device)
    chosen = choose_backend(wanted, gpu)
    target, draft = map(load_model_config, pair)
    dtype = choose_dtype(wanted.dtype, gpu, chosen)
    per_block = bytes_per_block(wanted.block_size, target, draft, dtype, chosen)
    return replace(wanted, kv_cache_memory=size.num_blocks * per_block)
