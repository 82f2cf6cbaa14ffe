"""AdminService: load, what is live, ending it, draining, and what was served."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core.params import StopParams
from paceline.core.plan import StepPlan, StepTimes
from paceline.core.tenant_policy import TenantPolicy
from paceline.engine import GenerationRequest
from paceline.engine.usage import ALL_OTHERS
from paceline.server import SERVICE_NAME, admin_service
from paceline.server.admin_service import ADMIN_SERVICE
from paceline.server.model_service import MODEL_SERVICE
from paceline.v1 import admin_pb2 as pb
from paceline.v1 import admin_pb2_grpc
from paceline.v1 import generation_pb2 as gen
from support.serving import MODEL, NUM_BLOCKS, Serving, details_of, request
from support.serving import failure as stream_failure
from support.serving import serving as serving_context

CANCELLED, NOT_FOUND = grpc.StatusCode.CANCELLED, grpc.StatusCode.NOT_FOUND
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def stub_of(served: Serving) -> Any:
    return admin_pb2_grpc.AdminServiceStub(served.channel)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def of(tenant: str, text: str = "hello", max_tokens: int = 100, **fields: object) -> gen.GenerateRequest:
    return request(text, max_tokens, scheduling=gen.SchedulingParams(tenant=tenant), **fields)


async def begun(served: Serving, message: gen.GenerateRequest, tokens: bool = False) -> Any:
    """A call whose request waits or runs; with its first tokens, if it should have some."""
    before = served.engine.num_live
    call = served.stub.Generate(message)
    await served.until(lambda: served.engine.num_live > before)
    if tokens:
        served.runner.allow(1)
        await served.until(lambda: served.engine.engine.totals.tokens > 0)
    return call


async def whole(call: Any) -> list[gen.GenerateResponse]:
    return [response async for response in call]


async def health(served: Serving) -> int:
    """That of the server and of each of its services, which share it."""
    stub = health_pb2_grpc.HealthStub(served.channel)
    names = ("", SERVICE_NAME, MODEL_SERVICE, ADMIN_SERVICE)
    [status] = {(await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names}
    return int(status)


def stats_of(response: pb.GetStatsResponse) -> dict[str, pb.TenantStats]:
    return {stats.tenant: stats for stats in response.tenants}


async def test_while_the_model_is_loading() -> None:
    async with serving_context(open_engine=False) as served:
        for method in ("GetLoad", "ListRequests", "CancelGeneration", "Drain", "GetStats"):
            error = await failure(getattr(stub_of(served), method)(getattr(pb, f"{method}Request")()))
            assert error.code() is UNAVAILABLE, method
            assert "still loading" in (error.details() or "")


# -- load -------------------------------------------------------------------------------------------------------------


async def test_load(serving: Serving) -> None:
    idle = await stub_of(serving).GetLoad(pb.GetLoadRequest())
    assert idle == pb.GetLoadResponse(
        max_running_requests=64, max_waiting_requests=4096, kv_blocks=NUM_BLOCKS, free_kv_blocks=NUM_BLOCKS
    )
    serving.scheduler.tenants.set_policies({"a": TenantPolicy(max_running=1)}, None, 0.0)
    first = await begun(serving, of("a", n=3), tokens=True)
    busy = await stub_of(serving).GetLoad(pb.GetLoadRequest())
    assert (busy.running_requests, busy.waiting_requests) == (1, 2), "choices count one by one"
    assert busy.free_kv_blocks < NUM_BLOCKS
    assert busy.tokens_per_second > 0
    assert not busy.draining
    serving.runner.open()
    await whole(first)


async def test_rate_of_tokens_when_many_ask(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    admin, totals = serving.server._admin, serving.engine.engine.totals
    monkeypatch.setattr(admin_service.time, "monotonic", lambda: now)
    rates = list[float]()
    for tenth in range(400):  # 100 tokens per second for 20 s, then nothing
        now += 0.1
        totals.tokens += 10 if tenth < 200 else 0
        rates.append(admin._rate(totals.tokens))
    assert rates[0] > 0
    assert rates[150:200] == pytest.approx([100.0] * 50, rel=0.01)
    assert rates[249] == pytest.approx(50.0, rel=0.15)
    assert rates[-1] == 0.0
    assert len(admin._samples) <= 12
    now += 1000.0
    assert admin._rate(totals.tokens + 5000) == pytest.approx(5.0, rel=0.02), "nobody asked for long"


# -- what is live -----------------------------------------------------------------------------------------------------


async def test_live_requests(serving: Serving) -> None:
    first = await begun(serving, of("a", "hello", request_id="first", n=2), tokens=True)
    second = await begun(serving, of("b", "hello you", request_id="second"))
    found = list((await stub_of(serving).ListRequests(pb.ListRequestsRequest())).requests)
    for live in found:
        assert 0.0 <= live.age.ToNanoseconds() / 1e9 < 60.0
        live.ClearField("age")
    one, other = found
    assert one == pb.LiveRequest(
        request_id="first",
        tenant="a",
        model=MODEL,
        prompt_tokens=5,
        completion_tokens=1,
        choices=2,
        running_choices=2,  # the second has been planned behind the first, whose prompt it shares
        acceptance=one.acceptance,
    )
    assert 0.0 < one.acceptance <= 1.0
    assert other == pb.LiveRequest(
        request_id="second", tenant="b", model=MODEL, prompt_tokens=9, choices=1, acceptance=other.acceptance
    )
    serving.runner.allow(3)
    await serving.until(lambda: serving.engine.engine.totals.steps == 4)
    [one] = (await stub_of(serving).ListRequests(pb.ListRequestsRequest(tenant="a"))).requests
    assert (one.request_id, one.running_choices, one.depth) == ("first", 2, 2)
    assert one.completion_tokens > 2
    serving.runner.open()
    await asyncio.gather(whole(first), whole(second))
    await serving.until(lambda: not len(serving.server.live))
    assert not (await stub_of(serving).ListRequests(pb.ListRequestsRequest())).requests


async def test_many_live_requests_let_others_in_between(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch by batch; those that end meanwhile are left out."""
    monkeypatch.setattr(admin_service, "BATCH", 10)
    calls = [serving.stub.Generate(of("t", request_id=f"r{index}")) for index in range(95)]
    await serving.until(lambda: serving.engine.num_live == 95)
    *stay, leaves = serving.server.live
    batches = list[int]()
    describe = admin_service._describe

    def watched(generations: list[Any], engine: Any) -> list[pb.LiveRequest]:
        batches.append(len(generations))
        if len(batches) == 1:
            asyncio.get_running_loop().call_soon(leaves.cancel, serving.engine)
        return describe(generations, engine)

    monkeypatch.setattr(admin_service, "_describe", watched)
    found = (await stub_of(serving).ListRequests(pb.ListRequestsRequest())).requests
    assert len(batches) == 10
    assert [live.request_id for live in found] == [live.request_id for live in stay]
    serving.runner.open()
    ended = await asyncio.gather(*map(whole, calls), return_exceptions=True)
    [error] = [one for one in ended if isinstance(one, BaseException)]
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.code() is CANCELLED


