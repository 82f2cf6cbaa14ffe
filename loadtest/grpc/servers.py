"""What the servers have in common."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Final

STEP_SECONDS: Final = 0.020
TOKEN: Final = " token"


async def answer_stdin(report: Callable[[], dict[str, Any]]) -> None:
    """A server's life: each line on stdin is answered with a report, one line of JSON, and the end of stdin ends it."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    loop.add_reader(sys.stdin.fileno(), lambda: lines.put_nowait(sys.stdin.buffer.readline()))
    while await lines.get():
        print(json.dumps(report()), flush=True)
