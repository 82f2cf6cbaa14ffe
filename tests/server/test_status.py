"""Every way in which a call can fail ends with the code, the reason, the details and the hint that docs/errors.md
promises: one test for each, over a real server.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from paceline import errors
from paceline.core.tenant_policy import ONE_SHARE, TenantPolicy
from paceline.errors import Reason
from paceline.server import convert
from paceline.server.calls import Caller, OpenGate
from paceline.server.status import STATUS_RULES
from paceline.sim import VirtualClock
from paceline.v1 import generation_pb2 as pb
from support.serving import MAX_MODEL_LEN, MODEL, Serving, details_of, failure, request, serving

Failure = grpc.aio.AioRpcError
Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]
SAMPLING, STOP, SCHEDULING = pb.SamplingParams, pb.StopParams, pb.SchedulingParams
OUT_OF_RANGE, TOKEN_ID = Reason.SAMPLING_PARAM_OUT_OF_RANGE, Reason.INVALID_TOKEN_ID
SECRET = "the secret of somebody else"
GENERATE = "/paceline.v1.GenerationService/Generate"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "errors.md"


def asking(served: Serving, message: pb.GenerateRequest) -> Awaitable[Failure]:
    return failure(served.stub.Generate(message))


async def waiting(served: Serving, **scheduling: Any) -> Call:
    """A request that waits for another one of tenant a, which may not run two."""
    served.scheduler.tenants.set_policies({"a": TenantPolicy(max_running=1, max_queued=1)}, ONE_SHARE, 0.0)
    served.stub.Generate(request(scheduling=SCHEDULING(tenant="a")))
    await served.until(lambda: len(served.scheduler.running) == 1)
    call = served.stub.Generate(request(scheduling=SCHEDULING(tenant="a", **scheduling)))
    await served.until(lambda: len(served.scheduler.waiting) == 1)
    return call


class Refusing(OpenGate):
    """A gate that admits nobody."""

    def __init__(self, error: errors.PacelineError) -> None:
        self.error = error

    def admit(self, method: str, context: Any) -> Caller:
        raise self.error


class Only(OpenGate):
    """A gate that knows one caller."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant

    def admit(self, method: str, context: Any) -> Caller:
        return Caller("somebody", self.tenant)


# -- how to fail ------------------------------------------------------------------------------------------------------


async def malformed(served: Serving) -> Failure:
    return await failure(served.channel.unary_stream(GENERATE)(b"\x22\x02\xff\xfe"))


async def duplicate(served: Serving) -> Failure:
    call = served.stub.Generate(request(request_id="taken"))
    await served.until(lambda: served.engine.num_live == 1)
    error = await asking(served, request(request_id="taken"))
    call.cancel()
    return error


async def stranger(served: Serving) -> Failure:
    served.server.calls.gate = Refusing(errors.Unauthenticated("no credential"))
    return await asking(served, request())


async def forbidden(served: Serving) -> Failure:
    served.server.calls.gate = Refusing(errors.PermissionDenied("not for you"))
    return await asking(served, request())


async def tenant_of_others(served: Serving) -> Failure:
    served.server.calls.gate = Only("a")
    return await asking(served, request(scheduling=SCHEDULING(tenant="b")))


async def queue_of_a_tenant(served: Serving) -> Failure:
    await waiting(served)
    return await asking(served, request(scheduling=SCHEDULING(tenant="a")))


async def share_of_a_tenant(served: Serving) -> Failure:
    served.scheduler.tenants.set_policies({"a": TenantPolicy(max_blocks=1)}, ONE_SHARE, 0.0)
    return await asking(served, request(scheduling=SCHEDULING(tenant="a")))


async def more_than_there_is(served: Serving) -> Failure:
    served.scheduler.config = replace(served.scheduler.config, num_blocks=1)
    return await asking(served, request())


async def queue_of_the_server(served: Serving) -> Failure:
    served.scheduler.config = replace(served.scheduler.config, max_queued=1)
    await waiting(served)
    return await asking(served, request(scheduling=SCHEDULING(tenant="b")))


async def too_late(served: Serving, **bound: Duration) -> Failure:
    clock = served.engine.engine.clock = VirtualClock()
    call = await waiting(served, **bound)
    clock.advance(2.0)
    served.runner.allow(1)
    return await failure(call)


