"""Which code computes, in which precision, and models loaded for it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.device import Gpu, triton_obstacle
from paceline.errors import FailedPrecondition
from paceline.models import Decoder, Model, load_model, load_native
from paceline.models.config import DTYPES
from paceline.settings import EngineSettings
from paceline_kernels.cpu import build, decoder
from paceline_kernels.ops import Ops

logger = logging.getLogger(__name__)


def choose_backend(settings: EngineSettings, gpu: Gpu | None) -> str:
    """Which computes: native, triton or torch. What only the others can do is refused where they cannot run."""
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
        build.warn(logger, f"no {fast} backend, torch computes, several times slower", str(obstacles[fast]))
    return "torch"


def _native_obstacle(backend: str, gpu: Gpu | None) -> str | None:
    """Why the native backend does not compute; None if it can."""
    if gpu is not None:
        return "it runs on CPUs only, and this server uses cuda; device = cpu has it"
    return decoder.available() if backend in ("auto", "native") else f"backend = {backend}"


def _triton_obstacle(backend: str, gpu: Gpu | None) -> str | None:
    """Why the triton backend does not compute; None if it can."""
    return triton_obstacle(gpu) if backend in ("auto", "triton") else f"backend = {backend}"


def choose_dtype(name: str, gpu: Gpu | None, backend: str) -> torch.dtype:
    if name == "auto":
        if gpu is not None:
            return torch.bfloat16
        capabilities = torch.cpu.get_capabilities()
        # The native backend widens what it reads: with half of the bytes, few rows take about half of the time.
        fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16")
        return torch.bfloat16 if fast or backend == "native" else torch.float32
    return DTYPES[name]


def choose_draft_quantization(name: str, backend: str, dtype: torch.dtype) -> str:
    """Choose the quantization of a draft model's weights: none or int8."""
    if name == "auto":
        return "int8" if backend == "native" and dtype == torch.bfloat16 else "none"
    return name


def load(path: Path, dtype: torch.dtype, device: torch.device, backend: str, quantization: str) -> Model:
    int8 = quantization == "int8"
    try:
        if backend == "native":
            return load_native(path, dtype, int8=int8)
        if backend == "triton":
            return load_model(path, dtype, device, ops=_triton_ops(), int8=int8)
        return load_model(path, dtype, device)
    except torch.OutOfMemoryError as error:
        raise FailedPrecondition(f"the weights of {path} do not fit on the GPU: {error}") from error
    except (OSError, RuntimeError) as error:
        # Of the system, or of torch's allocator, which has no error of its own.
        if getattr(error, "errno", None) != errno.ENOMEM and "can't allocate memory" not in str(error):
            raise
        raise FailedPrecondition(f"the weights of {path} do not fit into memory: {error}") from error


def tune(models: Sequence[Decoder]) -> None:
    """Find out which way of multiplying is the fastest here."""
    from paceline_kernels.triton.linear import CHOICE

    def report(rows: int, outputs: int, inputs: int, kind: str, gates: bool, seconds: dict[Any, float]) -> None:
        times = ", ".join(f"{way or 'cuBLAS'} {1e6 * took:.1f} us" for way, took in seconds.items())
        gating = ", which gates" if gates else ""
        logger.debug("%d rows times %s [%d, %d]%s: %s", rows, kind, outputs, inputs, gating, times)

    for model in models:
        CHOICE.tune(model.linears(), report=report)


def _triton_ops() -> Ops:
    """Imported here, since there may be no Triton, and importing it takes long."""
    from paceline_kernels.triton import ops

    return ops
