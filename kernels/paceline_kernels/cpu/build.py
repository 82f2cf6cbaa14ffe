"""Compiles the C++ of this directory with the system's compiler, at first use, for exactly this machine.

A library is cached by a hash of its source, the flags and the CPU; `python -m paceline_kernels.cpu` builds all of them
ahead. Compiling takes a while and happens in the middle of something else, so it is said as a warning: those reach
stderr although a program has not configured its logging.

There is one OpenMP runtime in a process, the one that torch has loaded, and libraries are linked against it by path: a
second one would bring a second pool of threads, which spins against the first. `paceline doctor` shows what is loaded.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from paceline_kernels.cpu.identity import cpu_flags, cpu_info, cpu_name

logger = logging.getLogger(__name__)

LIBRARIES = ("sampling", "decoder", "ceilings")
SOURCES = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)
COMPILER_VARIABLE = "CXX"
# What to compile for, such as haswell or x86-64, and flags behind it; by default this CPU.
MARCH_VARIABLE = "PACELINE_MARCH"
CACHE_VARIABLE = "PACELINE_CACHE"
ELF_OF_64_BITS = b"\x7fELF\x02\x01"  # little-endian
ELF_HEADER = struct.Struct("<40xQ10xHH2x")  # of the section headers: offset, size of one, how many
LAST_LINES = 20  # of what a compiler complains about
MOST_KEPT = 16  # files of a library: of other versions, flags and CPUs; 300 KB or less each

_told: list[str] = []  # obstacles, in this process


class BuildError(Exception):
    """There is no compiler here, it refused the source, or the result cannot be kept or loaded; says which."""


def load(name: str) -> ctypes.CDLL:
    """The library of `<name>.cpp` for the CPU that is asked for, compiled if this machine has not done so before.

    Raises:
        BuildError: no compiler, a compiler that fails, or no place for the library.
    """
    found = _found(name, march())
    if isinstance(found, str):
        raise BuildError(found)
    return found


@functools.cache
def _found(name: str, march: str) -> ctypes.CDLL | str:
    """The library, or why there is none: what failed is not tried again in this process."""
    try:
        return _load(name, march)
    except BuildError as error:
        return str(error)


def _load(name: str, march: str) -> ctypes.CDLL:
    library = build(name, march)
    try:
        return _open(library)
    except BuildError as error:
        if not _discard(library):
            raise
        logger.warning("paceline: %s is compiled anew, for %s", name, error)
    return _open(build(name, march))


def _open(library: Path) -> ctypes.CDLL:
    try:
        if not _is_whole(library):
            raise OSError("its end is missing")
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"{library} cannot be loaded: {error}") from error


def _is_whole(library: Path) -> bool:
    """An ELF file reaches to the end of its section headers, which come last. To load one that does not is to be killed
    by SIGBUS; of anything else the loader says itself what is wrong.
    """
    with library.open("rb") as file:
        header = file.read(ELF_HEADER.size)
        size = os.fstat(file.fileno()).st_size
    if len(header) < ELF_HEADER.size or not header.startswith(ELF_OF_64_BITS):
        return True
    start, entry_size, entries = ELF_HEADER.unpack(header)
    return bool(start + entry_size * entries <= size)


def _discard(library: Path) -> bool:
    """Delete a file if it is this user's. Whether it is gone."""
    with suppress(OSError):
        if library.stat().st_uid == os.geteuid():
            library.unlink()
            return True
    return False


def obstacle(library: Callable[[], ctypes.CDLL]) -> str | None:
    """None if a library can be had, else why not; asking compiles it, at first use."""
    try:
        library()
    except BuildError as error:
        return str(error)
    return None


def warn(log: logging.Logger, consequence: str, obstacle: str) -> None:
    """Say what is slower here, and why. What one library misses others miss, too, so that after one warning it is for
    information.
    """
    log.log(logging.INFO if _told else logging.WARNING, "%s: %s", consequence, obstacle)
    _told.append(obstacle)


