"""The native backend in tests: who needs it, where and with how many threads it computes, what its 8 bits stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline_kernels.cpu import build

GROUP = 128  # activations that share a scale
LEVELS = 127  # on each side of zero
NEAR_TIE = 1e-4  # of a level: float32 may round to the other side


def compiler_found() -> bool:
    try:
        build.find_compiler()
    except build.BuildError:
        return False
    return True


# Where there is a compiler, native code that does not compile is a failure.
needs_compiler = pytest.mark.skipif(not compiler_found(), reason="no C++ compiler")


def device_of(backend: str) -> str:
    """For an engine's settings. On a machine with a GPU, too, the native backend is the CPU's."""
    return "cpu" if backend == "native" else "auto"


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Quantized:
    """Numbers that were rounded to 8 bits, in float64.

    Attributes:
        slack: by how much a value may be another: a level, where it lay in the middle of two.
    """

    values: Tensor
    slack: Tensor


def quantized_weights(rows: Tensor) -> Quantized:
    """Rows [outputs, inputs], each with its scale."""
    return _rounded(rows.double(), rows.double().abs().amax(1, keepdim=True) / LEVELS)


def quantized_activations(x: Tensor) -> Quantized:
    """x [rows, inputs], where every row and group of inputs has its scale."""
    groups = F.pad(x.double(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2, keepdim=True) / LEVELS).expand_as(groups)
    return _rounded(x.double(), scales.flatten(1)[:, : x.shape[1]])


def _rounded(x: Tensor, scales: Tensor) -> Quantized:
    levels = torch.where(scales > 0, x / scales, 0)
    from_tie = (levels - levels.floor() - 0.5).abs()
    return Quantized(levels.round() * scales, torch.where(from_tie < NEAR_TIE, scales, 0))
