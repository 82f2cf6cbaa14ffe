"""The decoder's operations with results that do not depend, to the last bit, on what else is in the batch.

A matmul that picks its blocking by its number of rows adds up in another order when requests join or leave, and a
greedy output may flip. Here every output element has one accumulation order, for every number of rows and threads,
every layout of the pages and every cut of a sequence into runs (the problem and the remedy: He et al., "Defeating
Nondeterminism in LLM Inference", 2025). The order belongs to the machine: another CPU may give other bits.

The signatures are those of `Ops`. CPU tensors only; ask `available` first, as nothing else here reports its absence.
"""

from paceline_kernels.cpu.model import available, linear, paged_attention, rms_norm, rotary, silu_mul
from paceline_kernels.reference import store_kv

__all__ = ["available", "linear", "paged_attention", "rms_norm", "rotary", "silu_mul", "store_kv"]
