"""The operations of the decoder, one signature each.

Callers import from here and never from a backend, so a faster implementation can take the place of the torch reference
without any of them noticing. Every operation runs on the device of its inputs, in fp32 or bf16, and computes no
gradients of its own.
"""

from paceline_kernels.batch import PagedBatch
from paceline_kernels.reference import linear, paged_attention, rms_norm, rotary, silu_mul, store_kv

__all__ = ["PagedBatch", "linear", "paged_attention", "rms_norm", "rotary", "silu_mul", "store_kv"]
