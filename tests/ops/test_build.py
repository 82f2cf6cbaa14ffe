"""Compiling C++ at first use: cached by content, safe at once in several places, and a clear error where it cannot."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline_kernels.cpu import build, sampling

SOURCE = '#include "toy.h"\nextern "C" int answer() { return ANSWER; }\n'


def compiler_found() -> bool:
    try:
        build._compiler()
    except build.BuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not compiler_found(), reason="no C++ compiler")
load: Callable[[str], ctypes.CDLL] = build.load.__wrapped__  # as a process does that has loaded nothing yet


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "toy.cpp").write_text(SOURCE)
    (folder / "toy.h").write_text("#define ANSWER 41\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(build.CACHE_VARIABLE, str(folder))
    return folder


def refuse(*_: object) -> None:
    pytest.fail("compiled again")


@needs_compiler
def test_compiles_once(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("toy").answer() == 41
    monkeypatch.setattr(build, "_compile", refuse)
    assert load("toy").answer() == 41


@needs_compiler
def test_compiles_again_when_a_header_changes(sources: Path, cache: Path) -> None:
    assert load("toy").answer() == 41
    (sources / "toy.h").write_text("#define ANSWER 42\n")
    assert load("toy").answer() == 42
    assert len(list(cache.iterdir())) == 2


@needs_compiler
def test_flags_are_part_of_the_identity(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "toy.h").write_text("#ifndef ANSWER\n#define ANSWER 41\n#endif\n")
    assert load("toy").answer() == 41
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DANSWER=43"))
    assert load("toy").answer() == 43


@needs_compiler
def test_several_at_once_leave_one_library(sources: Path, cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(load, ["toy"] * 4))
    assert [library.answer() for library in libraries] == [41] * 4
    assert len(list(cache.iterdir())) == 1


@needs_compiler
def test_a_refused_source_says_why_and_leaves_nothing(sources: Path, cache: Path) -> None:
    (sources / "toy.cpp").write_text("#error not today\n")
    with pytest.raises(build.BuildError, match="not today"):
        load("toy")
    assert list(cache.iterdir()) == []


@needs_compiler
def test_a_cache_that_cannot_be_made_is_a_build_error(sources: Path, cache: Path) -> None:
    cache.write_text("a file, where a folder should be")
    with pytest.raises(build.BuildError, match="cache"):
        load("toy")


def test_no_compiler_is_a_build_error(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.COMPILER_VARIABLE, "no-such-compiler")
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        load("toy")


def test_without_a_compiler_sampling_is_not_available(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.COMPILER_VARIABLE, "no-such-compiler")
    monkeypatch.setattr(sampling, "load", load)
    assert sampling._library.__wrapped__() is None


def test_a_user_without_a_home_is_a_build_error(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(build.CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(build.BuildError, match=build.CACHE_VARIABLE):
        build._cache()
