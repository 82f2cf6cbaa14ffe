"""`GET /metrics` over HTTP: what Prometheus asks for, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final, TypeAlias

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from paceline.errors import PacelineError

logger = logging.getLogger(__name__)

MOST_BYTES: Final = 16 << 10  # of a request
SCRAPE_SECONDS: Final = 10.0  # that a scrape may take, its reader included

Render: TypeAlias = Callable[[], Awaitable[bytes]]


class MetricsEndpoint:
    """On the event loop, so that no thread is left over; one answer to a connection.

    Args:
        render: makes the text; one at a time, however many ask.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._one_at_a_time = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Take the port and return it; 0 takes a free one. Raises PacelineError: it cannot be had."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=MOST_BYTES)
        except OSError as error:
            reason = "in use, not allowed, or not this machine's"
            raise PacelineError(f"cannot serve metrics on {host} port {port}: {reason}") from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Give the port back and hang up. Never started: no effect."""
        if self._server is None:
            return
        self._server.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(reader, writer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(SCRAPE_SECONDS):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._response(request.split(b"\r\n", 1)[0]))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()  # nobody is there who would read more
        except Exception:
            logger.exception("metrics could not be told")
        finally:
            writer.close()

    async def _response(self, request_line: bytes) -> bytes:
        """To a line such as "GET /metrics HTTP/1.1"."""
        method, _, rest = request_line.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != b"/metrics":
            return _http(HTTPStatus.NOT_FOUND, b"metrics are under /metrics\n")
        if method not in (b"GET", b"HEAD"):
            return _http(HTTPStatus.METHOD_NOT_ALLOWED, b"GET or HEAD\n")
        async with self._one_at_a_time:
            body = await self._render()
        return _http(HTTPStatus.OK, body, with_body=method == b"GET")


def _http(status: HTTPStatus, body: bytes, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {CONTENT_TYPE_PLAIN_0_0_4}\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
