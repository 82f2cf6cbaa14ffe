"""How much memory is free, on a machine and in a container on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline_kernels.cpu import memory

MIB = 1 << 20
OF_MACHINE = 4096 * MIB


@pytest.fixture(autouse=True)
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container's own, empty; on a machine with 4 GiB left."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr("os.sysconf", {"SC_AVPHYS_PAGES": OF_MACHINE // 4096, "SC_PAGE_SIZE": 4096}.__getitem__)
    return tmp_path


def fill(cgroup: Path, most: str | int, current: int, stat: str | None = None) -> None:
    (cgroup / "memory.max").write_text(f"{most}\n")
    (cgroup / "memory.current").write_text(f"{current}\n")
    if stat is not None:
        (cgroup / "memory.stat").write_text(stat)


def test_without_a_container_it_is_the_machine_s() -> None:
    assert memory.free_memory() == OF_MACHINE


@pytest.mark.parametrize(
    ("meminfo", "free"),
    [
        ("MemTotal:       24683520 kB\nMemFree:            1024 kB\nMemAvailable:    8388608 kB\n", 8192 * MIB),
        ("MemTotal:       24683520 kB\nMemFree:            1024 kB\n", OF_MACHINE),
        ("what\n", OF_MACHINE),
    ],
)
def test_pages_of_files_are_free_on_a_machine(cgroup: Path, meminfo: str, free: int) -> None:
    (cgroup / "meminfo").write_text(meminfo)
    assert memory.free_memory() == free


@pytest.mark.parametrize(
    ("most", "current", "free"),
    [
        ("max", 100 * MIB, OF_MACHINE),
        (300 * MIB, 100 * MIB, 200 * MIB),
        (100 * MIB, 200 * MIB, 0),  # a limit may be lowered below what is used
        (2 * OF_MACHINE, 0, OF_MACHINE),
    ],
)
def test_a_container_has_what_its_limit_leaves(cgroup: Path, most: str | int, current: int, free: int) -> None:
    fill(cgroup, most, current)
    assert memory.free_memory() == free


@pytest.mark.parametrize(
    ("stat", "free"),
    [
        (
            f"file {190 * MIB}\nshmem {20 * MIB}\ninactive_file {150 * MIB}\nactive_file {20 * MIB}\n",
            210,
        ),
        (f"inactive_file {900 * MIB}\nactive_file 0\n", 300),  # counted a moment after the whole
        (f"inactive_file {150 * MIB}\n", 40),
        ("what\n", 40),
    ],
)
def test_pages_of_files_are_free_in_a_container(cgroup: Path, stat: str, free: int) -> None:
    fill(cgroup, 300 * MIB, 260 * MIB, stat)
    assert memory.free_memory() == free * MIB


def test_what_is_read_together_lies_side_by_side() -> None:
    pages = memory.LargePages()
    sizes = (100, memory.SMALL, memory.SMALL + 1, 3 * MIB)
    parts = [pages.zeros(size) for size in sizes]
    for value, part in enumerate(parts, 1):
        assert not part.any()
        part.fill_(value)
    assert [len(part) for part in parts] == list(sizes)
    assert all((part == value).all() for value, part in enumerate(parts, 1))
    begins = [part.data_ptr() - parts[0].data_ptr() for part in parts]
    assert begins == [0, memory.SMALL, 2 * memory.SMALL, 4 * memory.SMALL]
    assert parts[0].data_ptr() % memory.LARGE == 0


def test_what_no_stretch_holds_gets_its_own() -> None:
    pages = memory.LargePages()
    small, large = pages.zeros(1), pages.zeros(memory.STRETCH + 1)
    large[-1] = 1
    assert len(large) == memory.STRETCH + 1
    assert small.item() == 0
    assert len(pages.zeros(memory.STRETCH)) == memory.STRETCH
