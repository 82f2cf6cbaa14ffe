"""Compiling C++ at first use: cached by content, safe at once in several places, and a clear error where it cannot."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline_kernels.cpu import build, identity, sampling
from support.native import needs_compiler

SOURCE = '#include "toy.h"\nextern "C" int answer() { return ANSWER; }\n'


def load(name: str) -> ctypes.CDLL:
    """As a process does that has loaded nothing yet."""
    return build._load(name, build.march())


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
def test_keeps_the_libraries_that_were_used_last(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(answer: int, now: int) -> None:
        (sources / "toy.h").write_text(f"#define ANSWER {answer}\n")
        assert load("toy").answer() == answer
        library = build.build("toy", build.march())
        os.utime(library, (now, now))

    monkeypatch.setattr(build, "MOST_KEPT", 2)
    use(1, now=1)
    use(2, now=2)
    use(1, now=3)
    use(3, now=4)
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr(build, "_compile", refuse)
    use(1, now=5)
    use(3, now=6)


@needs_compiler
def test_a_library_that_is_used_again_is_kept_longest(sources: Path, cache: Path) -> None:
    assert load("toy").answer() == 41
    (library,) = cache.iterdir()
    os.utime(library, (1, 1))
    assert load("toy").answer() == 41
    assert library.stat().st_mtime > 1


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
def test_a_failed_command_is_named_with_the_end_of_its_complaints(sources: Path, cache: Path) -> None:
    (sources / "toy.cpp").write_text("".join(f"#error complaint {i:03d}\n" for i in range(100)))
    with pytest.raises(build.BuildError) as caught:
        load("toy")
    command, *reason = str(caught.value).splitlines()
    assert build.find_compiler()[0] in command
    assert str(sources / "toy.cpp") in command
    assert len(reason) == build.LAST_LINES
    assert "complaint 099" in str(reason)
    assert "complaint 000" not in str(reason)


def cannot_be_written(folder: Path) -> None:
    """Also by root, whom permissions do not stop."""
    folder.write_text("a file, where a folder should be")


@needs_compiler
def test_without_a_cache_it_serves_and_warns_once(
    sources: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cannot_be_written(cache)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (sources / "other.cpp").write_text(SOURCE)
    assert [load(name).answer() for name in ("toy", "other", "toy")] == [41] * 3
    warnings = [record.getMessage() for record in caplog.records if "cannot be kept" in record.getMessage()]
    assert len(warnings) == 1
    assert str(cache) in warnings[0]
    assert build.CACHE_VARIABLE in warnings[0]
    (folder,) = (tmp_path / "temporary").iterdir()
    assert sorted(path.name.split("-")[0] for path in folder.iterdir()) == ["other", "toy"]


@needs_compiler
def test_what_a_process_alone_has_goes_with_it(sources: Path, cache: Path, tmp_path: Path) -> None:
    cannot_be_written(cache)
    code = (
        "import sys; from pathlib import Path; from paceline_kernels.cpu import build;"
        "build.SOURCES = Path(sys.argv[1]); print(build.load('toy').answer())"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(sources)],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "41\n"
    assert [line.split(",")[0] for line in done.stderr.splitlines()] == [
        "paceline: compiled code cannot be kept",
        "paceline: compiling toy for this CPU (once",
    ]
    assert list(temporary.iterdir()) == []


@needs_compiler
def test_no_place_at_all_is_a_build_error(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cannot_be_written(cache)
    monkeypatch.setattr("tempfile.tempdir", str(cache / "nowhere"))
    with pytest.raises(build.BuildError, match="toy cannot be compiled"):
        load("toy")


@needs_compiler
def test_a_cache_that_others_filled_need_not_be_writable(
    sources: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    load("toy")
    (kept,) = cache.iterdir()
    assert kept.stat().st_mode & 0o005 == 0o005, "others may read and execute it"
    caplog.clear()

    def refuse_to_write(folder: Path | None) -> Path:
        raise PermissionError(str(folder))

    monkeypatch.setattr(build, "_writable", refuse_to_write)
    assert load("toy").answer() == 41
    assert caplog.records == []


@needs_compiler
def test_compiling_is_said_once(sources: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    load("toy")
    load("toy")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "compiling toy for this CPU" in record.getMessage()


@needs_compiler
def test_each_march_has_its_library(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, too."""
    (sources / "toy.h").write_text("#ifdef __AVX2__\n#define ANSWER 2\n#else\n#define ANSWER 1\n#endif\n")
    answers = {}
    for march in ("x86-64", "haswell", "x86-64"):
        monkeypatch.setenv(build.MARCH_VARIABLE, march)
        answers[march] = build.load("toy").answer()
    assert answers == {"x86-64": 1, "haswell": 2}
    assert len(list(cache.iterdir())) == 2


