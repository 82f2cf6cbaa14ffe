"""Compiles Triton's kernels for a GPU that is not there, down to its machine code. A program: it prints whose.

python -m support.compiling 90
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from itertools import product as pairs
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

SHARED_MEMORY = {80: 166_912, 90: 232_448}  # bytes that a program may have, by compute capability
SEATS, SEQS, ROWS, DEPTH, VOCAB, HEAD_DIM = 8, 4, 16, 8, 2048, 64


class _Driver:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        properties = {"max_shared_mem": SHARED_MEMORY[capability], "multiprocessor_count": 132, "warpSize": 32}
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(capability: int) -> tuple[set[str], set[str]]:
    """Names of the kernels that were compiled, and of those that are launched anywhere in the package."""
    torch.cuda.is_available = lambda: True  # what depends on the device is decided at import
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)  # type: ignore[assignment]
    triton.runtime.driver.set_active(_Driver(capability))
    compiled: set[str] = set()

    def launcher(self: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            kernel = self.warmup(*args, grid=grid, **kwargs)
            shared = kernel.metadata.shared  # which is looked at when a kernel is loaded
            assert shared <= min(SHARED_MEMORY.values()), f"{self.__name__}: {shared} bytes of shared memory"
            compiled.add(self.__name__)

        return launch

    JITFunction.__getitem__ = launcher  # type: ignore[method-assign]
    _launch_all(capability)
    return compiled, _launched()


def _launch_all(capability: int) -> None:
    """Every operation, in the dtypes that are served. What comes of it is undefined: nothing runs."""
    from paceline_kernels.batch import PagedBatch
    from paceline_kernels.int8 import Int8Weight
    from paceline_kernels.triton import attention, elementwise, linear, ngrams, rows, sampling, verification
    from paceline_kernels.triton.state import SequenceTable, StepInput, StepOutput

    table = SequenceTable.allocate(SEATS, 64, 8, DEPTH, VOCAB, torch.device("cpu"))
    step = StepInput.view(torch.zeros(StepInput.size(SEATS, SEQS, ROWS), dtype=torch.int32), SEATS, SEQS, ROWS)
    output = StepOutput.view(torch.zeros(StepOutput.size(SEQS, DEPTH), dtype=torch.int32), SEQS, DEPTH)
    seats, depths, starts = (torch.zeros(SEQS + more, dtype=torch.int32) for more in (0, 0, 1))
    rows.step_rows(table, step, 16, 1 + DEPTH)
    rows.logit_rows(step, ROWS)
    rows.read_rows(table, step, ROWS, 16, ROWS)
    for first in (True, False):
        rows.draft_rows(table, seats, depths, starts, 16, first=first)
        verification.choose_drafts(torch.zeros(SEQS, VOCAB), table, step, first=first)
    verification.judge(torch.zeros(ROWS, VOCAB), step.seats.new_zeros(ROWS).long(), table, step, output)
    ngrams.look_up(table, seats.long(), 4, 8)
    ngrams.score_and_look_up(table, step, output, 4, 8)

    logits, numbers = torch.zeros(ROWS, VOCAB), torch.zeros(ROWS)
    limits = numbers, numbers.long(), numbers, numbers, numbers
    sampling.argmax(logits)
    sampling.truncate_(logits, *limits)
    sampling.distribution_(logits, *limits)
    sampling.softmax_(logits, numbers)
    sampling.gumbel_argmax(logits, numbers, torch.zeros(ROWS, 4, dtype=torch.int64))
    sampling.draw(logits, numbers.double())

    positions, slots = torch.zeros(2, ROWS, dtype=torch.int64).unbind()
    for dtype in (torch.bfloat16, torch.float32):
        hidden, scale = torch.zeros(ROWS, 1024, dtype=dtype), torch.zeros(1024, dtype=dtype)
        heads = torch.zeros(ROWS, 12, HEAD_DIM, dtype=dtype)
        query, key, value = heads.split([8, 2, 2], 1)
        caches = torch.zeros(2, 8, 16, 2, HEAD_DIM, dtype=dtype).unbind()
        angles = torch.zeros(2, 64, HEAD_DIM // 2).unbind()
        elementwise.rms_norm(hidden, scale, 1e-6)
        elementwise.add_rms_norm(hidden, hidden, scale, 1e-6)
        elementwise.silu_mul(hidden)
        elementwise.rotate_and_store(query, key, value, *angles, positions, *caches, slots)
        for max_rows in (1, ROWS):
            batch = PagedBatch(starts, seats, torch.zeros(SEATS, 64, dtype=torch.int32), 16, seats, max_rows)
            attention.paged_attention(query, *caches, batch, 1.0)
    for kind, block_m in linear.CANDIDATES:
        x = torch.zeros(block_m, 4096, dtype=torch.bfloat16)
        weight: Any = torch.zeros(2048, 4096, dtype=torch.bfloat16)
        if kind == "int8":
            weight = Int8Weight(weight.to(torch.int8), torch.zeros(2048))
        # To see that it compiles, one is enough.
        ways = linear.CANDIDATES[kind, block_m][: None if capability >= 90 else 1]
        for way, is_gated in pairs(ways, (False, True)):
            (linear._linear_silu_mul if is_gated else linear._linear)(x, weight, None, way)


def _launched() -> set[str]:
    """Kernels that some module of the package launches."""
    from paceline_kernels import triton as package

    found: set[str] = set()
    for path in Path(package.__path__[0]).glob("*.py"):
        if path.stem == "interpreting":  # which mends what is not used here
            continue
        module = importlib.import_module(f"{package.__name__}.{path.stem}")
        kernels = {name for name, value in vars(module).items() if isinstance(value, JITFunction)}
        source = path.read_text(encoding="utf-8")
        found |= {name for name in kernels if re.search(rf"\b{name}\[|_launch\({name},", source)}
    return found


def main() -> None:
    compiled, launched = compile_all(int(sys.argv[1]))
    print(json.dumps({"compiled": sorted(compiled), "launched": sorted(launched)}))


if __name__ == "__main__":
    main()
