"""How much of a GPU is left for KV: by a run of the largest step, since what a step needs besides weights depends on
the model, the kernels and torch's allocator.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from paceline.models import Model
from paceline.runner.input_batch import TokenRun, flatten
from paceline.runner.kv_cache import KVCache

GRAPH_RESERVE: Final = 1 << 30  # bytes, for CUDA graphs, which are captured after the pool is made
SPARE_SEATS: Final = 8  # for who has finished, but was not released yet when a measured step fills all others
# Of the logits, that a step of the host holds at once besides them: distributions of drafts, what logprobs are told of,
# the rows of one rule, and four in which drafts are judged in float64. Cuts and draws by Triton work in place; without
# Triton, torch sorts in twenty. Counted on a CPU over all that torch allocates, as in tests/runner/test_memory.py: 6.4.
SAMPLING_COPIES: Final = 7


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes on a GPU.

    Attributes:
        total: that it has.
        outside: held beside torch's allocator: by CUDA itself, and by other processes.
        peak: that torch's allocator took from it in the largest step, weights included.
    """

    total: int
    outside: int
    peak: int


@dataclass(frozen=True, slots=True)
class LargestStep:
    """What the scheduler may ask of a step at most.

    Attributes:
        rows: of a forward.
        sampled: of them, rows whose logits are wanted.
        max_model_len: of a chunk, at most.
    """

    rows: int
    sampled: int
    max_model_len: int
    block_size: int


def kv_bytes(measured: Measured, utilization: float, reserve: int = GRAPH_RESERVE) -> int:
    """What the KV pool may have, so that all of us together stay within the share of the GPU that is granted."""
    return max(0, int(measured.total * utilization) - measured.outside - measured.peak - reserve)


def give_back(device: torch.device) -> None:
    """Let go of what torch's allocator keeps of a GPU in pieces that were too small."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def logits_bytes(rows: int, drafting: int, vocab: int) -> int:
    """Bytes kept for the logits of recorded steps: the target's in fp32, and room in which it computes them in its own
    dtype, or the draft model its own in both.

    Args:
        rows: of the target's, at most.
        drafting: the same of the draft model's.
    """
    return vocab * (4 * rows + max(2 * rows, 6 * drafting))


def table_bytes(max_num_seqs: int, max_depth: int, max_model_len: int, vocab: int, *, draws: bool) -> int:
    """Bytes that a GPU keeps of all sequences besides KV: their texts, how often each token stands in each, and the
    distributions that the drafts of a step were drawn from until they are judged.
    """
    return 4 * (max_num_seqs + SPARE_SEATS) * (max_model_len + vocab * (1 + max_depth * draws))


def measure(models: Sequence[Model], step: LargestStep) -> Measured:
    """Run the largest step on each of the models, which are on one GPU. Raises torch.OutOfMemoryError."""
    device = models[0].device
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    for model in models:
        run_largest(model, step)
    torch.cuda.synchronize(device)
    # Reserved, not allocated: what lies between tensors cannot be had by the pool either.
    peak = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    return Measured(total, max(0, outside), peak)


@torch.inference_mode()
def run_largest(model: Model, step: LargestStep) -> None:
    """A forward of prompt chunks, its logits, and as much memory as sampling takes; over KV just for these rows."""
    longest = min(step.max_model_len, model.config.max_position_embeddings)  # a draft model may have fewer positions
    runs, first = [], 0
    for start in range(0, step.rows, longest):
        count = min(longest, step.rows - start)
        blocks = -(-count // step.block_size)
        runs.append(TokenRun(list(range(first, first + blocks)), 0, [0] * count))
        first += blocks
    cache = KVCache(model, first, step.block_size)
    token_ids, batch = flatten(runs, step.block_size, model.device)
    logits = model.logits(model.forward(token_ids, batch, cache)[: step.sampled])
    copies = [torch.empty_like(logits) for _ in range(SAMPLING_COPIES)]
    del copies
