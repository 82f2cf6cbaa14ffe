"""The most that this machine can do, measured: bytes read from memory and numbers multiplied, per second."""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from paceline_kernels.cpu.build import load, obstacle
from paceline_kernels.cpu.decoder import Kind
from paceline_kernels.cpu.memory import free_memory, largest_cache, zeros

LEAST_BUFFER = 1 << 30  # bytes
CACHE_MULTIPLE = 2.5  # of the largest cache, so that little of a buffer is found there when it is read again
MEMORY_SHARE = 0.25  # of the free memory at most, whatever the caches are
CHOOSING_ROUNDS = 3
LEAST_SECONDS = 0.05


@functools.cache
def _library() -> ctypes.CDLL:
    library = load("ceilings")
    library.paceline_family.argtypes = []
    library.paceline_family.restype = ctypes.c_char_p
    library.paceline_read.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int64),
        *(ctypes.c_int, ctypes.c_int64, ctypes.c_bool, ctypes.c_int64),
    ]
    library.paceline_read.restype = ctypes.c_uint32
    library.paceline_multiply.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    library.paceline_multiply.restype = ctypes.c_int64
    return library


def available() -> str | None:
    """None if this machine can compile the library, else why not; the first call compiles."""
    return obstacle(_library)


def family() -> str:
    """The instructions that the decoder multiplies by: AMX, AVX512-BF16, AVX512, AVX2 or plain."""
    return str(_library().paceline_family().decode())


def median_seconds(call: Callable[[], object], least: float = LEAST_SECONDS) -> float:
    """Time a call: the median over as many calls as take `least` seconds together; one before them is not counted."""
    call()
    seconds: list[float] = []
    began = ended = time.perf_counter()
    while not seconds or ended - began < least:
        before = ended
        call()
        ended = time.perf_counter()
        seconds.append(ended - before)
    return median(seconds)


# ---- Reading ----


@dataclass(frozen=True, slots=True)
class Walk:
    """A way through memory.

    Attributes:
        streams: places of its part that a thread reads side by side: 1, 4 or 8.
        ahead: bytes between what is read and what is fetched; 0 leaves that to the CPU.
        shared: threads take turns at small pieces, instead of one part for each.
    """

    streams: int
    ahead: int
    shared: bool


WALKS = tuple(Walk(*choice) for choice in itertools.product((1, 4, 8), (0, 1024, 4096), (False, True)))


def read(data: Tensor, walk: Walk, threads: int) -> int:
    """Read contiguous `data` once, as whole cache lines. What is returned depends on every one of them."""
    size = data.numel() * data.itemsize
    return int(_library().paceline_read(data.data_ptr(), size, walk.streams, walk.ahead, walk.shared, threads))


class ReadCeiling:
    """How fast `threads` threads read `data` again and again, by the walk that is best at it."""

    def __init__(self, data: Tensor, threads: int) -> None:
        self.threads = threads
        self._data = data
        rounds = [[self._rate(walk) for walk in WALKS] for _ in range(CHOOSING_ROUNDS)]
        rates = [median(rates) for rates in zip(*rounds, strict=True)]
        self.walk = WALKS[rates.index(max(rates))]

    def measure(self) -> float:
        """Bytes per second, now."""
        return self._rate(self.walk)

    def _rate(self, walk: Walk) -> float:
        size = self._data.numel() * self._data.itemsize
        return size / median_seconds(partial(read, self._data, walk, self.threads))


def buffer(size: int) -> Tensor:
    """Memory that is really there, [size] uint8, in large pages."""
    return zeros((size,), torch.uint8).fill_(1)


def uncached_bytes() -> int:
    """Size of a buffer that is read from memory and not from caches, as far as this machine has room for it."""
    wanted = max(LEAST_BUFFER, int(CACHE_MULTIPLE * largest_cache()))
    return min(wanted, int(MEMORY_SHARE * free_memory()))


# ---- Multiplying ----


def multiply(kind: Kind, rounds: int, threads: int) -> int:
    """Multiply and add numbers in registers; how many operations that was, a product and its sum being two."""
    return int(_library().paceline_multiply(kind, rounds, threads))


def multiply_rate(kind: Kind, threads: int) -> float:
    """Operations per second, with the fastest instructions there are for numbers of this kind."""
    rounds = 1 << 10
    while median_seconds(partial(multiply, kind, rounds, 1), least=0.0) < LEAST_SECONDS / 5:
        rounds *= 2  # until starting and ending the threads is nothing beside it
    operations = multiply(kind, rounds, threads)
    return operations / median_seconds(partial(multiply, kind, rounds, threads))
