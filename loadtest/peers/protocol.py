"""What all workers share: requests on stdin, answers on stdout, one JSON object a line. Standard library only.

    {"load": {"target": DIR, "draft": DIR, "depth": 3, "streams": 16, "length": 512}}  ->  {"engine": NAME AND VERSION}
    {"run": {"prompts": [[ID, ...], ...], "max_tokens": 128}}  ->  {"seconds": S, "token_ids": [[ID, ...], ...]}

A worker ends when stdin does. An error ends it too, with the traceback on stderr: the harness starts another.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

THREADS = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Load:
    """What an engine has to be ready for.

    Attributes:
        target, draft: Hugging Face directories.
        depth: drafts per step, 0 for none at all; None leaves it to the engine.
        streams: most prompts of one run.
        length: most tokens of one stream, its prompt included.
    """

    target: str
    draft: str
    depth: int | None
    streams: int
    length: int


class Engine(Protocol):
    def load(self, load: Load) -> str:
        """Be ready, whatever was loaded before; returns name and version, with what is notable about the settings."""

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Complete all prompts together, greedily and past any end of text; the `max_tokens` token ids of each."""


def serve(engine: Engine) -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout, and would break the protocol
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, object]
        if "load" in request:
            answer = {"engine": engine.load(Load(**request["load"]))}
        else:
            began = time.perf_counter()
            token_ids = engine.run(**request["run"])
            answer = {"seconds": time.perf_counter() - began, "token_ids": token_ids}
        print(json.dumps(answer), file=answers, flush=True)


def converted(source: str, convert: Callable[[Path, Path], None]) -> Path:
    """`source` in the engine's own format, kept in its environment; `convert(source, destination)` makes it once."""
    files = sorted(file for file in Path(source).resolve().iterdir() if file.is_file())
    facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    destination = Path(sys.prefix) / "models" / name
    if not destination.exists():
        destination.parent.mkdir(exist_ok=True)
        partial = destination.with_suffix(f".{os.getpid()}")
        convert(Path(source), partial)
        partial.rename(destination)
    return destination
