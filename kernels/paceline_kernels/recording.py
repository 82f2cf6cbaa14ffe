"""CUDA graphs: work that is recorded once and replayed, which spares its launches."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def record(work: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """What `work` launches, as a graph; nothing of it runs. It has run before: what is set up at first use is there.

    Garbage is not searched meanwhile: freeing an older graph, which waits for the device, would end the recording. One
    thread records at a time.

    Args:
        pool: of memory, that of another graph.
    """
    graph = torch.cuda.CUDAGraph()
    searched, stream = gc.isenabled(), torch.cuda.current_stream()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
    finally:
        torch.cuda.set_stream(stream)  # torch leaves the thread on its own where the recording fails
        if searched:
            gc.enable()
    return graph
