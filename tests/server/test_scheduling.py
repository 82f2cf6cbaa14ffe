"""Deadlines, tenants and their limits, as clients meet them: what is refused, with which status and hint, and when.

The engine's clock stands still unless a test moves it, and steps take as long as the test says.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from paceline import errors
from paceline.client import AsyncClient
from paceline.core.plan import StepPlan, StepTimes
from paceline.core.tenant_policy import ONE_SHARE, TenantPolicy
from paceline.sim import VirtualClock, reference_output
from paceline.v1 import generation_pb2 as pb
from support.serving import BLOCK_SIZE, NUM_BLOCKS, Serving, details_of, failure, request, serving

Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]
DEADLINE, INVALID = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED, UNAVAILABLE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def clock(serving: Serving) -> VirtualClock:
    """The engine's, from now on."""
    made = VirtualClock(1000.0)
    serving.engine.engine.clock = made
    return made


def of(tenant: str, text: str = "hello", max_tokens: int = 8, **scheduling: Any) -> pb.GenerateRequest:
    """A request of a tenant."""
    return request(text, max_tokens, scheduling=pb.SchedulingParams(tenant=tenant, **scheduling))


def seconds(number: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(number * 1e9))
    return duration


def let_steps_take(served: Serving, took: float) -> None:
    """As the runner reports it; nobody waits for it."""

    def times(plan: StepPlan) -> StepTimes:
        return StepTimes(total=took)

    served.runner.times = times  # type: ignore[method-assign]


def let_requests_end_every(served: Serving, gap: float) -> None:
    for _ in range(2):
        served.scheduler.rate.step((), (), [], gap)
        served.scheduler.rate.ended(8, 8)


async def whole(call: Call) -> list[pb.GenerateResponse]:
    return [response async for response in call]


async def begun(served: Serving, message: pb.GenerateRequest, timeout: float | None = None) -> Call:  # noqa: ASYNC109
    """A call whose request waits in the scheduler, or runs."""
    before = served.engine.num_live
    call = served.stub.Generate(message, timeout=timeout)
    await served.until(lambda: served.engine.num_live > before)
    return call


# -- deadlines --------------------------------------------------------------------------------------------------------


ESTIMATE = r"too late: it would take about \d+\.\d\d s, and (\d+\.\d\d) s are left"


async def busy(served: Serving) -> Call:
    """A request that runs, in steps of 10 s, on a server where requests get 20 tokens."""
    let_steps_take(served, 10.0)
    served.scheduler.rate.ended(20, 20)
    call = await begun(served, request("0123456789", 30))
    served.runner.allow(5)
    await served.until(lambda: served.engine.engine.totals.steps == 5)
    return call


async def test_what_cannot_be_in_time_is_refused_at_once(serving: Serving) -> None:
    calls = [await begun(serving, request("nothing is known yet", max_tokens=20), timeout=60.0), await busy(serving)]
    error = await failure(serving.stub.Generate(request("too long", max_tokens=20), timeout=30.0))
    assert error.code() is DEADLINE
    told = re.fullmatch(ESTIMATE, error.details() or "")
    assert told
    assert 0.0 < float(told[1]) <= 31.0, "gRPC rounds timeouts up, to three digits"
    assert serving.engine.num_live == 2
    calls.append(await begun(serving, request("in time", max_tokens=20), timeout=3600.0))
    calls.append(await begun(serving, request("whenever", max_tokens=20)))
    serving.runner.open()
    for call in calls:
        assert await whole(call)
    await serving.until(lambda: serving.idle)


async def test_a_first_token_that_cannot_be_in_time(serving: Serving) -> None:
    calls = [await busy(serving)]
    for bound in (8.0, 5.0):
        message = of("", "x" * 60, time_to_first_token=seconds(bound))
        error = await failure(serving.stub.Generate(message))
        assert error.code() is DEADLINE
        told = re.fullmatch(ESTIMATE, error.details() or "")
        assert told
        assert float(told[1]) == bound
    calls.append(await begun(serving, of("", "x" * 60, time_to_first_token=seconds(3600.0))))
    serving.runner.open()
    for call in calls:
        assert await whole(call)
    await serving.until(lambda: serving.idle)


