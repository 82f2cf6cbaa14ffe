"""The operations of the decoder and of sampling, one signature each.

Callers import from here and never from a backend, so a faster implementation can take the place of the torch reference
without any of them noticing. Every operation runs on the device of its inputs and computes no gradients of its own.
Those of the decoder take fp32 or bf16, those of sampling fp32 or fp64.
"""

from paceline_kernels.batch import PagedBatch
from paceline_kernels.int8 import Int8Weight
from paceline_kernels.reference import (
    add_rms_norm,
    linear,
    linear_silu_mul,
    paged_attention,
    rms_norm,
    rotary,
    rotate_and_store,
    silu_mul,
    store_kv,
)
from paceline_kernels.sampling import (
    argmax,
    distribution_,
    draw,
    gumbel_argmax,
    mask_,
    overlap,
    residual,
    residual_mass,
    softmax_,
    truncate_,
)

__all__ = [
    "Int8Weight",
    "PagedBatch",
    "add_rms_norm",
    "argmax",
    "distribution_",
    "draw",
    "gumbel_argmax",
    "linear",
    "linear_silu_mul",
    "mask_",
    "overlap",
    "paged_attention",
    "residual",
    "residual_mass",
    "rms_norm",
    "rotary",
    "rotate_and_store",
    "silu_mul",
    "softmax_",
    "store_kv",
    "truncate_",
]