# -- ending one -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("running", [True, False])
async def test_cancel(serving: Serving, running: bool) -> None:
    call = await begun(serving, of("a", request_id="mine", n=2), tokens=running)
    other = await begun(serving, of("a", request_id="other", max_tokens=5))
    await stub_of(serving).CancelGeneration(pb.CancelGenerationRequest(request_id="mine"))
    assert (await stream_failure(call)).code() is CANCELLED
    assert serving.engine.num_live == 1
    error = await failure(stub_of(serving).CancelGeneration(pb.CancelGenerationRequest(request_id="mine")))
    assert error.code() is NOT_FOUND
    assert details_of(error)["ResourceInfo"].resource_name == "mine"  # type: ignore[attr-defined]
    serving.runner.open()
    await whole(other)
    await serving.until(lambda: serving.idle)


async def test_cancel_where_tenants_have_the_same_id(serving: Serving) -> None:
    calls = {name: await begun(serving, of(name, "hello" + name, request_id="mine")) for name in ("", "a", "bcd")}
    serving.runner.allow(1)
    await serving.until(lambda: serving.engine.engine.totals.tokens > 0)
    admin = stub_of(serving)
    found = (await admin.ListRequests(pb.ListRequestsRequest())).requests
    assert [(live.request_id, live.tenant, live.prompt_tokens) for live in found] == [
        ("mine", "", 5),
        ("mine", "a", 6),
        ("mine", "bcd", 8),
    ]
    assert [live.running_choices for live in found] == [1, 1, 1], "each tells of its own"
    error = await failure(admin.CancelGeneration(pb.CancelGenerationRequest(request_id="mine")))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "as '', 'a', 'bcd' do" in (error.details() or "")
    assert serving.engine.num_live == 3
    for tenant in ("bcd", ""):
        await admin.CancelGeneration(pb.CancelGenerationRequest(request_id="mine", tenant=tenant))
        assert (await stream_failure(calls[tenant])).code() is CANCELLED
        error = await failure(admin.CancelGeneration(pb.CancelGenerationRequest(request_id="mine", tenant=tenant)))
        assert error.code() is NOT_FOUND
    [left] = (await admin.ListRequests(pb.ListRequestsRequest())).requests
    assert left.tenant == "a"
    await admin.CancelGeneration(pb.CancelGenerationRequest(request_id="mine"))
    assert (await stream_failure(calls["a"])).code() is CANCELLED
    await serving.until(lambda: serving.idle)


