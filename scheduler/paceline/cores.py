"""The cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Fewer than the machine has, where somebody has pinned the process; no quota is asked for."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
