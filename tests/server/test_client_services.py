"""ModelService and AdminService through both clients: against a fake that sets every field, and the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import fields
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import text_format

from paceline import errors
from paceline.client import (
    AsyncClient,
    ChatMessage,
    Client,
    DrafterStats,
    Drained,
    LiveRequest,
    Load,
    Model,
    RpcError,
    ServerStats,
    SpeculationReport,
    TenantStats,
)
from paceline.v1 import admin_pb2, admin_pb2_grpc, model_pb2, model_pb2_grpc
from support.serving import MODEL, Serving

MODEL_TEXT = """
    name: "m" max_model_len: 64 vocab_size: 100 eos_token_ids: [3, 4]
    speculation_modes: [SPECULATION_MODE_AUTO, SPECULATION_MODE_OFF] max_draft_tokens: 8
    default_sampling {temperature: 0.5 top_k: 0 allowed_token_ids: 3} has_chat_template: true max_logprobs: 20
"""
A_MODEL = Model("m", 64, 100, (3, 4), ("auto", "off"), 8, {"temperature": 0.5, "top_k": 0}, True, False, 20)

ANSWERS: dict[str, Any] = {
    "GetModel": text_format.Parse(f"model {{{MODEL_TEXT}}}", model_pb2.GetModelResponse()),
    "ListModels": text_format.Parse(f"models {{{MODEL_TEXT}}} models {{}}", model_pb2.ListModelsResponse()),
    "Tokenize": model_pb2.TokenizeResponse(token_ids=[1, 2]),
    "Detokenize": model_pb2.DetokenizeResponse(text="ab"),
    "GetLoad": text_format.Parse(
        "running_requests: 1 waiting_requests: 2 max_running_requests: 3 max_waiting_requests: 4 kv_blocks: 5 "
        "free_kv_blocks: 6 tokens_per_second: 7.5 draining: true",
        admin_pb2.GetLoadResponse(),
    ),
    "ListRequests": text_format.Parse(
        'requests {request_id: "r" tenant: "t" model: "m" prompt_tokens: 1 completion_tokens: 2 choices: 3 '
        "running_choices: 4 age {seconds: 1 nanos: 500000000} depth: 5 acceptance: 0.5} requests {}",
        admin_pb2.ListRequestsResponse(),
    ),
    "CancelGeneration": admin_pb2.CancelGenerationResponse(),
    "Drain": admin_pb2.DrainResponse(ended=3, failed=1),
    "GetStats": text_format.Parse(
        """
        uptime {seconds: 2}
        tenants {
            tenant: "t" requests: 1 ended {key: "OK" value: 2} prompt_tokens: 3 cached_prompt_tokens: 4
            completion_tokens: 5 drafted_tokens: 6 accepted_tokens: 7 engine_seconds: 8 rejected_seconds: 9
            queue_seconds: 10 preemptions: 11 running_requests: 12 waiting_requests: 13 weight: 14
            saved_seconds: 15 service_seconds: 16
        }
        speculation {
            depth: 1 tokens_per_second: 2 saved_seconds: 3 rejected_seconds: 4 checked_saved_seconds: 0
            drafters {mode: SPECULATION_MODE_NGRAM rule: "block" acceptance: [0.5] drafted_tokens: 5 accepted_tokens: 6}
        }
        """,
        admin_pb2.GetStatsResponse(),
    ),
}
A_TENANT = TenantStats("t", 1, {"OK": 2}, 3, 4, 5, 6, 7, 8.0, 9.0, 10.0, 11, 12, 13, 14.0, 15.0, 16.0)
A_REPORT = SpeculationReport(1, 2.0, (DrafterStats("ngram", "block", (0.5,), 5, 6),), 3.0, 4.0, 0.0)


class FakeServices:
    """Answers every method with its entry of `ANSWERS`.

    Attributes:
        requests: what came, by method.
        metadata: of the last call.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.metadata: dict[str, str | bytes] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def respond(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self.requests[name] = request
            self.metadata = dict(context.invocation_metadata() or ())
            return ANSWERS[name]

        return respond


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeServices, str]]:
    made = FakeServices()
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    model_pb2_grpc.add_ModelServiceServicer_to_server(made, server)  # type: ignore[no-untyped-call]
    admin_pb2_grpc.add_AdminServiceServicer_to_server(made, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield made, f"127.0.0.1:{port}"
    await server.stop(None)


CALLS: list[tuple[Callable[[Any], Any], Any, str, str]] = [
    (lambda c: c.model("m"), A_MODEL, "GetModel", 'model: "m"'),
    (lambda c: c.model(), A_MODEL, "GetModel", ""),
    (lambda c: c.models(), (A_MODEL, Model("", 0, 0, (), (), 0, {}, False, False, 0)), "ListModels", ""),
    (lambda c: c.tokenize("hi"), (1, 2), "Tokenize", 'text: "hi"'),
    (lambda c: c.tokenize("", model="m"), (1, 2), "Tokenize", 'text: "" model: "m"'),
    (
        lambda c: c.tokenize([ChatMessage("user", "hi")]),
        (1, 2),
        "Tokenize",
        'chat {messages {role: "user" content: "hi"}}',
    ),
    (lambda c: c.detokenize([1, 2]), "ab", "Detokenize", "token_ids: [1, 2]"),
    (
        lambda c: c.detokenize([], include_special_tokens=True, model="m"),
        "ab",
        "Detokenize",
        'include_special_tokens: true model: "m"',
    ),
    (lambda c: c.admin.load(), Load(1, 2, 3, 4, 5, 6, 7.5, True), "GetLoad", ""),
    (
        lambda c: c.admin.requests("t"),
        (LiveRequest("r", "t", "m", 1, 2, 3, 4, 1.5, 5, 0.5), LiveRequest("", "", "", 0, 0, 0, 0, 0.0, 0, 0.0)),
        "ListRequests",
        'tenant: "t"',
    ),
    (lambda c: c.admin.cancel("r"), None, "CancelGeneration", 'request_id: "r"'),
    (lambda c: c.admin.cancel("r", "t"), None, "CancelGeneration", 'request_id: "r" tenant: "t"'),
    (lambda c: c.admin.cancel("r", tenant=""), None, "CancelGeneration", 'request_id: "r" tenant: ""'),
    (lambda c: c.admin.drain(), Drained(3, 1), "Drain", ""),
    (lambda c: c.admin.drain(0), Drained(3, 1), "Drain", "grace {}"),
    (lambda c: c.admin.drain(1.5, timeout=9.0), Drained(3, 1), "Drain", "grace {seconds: 1 nanos: 500000000}"),
    (lambda c: c.admin.stats("t"), ServerStats(2.0, (A_TENANT,), A_REPORT), "GetStats", 'tenant: "t"'),
]


@pytest.mark.parametrize(("call", "result", "method", "request_text"), CALLS)
async def test_questions(
    fake: tuple[FakeServices, str], call: Callable[[Any], Any], result: object, method: str, request_text: str
) -> None:
    services, address = fake
    async with AsyncClient(address) as client:
        assert await call(client) == result
        expected = text_format.Parse(request_text, type(services.requests[method])())
        assert services.requests.pop(method) == expected
    with Client(address) as blocking:
        assert await asyncio.to_thread(call, blocking) == result
        assert services.requests[method] == expected


async def test_what_is_unset_is_none(fake: tuple[FakeServices, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ANSWERS, "GetStats", admin_pb2.GetStatsResponse())
    async with AsyncClient(fake[1]) as client:
        stats = await client.admin.stats()
    assert stats == ServerStats(0.0, (), SpeculationReport(0, 0.0, (), 0.0, 0.0, None))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Model, model_pb2.Model),
        (Load, admin_pb2.GetLoadResponse),
        (LiveRequest, admin_pb2.LiveRequest),
        (Drained, admin_pb2.DrainResponse),
        (TenantStats, admin_pb2.TenantStats),
        (DrafterStats, admin_pb2.DrafterStats),
        (SpeculationReport, admin_pb2.SpeculationReport),
        (ServerStats, admin_pb2.GetStatsResponse),
    ],
)
def test_the_values_have_what_the_contract_has(value: Any, message: Any) -> None:
    assert {field.name for field in fields(value)} == set(message.DESCRIPTOR.fields_by_name)