async def test_cancel_on_the_way_to_the_engine(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its prompt is tokenised in another thread, it is live too."""
    submit, go_on = serving.engine.submit, asyncio.Event()

    async def slow(wanted: GenerationRequest) -> Any:
        await go_on.wait()
        return await submit(wanted)

    monkeypatch.setattr(serving.engine, "submit", slow)
    call = serving.stub.Generate(of("a", request_id="mine"))
    await serving.until(lambda: len(serving.server.live) == 1)
    [live] = (await stub_of(serving).ListRequests(pb.ListRequestsRequest())).requests
    assert (live.request_id, live.choices, live.prompt_tokens) == ("mine", 0, 0)
    await stub_of(serving).CancelGeneration(pb.CancelGenerationRequest(request_id="mine"))
    go_on.set()
    assert (await stream_failure(call)).code() is CANCELLED
    assert serving.idle


async def test_cancel_what_has_ended_but_is_still_read(free: Serving) -> None:
    wanted = GenerationRequest("hello", stop=StopParams(max_tokens=5))
    with free.server.live.claim("mine", "a") as live:
        async with aclosing(await free.engine.submit(wanted)) as stream:
            live.attach(stream)
            await free.until(lambda: stream.ended)
            error = await failure(stub_of(free).CancelGeneration(pb.CancelGenerationRequest(request_id="mine")))
            assert error.code() is NOT_FOUND
            assert [delta async for delta in stream]
    assert (await failure(stub_of(free).CancelGeneration(pb.CancelGenerationRequest()))).code() is NOT_FOUND


# -- draining ---------------------------------------------------------------------------------------------------------


async def test_drain_waits_for_what_is_live(serving: Serving) -> None:
    calls = [await begun(serving, of("a", n=2), tokens=True), await begun(serving, of("b"))]
    draining = asyncio.ensure_future(stub_of(serving).Drain(pb.DrainRequest()))
    await serving.until(lambda: serving.engine.draining)
    assert await health(serving) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await stub_of(serving).GetLoad(pb.GetLoadRequest())).draining
    error = await stream_failure(serving.stub.Generate(of("a")))
    assert error.code() is UNAVAILABLE
    assert details_of(error)["ErrorInfo"].reason == "DRAINING"  # type: ignore[attr-defined]
    assert not draining.done()
    serving.runner.open()
    assert await draining == pb.DrainResponse(ended=2)
    await asyncio.gather(*map(whole, calls))
    assert await stub_of(serving).Drain(pb.DrainRequest()) == pb.DrainResponse()
    assert serving.engine.healthy, "the process stays"


async def test_drain_until_the_grace_is_over(serving: Serving) -> None:
    call = await begun(serving, of("a"), tokens=True)
    answer = await stub_of(serving).Drain(pb.DrainRequest(grace=Duration(nanos=1)))
    assert answer == pb.DrainResponse(failed=1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await whole(call)
    assert caught.value.code() is UNAVAILABLE
    assert serving.idle


async def test_what_another_drain_fails_has_failed(serving: Serving) -> None:
    """Whatever the grace of the one that tells."""
    calls = [await begun(serving, of("a", n=2), tokens=True), await begun(serving, of("b"))]
    patient = [asyncio.create_task(serving.server.drain(grace)) for grace in (None, 3600.0)]
    await asyncio.sleep(0)
    calls.pop().cancel()
    await serving.until(lambda: len(serving.server.live) == 1)
    assert await stub_of(serving).Drain(pb.DrainRequest(grace=Duration(nanos=1))) == pb.DrainResponse(failed=1)
    assert await asyncio.gather(*patient) == [(1, 1)] * 2
    assert (await stream_failure(calls[0])).code() is UNAVAILABLE


async def test_what_a_stop_fails_has_failed(serving: Serving) -> None:
    call = await begun(serving, of("a"), tokens=True)
    patient = asyncio.create_task(serving.server.drain(None))
    await asyncio.sleep(0)
    serving.runner.open()  # the forward that runs cannot be interrupted
    stopping = asyncio.create_task(serving.server.stop(0))
    assert await patient == (0, 1)
    assert (await stream_failure(call)).code() is UNAVAILABLE
    await stopping


async def test_draining_goes_on_when_nobody_waits_for_it(serving: Serving) -> None:
    call = await begun(serving, of("a"), tokens=True)
    draining = stub_of(serving).Drain(pb.DrainRequest())
    await serving.until(lambda: serving.engine.draining)
    draining.cancel()
    assert (await stream_failure(serving.stub.Generate(of("a")))).code() is UNAVAILABLE
    serving.runner.open()
    assert await whole(call)
    assert await health(serving) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_grace_ends_although_nobody_waits_for_it(serving: Serving) -> None:
    call = await begun(serving, of("a"), tokens=True)
    draining = stub_of(serving).Drain(pb.DrainRequest(grace=Duration(nanos=300_000_000)))
    await serving.until(lambda: serving.engine.draining)
    draining.cancel()
    assert (await stream_failure(call)).code() is UNAVAILABLE
    assert serving.idle


async def test_drain_while_the_engine_dies(serving: Serving) -> None:
    call = await begun(serving, of("a"), tokens=True)
    draining = asyncio.ensure_future(stub_of(serving).Drain(pb.DrainRequest()))
    await serving.until(lambda: serving.engine.draining)
    serving.runner.failure = RuntimeError("of the test")
    serving.runner.open()
    assert await draining == pb.DrainResponse(failed=1)
    with pytest.raises(grpc.aio.AioRpcError):
        await whole(call)


@pytest.mark.parametrize("grace", [Duration(seconds=-1), Duration(seconds=10**9, nanos=1000), Duration(nanos=-1)])
async def test_a_grace_that_is_none(serving: Serving, grace: Duration) -> None:
    error = await failure(stub_of(serving).Drain(pb.DrainRequest(grace=grace)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    [violation] = details_of(error)["BadRequest"].field_violations  # type: ignore[attr-defined]
    assert violation.field == "grace"
    assert not serving.engine.draining


# -- what was served --------------------------------------------------------------------------------------------------


async def test_stats(serving: Serving) -> None:
    def times(plan: StepPlan) -> StepTimes:
        return StepTimes(total=0.25)

    serving.runner.times = times  # type: ignore[method-assign]
    serving.scheduler.tenants.set_policies({"a": TenantPolicy(weight=2.0)}, TenantPolicy(), 0.0)
    goes_on = await begun(serving, of("b", "hello you", request_id="live", n=2), tokens=True)
    serving.runner.open()
    finished = [(await whole(serving.stub.Generate(of("a", "x" * 20, 10))))[-1].finished for _ in range(3)]
    assert (await stream_failure(serving.stub.Generate(of("a", "x" * 5000)))).code() is not None
    response = await stub_of(serving).GetStats(pb.GetStatsRequest())
    assert 0.0 < response.uptime.ToNanoseconds() / 1e9 < 60.0
    stats = stats_of(response)
    assert list(stats) == ["a", "b"]
    a = stats["a"]
    assert (a.requests, dict(a.ended)) == (4, {"OK": 3, "INVALID_ARGUMENT": 1})
    assert (a.prompt_tokens, a.completion_tokens) == (60, 30)
    assert a.cached_prompt_tokens == sum(one.usage.cached_prompt_tokens for one in finished) > 0
    assert a.drafted_tokens == sum(one.speculation.drafted_tokens for one in finished) > 0
    assert a.accepted_tokens == sum(one.speculation.accepted_tokens for one in finished) > 0
    assert a.engine_seconds == pytest.approx(sum(one.speculation.engine_seconds for one in finished))
    assert a.engine_seconds > 0
    assert a.weight == 2.0
    assert a.service_seconds > 0
    assert response.speculation.drafters[0].mode == gen.SPECULATION_MODE_NGRAM
    assert response.speculation.drafters[0].rule == "greedy"
    assert response.speculation.drafters[0].drafted_tokens >= a.drafted_tokens
    await whole(goes_on)
    b = stats_of(await stub_of(serving).GetStats(pb.GetStatsRequest(tenant="b")))
    assert list(b) == ["b"]
    assert (b["b"].requests, dict(b["b"].ended), b["b"].completion_tokens) == (1, {"OK": 1}, 200)
    assert b["b"].weight == 1.0
    assert not (await stub_of(serving).GetStats(pb.GetStatsRequest(tenant="nobody"))).tenants


async def test_stats_of_what_is_live(serving: Serving) -> None:
    serving.scheduler.tenants.set_policies({}, TenantPolicy(max_running=1), 0.0)
    call = await begun(serving, of("b", "hello you", n=2), tokens=True)
    b = stats_of(await stub_of(serving).GetStats(pb.GetStatsRequest()))["b"]
    assert (b.requests, dict(b.ended)) == (1, {})
    assert (b.running_requests, b.waiting_requests) == (1, 1)
    assert (b.prompt_tokens, b.completion_tokens) == (9, 1)
    call.cancel()
    await serving.until(lambda: not len(serving.server.live))
    serving.runner.open()
    b = stats_of(await stub_of(serving).GetStats(pb.GetStatsRequest()))["b"]
    assert (b.requests, dict(b.ended)) == (1, {"CANCELLED": 1})
    assert (b.running_requests, b.waiting_requests, b.completion_tokens) == (0, 0, 1)


async def test_stats_of_many_on_one_stream(free: Serving) -> None:
    call = free.stub.GenerateMany()
    for key, message in enumerate((of("a", max_tokens=4), of("b", max_tokens=6), of("b", "x" * 5000))):
        await call.write(gen.GenerateManyRequest(key=key, start=message))
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass
    stats = stats_of(await stub_of(free).GetStats(pb.GetStatsRequest()))
    assert {name: (dict(one.ended), one.completion_tokens) for name, one in stats.items()} == {
        "a": ({"OK": 1}, 4),
        "b": ({"OK": 1, "INVALID_ARGUMENT": 1}, 6),
    }


async def test_stats_of_more_tenants_than_are_told_apart(free: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.usage.MAX_TENANTS", 2)
    monkeypatch.setattr(admin_service, "BATCH", 1)
    for index in range(5):
        await whole(free.stub.Generate(of(f"t{index}", max_tokens=4)))
    stats = stats_of(await stub_of(free).GetStats(pb.GetStatsRequest()))
    assert list(stats) == [ALL_OTHERS, "t0", "t1"]
    assert (stats[ALL_OTHERS].requests, stats[ALL_OTHERS].completion_tokens) == (3, 12)
    assert dict(stats[ALL_OTHERS].ended) == {"OK": 3}


async def test_what_the_deadline_ends_is_counted_so(serving: Serving) -> None:
    """That of their RPC, as no step ends any of them."""
    one = serving.stub.Generate(of("one"), timeout=3.0)
    many = serving.stub.GenerateMany(timeout=3.0)
    await many.write(gen.GenerateManyRequest(key=1, start=of("many")))
    await serving.until(lambda: len(serving.server.live) == 2)
    for call in (one, many):
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await serving.until(lambda: len(serving.server.live) == 0)
    stats = stats_of(await stub_of(serving).GetStats(pb.GetStatsRequest()))
    assert {name: dict(one.ended) for name, one in stats.items()} == {
        "one": {"DEADLINE_EXCEEDED": 1},
        "many": {"DEADLINE_EXCEEDED": 1},
    }
