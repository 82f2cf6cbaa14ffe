"""The native backend compiled for other CPUs than this one: every path of it that this one can run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline_kernels.cpu import build
from paceline_kernels.cpu.identity import cpu_flags
from support.native import needs_compiler

TESTS = Path(__file__).parents[1]
FILES = ("ops/test_linear.py", "ops/test_native_attention.py", "models/test_native.py")
# Of those, numbers and what must not be seen; that batches change nothing, where it costs little.
CHOSEN = "64-33-1 or 100-2100-1 or not (a_row or threads or batch or loop)"
# What a target needs beyond x86-64, by the names of /proc/cpuinfo.
AVX2 = {"avx2", "bmi2", "fma", "movbe"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# With products of bfloat16 as this machine's own build does not do them.
OTHER_MAKE = "cooperlake" if build._vendor_flags("native") else "cooperlake -DINTEL=1"
TARGETS: dict[str, set[str]] = {
    "x86-64": set(),
    "x86-64 -DEMULATED_TILES=1": set(),  # how a matrix unit is fed
    "haswell": AVX2,
    "skylake-avx512": AVX512,
    OTHER_MAKE: AVX512 | {"avx512_bf16", "avx512_vnni"},
}

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="other machines have other names"),
]


def run(target: str) -> subprocess.CompletedProcess[str]:
    """The chosen tests, compiled for a target, with one thread."""
    environment = os.environ | {build.MARCH_VARIABLE: target, "OMP_NUM_THREADS": "1"}
    files = [str(TESTS / file) for file in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN, *files]
    return subprocess.run(command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """Of every selected target that this CPU can run, as many at a time as there are cores."""
    selected = {item.name for item in request.session.items}
    targets = [target for target in TARGETS if f"{test_another_instruction_set.__name__}[{target}]" in selected]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {target: pool.submit(run, target) for target in targets if TARGETS[target] <= cpu_flags()}


@pytest.mark.parametrize("target", TARGETS)
def test_another_instruction_set(target: str, runs: dict[str, Future[subprocess.CompletedProcess[str]]]) -> None:
    if missing := TARGETS[target] - cpu_flags():
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    done = runs[target].result()
    assert done.returncode == 0, done.stdout[-5000:]
    assert "skipped" not in done.stdout