async def queue_timeout(served: Serving) -> Failure:
    return await too_late(served, queue_timeout=Duration(seconds=1))


async def draining(served: Serving) -> Failure:
    await served.engine.drain(0)
    return await asking(served, request())


async def drained(served: Serving) -> Failure:
    """It began, and the server would not wait for it."""
    call = aiter(served.stub.Generate(request()))
    served.runner.allow(2)
    await anext(call)
    await served.engine.drain(0)
    return await failure(call)


async def deadline(served: Serving) -> Failure:
    return await too_late(served, time_to_first_token=Duration(seconds=1))


async def cancelled(served: Serving) -> Failure:
    """By an operator, in the client's place."""
    call = asyncio.create_task(asking(served, request(request_id="unwanted")))
    await served.until(lambda: served.engine.num_live == 1)
    live = served.server.live.get("unwanted", "")
    assert live is not None
    assert live.stream is not None
    assert served.engine.abort(live.stream.request_id)
    return await call


async def engine_that_fails(served: Serving) -> Failure:
    call = aiter(served.stub.Generate(request()))
    served.runner.allow(2)
    await anext(call)
    served.runner.failure = RuntimeError(SECRET)
    served.runner.open()
    return await failure(call)


async def engine_that_failed(served: Serving) -> Failure:
    await engine_that_fails(served)
    return await asking(served, request())


async def bug(served: Serving) -> Failure:
    def broken(wanted: Any) -> Any:
        raise ValueError(SECRET)

    served.engine.engine.prepare = broken  # type: ignore[method-assign]
    return await asking(served, request())


async def bug_in_the_middle(served: Serving) -> Failure:
    """The last delta cannot be written."""

    class Broken(dict[Any, Any]):
        def __missing__(self, key: Any) -> Any:
            raise ValueError(SECRET)

    call = aiter(served.stub.Generate(request()))
    served.runner.allow(2)
    await anext(call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "REASONS", Broken())
        served.runner.open()
        return await failure(call)


# -- what it looks like -----------------------------------------------------------------------------------------------


@dataclass
class Row:
    """Attributes:
    ask: the message, or whatever else makes a call fail.
    details: the typed ones, besides ErrorInfo.
    pushback: milliseconds; None: none is sent.
    field: that BadRequest names.
    """

    name: str
    ask: pb.GenerateRequest | Callable[[Serving], Awaitable[Failure]]
    reason: Reason
    details: tuple[str, ...] = ()
    pushback: str | None = None
    field: str = ""


def invalid(name: str, field: str, reason: Reason, **fields: Any) -> Row:
    return Row(name, request(**fields), reason, ("BadRequest",), field=field)


