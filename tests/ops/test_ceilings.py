"""What the ceilings are made of: every byte is read once, every operation counts."""

from __future__ import annotations

import itertools
from functools import reduce
from operator import xor
from pathlib import Path

import pytest
import torch

from paceline_kernels.cpu import ceilings, memory
from paceline_kernels.cpu.ceilings import WALKS, ReadCeiling, Walk
from paceline_kernels.cpu.decoder import Kind
from support.native import needs_compiler

pytestmark = needs_compiler

LINE = 64
MIB = 1 << 20


@pytest.mark.parametrize("walk", WALKS, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [0, LINE - 1, LINE, 7 * LINE + 5, 1021 * LINE, 2 * MIB + 13 * LINE])
def test_every_line_is_read_once(walk: Walk, threads: int, size: int) -> None:
    """The result is the xor of all words: a line that is left out, or read twice, changes it."""
    words = torch.randint(-(1 << 31), 1 << 31, (size // 4,), generator=torch.Generator().manual_seed(size))
    words = words.to(torch.int32)
    whole = words[: size // LINE * LINE // 4].tolist()
    assert ceilings.read(words, walk, threads) == reduce(xor, whole, 0) & 0xFFFFFFFF


def test_the_best_walk_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    best = Walk(4, 1024, shared=True)
    rates = itertools.cycle([1.0, 3.0, 2.0])
    monkeypatch.setattr(ReadCeiling, "_rate", lambda self, walk: next(rates) + 10.0 * (walk == best))
    ceiling = ReadCeiling(torch.ones(LINE), 1)
    assert ceiling.walk == best
    assert ceiling.measure() > 10.0


@pytest.mark.parametrize("kind", Kind)
def test_operations_are_those_of_every_thread_and_round(kind: Kind) -> None:
    one = ceilings.multiply(kind, 1, 1)
    assert one > 0
    assert ceilings.multiply(kind, 10, 1) == 10 * one
    assert ceilings.multiply(kind, 10, 3) == 30 * one


def test_rates() -> None:
    data = ceilings.buffer(MIB)
    assert (data.shape, data.dtype, int(data.sum())) == ((MIB,), torch.uint8, MIB)
    assert ReadCeiling(data, 1).measure() > 0
    assert ceilings.multiply_rate(Kind.FLOAT32, 1) > 0


def test_median_seconds_leaves_out_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    durations = iter([100.0, 3.0, 1.0, 2.0, 50.0])

    def call() -> None:
        nonlocal now
        now += next(durations)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    assert ceilings.median_seconds(call, least=6.0) == 2.0


def test_a_buffer_leaves_most_of_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "none")
    sizes = {"SC_AVPHYS_PAGES": 1 << 30, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    for cache, size in ((0, 1 << 30), (100 * MIB, 1 << 30), (1000 * MIB, 2500 * MIB)):
        monkeypatch.setattr(ceilings, "largest_cache", lambda cache=cache: cache)
        assert ceilings.uncached_bytes() == size
    sizes["SC_AVPHYS_PAGES"] = MIB // 4
    assert ceilings.uncached_bytes() == 256 * MIB


def test_a_buffer_leaves_most_of_a_container_s_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{96 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{32 * MIB}\n")
    assert ceilings.uncached_bytes() == 16 * MIB


def test_family_is_one_that_is_known() -> None:
    assert ceilings.family() in ("AMX", "AVX512-BF16", "AVX512", "AVX2", "plain")
