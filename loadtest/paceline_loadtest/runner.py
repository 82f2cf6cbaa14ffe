"""Drives a workload: sends each request when it is due and records what comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext

from paceline_loadtest.clients import Client, Outcome, RequestFailed
from paceline_loadtest.metrics import Report, RequestRecord, summarize
from paceline_loadtest.workload import PlannedRequest, Workload


async def run_load(
    client: Client, workload: Workload, *, on_record: Callable[[RequestRecord], None] | None = None
) -> Report:
    """Send the warm-ups, then the requests, and report on the latter. A request that fails is counted, not raised.

    Args:
        client: where to; it stays open.
        workload: what and when.
        on_record: called as each measured request ends, from the event loop.
    """
    for warmup in workload.warmups:
        await _measure(client, warmup, origin=0.0, arrival=0.0)
    return await _Run(client, workload, on_record).measure()


class _Run:
    """One run: the time it began and the limit its requests share."""

    def __init__(self, client: Client, workload: Workload, on_record: Callable[[RequestRecord], None] | None) -> None:
        self._client = client
        self._workload = workload
        self._on_record = on_record
        self._origin = time.perf_counter()
        concurrency = workload.config.max_concurrency
        # First come, first served: a request that was due earlier is sent earlier.
        self._place: AbstractAsyncContextManager[None] = (
            asyncio.Semaphore(concurrency) if concurrency else nullcontext()
        )

    async def measure(self) -> Report:
        tasks: list[asyncio.Task[RequestRecord]] = []
        async with asyncio.TaskGroup() as group:
            for request in self._workload.requests:
                # From the start, not from the request before: a late wake-up must not delay all that follow.
                delay = request.arrival - self._now()
                if delay > 0:
                    await asyncio.sleep(delay)
                tasks.append(group.create_task(self._send(request)))
        return summarize(self._workload.config, [task.result() for task in tasks])

    async def _send(self, request: PlannedRequest) -> RequestRecord:
        async with self._place:
            arrival = self._now() if self._workload.config.closed_loop else request.arrival
            record = await _measure(self._client, request, self._origin, arrival)
        if self._on_record is not None:
            self._on_record(record)
        return record

    def _now(self) -> float:
        return time.perf_counter() - self._origin


async def _measure(client: Client, request: PlannedRequest, origin: float, arrival: float) -> RequestRecord:
    """Send one request now; `origin` is the start of the run on the clock, `arrival` in seconds after it."""
    times: list[float] = []
    tokens: list[int] = []
    outcome: Outcome | None = None
    code = message = ""
    sent = time.perf_counter() - origin
    try:
        async with aclosing(client.stream(request)) as chunks:
            async for chunk in chunks:
                if chunk.num_tokens:
                    times.append(time.perf_counter() - origin)
                    tokens.append(chunk.num_tokens)
                outcome = chunk.outcome or outcome
    except RequestFailed as error:
        code, message = error.code, error.message
    return RequestRecord(
        index=request.index,
        arrival=arrival,
        sent=sent,
        ended=time.perf_counter() - origin,
        chunk_times=tuple(times),
        chunk_tokens=tuple(tokens),
        outcome=outcome,
        error_code=code,
        error=message,
    )