ROWS = [
    invalid("temperature", "sampling.temperature", OUT_OF_RANGE, sampling=SAMPLING(temperature=-1)),
    invalid("top_p is NaN", "sampling.top_p", OUT_OF_RANGE, sampling=SAMPLING(top_p=float("nan"))),
    invalid("penalty", "sampling.presence_penalty", OUT_OF_RANGE, sampling=SAMPLING(presence_penalty=3)),
    invalid("bias", "sampling.logit_bias", OUT_OF_RANGE, sampling=SAMPLING(logit_bias={1: 101})),
    invalid("biases", "sampling.logit_bias", OUT_OF_RANGE, sampling=SAMPLING(logit_bias=dict.fromkeys(range(1025), 1))),
    invalid("biased id", "sampling.logit_bias", TOKEN_ID, sampling=SAMPLING(logit_bias={997: 1})),
    invalid("prompt id", "prompt_tokens.ids", TOKEN_ID, prompt_tokens=pb.TokenIds(ids=[997])),
    invalid("stop id", "stop.token_ids", TOKEN_ID, stop=STOP(token_ids=[997])),
    invalid("prompt", "prompt_text", Reason.PROMPT_TOO_LONG, text="x" * MAX_MODEL_LEN),
    invalid(
        "prompt and least completion",
        "stop.min_tokens",
        Reason.PROMPT_TOO_LONG,
        max_tokens=MAX_MODEL_LEN,
        stop=STOP(min_tokens=MAX_MODEL_LEN),
    ),
    invalid("stop strings", "stop.strings", Reason.TOO_MANY_STOP_STRINGS, stop=STOP(strings=["x"] * 17)),
    invalid("stop string", "stop.strings", Reason.INVALID_FIELD, stop=STOP(strings=["x" * 257])),
    invalid("min_tokens", "stop.min_tokens", Reason.INVALID_FIELD, max_tokens=8, stop=STOP(min_tokens=9)),
    invalid("empty prompt", "prompt_text", Reason.INVALID_FIELD, text=""),
    invalid("empty ids", "prompt_tokens.ids", Reason.INVALID_FIELD, prompt_tokens=pb.TokenIds()),
    invalid("logprobs", "output.logprobs", Reason.INVALID_FIELD, output=pb.OutputParams(logprobs=21)),
    invalid("enum", "speculation.mode", Reason.INVALID_FIELD, speculation=pb.SpeculationParams(mode=77)),  # type: ignore[arg-type]
    invalid(
        "duration",
        "scheduling.queue_timeout",
        Reason.INVALID_FIELD,
        scheduling=SCHEDULING(queue_timeout=Duration(seconds=-1)),
    ),
    invalid("request id", "request_id", Reason.INVALID_FIELD, request_id="a b"),
    Row("no prompt", pb.GenerateRequest(), Reason.INVALID_FIELD, ("BadRequest",), field="prompt"),
    Row("bytes", malformed, Reason.MALFORMED_REQUEST, ("BadRequest",), field="request"),
    Row("model", request(model="other"), Reason.NOT_FOUND, ("ResourceInfo",)),
    Row("live id", duplicate, Reason.DUPLICATE_REQUEST_ID),
    Row(
        "drafter",
        request(speculation=pb.SpeculationParams(mode=pb.SPECULATION_MODE_DRAFT_MODEL)),
        Reason.FEATURE_NOT_ENABLED,
    ),
    Row("option", request(structured=pb.StructuredOutput(regex="a")), Reason.FEATURE_NOT_ENABLED),
    Row("stranger", stranger, Reason.UNAUTHENTICATED),
    Row("forbidden", forbidden, Reason.PERMISSION_DENIED),
    Row("tenant of others", tenant_of_others, Reason.PERMISSION_DENIED),
    Row("queue of a tenant", queue_of_a_tenant, Reason.TENANT_QUOTA_EXCEEDED, ("QuotaFailure", "RetryInfo"), "100"),
    Row("share of a tenant", share_of_a_tenant, Reason.TENANT_QUOTA_EXCEEDED, ("QuotaFailure",), "-1"),
    Row("KV cache", more_than_there_is, Reason.EXCEEDS_KV_CACHE, (), "-1"),
    Row("queue of the server", queue_of_the_server, Reason.QUEUE_FULL, ("RetryInfo",), "100"),
    Row("queue_timeout", queue_timeout, Reason.QUEUE_TIMEOUT, ("RetryInfo",), "100"),
    Row("draining", draining, Reason.DRAINING, ("RetryInfo",), "500"),
    Row("drained", drained, Reason.DRAINING, ("RetryInfo",), "500"),
    Row("deadline", deadline, Reason.DEADLINE_EXCEEDED),
    Row("cancelled", cancelled, Reason.CANCELLED),
    Row("engine that fails", engine_that_fails, Reason.ENGINE_LOST, ("RetryInfo",), "5000"),
    Row("engine that failed", engine_that_failed, Reason.ENGINE_LOST, ("RetryInfo",), "5000"),
    Row("bug", bug, Reason.INTERNAL),
    Row("bug in the middle", bug_in_the_middle, Reason.INTERNAL),
]


# What no row ends with. Slow readers have tests of their own, and the last two are for what has no reason of its own.
ELSEWHERE = {
    *(Reason.MODEL_LOADING, Reason.SLOW_CONSUMER, Reason.RESOURCE_EXHAUSTED, Reason.UNAVAILABLE),
    Reason.NOT_FINITE,  # e2e/test_not_finite.py
}


