"""What runs in a process in which grammars are tried: `python -m paceline.structured.trial_process FD`.

It reads the arguments of `Vocabulary` from its standard input, says that it is ready, and then compiles what it is
sent, for nothing but to see whether that ends. Neither torch nor grpc nor transformers is imported here, so that it
starts in a fraction of a second.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from paceline.core.grammar import GrammarKind, GrammarSpec
from paceline.structured.compiler import build
from paceline.structured.vocabulary import Vocabulary

UNLIMITED_STACK = 2 << 20  # what glibc gives a thread then


def main(connection: Connection, seconds: float, num_bytes: int) -> None:
    """Serve until the other end is closed, or a grammar takes more than its share: then the system ends this process.

    Args:
        seconds: of CPU, for each grammar. Whatever else the machine does is not counted.
        num_bytes: on top of what this process has before the first one.
    """
    # By its address, not by `read`: the file and its position are shared by all such processes.
    with mmap.mmap(sys.stdin.fileno(), 0, access=mmap.ACCESS_READ) as state:
        vocabulary = Vocabulary(*json.loads(state[:]))
    _limit_memory(num_bytes)
    _limit_stack()
    connection.send_bytes(b"")
    # From here on whoever sends grammars decides what is written there: that memory ended, for one.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process, in native code too
    while True:
        try:
            kind, text, choices = json.loads(connection.recv_bytes())
        except EOFError:
            return
        spec = GrammarSpec(GrammarKind(kind), text, tuple(choices))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            built = build(vocabulary, spec)
        except MemoryError:
            os.abort()  # as llguidance does
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(json.dumps(built if isinstance(built, str) else None).encode())
        del built


def _limit_memory(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except FileNotFoundError:  # not Linux: there the CPU's time alone is limited, and with it how much can be filled
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * mmap.PAGESIZE + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _limit_stack() -> None:
    """What recurses too deeply shall end this process, not the server: its threads have a little more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    of_threads = UNLIMITED_STACK if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_STACK, (of_threads * 3 // 4, hard))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]))
