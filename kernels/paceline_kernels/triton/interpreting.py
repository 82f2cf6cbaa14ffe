"""Mends Triton's interpreter where it is imported: what triton 3.6 gets wrong and a GPU does right."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor
_dot = interpreter.InterpreterBuilder.create_dot


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Scalars are arrays of one element, which numpy 2.4 no longer takes for the bounds of a loop."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
    """bf16 is held as uint16, and multiplied as that."""
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _dot(self, a, b, *args)


interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter.InterpreterBuilder.create_dot = _create_dot
