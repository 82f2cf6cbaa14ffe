"""What Prometheus reads: vLLM's names where the meaning is the same, ours with `paceline_` in front."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import grpc
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.depth import Decision
from paceline.core.plan import FinishReason
from paceline.core.request import Request
from paceline.engine import AsyncEngine, Engine, Totals
from paceline.engine.usage import TenantUsage
from paceline.server.calls import Call

# Seconds, as vLLM has them, so that dashboards for it fit; with a few more below for small models.
FIRST_TOKEN_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_BUCKETS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
RPC_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

FINISHED_REASONS: Final = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_LENGTH: "length",
    FinishReason.DEAD_END: "dead_end",
}
ABORTED: Final = "abort"


class Metrics:
    """Counts what passes, and shows it together with what the engine counts itself. Before `open`, there is only what
    concerns the process and its RPCs.
    """

    def __init__(self) -> None:
        # They double the series, for what no query needs.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._rpcs = Counter("paceline_rpcs", "RPCs that have ended.", ("method", "code"), registry=self._registry)
        self._rpc_seconds = Histogram(
            "paceline_rpc_duration_seconds",
            "RPCs from their first to their last byte.",
            ("method",),
            buckets=RPC_BUCKETS,
            registry=self._registry,
        )
        # Its own: the loop's threads may all be busy with long prompts.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-metrics")
        self._engine: AsyncEngine | None = None

    def open(self, engine: AsyncEngine) -> None:
        """From now on, show `engine` too."""
        self._engine = engine
        engine.engine.on_end.append(_RequestTimes(engine.engine.model_name, self._registry).observe)

    def observe_rpc(self, call: Call, code: grpc.StatusCode, seconds: float) -> None:
        """An `Observer` of RPCs."""
        self._rpcs.labels(call.method, code.name).inc()
        self._rpc_seconds.labels(call.method).observe(seconds)

    async def render(self) -> bytes:
        """All of it, in Prometheus' text format. Values are read at once, on the event loop's thread, and written in
        another.
        """
        snapshot = None if self._engine is None else Snapshot.of(self._engine)
        both = _Both(self._registry, snapshot)
        return await asyncio.get_running_loop().run_in_executor(self._writer, generate_latest, both)

    def close(self) -> None:
        """No more `render` from now on."""
        self._writer.shutdown(wait=False)


class _RequestTimes:
    """Histograms of what happened to completions, told when they end."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("model_name",), buckets=buckets, registry=registry).labels(model)

        self._model = model
        self._ended = Counter(
            "vllm:request_success", "Completions that have ended.", ("model_name", "finished_reason"), registry=registry
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "From arrival to admission, of those admitted.", REQUEST_BUCKETS
        )
        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_BUCKETS
        )
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "A finished completion's mean time between tokens.",
            PER_TOKEN_BUCKETS,
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end, of those finished.", REQUEST_BUCKETS
        )

    def observe(self, request: Request, reason: FinishReason | None, now: float) -> None:
        """An `EndObserver`."""
        self._ended.labels(self._model, FINISHED_REASONS[reason] if reason else ABORTED).inc()
        if request.first_scheduled is not None:
            self._queue.observe(request.first_scheduled - request.arrival)
        if request.first_token is None:
            return
        self._first_token.observe(request.first_token - request.arrival)
        if reason is not None:
            self._whole.observe(now - request.arrival)
            later_tokens = len(request.output_token_ids) - 1
            if later_tokens > 0:
                self._per_token.observe((now - request.first_token) / later_tokens)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine at one moment.

    Attributes:
        serving: it runs, and takes new requests.
        kv_usage: share of the KV blocks that live requests hold.
        decision: the last of the policy.
        tenants: as `Usage.report` has them.
    """

    model: str
    serving: bool
    running: int
    waiting: int
    kv_usage: float
    decision: Decision | None
    totals: Totals
    tenants: dict[str, TenantUsage]

    @classmethod
    def of(cls, engine: AsyncEngine) -> Snapshot:
        inner: Engine = engine.engine
        scheduler = inner.scheduler
        return cls(
            model=inner.model_name,
            serving=engine.healthy and not engine.draining,
            running=len(scheduler.running),
            waiting=scheduler.tenants.num_queued,
            kv_usage=1.0 - scheduler.kv.num_free_blocks / scheduler.config.num_blocks,
            decision=scheduler.speculation.policy.decision,
            totals=replace(inner.totals),
            tenants=inner.usage.report(),
        )

    def families(self) -> Iterator[Metric]:
        """As Prometheus has them. May run in any thread."""
        decision = self.decision or Decision()
        yield self._gauge("vllm:num_requests_running", "Completions in the batch.", self.running)
        yield self._gauge("vllm:num_requests_waiting", "Completions that wait or are prepared.", self.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks that requests hold, 0 to 1.", self.kv_usage)
        yield self._gauge("paceline_serving", "1 while new requests are taken.", float(self.serving))
        yield self._gauge("paceline_speculation_depth", "Drafts of the deepest request, last decided.", decision.depth)
        yield self._gauge(
            "paceline_price_of_time_tokens_per_second",
            "Tokens that a second of the engine is worth to the policy.",
            decision.price_of_time,
        )
        yield self._gauge(
            "paceline_saved_seconds",
            "Against no drafts, by the cost model, since the start.",
            self._sum(lambda tenant: tenant.saved_seconds),
        )
        yield self._counter("paceline_engine_steps", "Steps of the engine.", self.totals.steps)
        for name, (text, value_of) in SUMS.items():
            yield self._counter(name, text, self._sum(value_of))
        phases = CounterMetricFamily(
            "paceline_engine_step_seconds", "What steps took, by what it was spent on.", labels=("model_name", "phase")
        )
        for phase in ("draft", "verify", "sample", "python"):
            phases.add_metric((self.model, phase), getattr(self.totals, phase))
        yield phases
        yield from self._by_tenant()

    def _by_tenant(self) -> Iterator[Metric]:
        labels = ("model_name", "tenant")
        for kind, table in ((CounterMetricFamily, TENANT_COUNTERS), (GaugeMetricFamily, TENANT_GAUGES)):
            for name, (text, value_of) in table.items():
                family = kind(name, text, labels=labels)
                for tenant, usage in self.tenants.items():
                    family.add_metric((self.model, tenant), value_of(usage))
                yield family
        outcomes = CounterMetricFamily(
            "paceline_generations", "Generations that have ended, by gRPC status.", labels=(*labels, "code")
        )
        for tenant, usage in self.tenants.items():
            for code, count in usage.outcomes.items():
                outcomes.add_metric((self.model, tenant, code), count)
        yield outcomes

    def _sum(self, value_of: Callable[[TenantUsage], float]) -> float:
        return sum(map(value_of, self.tenants.values()))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self.model,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self.model,), value)
        return family


Values = dict[str, tuple[str, Callable[[TenantUsage], float]]]

# Of all tenants together.
SUMS: Final[Values] = {
    "vllm:prompt_tokens": ("Tokens of prompts that were admitted.", lambda t: t.prompt_tokens),
    "vllm:generation_tokens": ("Completion tokens.", lambda t: t.completion_tokens),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", lambda t: t.prompt_tokens),
    "vllm:prefix_cache_hits": ("Prompt tokens whose KV was there.", lambda t: t.cached_prompt_tokens),
    "vllm:num_preemptions": ("Times that a running completion gave way.", lambda t: t.preemptions),
    "vllm:spec_decode_num_drafts": ("Verify steps with drafts.", lambda t: t.draft_steps),
    "vllm:spec_decode_num_draft_tokens": ("Drafts verified.", lambda t: t.drafted_tokens),
    "vllm:spec_decode_num_accepted_tokens": ("Drafts kept.", lambda t: t.accepted_tokens),
    "paceline_rejected_seconds": ("Spent on drafts that were rejected.", lambda t: t.rejected_seconds),
}
TENANT_COUNTERS: Final[Values] = {
    "paceline_tenant_prompt_tokens": ("Tokens of prompts that were admitted.", lambda t: t.prompt_tokens),
    "paceline_tenant_cached_prompt_tokens": ("Of these, those whose KV was there.", lambda t: t.cached_prompt_tokens),
    "paceline_tenant_generation_tokens": ("Completion tokens.", lambda t: t.completion_tokens),
    "paceline_tenant_engine_seconds": ("Engine time charged.", lambda t: t.engine_seconds),
    "paceline_tenant_rejected_seconds": ("Of this, what rejected drafts took.", lambda t: t.rejected_seconds),
    "paceline_tenant_queue_seconds": ("From arrival to admission, summed.", lambda t: t.queue_seconds),
    "paceline_tenant_preemptions": ("Times that a running completion gave way.", lambda t: t.preemptions),
}
TENANT_GAUGES: Final[Values] = {
    "paceline_tenant_requests_running": ("Completions in the batch.", lambda t: t.running),
    "paceline_tenant_requests_waiting": ("Completions that wait or are prepared.", lambda t: t.waiting),
    "paceline_tenant_service_seconds": ("Charged over weight: the lowest is served next.", lambda t: t.service_seconds),
}


class _Both(Collector):
    """What was counted here, and what the engine counted."""

    def __init__(self, registry: CollectorRegistry, snapshot: Snapshot | None) -> None:
        self._registry = registry
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        yield from self._registry.collect()
        if self._snapshot is not None:
            yield from self._snapshot.families()
