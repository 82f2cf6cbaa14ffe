"""What the device can do at most: the ceilings of everything else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

REPEATS = 10


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device can do at most.

    Attributes:
        bandwidth: bytes per second that a copy reads and writes.
        matmul: bf16 operations per second.
    """

    bandwidth: float
    matmul: float


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def name(of: torch.device) -> str:
    return torch.cuda.get_device_name(of) if of.type == "cuda" else "CPU"


def seconds(call: Callable[[], object], on: torch.device, repeats: int = REPEATS) -> float:
    """Median of a call, by the device's own clock where it has one; one before is not counted."""
    call()
    return median(_once(call, on) for _ in range(repeats))


def _once(call: Callable[[], object], on: torch.device) -> float:
    if on.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def measure(on: torch.device, copied: int, side: int) -> Ceilings:
    """Measure what the device can do, and leave no memory taken.

    Args:
        copied: bytes, read and written once each.
        side: of the square matrices that are multiplied.
    """
    ceilings = Ceilings(_bandwidth(on, copied), _matmul(on, side))
    if on.type == "cuda":
        torch.cuda.empty_cache()  # for the engine, which counts what is free
    return ceilings


def _bandwidth(on: torch.device, copied: int) -> float:
    source = torch.ones(copied // 4, dtype=torch.float32, device=on)
    target = torch.empty_like(source)
    return 2 * copied / seconds(lambda: target.copy_(source), on)


def _matmul(on: torch.device, side: int) -> float:
    left, right = (torch.randn(side, side, device=on).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * side**3 / seconds(lambda: torch.mm(left, right, out=product), on)
