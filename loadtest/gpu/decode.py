"""Without speculation: decodes and prefills against what the device can do, and what the host adds."""

from __future__ import annotations

from statistics import median
from typing import Any

from drive import WITHOUT_DRAFTS, Window, complete, serve
from rig import Rig

from paceline.bench.limits.work import prefill_operations, streamed_bytes
from paceline.models import ModelConfig

LEAST_OF_BANDWIDTH, LEAST_OF_BANDWIDTH_IN_BATCHES = 0.85, 0.75  # of a copy's: by one stream, by several
MOST_GAP = 0.03  # of the time between two results: the device waits


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def decode(rig: Rig) -> dict[str, Any]:
    """A decode step has to read all weights, and the KV of its streams: how near is it to a copy's bandwidth?"""
    rows, results = [], []
    for streams, context in rig.scale.batches:
        bound = _bytes(rig, streams, context + rig.scale.steps // 2) / rig.ceilings.bandwidth
        windows = _windows(rig, streams, context)
        wall = median(window.step_seconds for window in windows)
        busy = median(median(step.times.total for step in window.steps) for window in windows)
        target = LEAST_OF_BANDWIDTH if streams == 1 else LEAST_OF_BANDWIDTH_IN_BATCHES
        rows.append(
            (f"{streams} x {context}", _ms(busy), _ms(wall), _ms(bound), f"{bound / busy:.1%}", f"{bound / wall:.1%}",
             f"{target:.0%}")
        )  # fmt: skip
        results.append({"streams": streams, "context": context, "device": busy, "wall": wall, "bound": bound})
    columns = "streams x context", "device ms", "wall ms", "bound ms", "bound / device", "bound / wall", "target"
    rig.table("decode, speculation off: per step", columns, rows)
    return {"decode": results}


def host(rig: Rig) -> dict[str, Any]:
    """How long the device waits between steps."""
    rows, results = [], []
    for streams, _ in rig.scale.batches:
        windows = _windows(rig, streams, context=128)
        gap = median(1 - window.busy for window in windows)
        wall = median(window.step_seconds for window in windows)
        rows.append((str(streams), _ms(wall), f"{1e6 * gap * wall:.0f}", f"{gap:.1%}", f"{MOST_GAP:.0%}"))
        results.append({"streams": streams, "wall": wall, "gap": gap})
    rig.table("host: the device's idle time", ("streams", "wall ms", "gap us", "gap / wall", "at most"), rows)
    return {"host": results}


def prefill(rig: Rig) -> dict[str, Any]:
    """A prompt's forward against the rate of large multiplications."""
    length = rig.scale.prefill
    seconds = [
        complete(rig.engine, rig.random_streams(1, length), WITHOUT_DRAFTS, max_tokens=1).busy
        for _ in rig.rounds(least=3)
    ]
    taken = median(seconds[1:])  # the first meets the shape
    rate = prefill_operations(rig.configs[0], length) / taken
    share = rate / rig.ceilings.matmul
    row = str(length), _ms(taken), f"{rate / 1e12:.3g}", f"{rig.ceilings.matmul / 1e12:.3g}", f"{share:.1%}"
    rig.table("prefill", ("tokens", "device ms", "TFLOP/s", "ceiling", "share"), [row])
    return {"tokens": length, "device": taken, "rate": rate, "share": share}


def _windows(rig: Rig, streams: int, context: int) -> list[Window]:
    """The first, which meets the shapes, is not among them."""
    steps = rig.scale.steps
    windows = [
        serve(rig.engine, rig.random_streams(streams, context), WITHOUT_DRAFTS, steps + 1) for _ in rig.rounds(least=3)
    ]
    return windows[1:]


def _bytes(rig: Rig, streams: int, context: int) -> int:
    """That a decode step cannot help but read."""
    config = rig.configs[0]
    kv = streams * context * kv_bytes_per_token(config, rig.itemsize)
    return streamed_bytes(config, rig.itemsize) + kv


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"
