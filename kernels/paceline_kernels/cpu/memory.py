"""Large memory in large pages, and what of it a cache holds.

Walking through gigabytes page by 4 KiB page costs more than reading them.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
LARGE = 2 << 20  # bytes of a large page, and the least that is worth one


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of zeros on the CPU. Memory is taken where it is first written."""
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -whole.data_ptr() % LARGE
    return whole[skipped : skipped + size].view(dtype).view(shape)


def largest_cache() -> int:
    """Bytes of this CPU's last level of cache; 0 if the system does not say."""
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = [path.read_text().strip() for path in CACHES.glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)
