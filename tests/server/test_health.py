"""Health, reflection, and what clients see while the server starts, dies and stops."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.errors import PacelineError
from paceline.server import SERVICE_NAME, GrpcServer
from paceline.server.app import join_address
from paceline.sim import reference_output
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc
from support.serving import PATIENCE, Serving, details_of, failure, request
from support.serving import serving as serving_context

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NAMES = ("", SERVICE_NAME)


def health_of(served: Serving) -> health_pb2_grpc.HealthStub:
    return health_pb2_grpc.HealthStub(served.channel)


async def statuses(served: Serving) -> list[int]:
    stub = health_of(served)
    return [(await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in NAMES]


async def test_healthy_under_both_names(serving: Serving) -> None:
    assert SERVICE_NAME == "paceline.v1.GenerationService"
    assert await statuses(serving) == [SERVING, SERVING]


async def test_unknown_service(serving: Serving) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_of(serving).Check(health_pb2.HealthCheckRequest(service="nope"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # what headers would not carry
        await health_of(serving).Check(health_pb2.HealthCheckRequest(service="\0" * 100_000))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    call = health_of(serving).Watch(health_pb2.HealthCheckRequest(service="nope"))
    assert (await call.read()).status == UNKNOWN
    call.cancel()


async def test_not_serving_before_there_is_an_engine() -> None:
    async with serving_context(open_engine=False) as served:
        assert await statuses(served) == [NOT_SERVING, NOT_SERVING]
        watch = health_of(served).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        error = await failure(served.stub.Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "still loading" in (error.details() or "")
        assert "RetryInfo" in details_of(error)
        served.server.open(served.engine)
        assert (await watch.read()).status == SERVING
        assert await statuses(served) == [SERVING, SERVING]


async def test_watchers_outlive_each_other(serving: Serving) -> None:
    stays, leaves = [health_of(serving).Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
    assert (await stays.read()).status == (await leaves.read()).status == SERVING
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves.read()
    await serving.server.stop(0)
    assert (await stays.read()).status == NOT_SERVING
    assert await stays.read() is grpc.aio.EOF


async def test_engine_death(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    live = aiter(serving.stub.Generate(request(max_tokens=100)))
    serving.runner.allow(1)
    await anext(live)
    waiting = serving.stub.Generate(request("waits", max_tokens=100))
    await serving.until(lambda: len(serving.scheduler.requests) == 2)
    serving.runner.failure = RuntimeError("a secret of the machine")
    serving.runner.open()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in live:
            pass
    for error in (caught.value, await failure(waiting), await failure(serving.stub.Generate(request()))):
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "secret" not in str(error)
        assert details_of(error)["ErrorInfo"].reason == "ENGINE_LOST"  # type: ignore[attr-defined]
    assert await statuses(serving) == [NOT_SERVING, NOT_SERVING]
    assert "a secret of the machine" in caplog.text


async def test_graceful_stop_lets_live_requests_end(serving: Serving) -> None:
    live = aiter(serving.stub.Generate(request(max_tokens=100)))
    serving.runner.allow(1)
    token_ids = list((await anext(live)).token_ids)
    stopping = asyncio.ensure_future(serving.server.stop(grace=60))
    await asyncio.sleep(0)
    assert await statuses(serving) == [NOT_SERVING, NOT_SERVING]
    error = await failure(serving.stub.Generate(request("too late")))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in (error.details() or "")
    assert not stopping.done()
    serving.runner.open()
    async for response in live:
        token_ids += response.token_ids
    assert token_ids == reference_output(b"hello", 100)
    await stopping


async def test_reflection_holds_no_stop_up(serving: Serving) -> None:
    """Its streams end with their clients."""
    call = reflection_pb2_grpc.ServerReflectionStub(serving.channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    assert (await call.read()).list_services_response.service
    async with asyncio.timeout(PATIENCE):
        await serving.server.stop(grace=3600)
    assert await call.code() is not grpc.StatusCode.OK


@pytest.mark.parametrize("many", [False, True], ids=["Generate", "GenerateMany"])
async def test_the_grace_is_for_readers_too(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All has been generated, and more is unread than fits into the buffers on the way."""
    monkeypatch.setattr("paceline.server.app.FLUSH_SECONDS", flush_seconds := 0.1)
    options = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
    async with serving_context(width=8192) as served, grpc.aio.insecure_channel(served.address, options) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.GenerateMany() if many else stub.Generate(request(max_tokens=300))
        if many:
            await call.write(pb.GenerateManyRequest(start=request(max_tokens=300)))
            await call.done_writing()
        await served.until(lambda: served.scheduler.has_requests)
        served.runner.open()
        await served.until(lambda: served.idle)
        stopping = asyncio.create_task(served.server.stop(grace=3600))
        await asyncio.sleep(2 * flush_seconds)
        assert not stopping.done()
        responses = [response async for response in call]
        last = responses[-1].responses[-1].response if many else responses[-1]
        assert last.HasField("finished")
        async with asyncio.timeout(PATIENCE):
            await stopping


async def test_grace_runs_out(serving: Serving) -> None:
    live = aiter(serving.stub.Generate(request(max_tokens=100)))
    serving.runner.allow(1)
    await anext(live)
    stopping = asyncio.ensure_future(serving.server.stop(grace=0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in live:
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in (caught.value.details() or "")
    assert serving.idle
    serving.runner.open()  # the forward that runs cannot be interrupted
    await stopping


async def test_reflection(serving: Serving) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(serving.channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME),
    ]
    services, files = [response async for response in stub.ServerReflectionInfo(iter(asked))]
    names = {service.name for service in services.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names
    assert files.file_descriptor_response.file_descriptor_proto


async def test_port_that_is_taken(serving: Serving) -> None:
    port = int(serving.address.rpartition(":")[2])
    with pytest.raises(PacelineError, match=f"cannot listen on 127.0.0.1:{port}"):
        GrpcServer().bind("127.0.0.1", port)


def test_addresses() -> None:
    assert join_address("127.0.0.1", 80) == "127.0.0.1:80"
    assert join_address("::1", 80) == "[::1]:80"
