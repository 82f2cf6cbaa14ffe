"""`paceline.v1.AdminService`: how full the server is, what lives on it, who had how much of it, and its end.

Everything is read on the event loop's thread, which the engine's state belongs to; long lists in parts, so that others
get their turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias

import grpc

from paceline.core.request import Request
from paceline.core.speculation_report import SpeculationReport
from paceline.engine import AsyncEngine
from paceline.engine.usage import TenantUsage
from paceline.errors import NotFound, brief
from paceline.options import check_seconds
from paceline.server.calls import loaded
from paceline.server.convert import MODES, write_duration
from paceline.server.live import LiveGeneration, LiveGenerations
from paceline.v1 import admin_pb2 as pb
from paceline.v1 import admin_pb2_grpc

ADMIN_SERVICE: Final = pb.DESCRIPTOR.services_by_name["AdminService"].full_name

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
# Seconds of grace, or None without a limit, to how many generations ended and how many failed.
Drain: TypeAlias = Callable[[float | None], Awaitable[tuple[int, int]]]

# Entries made before others get their turn: a few milliseconds' worth.
BATCH: Final = 256
RATE_SECONDS: Final = 10.0  # over which tokens per second are told


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Answers UNAVAILABLE until `open` gives it an engine.

    Args:
        live: the generations that have not ended.
        drain: ends service for good.
    """

    def __init__(self, live: LiveGenerations, drain: Drain) -> None:
        self._live = live
        self._drain = drain
        self._started = time.monotonic()
        self._engine: AsyncEngine | None = None
        self._samples: deque[tuple[float, int]] = deque()  # when how many tokens had been emitted, oldest first

    def open(self, engine: AsyncEngine) -> None:
        """From now on, tell of `engine`."""
        self._engine = engine
        self._samples.append((time.monotonic(), engine.engine.totals.tokens))

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        engine = loaded(self._engine)
        scheduler = engine.engine.scheduler
        return pb.GetLoadResponse(
            running_requests=len(scheduler.running),
            waiting_requests=scheduler.tenants.num_queued,
            max_running_requests=scheduler.config.max_num_seqs,
            max_waiting_requests=scheduler.config.max_queued,
            kv_blocks=scheduler.config.num_blocks,
            free_kv_blocks=scheduler.kv.num_free_blocks,
            tokens_per_second=self._rate(engine.engine.totals.tokens),
            draining=engine.draining,
        )

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Context) -> pb.ListRequestsResponse:
        engine = loaded(self._engine)
        response = pb.ListRequestsResponse()
        wanted = [live for live in self._live if request.tenant in ("", live.tenant)]
        for start in range(0, len(wanted), BATCH):
            await asyncio.sleep(0)
            # Others may have ended meanwhile.
            batch = [one for one in wanted[start : start + BATCH] if self._live.get(one.request_id, one.tenant) is one]
            response.requests.extend(_describe(batch, engine))
        return response

    async def CancelGeneration(
        self, request: pb.CancelGenerationRequest, context: Context
    ) -> pb.CancelGenerationResponse:
        engine = loaded(self._engine)
        named = request.HasField("tenant")
        live = self._live.get(request.request_id, request.tenant) if named else self._live.find(request.request_id)
        if live is None or not live.cancel(engine):
            text = f"no generation with request_id {brief(request.request_id)} is live"
            raise NotFound(text, kind="generation", name=request.request_id[:80])
        return pb.CancelGenerationResponse()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        loaded(self._engine)
        grace = None
        if request.HasField("grace"):
            grace = request.grace.seconds + request.grace.nanos / 1e9
            check_seconds("grace", grace)
        ended, failed = await self._drain(grace)
        return pb.DrainResponse(ended=ended, failed=failed)

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        engine = loaded(self._engine).engine
        scheduler, usage = engine.scheduler, engine.usage
        response = pb.GetStatsResponse(
            uptime=write_duration(time.monotonic() - self._started),
            # Those that wait have nothing to tell yet.
            speculation=_write_speculation(scheduler.speculation.report(scheduler.running.values())),
        )
        accounts = usage.report()
        live = Counter(usage.name_of(one.tenant) for one in self._live)
        policies, default = scheduler.tenants.policies, scheduler.tenants.default
        names = [name for name in sorted(accounts.keys() | live.keys()) if request.tenant in ("", name)]
        for index, name in enumerate(names):
            if index % BATCH == 0:
                await asyncio.sleep(0)
            policy = policies.get(name, default)
            weight = policy.weight if policy else 0.0
            response.tenants.append(_write_tenant(name, accounts.get(name, TenantUsage()), live[name], weight))
        return response

    def _rate(self, tokens: int) -> float:
        """Tokens per second since the newest call that is long enough ago, or else the oldest that is known."""
        now, samples = time.monotonic(), self._samples
        while len(samples) > 1 and samples[1][0] <= now - RATE_SECONDS:
            samples.popleft()
        (since, before), (newest, _) = samples[0], samples[-1]
        if now - newest >= RATE_SECONDS / 10:  # so that few are kept, however often somebody asks
            samples.append((now, tokens))
        return (tokens - before) / (now - since) if now > since else 0.0