async def test_a_call_has_a_name_and_a_span(fake: tuple[FakeServices, str]) -> None:
    span = f"00-{'1' * 32}-{'2' * 16}-01"
    async with AsyncClient(fake[1], api_key="k") as client:
        await client.admin.load(request_id="r-1", traceparent=span)
    sent = fake[0].metadata
    assert (sent["x-request-id"], sent["traceparent"], sent["authorization"]) == ("r-1", span, "Bearer k")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.tokenize([1, 2]), "prompt = .*must be text or chat messages"),
        (lambda c: c.tokenize(5), "prompt = 5: must be text or chat messages"),
        (lambda c: c.tokenize("\ud800"), "text = .*UTF-8"),
        (lambda c: c.detokenize([-1]), r"token_ids = \[-1\]: must be a sequence"),
        (lambda c: c.admin.drain(-1), r"grace = -1: must be seconds in \[0"),
        (lambda c: c.admin.drain("1"), "grace = '1': must be seconds"),
        (lambda c: c.admin.cancel(5), "request_id = 5: must be text"),
        (lambda c: c.admin.cancel("r", tenant=5), "tenant = 5: must be text"),
        (lambda c: c.admin.requests(5), "tenant = 5: must be text"),
        (lambda c: c.admin.stats("\ud800"), "tenant = .*: must be text that UTF-8 can hold"),
        (lambda c: c.model(5), "model = 5: must be text"),
        (lambda c: c.health(5), "service = 5: must be text"),
    ],
)
def test_what_a_question_cannot_carry(call: Callable[[Any], Any], message: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(errors.InvalidArgument, match=message):
        call(client)


async def test_an_option_of_a_question_that_does_not_exist() -> None:
    meant = r"unknown option timout \(did you mean timeout\?\)"
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match=meant):
        client.models(timout=3)  # type: ignore[call-arg]
    async with AsyncClient("127.0.0.1:1") as client_too:
        with pytest.raises(TypeError, match=meant):
            await client_too.admin.load(timout=3)  # type: ignore[call-arg]


