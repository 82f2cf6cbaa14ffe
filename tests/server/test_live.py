"""Who holds which id, and what becomes of one that is taken."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import pytest

from paceline.engine import GenerationRequest
from paceline.engine.engine import Prepared
from paceline.errors import AlreadyExists, InvalidArgument
from paceline.server.live import LiveGenerations
from paceline.v1 import admin_pb2, admin_pb2_grpc
from paceline.v1 import generation_pb2 as pb
from support.serving import PATIENCE, Serving, details_of, failure, request


def test_a_tenant_has_an_id_once() -> None:
    live = LiveGenerations()
    with live.claim("mine", "a") as ours, live.claim("mine", "b") as theirs:
        assert live.get("mine", "a") is ours
        assert live.get("mine", "b") is theirs
        assert live.get("mine", "") is None
        with pytest.raises(AlreadyExists), live.claim("mine", "a"):
            pass
        assert len(live) == 2
    with live.claim("mine", "a"):
        assert live.get("mine", "b") is None
    assert not len(live)


async def test_an_id_is_free_once_it_is_cancelled(serving: Serving) -> None:
    live = LiveGenerations()
    with ExitStack() as first, ExitStack() as second:
        cancelled = first.enter_context(live.claim("mine", "a"))
        assert cancelled.cancel(serving.engine)
        ours = second.enter_context(live.claim("mine", "a"))
        with pytest.raises(AlreadyExists), live.claim("mine", "a"):
            pass
        first.close()
        assert live.get("mine", "a") is ours, "the end of the first is not the second's"
        with pytest.raises(AlreadyExists), live.claim("mine", "a"):
            pass
    assert not len(live)


SLOW = request(request_id="mine", sampling=pb.SamplingParams(bad_words=["b"]))


@contextmanager
def preparing_stands_still(serving: Serving) -> Iterator[threading.Event]:
    """What is prepared in another thread waits for the event, or for the end of the block."""
    engine, gate = serving.engine.engine, threading.Event()
    prepare = engine.prepare

    def slow(request: GenerationRequest) -> Prepared:
        assert not request.sampling.bad_words or gate.wait(PATIENCE)
        return prepare(request)

    engine.prepare = slow  # type: ignore[method-assign]
    try:
        yield gate
    finally:
        gate.set()


async def cancel_mine(serving: Serving) -> None:
    await serving.until(lambda: serving.server.live.get("mine", "") is not None)
    admin = admin_pb2_grpc.AdminServiceStub(serving.channel)
    await admin.CancelGeneration(admin_pb2.CancelGenerationRequest(request_id="mine"))


async def test_one_that_is_cancelled_while_it_is_prepared_does_not_wait_for_that(serving: Serving) -> None:
    with preparing_stands_still(serving) as gate:
        first = serving.stub.Generate(SLOW)
        await cancel_mine(serving)
        serving.runner.open()
        assert [response async for response in serving.stub.Generate(request(request_id="mine"))]
        error = await failure(first)
        assert (error.code(), error.details()) == (grpc.StatusCode.CANCELLED, "the request was aborted")
        assert not gate.is_set()
    assert serving.idle


async def test_the_others_of_its_stream_live_on(serving: Serving) -> None:
    with preparing_stands_still(serving):
        call = serving.stub.GenerateMany()
        await call.write(pb.GenerateManyRequest(key=1, start=SLOW))
        await cancel_mine(serving)
        [refused] = (await call.read()).responses
        assert (refused.key, refused.error.reason) == (1, "CANCELLED")
        await call.write(pb.GenerateManyRequest(key=2, start=request()))
        serving.runner.open()
        assert {keyed.key for keyed in (await call.read()).responses} == {2}
        call.cancel()


async def test_draining_does_not_wait_for_what_is_prepared(serving: Serving) -> None:
    with preparing_stands_still(serving) as gate:
        call = serving.stub.Generate(SLOW)
        await serving.until(lambda: serving.server.live.get("mine", "") is not None)
        admin = admin_pb2_grpc.AdminServiceStub(serving.channel)
        assert await admin.Drain(admin_pb2.DrainRequest()) == admin_pb2.DrainResponse()
        error = await failure(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(error)["ErrorInfo"].reason == "DRAINING"  # type: ignore[attr-defined]
        assert not gate.is_set()


def test_one_that_may_have_another_name_gets_one() -> None:
    live = LiveGenerations()
    with ExitStack() as rest:
        with live.claim("trace", "a", rename=True) as first:
            assert first.request_id == "trace"
            with live.claim("trace-2", "a"), live.claim("trace", "a", rename=True) as one:
                assert one.request_id == "trace-3", "a client has the second name for another"
            last = rest.enter_context(live.claim("trace", "a", rename=True))
            assert last.request_id == "trace-4", "names do not come back while the first lives"
            assert live.get("trace-4", "a") is last
            with live.claim("trace", "b", rename=True) as other:
                assert other.request_id == "trace", "another tenant's"
        rest.enter_context(live.claim("trace", "a", rename=True))
        names = [rest.enter_context(live.claim("trace", "a", rename=True)).request_id for _ in range(3)]
        assert names == ["trace-2", "trace-3", "trace-5"], "one of those who came before still lives"
    assert not len(live)


def test_who_sees_all_tenants_names_one() -> None:
    live = LiveGenerations()
    with live.claim("mine", "") as nobodys, live.claim("theirs", "b") as theirs:
        assert live.find("mine") is live.get("mine", "") is nobodys
        assert live.find("theirs") is live.get("theirs", "b") is theirs
        assert live.get("theirs", "a") is live.get("theirs", "") is live.find("") is None
        with live.claim("mine", "a") as ours:
            assert live.get("mine", "a") is ours
            assert live.get("mine", "") is nobodys
            with pytest.raises(InvalidArgument, match=r"tenant = '': must be named .* as '', 'a' do"):
                live.find("mine")
