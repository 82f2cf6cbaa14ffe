"""Without speculation: decodes and prefills against what the device can do, and what the host adds."""

from __future__ import annotations

from statistics import median
from typing import Any

from common import Bench
from drive import Window, complete, serve

from paceline.bench.limits.work import prefill_operations, streamed_bytes
from paceline.core.method import Method
from paceline.core.params import SpeculationParams
from paceline.models import ModelConfig

OFF = SpeculationParams(Method.NONE)
LEAST_OF_BANDWIDTH = {1: 0.85}  # by the number of streams
LEAST_OF_BANDWIDTH_IN_BATCHES = 0.75
MOST_GAP = 0.03


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def decode(bench: Bench) -> dict[str, Any]:
    """A decode step has to read all weights, and the KV of its streams: how near is it to a copy's bandwidth?"""
    rows, results = [], []
    for streams, context in bench.scale.batches:
        bound = _bytes(bench, streams, context + bench.scale.steps // 2) / bench.ceilings.bandwidth
        windows = _windows(bench, streams, context)
        wall = median(window.step_seconds for window in windows)
        busy = median(median(step.times.total for step in window.steps) for window in windows)
        target = LEAST_OF_BANDWIDTH.get(streams, LEAST_OF_BANDWIDTH_IN_BATCHES)
        rows.append(
            (f"{streams} x {context}", _ms(busy), _ms(wall), _ms(bound), f"{bound / busy:.1%}", f"{bound / wall:.1%}",
             f"{target:.0%}")
        )  # fmt: skip
        results.append({"streams": streams, "context": context, "device": busy, "wall": wall, "bound": bound})
    columns = "streams x context", "device ms", "wall ms", "bound ms", "bound / device", "bound / wall", "target"
    bench.table("decode, speculation off: per step", columns, rows)
    return {"decode": results}


def host(bench: Bench) -> dict[str, Any]:
    """How long the device waits between steps."""
    rows, results = [], []
    for streams, _ in bench.scale.batches:
        windows = _windows(bench, streams, context=128)
        gap = median(1 - window.busy for window in windows)
        wall = median(window.step_seconds for window in windows)
        rows.append((str(streams), _ms(wall), f"{1e6 * gap * wall:.0f}", f"{gap:.1%}", f"{MOST_GAP:.0%}"))
        results.append({"streams": streams, "wall": wall, "gap": gap})
    bench.table("host: the device's idle time", ("streams", "wall ms", "gap us", "gap / wall", "at most"), rows)
    return {"host": results}


def prefill(bench: Bench) -> dict[str, Any]:
    """A prompt's forward against the rate of large multiplications."""
    length = bench.scale.prefill
    seconds = [
        complete(bench.engine, bench.random_streams(1, length), OFF, max_tokens=1).busy for _ in bench.rounds(least=3)
    ]
    taken = median(seconds[1:])  # the first meets the shape
    rate = prefill_operations(bench.configs[0], length) / taken
    share = rate / bench.ceilings.matmul
    row = str(length), _ms(taken), f"{rate / 1e12:.3g}", f"{bench.ceilings.matmul / 1e12:.3g}", f"{share:.1%}"
    bench.table("prefill", ("tokens", "device ms", "TFLOP/s", "ceiling", "share"), [row])
    return {"tokens": length, "device": taken, "rate": rate, "share": share}


def _windows(bench: Bench, streams: int, context: int) -> list[Window]:
    """The first, which meets the shapes, is not among them."""
    steps = bench.scale.steps
    windows = [
        serve(bench.engine, bench.random_streams(streams, context), OFF, steps + 1) for _ in bench.rounds(least=3)
    ]
    return windows[1:]


def _bytes(bench: Bench, streams: int, context: int) -> int:
    """That a decode step cannot help but read."""
    config = bench.configs[0]
    kv = streams * context * kv_bytes_per_token(config, bench.itemsize)
    return streamed_bytes(config, bench.itemsize) + kv


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"