def _describe(generations: Sequence[LiveGeneration], engine: AsyncEngine) -> list[pb.LiveRequest]:
    scheduler, now = engine.engine.scheduler, time.monotonic()
    choices = [_choices(live, scheduler.requests) for live in generations]
    report = scheduler.speculation.report([request for requests in choices for request in requests]).requests
    found = []
    for live, own in zip(generations, choices, strict=True):
        stream = live.stream
        found.append(
            pb.LiveRequest(
                request_id=live.request_id,
                tenant=live.tenant,
                model=engine.engine.model_name,
                prompt_tokens=stream.prompt_tokens if stream else 0,
                completion_tokens=stream.num_tokens if stream else 0,
                choices=stream.num_choices if stream else 0,
                running_choices=sum(request.request_id in scheduler.running for request in own),
                age=write_duration(now - live.since),
                depth=max([request.depth for request in own], default=0),
                acceptance=max([p for one in own for p in report[one.request_id].acceptance.values()], default=0.0),
            )
        )
    return found


def _choices(live: LiveGeneration, requests: dict[int, Request]) -> list[Request]:
    """Those that have not ended."""
    if live.stream is None:
        return []
    ids = range(live.stream.request_id, live.stream.request_id + live.stream.num_choices)
    return [requests[i] for i in ids if i in requests]


def _write_tenant(name: str, usage: TenantUsage, num_live: int, weight: float) -> pb.TenantStats:
    return pb.TenantStats(
        tenant=name,
        requests=usage.outcomes.total() + num_live,
        ended=usage.outcomes,
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        completion_tokens=usage.completion_tokens,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        engine_seconds=usage.engine_seconds,
        rejected_seconds=usage.rejected_seconds,
        queue_seconds=usage.queue_seconds,
        preemptions=usage.preemptions,
        running_requests=usage.running,
        waiting_requests=usage.waiting,
        weight=weight,
        saved_seconds=usage.saved_seconds,
        service_seconds=usage.service_seconds,
    )


def _write_speculation(report: SpeculationReport) -> pb.SpeculationReport:
    drafters = [
        pb.DrafterStats(
            mode=MODES[method],
            rule=rule,
            acceptance=drafter.acceptance,
            drafted_tokens=drafter.counts.drafted,
            accepted_tokens=drafter.counts.accepted,
        )
        for (method, rule), drafter in report.drafters.items()
    ]
    return pb.SpeculationReport(
        depth=report.decision.depth if report.decision else 0,
        tokens_per_second=report.decision.price_of_time if report.decision else 0.0,
        drafters=drafters,
        saved_seconds=report.totals.saved_seconds,
        rejected_seconds=report.totals.rejected_seconds,
        checked_saved_seconds=report.checked_saved_seconds,
    )
