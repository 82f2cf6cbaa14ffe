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
def test_pages_of_files_are_free(cgroup: Path, stat: str, free: int) -> None:
    fill(cgroup, 300 * MIB, 260 * MIB, stat)
    assert memory.free_memory() == free * MIB
