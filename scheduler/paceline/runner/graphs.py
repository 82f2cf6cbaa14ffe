"""CUDA graphs: a step is recorded once for each size and replayed, which spares hundreds of launches."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable
from typing import Any

import torch

# Rows and sequences of recorded steps; between them, a step is padded.
SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
READ_BUCKETS = (8, 16, 32, 64, 128, 256, 512)  # rows that a draft model reads besides those it drafts from
ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def bucket(count: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest that holds so many; None if none does."""
    index = bisect.bisect_left(buckets, count)
    return buckets[index] if index < len(buckets) else None


class Graphs:
    """Runs pieces of work that read and write tensors in fixed places; recorded on a GPU, as they are elsewhere.

    All share one pool of memory: they run one after the other, and what one leaves in passing nobody reads later.
    """

    def __init__(self, device: torch.device) -> None:
        self._records = device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do the work of this key. The first time it is done, then recorded: what is compiled or set up at first use is
        there by then, and recording does nothing.
        """
        if key in self._graphs:
            self._graphs[key].replay()
            return
        work()
        if not self._records:
            return
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        self._pool = graph.pool()
        self._graphs[key] = graph
