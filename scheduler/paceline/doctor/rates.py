"""What this machine can do: ceilings, and how near products come to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from paceline_kernels.cpu import ceilings, decoder
from paceline_kernels.cpu.ceilings import ReadCeiling, median_seconds
from paceline_kernels.cpu.decoder import Kind, Matrix

FEATURES = 4096  # inputs and outputs of the synthetic matrices
ROWS = (1, 4, 16)
STACK = 768 << 20  # bytes of matrices, so that caches do not help
ROUNDS = 3
GIGA, TERA = 1e9, 1e12
COPIED = 1 << 30  # bytes that a GPU copies within its memory, many times its caches
MULTIPLIED = 8192  # rows, columns and depth of its product


@dataclass(frozen=True, slots=True)
class Linear:
    """How near a product of few rows comes to reading its weights at the ceiling, in the same rounds."""

    kind: str
    rows: int
    gigabytes_per_second: float
    fraction: float


@dataclass(frozen=True, slots=True)
class Measured:
    """GB/s and GFLOP/s."""

    read_one_thread: float
    read: float
    multiply: dict[str, float]  # by kind of number
    linear: list[Linear]


@dataclass(frozen=True, slots=True)
class GpuMeasured:
    """What nothing that runs on a GPU can exceed.

    Attributes:
        copy: GB/s, bytes read and bytes written together.
        multiply: TFLOP/s of a large product in bf16.
    """

    copy: float
    multiply: float


def measure() -> Measured:
    threads = torch.get_num_threads()
    data = ceilings.buffer(ceilings.uncached_bytes())
    ceiling = ReadCeiling(data, threads)
    return Measured(
        read_one_thread=ReadCeiling(data, 1).measure() / GIGA,
        read=ceiling.measure() / GIGA,
        multiply={kind.name.lower(): ceilings.multiply_rate(kind, threads) / GIGA for kind in Kind},
        linear=[figure for kind in Kind for figure in _measure_linear(kind, ceiling.measure)],
    )


def measure_gpu() -> GpuMeasured:
    device = torch.device("cuda")
    copied = torch.empty(2, COPIED, dtype=torch.uint8, device=device)
    seconds = _gpu_seconds(lambda: copied[1].copy_(copied[0]))
    factor = torch.randn(MULTIPLIED, MULTIPLIED, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(factor)
    multiplying = _gpu_seconds(lambda: torch.mm(factor, factor, out=product))
    return GpuMeasured(2 * COPIED / seconds / GIGA, 2 * MULTIPLIED**3 / multiplying / TERA)


def _gpu_seconds(call: Callable[[], object], rounds: int = 10) -> float:
    """By the GPU's own clock; the median, after one that may set things up."""
    call()
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    milliseconds: float = median(begin.elapsed_time(end) for begin, end in itertools.pairwise(events))
    return milliseconds / 1e3


def _measure_linear(kind: Kind, ceiling: Callable[[], float]) -> list[Linear]:
    """Products with a stack of matrices, one after the other, and the ceiling, in turns."""
    dtype = torch.float32 if kind is Kind.FLOAT32 else torch.bfloat16
    weights = torch.randn(FEATURES, FEATURES).to(dtype)
    size = FEATURES * FEATURES * {Kind.FLOAT32: 4, Kind.BFLOAT16: 2, Kind.INT8: 1}[kind]
    room = min(STACK, ceilings.uncached_bytes())
    stack = [Matrix(kind, FEATURES, FEATURES) for _ in range(max(1, room // size))]
    for matrix in stack:
        matrix.fill(weights)
    figures = []
    for rows in ROWS:
        x = torch.randn(rows, FEATURES).to(dtype)
        rounds = [(ceiling(), size * len(stack) / median_seconds(partial(_multiply, x, stack))) for _ in range(ROUNDS)]
        rate = median(rate for _, rate in rounds) / GIGA
        figures.append(Linear(kind.name.lower(), rows, rate, median(rate / most for most, rate in rounds)))
    return figures


def _multiply(x: torch.Tensor, stack: list[Matrix]) -> None:
    for matrix in stack:
        decoder.linear(x, matrix)
