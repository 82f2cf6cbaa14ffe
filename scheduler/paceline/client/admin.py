"""For those who operate a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, Unpack

from paceline.client.connection import CallOptions
from paceline.client.question import Question
from paceline.client.request import build_drain, build_named
from paceline.client.results import read_fields
from paceline.v1 import admin_pb2 as pb

T = TypeVar("T")

_SERVICE: Final = "/paceline.v1.AdminService/"


@dataclass(frozen=True, slots=True)
class Load:
    """How full a server is. KV blocks that only the prefix cache holds are free; the rate is of completion tokens, over
    the last seconds.
    """

    running_requests: int
    waiting_requests: int
    max_running_requests: int
    max_waiting_requests: int
    kv_blocks: int
    free_kv_blocks: int
    tokens_per_second: float
    draining: bool


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A generation that has not ended. `age` is in seconds; `completion_tokens` are of all its choices; `depth` is of
    its last step, and `acceptance` what is expected of its next first draft.
    """

    request_id: str
    tenant: str
    model: str
    prompt_tokens: int
    completion_tokens: int
    choices: int
    running_choices: int
    age: float
    depth: int
    acceptance: float


@dataclass(frozen=True, slots=True)
class Drained:
    """Generations that ended by themselves, and those that were failed when the grace was over."""

    ended: int
    failed: int


@dataclass(frozen=True, slots=True)
class TenantStats:
    """What a tenant was served since the server started; `ended` counts generations by status, "OK" among them; who has
    the least `service_seconds` is served next.
    """

    tenant: str
    requests: int
    ended: Mapping[str, int]
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    engine_seconds: float
    rejected_seconds: float
    queue_seconds: float
    preemptions: int
    running_requests: int
    waiting_requests: int
    weight: float
    saved_seconds: float
    service_seconds: float


@dataclass(frozen=True, slots=True)
class DrafterStats:
    """`acceptance` is expected of a new request, by position: that a draft is kept if those before it were."""

    mode: str
    rule: str
    acceptance: tuple[float, ...]
    drafted_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """What speculation does at this moment, and has saved. `tokens_per_second` is what a second of the engine is worth;
    `checked_saved_seconds` is None where no step without drafts was there to check by.
    """

    depth: int
    tokens_per_second: float
    drafters: tuple[DrafterStats, ...]
    saved_seconds: float
    rejected_seconds: float
    checked_saved_seconds: float | None


@dataclass(frozen=True, slots=True)
class ServerStats:
    """`uptime` is in seconds."""

    uptime: float
    tenants: tuple[TenantStats, ...]
    speculation: SpeculationReport


def ask_load() -> Question[Load]:
    return Question(
        f"{_SERVICE}GetLoad", pb.GetLoadRequest(), pb.GetLoadResponse, lambda answer: read_fields(Load, answer)
    )


def ask_requests(tenant: str) -> Question[tuple[LiveRequest, ...]]:
    return Question(
        f"{_SERVICE}ListRequests",
        build_named(pb.ListRequestsRequest(), tenant=tenant),
        pb.ListRequestsResponse,
        lambda answer: tuple(read_fields(LiveRequest, request) for request in answer.requests),
    )


def ask_cancel(live_id: str, tenant: str | None) -> Question[None]:
    request = build_named(pb.CancelGenerationRequest(), request_id=live_id, tenant=tenant)
    answer = pb.CancelGenerationResponse
    return Question(f"{_SERVICE}CancelGeneration", request, answer, lambda _: None, repeatable=False)


def ask_drain(grace: float | None) -> Question[Drained]:
    return Question(
        f"{_SERVICE}Drain", build_drain(grace), pb.DrainResponse, lambda answer: read_fields(Drained, answer)
    )


def ask_stats(tenant: str) -> Question[ServerStats]:
    request = build_named(pb.GetStatsRequest(), tenant=tenant)
    return Question(f"{_SERVICE}GetStats", request, pb.GetStatsResponse, _read_stats)


def _read_stats(message: pb.GetStatsResponse) -> ServerStats:
    report = message.speculation
    drafters = tuple(read_fields(DrafterStats, drafter) for drafter in report.drafters)
    return read_fields(
        ServerStats,
        message,
        tenants=tuple(read_fields(TenantStats, tenant) for tenant in message.tenants),
        speculation=read_fields(SpeculationReport, report, drafters=drafters),
    )


class AsyncAsk(Protocol):
    """How an `AsyncClient` has a question answered."""

    async def __call__(self, question: Question[T], /, **options: Unpack[CallOptions]) -> T: ...


class Ask(Protocol):
    """How a `Client` has a question answered."""

    def __call__(self, question: Question[T], /, **options: Unpack[CallOptions]) -> T: ...


class AsyncAdmin:
    """`AsyncClient.admin`: for callers whom the server lets. Every method raises `RpcError`."""

    def __init__(self, ask: AsyncAsk) -> None:
        self._ask = ask

    async def load(self, **options: Unpack[CallOptions]) -> Load:
        """How full the server is: cheap, for balancers and autoscalers."""
        return await self._ask(ask_load(), **options)

    async def requests(self, tenant: str = "", **options: Unpack[CallOptions]) -> tuple[LiveRequest, ...]:
        """The generations that have not ended, of one tenant or of everybody."""
        return await self._ask(ask_requests(tenant), **options)

    async def cancel(self, live_id: str, tenant: str | None = None, **options: Unpack[CallOptions]) -> None:
        """End the generation of that id with CANCELLED: of this tenant, or of the only one that has such an id.

        Never retried: what was done and whose answer was lost would be answered by `NotFound`. After `Unavailable` it
        may have ended; to be sure, cancel it again, and take `NotFound` for an end.

        Raises:
            NotFound: none is live.
            InvalidArgument: several tenants have one.
        """
        await self._ask(ask_cancel(live_id, tenant), **options)

    async def drain(self, grace: float | None = None, **options: Unpack[CallOptions]) -> Drained:
        """Take nothing new, and return when everything has ended, or after `grace` seconds, when what is left fails."""
        return await self._ask(ask_drain(grace), **options)

    async def stats(self, tenant: str = "", **options: Unpack[CallOptions]) -> ServerStats:
        """What was served to one tenant or to everybody, and what speculation does."""
        return await self._ask(ask_stats(tenant), **options)


class Admin:
    """`Client.admin`: as `AsyncAdmin`, but blocking."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def load(self, **options: Unpack[CallOptions]) -> Load:
        return self._ask(ask_load(), **options)

    def requests(self, tenant: str = "", **options: Unpack[CallOptions]) -> tuple[LiveRequest, ...]:
        return self._ask(ask_requests(tenant), **options)

    def cancel(self, live_id: str, tenant: str | None = None, **options: Unpack[CallOptions]) -> None:
        """Not retried either: see there."""
        self._ask(ask_cancel(live_id, tenant), **options)

    def drain(self, grace: float | None = None, **options: Unpack[CallOptions]) -> Drained:
        return self._ask(ask_drain(grace), **options)

    def stats(self, tenant: str = "", **options: Unpack[CallOptions]) -> ServerStats:
        return self._ask(ask_stats(tenant), **options)
