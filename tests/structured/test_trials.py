"""Grammars that take too much end a process of their own, and nothing else. The processes are real."""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from paceline.core.grammar import GrammarSpec
from paceline.errors import InvalidArgument, Unavailable
from paceline.structured import LLGuidanceCompiler
from paceline.structured import compiler as compiler_module
from paceline.structured import trials as trials_module
from paceline.structured.trials import ATTEMPTS, MIB, TrialLimits
from structured.conftest import EOS, PADDED
from structured.vocabularies import choice, follows, json_schema, lark, regex

LITTLE_TIME = TrialLimits(cpu_seconds=0.5)
LITTLE_MEMORY = TrialLimits(cpu_seconds=60.0, num_bytes=48 * MIB)
FOR_EVER = TrialLimits(cpu_seconds=600.0, num_bytes=2048 * MIB)


def conjunction(terms: int) -> GrammarSpec:
    """Twice as much to compile for each term."""
    return lark("start: ALL\nALL: " + " & ".join(f"/(.*a.{{{gap}}}b.*)/" for gap in range(1, terms + 1)))


def all_of(patterns: int) -> GrammarSpec:
    """The same as a schema."""
    parts = [{"type": "string", "pattern": f"^(.*a.{{{gap}}}b.*)$"} for gap in range(1, patterns + 1)]
    return json_schema(json.dumps({"allOf": parts}))


def pids(compiler: LLGuidanceCompiler) -> list[int]:
    assert compiler._trials is not None
    return [process._process.pid for process in list(compiler._trials._processes)]


def is_there(pid: int) -> bool:
    """As a zombie, too."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def cpu_seconds(pid: int) -> float:
    """That a process has had."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


