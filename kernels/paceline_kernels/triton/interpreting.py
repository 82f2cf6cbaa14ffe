"""Mends Triton's interpreter where it is imported: what triton gets wrong there and a GPU does right, and what takes it
long for nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor
_dot = interpreter.InterpreterBuilder.create_dot
_call = interpreter.GridExecutor.__call__
_cast = interpreter.InterpreterBuilder.cast_impl
_patch_all = interpreter._patch_lang
_find_dtype = interpreter._get_np_dtype

_patched: set[str] = set()  # modules whose names were seen to in this launch
_dtypes: dict[str, Any] = {}  # of numpy, by the names of triton's


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Scalars are arrays of one element, which numpy 2.4 no longer takes for the bounds of a loop."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
    """bf16 is held as uint16, and multiplied as that."""
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _dot(self, a, b, *args)


def _cast_impl(self: Any, source: Any, dtype: Any) -> Any:
    """To bf16, numbers are cut off, and integers taken for bits."""
    if dtype.scalar == tl.bfloat16 and source.dtype.scalar != tl.bfloat16:
        wide = np.ascontiguousarray(source.data, np.float32)
        bits = wide.view(np.uint32)
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        narrow = np.where(np.isnan(wide), np.uint32(0x7FC0), nearest).astype(np.uint16)
        return interpreter.TensorHandle(narrow.reshape(source.data.shape), tl.bfloat16)
    if dtype.scalar == tl.float32 and source.dtype.scalar == tl.bfloat16:
        wide = (source.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)
    return _cast(self, source, dtype)


def _patch_lang(function: Any) -> Any:
    """At every call of a function by a kernel, all of triton's names are looked through anew."""
    if function.__module__ in _patched:
        return interpreter._LangPatchScope()
    _patched.add(function.__module__)
    return _patch_all(function)


def _get_np_dtype(dtype: Any) -> Any:
    """For every operation, a table of all types is made anew."""
    if dtype.name not in _dtypes:
        _dtypes[dtype.name] = _find_dtype(dtype)
    return _dtypes[dtype.name]


def _call_kernel(self: Any, *args: Any, **options: Any) -> Any:
    """What overflows, or is no number, is so without a word, as on a GPU."""
    _patched.clear()
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return _call(self, *args, **options)


interpreter.GridExecutor.__call__ = _call_kernel
# Else each sum of integers is computed three times over, for an assertion that nobody asked for.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
interpreter._patch_lang = _patch_lang
interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter._get_np_dtype = _get_np_dtype
interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter.InterpreterBuilder.cast_impl = _cast_impl
