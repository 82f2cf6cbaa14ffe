"""Large memory in large pages, how much is free, and what of it a cache holds.

Walking through gigabytes page by 4 KiB page costs more than reading them.
"""

from __future__ import annotations

import math
import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
CGROUP = Path("/sys/fs/cgroup")  # of a container, its own
MEMINFO = Path("/proc/meminfo")
LARGE = 2 << 20  # bytes of a large page, and the least that is worth one
SMALL = 4 << 10  # bytes of a page
STRETCH = 64 << 20  # bytes; of what is never written, nothing is taken


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


class LargePages:
    """Memory for what is read together, side by side in large pages: what is smaller than one gets none by itself."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def zeros(self, size: int) -> Tensor:
        """[size] uint8, from the begin of a small page on. Memory is taken where it is first written."""
        room = -(-size // SMALL) * SMALL
        if room > len(self._left):
            self._left = zeros((max(room, STRETCH),), torch.uint8)
        taken, self._left = self._left[:size], self._left[room:]
        return taken


def free_memory() -> int:
    """Bytes that can be had on this machine, and no more than a container has left.

    Pages of files count as free: loading a model reads many, and the kernel gives them back before it refuses memory.
    """
    free = _left_of_machine()
    left = _left_of_container()
    return free if left is None else min(free, left)


def total_memory() -> int:
    """Bytes that this machine has, and no more than a container may have, held or not."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _of_container("memory.max")
    return total if limit is None else min(total, limit)


def _of_container(name: str) -> int | None:
    """Bytes by that file; None without a limit, or without control groups of version 2."""
    try:
        return int((CGROUP / name).read_text())
    except (OSError, ValueError):  # no limit is the word "max"
        return None


def _left_of_machine() -> int:
    """Without MemAvailable, what nothing holds, not even a page of a file."""
    try:
        sizes = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        return int(sizes["MemAvailable"].removesuffix("kB")) << 10
    except (OSError, ValueError, KeyError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_of_container() -> int | None:
    """None without a limit. Pages of files are reckoned as in MemAvailable, the active ones too."""
    limit, used = _of_container("memory.max"), _of_container("memory.current")
    if limit is None or used is None:
        return None
    return max(0, limit - max(0, used - _file_pages()))


def _file_pages() -> int:
    """Bytes of them in the control group; those of shared memory, which cannot be given back, are none of them."""
    try:
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return int(counts["inactive_file"]) + int(counts["active_file"])
    except (OSError, ValueError, KeyError):
        return 0


def largest_cache() -> int:
    """Bytes of this CPU's last level of cache; 0 if the system does not say."""
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = [path.read_text().strip() for path in CACHES.glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)
