"""A server of its own, for whoever drives one from outside."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def server(*options: str) -> AsyncIterator[str]:
    """Run `paceline serve` in a process of its own, on a free port; yields HOST:PORT, and stops the server gracefully.

    Args:
        options: of the command, besides --port.

    Raises:
        RuntimeError: it did not start; why is on stderr.
    """
    command = (sys.executable, "-m", "paceline", "serve", "--port", "0", *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode().strip()
        if not line.startswith("serving on "):
            raise RuntimeError(f"the server did not start (exit code {await process.wait()})")
        yield line.removeprefix("serving on ")
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
