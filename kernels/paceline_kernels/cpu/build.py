"""Compiles the C++ of this directory with the system's compiler, at first use, for exactly this machine.

The library is cached by a hash of its source, the flags and the CPU. It is linked against the OpenMP runtime that
torch has loaded: a second one would bring a second pool of threads, which spins against the first.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
COMPILER_VARIABLE = "CXX"
CACHE_VARIABLE = "PACELINE_CACHE"


class BuildError(Exception):
    """There is no compiler here, it refused the source, or the result cannot be kept or loaded; says which."""


@functools.cache
def load(name: str) -> ctypes.CDLL:
    """The library of `<name>.cpp`, compiled if this machine has not done so before.

    Raises:
        BuildError: no compiler, a compiler that fails, or no place for the library.
    """
    compiler = _compiler()
    source = SOURCES / f"{name}.cpp"
    texts = [path.read_bytes() for path in (source, *sorted(SOURCES.glob("*.h")))]
    identity = "\0".join((compiler, *FLAGS, torch.__version__, _cpu())).encode()
    digest = hashlib.sha256(b"\0".join([identity, *texts])).hexdigest()[:16]
    library = _cache() / f"{name}-{digest}.so"
    try:
        if not library.exists():
            _compile(compiler, source, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"{library}: {error}") from error


def _compile(compiler: str, source: Path, library: Path) -> None:
    """Into a file of its own first, so that processes that compile at once do not disturb each other."""
    library.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    partial = Path(name)
    try:
        command = [compiler, *FLAGS, str(source), "-o", str(partial), *_openmp()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
        partial.replace(library)
    finally:
        partial.unlink(missing_ok=True)


def _compiler() -> str:
    wanted = os.environ.get(COMPILER_VARIABLE)
    found = shutil.which(wanted) if wanted else shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise BuildError(f"no C++ compiler: {wanted or 'c++, g++ or clang++'} is not on PATH")
    return found


def _openmp() -> list[str]:
    """Link by path against torch's own runtime, where it ships one; else against the system's, which it uses too."""
    folder = Path(torch.__file__).parent / "lib"
    return [str(path) for path in sorted(folder.glob("libgomp*.so*"))[:1]]


def _cache() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    except RuntimeError as error:  # a user without a home, as in some containers
        raise BuildError(f"no place for the library: {error}; {CACHE_VARIABLE} can name one") from error


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "flags")
    return "\n".join(next((line for line in lines if line.startswith(field)), "") for field in wanted)
