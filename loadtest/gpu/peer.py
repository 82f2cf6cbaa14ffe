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
from drive import BOUNDS, complete
from rig import GREEDY, Rig
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from paceline.bench.ratio import median_ratio

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
def started(rig: Rig) -> Iterator[Peer]:
    """The peer with its model, which leaves the device at the end."""
    attention = "flash_attention_2" if rig.device.type == "cuda" and find_spec("flash_attn") else "paged|sdpa"
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        rig.paths()[0], dtype=torch.bfloat16, attn_implementation=attention
    )
    model = loaded.to(rig.device)
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    if rig.device.type == "cuda":
        batching = ContinuousBatchingConfig(max_memory_percent=MEMORY_SHARE)
    else:  # which has no memory that it could ask for
        batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=2048)
    longest = max(len(prompt) for prompt in rig.held_out()) + 1
    hints = WorkloadHints(longest, rig.scale.max_tokens, rig.scale.peer_streams)  # as `generate_batch` gives them
    rig.say(f"transformers {transformers.__version__}, continuous batching, {attention}")
    try:
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, timeout=5, workload_hints=hints
        ) as manager:
            yield Peer(manager)
    finally:
        del loaded, model
        gc.collect()
        if rig.device.type == "cuda":
            torch.cuda.empty_cache()


def peer(rig: Rig) -> dict[str, Any]:
    """Whole requests, prefill included, that all arrive at once."""
    engine = rig.engine  # first: it takes its share of all memory
    seconds: dict[str, list[float]] = {name: [] for name in (*BOUNDS, "transformers")}
    max_tokens = rig.scale.max_tokens
    with started(rig) as other, torch.inference_mode():
        for number in rig.rounds(least=3):
            for name, taken in seconds.items():
                prompts = _prompts(rig, number)
                if name in BOUNDS:
                    batch = [(prompt, GREEDY) for prompt in prompts]
                    taken.append(complete(engine, batch, BOUNDS[name], max_tokens).seconds)
                else:
                    taken.append(other.complete(prompts, max_tokens))
    tokens = rig.scale.peer_streams * max_tokens
    theirs = seconds["transformers"][1:]  # the first round meets the shapes
    rows, ratios = [], {}
    for name, all_taken in seconds.items():
        taken = all_taken[1:]
        ratios[name] = median_ratio(theirs, taken)
        rows.append((name, f"{tokens / median(taken):.1f}", f"{ratios[name]:.2f}"))
    columns = "ours, or the peer", "tok/s", f"it / the peer (target {LEAST_OF_PEER:g})"
    rig.table(f"beside transformers, {rig.scale.peer_streams} at once", columns, rows)
    return {"seconds": seconds, "tokens": tokens, "over_peer": ratios}


def _prompts(rig: Rig, number: int) -> list[tuple[int, ...]]:
    """Another token in front each time, so that no cache of prefixes knows them."""
    prompts, count = rig.held_out(), rig.scale.peer_streams
    chosen = [prompts[(number * count + i) % len(prompts)] for i in range(count)]
    return [own[:1] + prompt for (own, _), prompt in zip(rig.random_streams(count, 1), chosen, strict=True)]
