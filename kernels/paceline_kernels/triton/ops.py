"""The operations of a decoder on GPUs; a module that is an `Ops`."""

from paceline_kernels.triton.attention import paged_attention
from paceline_kernels.triton.elementwise import add_rms_norm, rms_norm, rotate_and_store, silu_mul
from paceline_kernels.triton.linear import linear

__all__ = ["add_rms_norm", "linear", "paged_attention", "rms_norm", "rotate_and_store", "silu_mul"]