async def test_closing_under_a_question_is_an_error_to_it() -> None:
    asked = asyncio.Event()

    class Never(model_pb2_grpc.ModelServiceServicer):
        async def ListModels(self, request: Any, context: Any) -> None:
            asked.set()
            await asyncio.Event().wait()

    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    model_pb2_grpc.add_ModelServiceServicer_to_server(Never(), server)  # type: ignore[no-untyped-call]
    client = AsyncClient(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    waiting = asyncio.create_task(client.models())
    await asked.wait()
    await client.aclose()
    with pytest.raises(errors.Cancelled):
        await waiting
    await server.stop(None)


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_cancel_whose_answer_is_lost_is_no_end_that_was_not_found(blocking: bool) -> None:
    live, asked = {"r-1"}, list[str]()

    class Lossy(admin_pb2_grpc.AdminServiceServicer):
        async def CancelGeneration(self, request: Any, context: Any) -> None:
            asked.append(request.request_id)
            if request.request_id not in live:
                await context.abort(grpc.StatusCode.NOT_FOUND, "none")
            live.remove(request.request_id)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")  # as gRPC says it

    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Lossy(), server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    if blocking:
        with Client(address) as client, pytest.raises(errors.Unavailable):
            await asyncio.to_thread(client.admin.cancel, "r-1")
    else:
        async with AsyncClient(address) as client_too:
            with pytest.raises(errors.Unavailable):
                await client_too.admin.cancel("r-1")
    assert asked == ["r-1"]
    await server.stop(None)


# ---- The server itself ---------------------------------------------------------------------------------------------


async def test_the_model_of_the_server(free: Serving) -> None:
    async with AsyncClient(free.address) as client:
        [model] = await client.models()
        assert model == await client.model(MODEL)
        assert (model.name, model.default_sampling["temperature"]) == (MODEL, 0.0)
        assert await client.tokenize("ab") == (97, 98)
        assert await client.detokenize([0, 1]) == "ab"
        with pytest.raises(errors.NotFound):
            await client.model("another")


async def test_operating_the_server(serving: Serving) -> None:
    async with AsyncClient(serving.address) as client:
        reading = asyncio.create_task(client.complete("hello", request_id="r-1", tenant="blue", max_tokens=8))
        while not (live := await client.admin.requests("blue")):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert [(request.request_id, request.tenant, request.prompt_tokens) for request in live] == [("r-1", "blue", 5)]
        load = await client.admin.load()
        assert (load.running_requests + load.waiting_requests, load.draining) == (1, False)
        await client.admin.cancel("r-1")
        serving.runner.open()
        with pytest.raises(errors.Cancelled):
            await reading
        with pytest.raises(errors.NotFound):
            await client.admin.cancel("r-1")
        await client.complete("hello", tenant="blue", max_tokens=8)
        stats = await client.admin.stats()
        [tenant] = [tenant for tenant in stats.tenants if tenant.tenant == "blue"]
        assert tenant.ended == {"OK": 1, "CANCELLED": 1}
        assert await client.admin.drain(1.0) == Drained(0, 0)
        assert (await client.admin.load()).draining
    async with AsyncClient(serving.address, max_retries=0) as client:
        with pytest.raises(RpcError) as caught:
            await client.complete("hello")
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, errors.Reason.DRAINING)
