"""The operations of sampling in C++: the signatures of `paceline_kernels.sampling`, on contiguous float32."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch
from torch import Tensor

from paceline_kernels.cpu.build import BuildError, load, warn

logger = logging.getLogger(__name__)

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64

_SIGNATURES: dict[str, list[Any]] = {
    "argmax": [_INT, _INT, _POINTER, _POINTER],
    "mask": [_INT, _INT, _POINTER, _INT, _POINTER, _POINTER],
    "truncate": [_INT, _INT, *[_POINTER] * 6, _INT],
    "softmax": [_INT, _INT, _POINTER, _POINTER],
    "gumbel_argmax": [_INT, _INT, *[_POINTER] * 4],
    "residual_mass": [_INT, _INT, *[_POINTER] * 6],
    "overlap": [_INT, _INT, *[_POINTER] * 5],
    "residual": [_INT, _INT, *[_POINTER] * 6],
    "draw": [_INT, _INT, *[_POINTER] * 3],
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    """None, which is said once, where there is none."""
    try:
        library = load("sampling")
    except BuildError as error:
        warn(logger, "no native sampling, torch samples, which is slower", str(error))
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, f"paceline_{name}")
        function.argtypes = arguments
        function.restype = None
    return library


def available() -> bool:
    """Whether this machine can compile the library; the first call does so, which takes seconds."""
    return _library() is not None


def _call(name: str, rows: int, vocab: int, logits: Tensor, *arguments: Tensor | int) -> None:
    """Call a function of (rows, vocab, logits, ...); the caller keeps the tensors alive meanwhile."""
    library = _library()
    assert library is not None, "ask available() first"
    assert vocab > 0, "a distribution over nothing"
    assert logits.dtype == torch.float32, f"{logits.dtype}, where C++ reads float32"
    values = []
    for x in (logits, *arguments):
        if isinstance(x, Tensor):
            assert x.is_contiguous(), "C++ sees no strides"
            values.append(x.data_ptr())
        else:
            values.append(x)
    getattr(library, f"paceline_{name}")(rows, vocab, *values)


def _per_row(values: Tensor, logits: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """A parameter as the C++ reads it. What it reads lies within the tensor, whatever the caller passed."""
    assert values.shape == (logits.shape[0], *shape), f"{tuple(values.shape)} for {logits.shape[0]} rows"
    return values.to(dtype).contiguous()


def argmax(logits: Tensor) -> Tensor:
    """[rows, vocab] -> [rows] int64."""
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    _call("argmax", *logits.shape, logits, out)
    return out


def mask_(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Mutates logits [num_rows, vocab] at rows [n] int64; bitmask [n, ceil(vocab / 32)] int32."""
    count = rows.shape[0]
    assert bitmask.shape == (count, (logits.shape[1] + 31) // 32), tuple(bitmask.shape)
    assert count == 0 or (int(rows.min()) >= 0 and int(rows.max()) < logits.shape[0]), "rows out of range"
    rows, bitmask = rows.to(torch.int64).contiguous(), bitmask.to(torch.int32).contiguous()
    _call("mask", *logits.shape, logits, count, rows, bitmask)


def truncate_(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
) -> None:
    """Mutates logits [rows, vocab]; all parameters are [rows]."""
    _truncate(logits, temperature, top_k, top_p, min_p, typical_p, normalise=False)


def distribution_(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
) -> None:
    """Mutates logits [rows, vocab]; all parameters are [rows]."""
    _truncate(logits, temperature, top_k, top_p, min_p, typical_p, normalise=True)


def _truncate(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    typical_p: Tensor,
    *,
    normalise: bool,
) -> None:
    shares = [_per_row(share, logits, torch.float32) for share in (top_p, min_p, typical_p)]
    warmth = _per_row(temperature, logits, torch.float32)
    _call("truncate", *logits.shape, logits, warmth, _per_row(top_k, logits, torch.int64), *shares, int(normalise))


def softmax_(logits: Tensor, temperature: Tensor) -> None:
    """Mutates logits [rows, vocab] into probabilities at temperature [rows]."""
    _call("softmax", *logits.shape, logits, _per_row(temperature, logits, torch.float32))


def gumbel_argmax(logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    """logits [rows, vocab], temperature [rows], keys [rows, 4] int64 -> [rows] int64."""
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    warmth = _per_row(temperature, logits, torch.float32)
    _call("gumbel_argmax", *logits.shape, logits, warmth, _per_row(keys, logits, torch.int64, 4), out)
    return out


def residual_mass(p: Tensor, q: Tensor, p_rows: Tensor, q_rows: Tensor, scale: Tensor) -> Tensor:
    """p, q [.., vocab]; p_rows, q_rows [n] int64, scale [n] -> [n] float64."""
    out = torch.empty(len(p_rows), dtype=torch.float64)
    _call_pairs("residual_mass", p, q, p_rows, q_rows, scale.to(torch.float64).contiguous(), out)
    return out


def overlap(p: Tensor, q: Tensor, p_rows: Tensor, q_rows: Tensor) -> Tensor:
    """p, q [.., vocab]; p_rows, q_rows [n] int64 -> [n] float64."""
    out = torch.empty(len(p_rows), dtype=torch.float64)
    _call_pairs("overlap", p, q, p_rows, q_rows, out)
    return out


def residual(p: Tensor, q: Tensor, p_rows: Tensor, q_rows: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """p, q [.., vocab]; p_rows, q_rows [n] int64, scale [n] -> out [n, vocab]."""
    assert out.shape == (len(p_rows), p.shape[1]), tuple(out.shape)
    assert out.dtype == torch.float32, out.dtype
    _call_pairs("residual", p, q, p_rows, q_rows, scale.to(torch.float64).contiguous(), out)
    return out


def _call_pairs(name: str, p: Tensor, q: Tensor, p_rows: Tensor, q_rows: Tensor, *arguments: Tensor) -> None:
    """Call a function of (count, vocab, p, q, p_rows, q_rows, ...)."""
    assert p.shape[1] == q.shape[1], f"{p.shape[1]} and {q.shape[1]} tokens"
    assert p.dtype == q.dtype, f"{p.dtype} and {q.dtype}"
    assert all(len(x) == len(p_rows) for x in (q_rows, *arguments)), "one of each for each pair"
    least = -1 if name == "residual" else 0  # which means no q
    for rows, tensor, first in ((p_rows, p, 0), (q_rows, q, least)):
        assert len(rows) == 0 or (int(rows.min()) >= first and int(rows.max()) < len(tensor)), "rows out of range"
    p_rows, q_rows = p_rows.to(torch.int64).contiguous(), q_rows.to(torch.int64).contiguous()
    _call(name, len(p_rows), p.shape[1], p, q, p_rows, q_rows, *arguments)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """weights [rows, vocab], u [rows] float64 -> [rows] int64."""
    out = torch.empty(weights.shape[0], dtype=torch.int64)
    _call("draw", *weights.shape, weights, _per_row(u, weights, torch.float64), out)
    return out
