"""Grammars are tried in other processes before they are compiled here, where nothing could stop that."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from typing import IO

from paceline.core.grammar import GrammarSpec
from paceline.errors import Reason, Unavailable

logger = logging.getLogger(__name__)

MIB = 1 << 20
# By the clock, what takes a second for a large vocabulary, and much less.
START_SECONDS = 120.0
END_SECONDS = 10.0
ATTEMPTS = 2  # somebody else may have ended a process, such as the system for memory


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What a grammar may take to compile.

    Attributes:
        cpu_seconds: of the CPU, so that a busy machine refuses nothing.
        num_bytes: of memory.
        clock_seconds: by the clock, however busy the machine is.
    """

    cpu_seconds: float = 5.0
    num_bytes: int = 512 * MIB
    clock_seconds: float = 120.0


class Trials:
    """Tries grammars, as many at once as there are threads that ask. Thread-safe.

    A process tries one grammar after another. There are as many as were ever wanted at once, and none before the first
    grammar. Where one has ended another is started at once, not when somebody has to wait for it.

    Args:
        vocabulary: the arguments of `Vocabulary`.
    """

    def __init__(self, vocabulary: tuple[str, int, list[int], list[int]], limits: TrialLimits) -> None:
        self.limits = limits
        self._processes: set[_TrialProcess] = set()
        self._idle: list[_TrialProcess] = []  # the next to be taken is the last
        self._lock = threading.Lock()
        self._vocabulary = _memory_file()
        self._vocabulary.write(json.dumps(vocabulary).encode())
        self._vocabulary.flush()
        # Also where nobody closes this. Should the server be killed, the processes find their connections closed.
        self._close = weakref.finalize(self, _close, self._processes, self._vocabulary)

    def refusal(self, spec: GrammarSpec) -> str | None:
        """Why a grammar cannot be compiled, in words; None if it can, within the limits.

        Raises:
            Unavailable: it could not be tried.
        """
        for _ in range(ATTEMPTS):
            process = self._take()
            try:
                reason = process.refusal(spec)
            except EOFError:
                self._replace(process)
                reason = self._fault(process)
                if reason is not None:
                    return reason
                if self._close.alive:
                    logger.warning("a process in which grammars are tried ended: %s", process.returncode)
            except BaseException:
                self._replace(process)
                raise
            else:
                with self._lock:
                    self._idle.append(process)
                return reason
        raise Unavailable("grammars cannot be tried: the processes that do it end")

    def close(self) -> None:
        """End all processes. Grammars that are being tried are Unavailable, as are all later ones."""
        with self._lock:
            self._close()

    def _fault(self, process: _TrialProcess) -> str | None:
        """What the grammar has ended a process by, in words; None if somebody else has."""
        if process.returncode is None or not process.is_ready:
            return None
        match -process.returncode:
            case signal.SIGPROF:
                return f"it takes more than {self.limits.cpu_seconds:g} s of CPU to compile"
            case signal.SIGABRT:  # by Rust's allocator
                return f"it takes more than {self.limits.num_bytes // MIB} MiB to compile"
            case signal.SIGSEGV | signal.SIGBUS:  # by the end of the stack
                return "it goes too deep to compile"
            case _:
                return None

    def _take(self) -> _TrialProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.end()
                self._processes.discard(process)
            return self._start()

    def _replace(self, process: _TrialProcess) -> None:
        process.end()  # which takes the system a while, if there is much memory to take back
        with self._lock:
            self._processes.discard(process)
            if self._close.alive:
                self._idle.insert(0, self._start())  # it is the last to be taken: it has to load the vocabulary

    def _start(self) -> _TrialProcess:
        if not self._close.alive:
            raise Unavailable("the server is shutting down", reason=Reason.DRAINING)
        try:
            process = _TrialProcess(self._vocabulary, self.limits)
        except OSError as error:
            raise Unavailable(f"grammars cannot be tried: {error.strerror}") from error
        self._processes.add(process)
        return process


class _TrialProcess:
    """One process, for one thread at a time.

    Attributes:
        is_ready: it has read the vocabulary.
    """

    def __init__(self, vocabulary: IO[bytes], limits: TrialLimits) -> None:
        self._limits = limits
        self._connection, its_end = Pipe()
        self.is_ready = False
        arguments = map(str, (its_end.fileno(), limits.cpu_seconds, limits.num_bytes))
        try:
            with its_end:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "paceline.structured.trial_process", *arguments],
                    stdin=vocabulary,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[its_end.fileno()],
                    env=_environment(),
                    process_group=0,  # Ctrl-C is for the server, which has its own way to end
                )
        except BaseException:
            self._connection.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def refusal(self, spec: GrammarSpec) -> str | None:
        """See `Trials`. EOFError where the process has ended meanwhile."""
        try:
            if not self.is_ready:
                self._receive(START_SECONDS)
                self.is_ready = True
            self._connection.send_bytes(json.dumps([spec.kind, spec.text, spec.choices]).encode())
            reason: str | None = json.loads(self._receive(self._limits.clock_seconds))
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):  # it tells by what as it has ended altogether
                self._process.wait(END_SECONDS)
            raise EOFError from error
        return reason

    def kill(self) -> None:
        """From any thread: whoever waits for it finds that it has ended."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Kill it if it lives, and leave nothing of it."""
        self.kill()
        self._connection.close()

    def _receive(self, seconds: float) -> bytes:
        if self._connection.poll(seconds):
            return self._connection.recv_bytes()
        raise Unavailable(f"the grammar could not be tried within {seconds:g} s, so busy is this machine")


def _memory_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("vocabulary"), "w+b")
    return tempfile.TemporaryFile()


def _environment() -> dict[str, str]:
    """Modules are found where they are found here, and no threads of numpy's take address space."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}


def _close(processes: Iterable[_TrialProcess], vocabulary: IO[bytes]) -> None:
    for process in list(processes):  # threads may still start some
        process.kill()
    vocabulary.close()
