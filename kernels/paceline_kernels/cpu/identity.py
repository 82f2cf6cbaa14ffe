"""Which CPU this is, as the system tells it."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def cpu_info() -> Mapping[str, str]:
    """What is told of the first core, by Linux's names for it, such as "vendor_id", "model name" and "flags"; empty
    where nothing is.
    """
    return _fields(CPU_INFO)


def cpu_name() -> str:
    """For people, and to tell machines apart."""
    return cpu_info().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """The instructions and other abilities that it has."""
    return set(cpu_info().get("flags", "").split())


@functools.cache
def _fields(file: Path) -> Mapping[str, str]:
    """Once in a process: a system of hundreds of cores takes its time to tell of them."""
    try:
        lines = file.read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