async def test_a_deadline_that_comes_while_it_runs(serving: Serving, clock: VirtualClock) -> None:
    late = aiter(await begun(serving, request("late", 100), timeout=60.0))
    kept = await begun(serving, request("kept", 30))
    serving.runner.allow(3)
    assert (await anext(late)).token_ids
    await serving.until(lambda: serving.runner.steps == 3)
    clock.advance(61.0)
    serving.runner.allow(1)
    error = await failure(late)
    assert (error.code(), error.details()) == (DEADLINE, "too late: the time is over")
    assert [one.prompt_token_ids for one in serving.scheduler.requests.values()] == [tuple(b"kept")]
    serving.engine.engine.check_invariants()
    serving.runner.open()
    assert [token for response in await whole(kept) for token in response.token_ids] == reference_output(b"kept", 30)
    await serving.until(lambda: serving.idle)


async def test_the_rpcs_own_end_frees_the_blocks_too(serving: Serving) -> None:
    """While a step runs, nobody looks at the time but gRPC."""
    error = await failure(serving.stub.Generate(request(max_tokens=100), timeout=0.2))
    assert error.code() is DEADLINE
    await serving.until(lambda: serving.idle)


async def test_a_request_that_was_prepared_for_too_long(
    serving: Serving, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serving.engine.engine
    prepare = engine.prepare

    def slow(wanted: Any) -> Any:
        clock.advance(61.0)
        return prepare(wanted)

    monkeypatch.setattr(engine, "prepare", slow)
    error = await failure(serving.stub.Generate(request(), timeout=60.0))
    assert error.code() is DEADLINE
    assert "the time is over" in (error.details() or "")
    assert serving.idle


@pytest.mark.parametrize(
    ("bound", "code", "text"),
    [
        ({"queue_timeout": seconds(1.5)}, UNAVAILABLE, "not admitted within scheduling.queue_timeout, 1.5 s"),
        ({"time_to_first_token": seconds(1.5)}, DEADLINE, "too late: the time is over"),
    ],
    ids=["queue_timeout", "time_to_first_token"],
)
async def test_a_bound_on_the_wait(
    serving: Serving, clock: VirtualClock, bound: dict[str, Duration], code: grpc.StatusCode, text: str
) -> None:
    """It holds while a request waits, and no longer."""
    serving.scheduler.tenants.set_policies({"a": TenantPolicy(max_running=1)}, ONE_SHARE, 0.0)
    first = await begun(serving, of("a", **bound))
    await serving.until(lambda: len(serving.scheduler.running) == 1)
    second = asyncio.create_task(failure(await begun(serving, of("a", **bound))))
    clock.advance(1.0)
    serving.runner.allow(1)
    await serving.until(lambda: serving.runner.steps == 1)
    assert serving.engine.num_live == 2
    clock.advance(1.0)
    serving.runner.allow(1)
    error = await second
    assert (error.code(), error.details()) == (code, text)
    assert serving.engine.num_live == 1
    serving.runner.open()
    assert (await whole(first))[-1].finished.usage.completion_tokens == 8
    await serving.until(lambda: serving.idle)


@pytest.mark.parametrize("lag", [0, 1])
async def test_one_of_several_completions_that_comes_too_late_ends_all_of_them(lag: int) -> None:
    async with serving(lag=lag) as served:
        clock = served.engine.engine.clock = VirtualClock()
        served.scheduler.tenants.set_policies({"a": TenantPolicy(max_running=2)}, ONE_SHARE, 0.0)
        message = of("a", "hello, all of you", 100, queue_timeout=seconds(1.0))
        message.n = 4
        call = aiter(await begun(served, message, timeout=60.0))
        served.runner.allow(4)
        assert (await anext(call)).HasField("started")
        await served.until(lambda: served.runner.steps == 4)
        assert (len(served.scheduler.running), len(served.scheduler.waiting)) == (2, 2)
        clock.advance(2.0)
        served.runner.allow(2)
        await served.until(lambda: served.runner.steps == 6)
        assert (len(served.scheduler.running), len(served.scheduler.waiting)) == (2, 2)  # it has begun: it may wait
        clock.advance(60.0)
        served.runner.allow(1)
        assert (await failure(call)).code() is DEADLINE
        await served.until(lambda: served.idle)
        served.runner.open()
        assert await whole(served.stub.Generate(of("a")))
        served.engine.engine.check_invariants()


# -- tenants and queues -----------------------------------------------------------------------------------------------


async def test_a_tenant_that_nobody_knows(free: Serving) -> None:
    free.scheduler.tenants.set_policies({"known": ONE_SHARE}, None, 0.0)
    unnamed = ", and named: the caller's credential has none of its own"
    for tenant, more in (("stranger", ""), ("", unnamed)):
        error = await failure(free.stub.Generate(of(tenant)))
        assert error.code() is INVALID
        assert error.details() == f"scheduling.tenant = {tenant!r}: must be a tenant of this server{more}"
        [violation] = details_of(error)["BadRequest"].field_violations  # type: ignore[attr-defined]
        assert violation.field == "scheduling.tenant"
    assert free.idle
    assert await whole(free.stub.Generate(of("known")))


def hint_of(error: grpc.aio.AioRpcError) -> tuple[str | bytes | None, float | None]:
    """When to come again, as gRPC's own retries and as programs are told."""
    found = details_of(error).get("RetryInfo")
    delay = None if found is None else found.retry_delay.ToTimedelta().total_seconds()  # type: ignore[attr-defined]
    return dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms"), delay


async def test_a_full_queue_of_a_tenant(serving: Serving) -> None:
    serving.scheduler.tenants.set_policies({"a": TenantPolicy(max_running=1, max_queued=2)}, ONE_SHARE, 0.0)
    let_requests_end_every(serving, 2.5)
    calls = [await begun(serving, of("a"))]
    await serving.until(lambda: len(serving.scheduler.running) == 1)
    calls.append(await begun(serving, of("a")))
    two = of("a")
    two.n = 2

    async def check(message: pb.GenerateRequest, waiting: int, wait: float) -> None:
        error = await failure(serving.stub.Generate(message))
        assert error.code() is EXHAUSTED
        assert error.details() == f"{waiting} requests of tenant 'a' are waiting, and its max_queued is 2"
        assert hint_of(error) == (str(round(1000 * wait)), wait)

    await check(two, 1, 2.5)
    calls.append(await begun(serving, of("a")))
    await check(of("a"), 2, 2.5)
    await check(two, 2, 5.0)
    calls.append(await begun(serving, of("b")))
    async with AsyncClient(serving.address, max_retries=0) as client:
        with pytest.raises(errors.ResourceExhausted) as caught:
            await client.complete("hello", tenant="a")
    assert caught.value.retry_after == 2.5
    serving.runner.open()
    for call in calls:
        assert await whole(call)
    await serving.until(lambda: serving.idle)


async def test_more_completions_than_the_tenants_queue_ever_holds(free: Serving) -> None:
    free.scheduler.tenants.set_policies({"a": TenantPolicy(max_queued=2)}, ONE_SHARE, 0.0)
    message = of("a")
    message.n = 3
    error = await failure(free.stub.Generate(message))
    assert (error.code(), error.details()) == (INVALID, "n = 3: must be at most 2, max_queued of tenant 'a'")
    message.n = 2
    assert await whole(free.stub.Generate(message))


async def test_a_full_queue_of_the_server() -> None:
    async with serving(max_queued=1) as served:
        let_requests_end_every(served, 2.5)
        calls = [await begun(served, of("a"))]
        await served.until(lambda: len(served.scheduler.running) == 1)
        calls.append(await begun(served, of("a")))
        error = await failure(served.stub.Generate(of("b")))
        assert (error.code(), error.details()) == (UNAVAILABLE, "1 requests are waiting, and max_queued is 1")
        assert hint_of(error) == ("2500", 2.5)
        served.runner.open()
        for call in calls:
            assert await whole(call)


async def test_what_can_never_fit_is_worth_no_retry(free: Serving) -> None:
    free.scheduler.tenants.set_policies({"a": TenantPolicy(max_blocks=4)}, ONE_SHARE, 0.0)
    error = await failure(free.stub.Generate(of("a", max_tokens=4 * BLOCK_SIZE)))
    assert error.code() is EXHAUSTED
    assert "can never fit the KV cache share of tenant 'a': 16 tokens" in (error.details() or "")
    assert hint_of(error) == ("-1", None)
    async with AsyncClient(free.address) as client:
        with pytest.raises(errors.ResourceExhausted) as caught:
            await client.complete("hello", tenant="a", max_tokens=4 * BLOCK_SIZE)
    assert caught.value.retry_after == -1.0
    assert await whole(free.stub.Generate(of("a", max_tokens=4 * BLOCK_SIZE - 5)))


def meter(served: Serving, tokens_per_second: float) -> list[StepPlan | None]:
    """Give tenant a's bucket, which holds one token, this rate. Every attempt to plan a step from now on."""
    policy = TenantPolicy(tokens_per_second=tokens_per_second, burst_tokens=1.0)
    served.scheduler.tenants.set_policies({"a": policy}, ONE_SHARE, 0.0)
    plans: list[StepPlan | None] = []
    plan = served.engine.engine.plan

    def kept() -> StepPlan | None:
        plans.append(plan())
        return plans[-1]

    served.engine.engine.plan = kept  # type: ignore[method-assign]
    return plans


async def test_out_of_tokens(free: Serving, clock: VirtualClock) -> None:
    plans = meter(free, 200.0)
    assert await whole(free.stub.Generate(of("a", "x" * 35, 5)))
    waiting = await begun(free, of("a"))
    assert await whole(free.stub.Generate(of("b", max_tokens=4)))
    assert (free.engine.num_live, len(free.scheduler.waiting)) == (1, 1), "no time has gone by"
    clock.advance(0.2)
    finished = (await whole(waiting))[-1].finished
    assert finished.usage.completion_tokens == 8
    assert finished.timing.queue.ToTimedelta().total_seconds() == pytest.approx(0.2)
    assert plans.count(None) < 20, "a few looks that found nothing to do, and no more"
    await free.until(lambda: free.idle)


async def test_a_deadline_wakes_those_who_wait_for_tokens(free: Serving, clock: VirtualClock) -> None:
    plans = meter(free, 1e-3)
    assert await whole(free.stub.Generate(of("a")))
    call = asyncio.create_task(failure(await begun(free, of("a", queue_timeout=seconds(0.1)))))
    clock.advance(0.1)
    await free.until(lambda: free.idle)
    error = await call
    assert (error.code(), error.details()) == (UNAVAILABLE, "not admitted within scheduling.queue_timeout, 0.1 s")
    assert plans.count(None) < 20


# -- what the account says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
async def test_charges_sum_to_the_engines_time(lag: int) -> None:
    async with serving(lag=lag) as served:
        let_steps_take(served, 0.25)
        served.runner.open()
        calls = [served.stub.Generate(of(tenant, tenant * 9, 10 + 3 * len(tenant))) for tenant in ("a", "bb", "ccc")]
        results = await asyncio.gather(*map(whole, calls))
        await served.until(lambda: served.engine.engine.totals.steps == served.runner.steps)
        charged = [responses[-1].finished.speculation.engine_seconds for responses in results]
        assert all(seconds > 0.0 for seconds in charged)
        # A step that was planned ahead may be for requests that have had their account by then.
        after = sum(tenant.charged_seconds for tenant in served.scheduler.tenants) - sum(charged)
        assert sum(charged) + after == pytest.approx(0.25 * served.runner.steps)
        assert -1e-9 < after < 0.25 * lag * len(calls) + 1e-9


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"output": pb.OutputParams(final_only=True), "n": 2}], ids=str)
async def test_a_prompt_that_was_computed_before(free: Serving, options: dict[str, Any]) -> None:
    text = "a prompt of five blocks"
    cached = (len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE

    async def told(tenant: str) -> tuple[int, int, list[int]]:
        """What a request found at its start and in the end, and the tokens of its first choice."""
        message = of(tenant, text)
        message.MergeFrom(pb.GenerateRequest(**options))
        responses = await whole(free.stub.Generate(message))
        [started] = [response.started for response in responses if response.HasField("started")]
        [usage] = [r.finished.usage for r in responses if r.choice == 0 and r.HasField("finished")]
        tokens = [token for response in responses if response.choice == 0 for token in response.token_ids]
        return started.cached_prompt_tokens, usage.cached_prompt_tokens, tokens

    tokens = reference_output(text.encode(), 8)
    assert await told("a") == (0, 0, tokens)
    assert await told("a") == (cached, cached, tokens)
    assert await told("b") == (0, 0, tokens), "another's"
    await free.until(lambda: free.scheduler.kv.num_free_blocks == NUM_BLOCKS)