def build(name: str, march: str) -> Path:
    """The file of a library, which is compiled if it is not there. Where the cache cannot be written it is a file of
    this process alone.

    Raises:
        BuildError: as `load`.
    """
    compiler = find_compiler()
    source = SOURCES / f"{name}.cpp"
    flags = (*FLAGS, *shlex.split(f"-march={march}"), *_vendor_flags(march))
    texts = [path.read_bytes() for path in (source, *sorted(SOURCES.glob("*.h")))]
    identity = "\0".join((*compiler, *flags, torch.__version__, _cpu())).encode()
    digest = hashlib.sha256(b"\0".join([identity, *texts])).hexdigest()[:16]
    file = f"{name}-{digest}.so"
    cache = cache_folder()
    if cache is not None and is_there(cache / file):
        with suppress(OSError):
            (cache / file).touch()  # those that were used last are kept
        return cache / file
    try:
        library = _writable(cache) / file
        if not library.exists():
            logger.warning("paceline: compiling %s for %s (once, up to a minute)...", name, _words(march))
            _compile([*compiler, *flags, str(source), *_openmp()], library)
            forget_oldest(library.parent, f"{name}-*.so", MOST_KEPT)
    except OSError as error:
        raise BuildError(f"{name} cannot be compiled: {error}") from error
    return library


def forget_oldest(folder: Path, pattern: str, most: int) -> None:
    """Delete the files of a pattern but those that were used last, `most` of them."""
    files: list[tuple[float, Path]] = []
    for path in folder.glob(pattern):
        with suppress(OSError):  # another process tidies up, too
            files.append((path.stat().st_mtime, path))
    for _, path in sorted(files)[:-most]:
        with suppress(OSError):
            path.unlink()


def is_there(path: Path) -> bool:
    """Where this user may not look, nothing is."""
    try:
        return path.exists()
    except OSError:
        return False


def _words(march: str) -> str:
    return "this CPU" if march == "native" else march


def _compile(command: list[str], library: Path) -> None:
    """Into a file of its own first, so that processes that compile at once do not disturb each other. It is on the disk
    before it has its name: a machine that stops at once leaves no library in part, but a file that goes one day.
    """
    handle, name = tempfile.mkstemp(prefix=f"{library.stem}-", suffix=".so", dir=library.parent)
    os.close(handle)
    partial = Path(name)
    command = [*command, "-o", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            reason = "\n".join(done.stderr.strip().splitlines()[-LAST_LINES:])
            raise BuildError(f"{shlex.join(command)} failed with exit status {done.returncode}:\n{reason}")
        partial.chmod(0o755)  # a cache may be shared with other users
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(library)
    finally:
        partial.unlink(missing_ok=True)


def march() -> str:
    """What libraries are compiled for, as the compiler calls it."""
    return os.environ.get(MARCH_VARIABLE) or "native"


def find_compiler() -> tuple[str, ...]:
    """The C++ compiler's path, and what `CXX` has behind it, as in `ccache g++`. Raises BuildError if there is none."""
    wanted = os.environ.get(COMPILER_VARIABLE, "")
    try:
        words = shlex.split(wanted)
    except ValueError as error:
        raise BuildError(f"no C++ compiler: {COMPILER_VARIABLE} = {wanted!r}: {error}") from error
    names, options = (words[:1], words[1:]) if words else (["c++", "g++", "clang++"], [])
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise BuildError(f"no C++ compiler: {names[0] if words else 'c++, g++ or clang++'} is not on PATH")
    return (found, *options)


def _openmp() -> list[str]:
    """Link by path against torch's own runtime, where it ships one; else against the system's, which it uses too."""
    folder = Path(torch.__file__).parent / "lib"
    return [str(path) for path in sorted(folder.glob("libgomp*.so*"))[:1]]


def cache_folder() -> Path | None:
    """Where libraries are kept from one process to the next; None for a user without a home, as in some containers."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    except RuntimeError:
        return None


@functools.cache
def _writable(cache: Path | None) -> Path:
    """The cache if it can be written, else a folder that goes with this process. Raises OSError if neither can be."""
    try:
        if cache is None:
            raise FileNotFoundError("this user has no home directory")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        logger.warning(
            "paceline: compiled code cannot be kept, so every process compiles anew (%s); %s can name another folder",
            error,
            CACHE_VARIABLE,
        )
        return folder


def _cpu() -> str:
    """What -march=native depends on."""
    return f"{cpu_name()} {' '.join(sorted(cpu_flags()))}"


def _vendor_flags(march: str) -> list[str]:
    """What the source asks of this machine's CPU and its instructions do not tell: by whom it is."""
    own = shlex.split(march)[:1] == ["native"]
    return ["-DINTEL=1"] if own and cpu_info().get("vendor_id") == "GenuineIntel" else []
