"""Beside transformers' continuous batching: the same checkpoint and prompts, in turns on the same device."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import transformers
from common import GREEDY, Bench
from drive import complete
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from paceline.core.method import Method
from paceline.core.params import SpeculationParams

OURS = {"off": SpeculationParams(Method.NONE), "auto": SpeculationParams()}
LEAST_OF_PEER = 3.0
MEMORY_SHARE = 0.5  # of what our engine and both models leave
ANSWER_SECONDS = 120.0


class Peer:
    """transformers, whose manager stays from run to run."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def complete(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> float:
        """Seconds until every prompt has all of its tokens."""
        began = time.perf_counter()
        self._manager.add_requests([list(prompt) for prompt in prompts], max_new_tokens=max_tokens)
        left = len(prompts)
        while left:
            if not self._manager.is_running() or time.perf_counter() - began > ANSWER_SECONDS:
                raise RuntimeError(f"transformers left {left} of {len(prompts)} requests")
            result = self._manager.get_result(timeout=1)
            if result is None or not result.is_finished():
                continue
            if result.error is not None or len(result.generated_tokens) != max_tokens:
                raise RuntimeError(f"transformers: {len(result.generated_tokens)} tokens, error {result.error}")
            left -= 1
        return time.perf_counter() - began


@contextmanager
def started(bench: Bench) -> Iterator[Peer]:
    """The peer with its model, which leaves the device at the end."""
    attention = "flash_attention_2" if bench.device.type == "cuda" and find_spec("flash_attn") else "paged|sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        bench.paths()[0], dtype=torch.bfloat16, device_map=None, attn_implementation=attention
    ).to(bench.device)
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    if bench.device.type == "cuda":
        batching = ContinuousBatchingConfig(max_memory_percent=MEMORY_SHARE)
    else:  # which has no memory that it could ask for
        batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=2048)
    longest = max(len(prompt) for prompt in bench.held_out()) + 1
    hints = WorkloadHints(longest, bench.scale.max_tokens, bench.scale.peer_streams)  # as `generate_batch` gives them
    bench.say(f"transformers {transformers.__version__}, continuous batching, {attention}")
    try:
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, timeout=5, workload_hints=hints
        ) as manager:
            yield Peer(manager)
    finally:
        del model
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def peer(bench: Bench) -> dict[str, Any]:
    """Whole requests, prefill included, that all arrive at once."""
    engine = bench.engine  # first: it takes its share of all memory
    seconds: dict[str, list[float]] = {"off": [], "auto": [], "transformers": []}
    max_tokens = bench.scale.max_tokens
    with started(bench) as other, torch.inference_mode():
        for number in bench.rounds(least=3):
            for name, taken in seconds.items():
                prompts = _prompts(bench, number)
                if name in OURS:
                    batch = [(prompt, GREEDY) for prompt in prompts]
                    taken.append(complete(engine, batch, OURS[name], max_tokens).seconds)
                else:
                    taken.append(other.complete(prompts, max_tokens))
    tokens = bench.scale.peer_streams * max_tokens
    theirs = seconds["transformers"][1:]  # the first round meets the shapes
    rows, ratios = [], {}
    for name, all_taken in seconds.items():
        taken = all_taken[1:]
        ratios[name] = median(its / mine for mine, its in zip(taken, theirs, strict=True))
        rows.append((name, f"{tokens / median(taken):.1f}", f"{ratios[name]:.2f}"))
    columns = "ours, or the peer", "tok/s", f"it / the peer (target {LEAST_OF_PEER:g})"
    bench.table(f"beside transformers, {bench.scale.peer_streams} at once", columns, rows)
    return {"seconds": seconds, "tokens": tokens, "over_peer": ratios}


def _prompts(bench: Bench, number: int) -> list[tuple[int, ...]]:
    """Another token in front each time, so that no cache of prefixes knows them."""
    prompts, count = bench.held_out(), bench.scale.peer_streams
    chosen = [prompts[(number * count + i) % len(prompts)] for i in range(count)]
    return [own[:1] + prompt for (own, _), prompt in zip(bench.random_streams(count, 1), chosen, strict=True)]
