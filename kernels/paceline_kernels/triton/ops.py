"""The operations of a decoder on GPUs; a module that is an `Ops`."""

from paceline_kernels.triton.attention import paged_attention
from paceline_kernels.triton.elementwise import add_rms_norm, rms_norm, rotate_and_store
from paceline_kernels.triton.linear import linear, linear_silu_mul

__all__ = ["add_rms_norm", "linear", "linear_silu_mul", "paged_attention", "rms_norm", "rotate_and_store"]