def documented() -> dict[str, tuple[str, str]]:
    """The code and the hint of each reason, as the table in docs/errors.md has them."""
    rows = re.findall(r"^\| ([A-Z_]+) \| `([A-Z_]+)` \| ([^|]+) \|", DOCS.read_text(), re.MULTILINE)
    return {reason: (code, hint.strip()) for code, reason, hint in rows}


def check(error: Failure, row: Row) -> None:
    code, hint = documented()[row.reason]
    assert error.code().name == code
    details = details_of(error)
    info: Any = details["ErrorInfo"]
    trailers = dict(error.trailing_metadata() or ())
    assert (info.reason, info.domain) == (row.reason, "paceline")
    assert info.metadata["request_id"] == trailers["x-request-id"]
    assert details.keys() - {"ErrorInfo"} == set(row.details)
    assert trailers.get("grpc-retry-pushback-ms") == row.pushback
    assert {None: "none", "-1": "no retry"}.get(row.pushback, "retry") in hint
    if row.field:
        [violation] = details["BadRequest"].field_violations  # type: ignore[attr-defined]
        assert (violation.field, violation.description) == (row.field, error.details())
    if "RetryInfo" in row.details:
        assert str(details["RetryInfo"].retry_delay.ToMilliseconds()) == row.pushback  # type: ignore[attr-defined]
    assert SECRET not in f"{error!r} {error.trailing_metadata()}"


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
async def test_every_way_to_fail(serving: Serving, row: Row, caplog: pytest.LogCaptureFixture) -> None:
    error = await (asking(serving, row.ask) if isinstance(row.ask, pb.GenerateRequest) else row.ask(serving))
    check(error, row)
    told = SECRET in caplog.text
    assert told == (row.reason is Reason.INTERNAL or row.ask in (engine_that_fails, engine_that_failed))


async def test_a_model_that_is_still_loading() -> None:
    async with serving(open_engine=False) as served:
        error = await failure(served.stub.Generate(request()))
        check(error, Row("", request(), Reason.MODEL_LOADING, ("RetryInfo",), "500"))


async def test_what_a_quota_says(serving: Serving) -> None:
    """Whose it is, which, and how much it allows."""
    for fail, limit in ((share_of_a_tenant, "max_blocks"), (queue_of_a_tenant, "max_queued")):
        error = await fail(serving)
        [violation] = details_of(error)["QuotaFailure"].violations  # type: ignore[attr-defined]
        assert (violation.subject, violation.quota_id, violation.quota_value) == ("tenant:a", limit, 1)
        assert violation.description == error.details()


async def test_what_is_not_found(serving: Serving) -> None:
    error = await failure(serving.stub.Generate(request(model="other" * 1000)))
    resource: Any = details_of(error)["ResourceInfo"]
    assert (resource.resource_type, resource.resource_name) == ("model", "other" * 16)
    assert MODEL in resource.description


async def test_messages_and_metadata_that_are_too_large_never_reach_us(free: Serving) -> None:
    """gRPC itself refuses them, so there are no details, and nothing that says that a retry is useless."""
    large = free.channel.unary_stream(GENERATE)(bytes((16 << 20) + 1))
    crowded = free.stub.Generate(request(), metadata=[("x-much", "x" * (32 << 10))])
    for call in (large, crowded):
        error = await failure(call)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not {"grpc-status-details-bin", "grpc-retry-pushback-ms"} & dict(error.trailing_metadata() or ()).keys()
    assert [response async for response in free.stub.Generate(request())]


async def test_metadata_of_up_to_16_kib_is_taken_and_of_more_is_not(free: Serving) -> None:
    """Each time: gRPC would refuse what is a little more now and then."""
    for _ in range(10):
        fits, much = ([("x-much", "x" * (size << 10))] for size in (15, 17))
        assert [response async for response in free.stub.Generate(request(max_tokens=1), metadata=fits)]
        error = await failure(free.stub.Generate(request(max_tokens=1), metadata=much))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_documented_table_is_the_one_in_code() -> None:
    assert {reason: code for reason, (code, _) in documented().items()} == {
        reason.value: STATUS_RULES[reason].code.name for reason in Reason
    }


def test_every_reason_has_a_test() -> None:
    assert {row.reason for row in ROWS} | ELSEWHERE == set(Reason)
