"""What this machine has for serving, and what to do about whatever is missing."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from paceline import compiled
from paceline.cores import usable_cores
from paceline.device import LEAST_CAPABILITY, Gpu, in_gib, triton_obstacle
from paceline_kernels.cpu import build, ceilings, decoder, identity, memory

# What the kernels look for, best first. Linux's names for them.
INSTRUCTIONS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "fma")
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
OPENMP = re.compile(r"/lib(?:gomp|omp5?|iomp5)(?:-\w+)?\.so[.\d]*$")


@dataclass(frozen=True, slots=True)
class Fact:
    """Something found, and what to do about it if it is not as it should be."""

    name: str
    value: str
    advice: str | None = None


def find_facts(missing: str | None, gpu: Gpu | str) -> list[Fact]:
    """All of them.

    Args:
        missing: what `native_obstacle` says.
        gpu: or why there is none.
    """
    unsampled = build.obstacle(partial(build.load, "sampling"))
    facts = [*_machine(), *_gpu(gpu), *_compiler(), *_torch(), *_backend(missing, gpu), *_sampling(unsampled)]
    return [*facts, _scheduler()]


def _machine() -> list[Fact]:
    flags = identity.cpu_flags()
    found = [name for name in INSTRUCTIONS if name in flags]
    slow = "without AVX2, products run several times slower than on CPUs of the last ten years"
    return [
        Fact("CPU", identity.cpu_name() or "unknown"),
        _cores(),
        Fact("instructions", ", ".join(found) or "none of interest", None if "avx2" in found else slow),
        _large_pages(),
    ]


def _cores() -> Fact:
    usable, quota, load = usable_cores(), _quota(), os.getloadavg()[0]
    value = f"{usable} of {os.cpu_count()} usable, load {load:.1f}"
    if quota is None:
        busy = "others use them too: what is measured now is too low" if load > usable / 2 else None
        return Fact("cores", value, busy)
    value += f", quota of {quota:g}"
    advice = f"start the server with --threads {max(1, int(quota))}: more threads than the quota wait for each other"
    return Fact("cores", value, advice if quota < torch.get_num_threads() else None)


def _quota() -> float | None:
    """Cores' worth of time that the control group of a container allows; None if it does not say."""
    try:
        limit, period = (memory.CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)


def _large_pages() -> Fact:
    try:
        text = LARGE_PAGES.read_text()
    except OSError:
        return Fact("large pages", "unknown", "this kernel has none: weights are read more slowly")
    chosen = text[text.index("[") + 1 : text.index("]")]
    advice = f"weights are read more slowly without; as root: echo madvise > {LARGE_PAGES}"
    return Fact("large pages", chosen, advice if chosen == "never" else None)


def _gpu(gpu: Gpu | str) -> list[Fact]:
    """Nothing to say where torch is made for CPUs."""
    if isinstance(gpu, str):
        return [] if torch.version.cuda is None else [Fact("GPU", "none", f"if there is one: {gpu}")]
    capability, least = (".".join(map(str, version)) for version in (gpu.capability, LEAST_CAPABILITY))
    memory_of = f"{in_gib(gpu.total_memory)}, {in_gib(gpu.free_memory)} of them free"
    old = f"it is too old to serve on: compute capability {least} is needed; serve with --device cpu"
    return [
        Fact(
            "GPU",
            f"{gpu.name}, compute capability {capability}, {memory_of}, CUDA {gpu.cuda}",
            old if gpu.capability < LEAST_CAPABILITY else None,
        )
    ]


def _compiler() -> list[Fact]:
    try:
        command = build.find_compiler()
    except build.BuildError as error:
        advice = f"install g++ (Debian: apt-get install g++), or name a compiler in {build.COMPILER_VARIABLE}"
        return [Fact("compiler", str(error), advice), _cache()]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    version = (done.stdout.splitlines() or ["no version"])[0]
    return [Fact("compiler", f"{shlex.join(command)}: {version}, -march={build.march()}"), _cache()]


def _cache() -> Fact:
    folder = build.cache_folder()
    advice = f"every process compiles anew; name a folder that can be written in {build.CACHE_VARIABLE}"
    if folder is None:
        return Fact("compiled code", "nowhere: this user has no home directory", advice)
    nearest = next(parent for parent in (folder, *folder.parents) if build.is_there(parent))
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        return Fact("compiled code", str(folder))
    return Fact("compiled code", f"{folder}, which cannot be written", advice)


def _torch() -> list[Fact]:
    """After the libraries were loaded: it counts what they brought."""
    runtimes = openmp_runtimes()
    advice = "several pools of threads work against each other; compile by g++, and import nothing that brings another"
    threads = torch.get_num_threads()
    return [
        Fact("torch", f"{torch.__version__}, {threads} threads"),
        Fact("OpenMP", ", ".join(map(str, runtimes)) or "none", advice if len(runtimes) > 1 else None),
    ]


def openmp_runtimes() -> list[Path]:
    """Shared libraries of OpenMP that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted({Path(file).resolve() for file in files if OPENMP.search(file)})


def native_obstacle() -> str | None:
    """Why there is no native backend here, if there is none. Compiles and loads what it consists of."""
    return decoder.available() or ceilings.available()


def _scheduler() -> Fact:
    if compiled.is_compiled():
        return Fact("scheduler", "compiled")
    return Fact("scheduler", "interpreted", "it takes twice the time; to compile it: python -m paceline.compiled")


def _backend(missing: str | None, gpu: Gpu | str) -> list[Fact]:
    if isinstance(gpu, Gpu) and gpu.capability >= LEAST_CAPABILITY:
        obstacle = triton_obstacle(gpu)
        if obstacle is None:
            return [Fact("backend", f"triton on {gpu.name}")]
        return [Fact("backend", f"torch on {gpu.name}, because: {obstacle}", "torch is several times slower")]
    if missing is not None:
        advice = "torch computes instead, several times slower; see what is said above about the compiler"
        return [Fact("backend", f"torch, because: {missing}", advice)]
    family = ceilings.family()
    unused = "amx_bf16" in identity.cpu_flags() and family != "AMX"
    advice = "this CPU has a matrix unit, which the compiler does not know or the kernel does not let processes use"
    return [
        Fact("backend", "native"),
        Fact("kernels", family, advice if unused and build.march() == "native" else None),
    ]


def _sampling(missing: str | None) -> list[Fact]:
    """Nothing to say where it is native."""
    if missing is None:
        return []
    advice = "torch samples instead, which is slower, whatever else is native"
    return [Fact("sampling", f"torch, because: {missing}", advice)]