@needs_compiler
@pytest.mark.parametrize(("vendor", "expected"), [("GenuineIntel", 1), ("AuthenticAMD", 0), ("", 0)])
def test_the_source_is_told_whose_this_cpu_is(
    vendor: str, expected: int, sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not whose another one is."""
    (sources / "toy.h").write_text("#ifndef INTEL\n#define INTEL 0\n#endif\n#define ANSWER INTEL\n")
    (cpu_info := tmp_path / "cpuinfo").write_text(f"processor : 0\nvendor_id\t: {vendor}\n\nprocessor : 1\n")
    monkeypatch.setattr(identity, "CPU_INFO", cpu_info)
    monkeypatch.delenv(build.MARCH_VARIABLE, raising=False)
    assert load("toy").answer() == expected
    monkeypatch.setenv(build.MARCH_VARIABLE, "x86-64")
    assert load("toy").answer() == 0


@needs_compiler
def test_one_openmp_runtime() -> None:
    """The one that torch has loaded: after all libraries have come and computed."""
    code = """
import torch
from paceline_kernels.cpu import ceilings, decoder, sampling
from paceline_kernels.cpu.decoder import Kind, Matrix
assert sampling.available() and decoder.available() is None and ceilings.available() is None
torch.ones(512, 512) @ torch.ones(512, 512)
decoder.linear(torch.ones(1, 64), Matrix(Kind.FLOAT32, 64, 64))
names = {line.split("/")[-1].strip() for line in open("/proc/self/maps") if "/" in line}
print(*(name for name in names if name.startswith(("libgomp", "libomp", "libiomp"))), sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 1, done.stdout


def test_no_compiler_is_a_build_error(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.COMPILER_VARIABLE, "no-such-compiler")
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        load("toy")


def test_without_a_compiler_sampling_is_not_available(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(build.COMPILER_VARIABLE, "no-such-compiler")
    monkeypatch.setattr(sampling, "load", load)
    monkeypatch.setattr(build, "_told", [])
    monkeypatch.setattr(sampling, "_library", functools.cache(sampling._library.__wrapped__))
    assert not sampling.available()
    assert not sampling.available()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "torch samples" in record.getMessage()
    assert "no-such-compiler" in record.getMessage()


@needs_compiler
def test_what_cannot_be_compiled_is_not_tried_again(
    sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_found", functools.cache(build._found.__wrapped__))
    (sources / "toy.cpp").write_text("#error not today\n")
    with pytest.raises(build.BuildError, match="not today"):
        build.load("toy")
    monkeypatch.setattr(build, "_compile", refuse)
    with pytest.raises(build.BuildError, match="not today"):
        build.load("toy")


@needs_compiler
@pytest.mark.parametrize("kept", [b"", b"\x7fELF"])
def test_a_library_in_part_is_compiled_anew(
    sources: Path, cache: Path, kept: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    library = build.build("toy", build.march())
    library.write_bytes(kept)
    caplog.clear()
    assert load("toy").answer() == 41
    assert library.stat().st_size > len(kept)
    assert "toy is compiled anew" in caplog.text


@needs_compiler
@pytest.mark.parametrize("missing", [1, 5000])
def test_a_library_without_its_end_is_compiled_anew(sources: Path, cache: Path, missing: int) -> None:
    """In a process of its own, which the loader would end by SIGBUS."""
    library = build.build("toy", build.march())
    whole = library.stat().st_size
    os.truncate(library, whole - missing)
    code = (
        "import sys; from pathlib import Path; from paceline_kernels.cpu import build;"
        "build.SOURCES = Path(sys.argv[1]); print(build.load('toy').answer())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(sources)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "41\n")
    assert "its end is missing" in done.stderr
    assert library.stat().st_size == whole


@needs_compiler
def test_what_others_have_kept_is_left_alone(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.build("toy", build.march())
    library.write_bytes(b"")
    monkeypatch.setattr("os.geteuid", lambda: library.stat().st_uid + 1)
    with pytest.raises(build.BuildError, match="cannot be loaded"):
        load("toy")
    assert library.read_bytes() == b""


@needs_compiler
def test_a_library_that_never_loads_is_compiled_twice_at_most(
    sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def compile_nothing(command: list[str], library: Path) -> None:
        library.write_bytes(b"nothing")
        made.append(library)

    monkeypatch.setattr(build, "_compile", compile_nothing)
    with pytest.raises(build.BuildError, match="cannot be loaded"):
        load("toy")
    assert len(made) == 2


@needs_compiler
def test_a_cache_that_cannot_be_looked_at_is_none(
    sources: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions do not stop root, so they are played."""
    look = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.is_relative_to(cache):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path, **options)

    def mkdir(path: Path, **options: bool) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert load("toy").answer() == 41
    assert "cannot be kept" in caplog.text
    assert not os.path.exists(cache)


@needs_compiler
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_compiler_with_options(
    sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    """`ccache g++`, `g++ -pipe`: what stands behind the first word goes along, and counts."""
    compiler = build.find_compiler()[0]
    (sources / "toy.h").write_text("#ifndef ANSWER\n#define ANSWER 41\n#endif\n")
    assert load("toy").answer() == 41
    wrapper = tmp_path / "a wrapper"
    wrapper.write_text('#!/bin/sh\nexec "$@"\n')
    wrapper.chmod(0o755)
    before = shlex.quote(str(wrapper)) if wrapped else ""
    monkeypatch.setenv(build.COMPILER_VARIABLE, f"{before} {compiler} -DANSWER=42")
    assert load("toy").answer() == 42
    assert len(list(cache.iterdir())) == 2


def test_a_compiler_that_cannot_be_read_is_a_build_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.COMPILER_VARIABLE, "g++ '-DX")
    with pytest.raises(build.BuildError, match="No closing quotation"):
        build.find_compiler()
    monkeypatch.setenv(build.COMPILER_VARIABLE, " ")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(build.BuildError, match=r"c\+\+, g\+\+ or clang\+\+ is not on PATH"):
        build.find_compiler()


@needs_compiler
def test_a_user_without_a_home_is_served(
    sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(build.CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert load("toy").answer() == 41
    assert "no home" in caplog.text


def test_every_library_is_built_ahead() -> None:
    assert {path.stem for path in build.SOURCES.glob("*.cpp")} == set(build.LIBRARIES)


@needs_compiler
def test_building_ahead(sources: Path, cache: Path) -> None:
    """What `make setup` does, with libraries that compile faster."""
    (sources / "other.cpp").write_text(SOURCE)
    (sources / "wrong.cpp").write_text("#error not today\n")

    def run(names: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        code = (
            "import sys; from pathlib import Path; from paceline_kernels.cpu import build;"
            "build.SOURCES, build.LIBRARIES = Path(sys.argv[1]), sys.argv[2:];"
            "from paceline_kernels.cpu.__main__ import main; main()"
        )
        return subprocess.run([sys.executable, "-c", code, str(sources), *names], capture_output=True, text=True)

    done = run(("toy", "other"))
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["toy", "other"]
    assert all(f"compiling {name} for this CPU" in done.stderr for name in ("toy", "other"))
    assert {path.name.split("-")[0] for path in cache.iterdir()} == {"toy", "other"}
    failed = run(("wrong", "toy"))
    assert failed.returncode == 1
    assert failed.stdout.startswith("toy: ")
    assert "wrong: " in failed.stderr
    assert "not today" in failed.stderr
    assert "Traceback" not in failed.stderr