class Made:
    """Compilers, closed in the end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._made: list[LLGuidanceCompiler] = []

    def __call__(self, limits: TrialLimits) -> LLGuidanceCompiler:
        self._made.append(LLGuidanceCompiler(self._tokenizer, PADDED, [EOS], limits))
        return self._made[-1]

    def close(self) -> None:
        for compiler in self._made:
            compiler.close()


@pytest.fixture
def make(tokenizer: PreTrainedTokenizerBase) -> Iterator[Made]:
    made = Made(tokenizer)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("limits", "reason"), [(LITTLE_TIME, "more than 0.5 s of CPU"), (LITTLE_MEMORY, "more than 48 MiB")]
)
@pytest.mark.parametrize("spec", [conjunction(40), all_of(40)], ids=["grammar", "schema"])
def test_what_takes_too_much_is_refused_alone(make: Made, spec: GrammarSpec, limits: TrialLimits, reason: str) -> None:
    compiler = make(limits)
    compiler.compile(regex("before"))
    [before] = pids(compiler)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidArgument, match=f"it takes {reason} to compile") as error:
        compiler.compile(spec)
    assert error.value.field == f"structured.{spec.kind}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < most + 32 * 1024  # KiB
    [after] = pids(compiler)
    assert after != before  # there is another already
    assert not is_there(before)
    assert follows(compiler.compile(regex("after")).matcher())
    assert pids(compiler) == [after]


def test_what_goes_too_deep_is_refused_alone(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_GRAMMAR_LINES", 10_000)
    chain = "".join(f"r{number}: r{number + 1}\n" for number in range(5000))
    compiler = make(TrialLimits())
    with pytest.raises(InvalidArgument, match="it goes too deep to compile"):
        compiler.compile(lark(f'start: r0\n{chain}r5000: "a"'))
    assert follows(compiler.compile(regex("after")).matcher())


def test_what_was_refused_is_not_tried_again(make: Made) -> None:
    compiler = make(LITTLE_TIME)
    for _ in range(3):
        with pytest.raises(InvalidArgument, match="it takes more"):
            compiler.compile(conjunction(40))
        assert compiler._tried.cache_info().misses == 1


def test_one_process_tries_one_grammar_after_another(make: Made) -> None:
    compiler = make(TrialLimits())
    assert pids(compiler) == []
    for number in range(20):
        compiler.compile(choice(f"number {number}", "\ud7ff", "\n"))
    with pytest.raises(InvalidArgument):
        compiler.compile(regex("\ud800"))
    assert len(pids(compiler)) == 1


def test_time_is_counted_for_each_grammar(make: Made) -> None:
    compiler = make(TrialLimits(cpu_seconds=1.0))
    numbers = itertools.count()
    compiler.compile(regex("begin"))
    [pid] = pids(compiler)
    while cpu_seconds(pid) < 1.5:
        schema = {"properties": {f"{next(numbers)}": {} for _ in range(500)}}
        compiler.compile(json_schema(json.dumps(schema)))
    assert pids(compiler) == [pid]


def test_threads_have_processes_of_their_own(make: Made) -> None:
    compiler = make(FOR_EVER)
    with ThreadPoolExecutor() as threads:
        slow = [threads.submit(compiler.compile, conjunction(40 + number)) for number in range(2)]
        try:
            assert threads.submit(compiler.compile, regex("quick")).result(60)
            assert not any(call.done() for call in slow)
        finally:
            compiler.close()
        for call in slow:
            with pytest.raises(Unavailable, match="shutting down"):
                call.result(60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_is_killed_is_replaced(make: Made, number: signal.Signals) -> None:
    compiler = make(TrialLimits())
    compiler.compile(regex("first"))
    [pid] = pids(compiler)
    os.kill(pid, number)
    assert follows(compiler.compile(regex("second")).matcher())
    assert not is_there(pid)


def test_one_that_is_killed_at_work_is_no_fault_of_the_grammar(make: Made) -> None:
    compiler = make(FOR_EVER)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(compiler.compile, conjunction(40))
        killed: set[int] = set()
        try:
            while not call.done():
                for pid in set(pids(compiler)) - killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
                time.sleep(0.01)
        finally:
            compiler.close()
        with pytest.raises(Unavailable, match="cannot be tried"):
            call.result()
    assert len(killed) >= ATTEMPTS
    assert not any(map(is_there, killed))


def test_a_clock_that_runs_out_is_no_fault_of_the_grammar(make: Made) -> None:
    compiler = make(TrialLimits(cpu_seconds=600.0, clock_seconds=0.1))
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"within 0.1 s"):
            compiler.compile(conjunction(40))
    assert len(pids(compiler)) == 1


def test_without_processes_the_request_ends(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: object, **kwargs: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    compiler = make(TrialLimits())
    with monkeypatch.context() as patched:
        patched.setattr(trials_module.subprocess, "Popen", none)
        with pytest.raises(Unavailable, match="Resource temporarily unavailable"):
            compiler.compile(regex("no process"))
    assert follows(compiler.compile(regex("no process")).matcher())


def test_nothing_is_left(make: Made) -> None:
    compiler = make(TrialLimits())
    compiler.compile(regex("one"))
    [pid] = pids(compiler)
    compiler.close()
    compiler.close()
    assert not is_there(pid)
    with pytest.raises(Unavailable, match="shutting down"):
        compiler.compile(regex("two"))


def test_nothing_is_left_of_a_compiler_that_is_forgotten(tokenizer: PreTrainedTokenizerBase) -> None:
    compiler = LLGuidanceCompiler(tokenizer, PADDED, [EOS])
    compiler.compile(regex("one"))
    [pid] = pids(compiler)
    del compiler
    gc.collect()
    assert not is_there(pid)


SERVER = """
import json, sys
from paceline.core.grammar import GrammarKind, GrammarSpec
from paceline.structured.trials import TrialLimits, Trials

model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
vocabulary = json.dumps({"model": model, "decoder": decoder, "added_tokens": [], "pre_tokenizer": None})
trials = Trials((vocabulary, 1, [], []), TrialLimits())
print(trials.refusal(GrammarSpec(GrammarKind.REGEX, "a")), *(p._process.pid for p in trials._processes), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_outlives_the_server(killed: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        refusal, pid = server.stdout.readline().split()
        assert refusal == "None"
        handle = os.pidfd_open(int(pid))
        try:
            if killed:
                server.kill()
            else:
                server.stdin.close()
            server.wait()
            assert select.select([handle], [], [], 60)[0]
        finally:
            os.close(handle)
