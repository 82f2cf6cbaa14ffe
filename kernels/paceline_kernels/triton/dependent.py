"""Dependent launches: a kernel is set up while the one before it ends, and waits for its results itself.

Between two of them that saves about a microsecond, of which a step has hundreds. A kernel launched so calls `wait`
before it reads what others have written, or writes what they may read still; `release` lets the next be set up. Devices
have it from compute capability 9.0 on.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents as release
from triton.language.extra.cuda import gdc_wait as wait

__all__ = ["DEPENDENT", "LAUNCH", "release", "wait"]


def _possible() -> bool:
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


DEPENDENT: Final = _possible()
LAUNCH: Final[dict[str, Any]] = {"launch_pdl": True} if DEPENDENT else {}  # for the launch of such a kernel
