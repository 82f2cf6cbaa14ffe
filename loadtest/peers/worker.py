"""A worker process, as the harness sees it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from protocol import THREADS

ANSWER_SECONDS = 1200.0  # vLLM compiles for minutes when it sees a model for the first time
QUIT_SECONDS = 10.0


class WorkerFailed(Exception):
    """A worker ended, said nothing for too long, or answered what tells nothing; the message says which."""


class Worker:
    """A worker process and its children, which run only while a request is answered."""

    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                process_group=0,  # for signals; and Linux ends a stopped group whose parent dies
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def ask(self, request: dict[str, Any], timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Raises WorkerFailed."""
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps(request), file=self._requests, flush=True)
        except BrokenPipeError:
            raise WorkerFailed(self._last_words()) from None
        if not select.select([self._answers], [], [], timeout)[0]:
            raise WorkerFailed(f"no answer in {timeout:.0f} s")
        line = self._answers.readline()
        if not line:
            raise WorkerFailed(self._last_words())
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the worker and whatever it started."""
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._requests.close()  # at which a worker ends
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(QUIT_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._answers.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"exit status {self._process.wait()}: {last}"
