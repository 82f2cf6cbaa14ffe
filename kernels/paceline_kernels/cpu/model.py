"""The decoder's operations in C++: the signatures of `paceline_kernels.ops`, on CPU tensors of fp32 or bf16."""

from __future__ import annotations

import ctypes
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline_kernels.batch import PagedBatch
from paceline_kernels.cpu.build import BuildError, load

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "linear": [*[_POINTER] * 4, *[_INT] * 3],
    "rms_norm": [*[_POINTER] * 3, *[_INT] * 2, _FLOAT],
    "rotary": [*[_POINTER] * 4, *[_INT] * 4],
    "silu_mul": [*[_POINTER] * 2, *[_INT] * 2],
    "paged_attention": [*[_POINTER] * 7, *[_INT] * 6, _FLOAT],
}


@functools.cache
def _library() -> ctypes.CDLL:
    library = load("model")
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, f"paceline_{name}")
        function.argtypes = [ctypes.c_bool, *arguments]
        function.restype = None
    return library


def available() -> str | None:
    """None if this machine can compile the library, else why not; the first call compiles, which takes seconds."""
    try:
        _library()
    except BuildError as error:
        return f"needs a C++ compiler: {error}"
    return None


def _call(name: str, tensors: list[Tensor | None], *numbers: float) -> None:
    """Tensors of the model's dtype first, at least one; the caller keeps all of them alive."""
    first = tensors[0]
    assert first is not None
    assert first.dtype in (torch.float32, torch.bfloat16)
    assert all(tensor is None or tensor.device.type == "cpu" for tensor in tensors)
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    getattr(_library(), f"paceline_{name}")(first.dtype == torch.bfloat16, *pointers, *numbers)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in], weight [out, in], bias [out] -> [rows, out]. Sums are fp32, the bias is added before rounding."""
    assert (x.dtype, x.shape[1]) == (weight.dtype, weight.shape[1]), f"{x.shape} {x.dtype}, {weight.shape}"
    if x.dtype == torch.bfloat16 and x.shape[1] % 2:  # read in pairs
        x, weight = F.pad(x, (0, 1)), F.pad(weight, (0, 1))
    x, weight = x.contiguous(), weight.contiguous()
    out = x.new_empty(len(x), len(weight))
    _call("linear", [out, x, weight, bias if bias is None else bias.contiguous()], *x.shape, len(weight))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size], weight [size] -> x's shape."""
    x, size = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    _call("rms_norm", [out, x, weight.contiguous()], x.numel() // size, size, eps)
    return out


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query [num_tokens, num_heads, head_dim], key, cos and sin [num_tokens, head_dim / 2] -> both, rotated."""
    cos, sin = cos.contiguous(), sin.contiguous()
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    num_tokens, heads, head_dim = x.shape
    if x.stride()[1:] != (head_dim, 1):  # a token's heads lie side by side, the tokens may be apart
        x = x.contiguous()
    out = x.new_empty(x.shape)
    _call("rotary", [out, x, cos, sin], num_tokens, heads, head_dim // 2, x.stride(0))
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [rows, 2 * size] -> [rows, size]."""
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    _call("silu_mul", [out, gate_up], *out.shape)
    return out


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """query [num_tokens, num_heads, head_dim] over the pages -> that shape. Fp32 inside, rounded once."""
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert query.dtype == key_cache.dtype == value_cache.dtype
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    query, block_tables = query.contiguous(), batch.block_tables.contiguous()
    assert block_tables.dtype == batch.query_starts.dtype == batch.context_lens.dtype == torch.int32
    out = torch.empty_like(query)
    layout = [batch.query_starts.contiguous(), batch.context_lens.contiguous(), block_tables]
    sizes = (*block_tables.shape, block_size, query.shape[1], num_kv_heads, head_dim)
    _call("paged_attention", [out, query, key_cache, value_cache, *layout], *sizes, scale)
    return out
