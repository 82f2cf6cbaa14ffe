"""ModelService: what is told of the model, and its tokenizer, as generations use it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.core.method import Method
from paceline.core.params import SpeculationBounds
from paceline.core.tenant_policy import TenantPolicy
from paceline.engine.async_engine import LONG_IDS, LONG_TEXT
from paceline.server.calls import Caller, Context, OpenGate
from paceline.v1 import generation_pb2, model_pb2_grpc
from paceline.v1 import model_pb2 as pb
from support.serving import EOS, MAX_MODEL_LEN, MODEL, Serving, details_of, request, text_of
from support.serving import serving as serving_context

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def stub_of(served: Serving) -> Any:
    return model_pb2_grpc.ModelServiceStub(served.channel)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


class TenantGate(OpenGate):
    """Everybody is this tenant, which may use these models."""

    def __init__(self, tenant: str, models: set[str] | None = None) -> None:
        self.caller = Caller("key", tenant, models_of=lambda tenant: models)

    def admit(self, method: str, context: Context) -> Caller:
        return self.caller


# -- what is served ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", MODEL])
async def test_the_model(serving: Serving, name: str) -> None:
    model = (await stub_of(serving).GetModel(pb.GetModelRequest(model=name))).model
    scalars = generation_pb2.SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, typical_p=1.0)
    scalars.MergeFrom(
        generation_pb2.SamplingParams(presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
    )
    assert model == pb.Model(
        name=MODEL,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=997,
        eos_token_ids=[EOS],
        speculation_modes=[generation_pb2.SPECULATION_MODE_NGRAM, generation_pb2.SPECULATION_MODE_OFF],
        max_draft_tokens=8,
        default_sampling=scalars,
        has_chat_template=True,
        max_logprobs=20,
    )
    assert list((await stub_of(serving).ListModels(pb.ListModelsRequest())).models) == [model]


async def test_what_is_told_can_be_sent(serving: Serving) -> None:
    serving.runner.open()
    model = (await stub_of(serving).GetModel(pb.GetModelRequest())).model
    for mode in model.speculation_modes:
        speculation = generation_pb2.SpeculationParams(mode=mode, max_draft_tokens=model.max_draft_tokens)
        asked = request(speculation=speculation, sampling=model.default_sampling)
        assert [response async for response in serving.stub.Generate(asked)]


async def test_a_tenant_sees_what_it_may_use(serving: Serving) -> None:
    bounds = SpeculationBounds(methods=frozenset({Method.NGRAM}), max_depth=3)
    tenants = serving.scheduler.tenants
    tenants.set_policies(
        {"a": TenantPolicy(speculation=bounds), "b": TenantPolicy(speculation=SpeculationBounds(frozenset()))},
        None,
        0.0,
    )
    for tenant, depth, modes in (("a", 3, 2), ("b", 0, 1)):
        serving.server.calls.gate = TenantGate(tenant)
        model = (await stub_of(serving).GetModel(pb.GetModelRequest())).model
        assert (model.max_draft_tokens, len(model.speculation_modes)) == (depth, modes)


async def test_models_that_are_not_for_the_caller(serving: Serving) -> None:
    serving.server.calls.gate = TenantGate("t", {"another"})
    assert not (await stub_of(serving).ListModels(pb.ListModelsRequest())).models
    for call in (
        stub_of(serving).GetModel(pb.GetModelRequest()),
        stub_of(serving).Tokenize(pb.TokenizeRequest(text="a")),
        stub_of(serving).Detokenize(pb.DetokenizeRequest(token_ids=[1])),
    ):
        assert (await failure(call)).code() is grpc.StatusCode.PERMISSION_DENIED


async def test_unknown_models(serving: Serving) -> None:
    name = "no such model" * 100
    for call in (
        stub_of(serving).GetModel(pb.GetModelRequest(model=name)),
        stub_of(serving).Tokenize(pb.TokenizeRequest(model=name, text="a")),
        stub_of(serving).Detokenize(pb.DetokenizeRequest(model=name, token_ids=[1])),
    ):
        error = await failure(call)
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert f"this server has {MODEL!r}" in (error.details() or "")
        assert len(error.details() or "") < 300
        assert details_of(error)["ResourceInfo"].resource_type == "model"  # type: ignore[attr-defined]


async def test_while_the_model_is_loading() -> None:
    async with serving_context(open_engine=False) as served:
        for call in (
            stub_of(served).GetModel(pb.GetModelRequest()),
            stub_of(served).ListModels(pb.ListModelsRequest()),
            stub_of(served).Tokenize(pb.TokenizeRequest(text="a")),
            stub_of(served).Detokenize(pb.DetokenizeRequest(token_ids=[1])),
        ):
            error = await failure(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "RetryInfo" in details_of(error)


# -- its tokenizer ----------------------------------------------------------------------------------------------------


async def test_tokens_are_those_that_a_generation_reads(free: Serving) -> None:
    stub = stub_of(free)
    text = await stub.Tokenize(pb.TokenizeRequest(text="héllo"))
    assert bytes(text.token_ids).decode() == "héllo"
    chat = generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    turns = await stub.Tokenize(pb.TokenizeRequest(model=MODEL, chat=chat))
    assert bytes(turns.token_ids) == b"user: hi\n"
    [first, *_] = [response async for response in free.stub.Generate(generation_pb2.GenerateRequest(chat=chat))]
    assert first.started.prompt_tokens == len(turns.token_ids)


async def test_text_is_that_which_a_generation_shows(free: Serving) -> None:
    responses = [response async for response in free.stub.Generate(request(max_tokens=40))]
    token_ids = [token_id for response in responses for token_id in response.token_ids]
    shown = await stub_of(free).Detokenize(pb.DetokenizeRequest(token_ids=token_ids))
    assert shown.text == "".join(response.text for response in responses) == text_of(token_ids)
    assert (await stub_of(free).Detokenize(pb.DetokenizeRequest())).text == ""


async def test_special_tokens_are_shown_on_demand(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[bool]()
    tokenizer = serving.engine.engine.tokenizer
    decoder = tokenizer.decoder

    def watched(prompt: Any, *, special_tokens: bool) -> Any:
        asked.append(special_tokens)
        return decoder(prompt, special_tokens=special_tokens)

    monkeypatch.setattr(tokenizer, "decoder", watched)
    for wanted in (False, True):
        await stub_of(serving).Detokenize(pb.DetokenizeRequest(token_ids=[1], include_special_tokens=wanted))
    assert asked == [False, True]


async def test_what_takes_long_runs_elsewhere(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serving.engine.engine
    threads = list[bool]()

    def watched(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return inner(*args)

        return call

    monkeypatch.setattr(engine, "tokenize", watched(engine.tokenize))
    monkeypatch.setattr(engine, "detokenize", watched(engine.detokenize))
    stub = stub_of(serving)
    # Longer than the model takes: whoever wants to cut a text asks for just that.
    size = 3 * LONG_TEXT
    assert size > MAX_MODEL_LEN
    assert len((await stub.Tokenize(pb.TokenizeRequest(text="x" * size))).token_ids) == size
    assert len((await stub.Detokenize(pb.DetokenizeRequest(token_ids=[1] * (LONG_IDS + 1)))).text) == LONG_IDS + 1
    await stub.Tokenize(pb.TokenizeRequest(text="short"))
    await stub.Detokenize(pb.DetokenizeRequest(token_ids=[1]))
    assert threads == [False, False, True, True]


@pytest.mark.parametrize(
    ("asked", "field", "allowed"),
    [
        (pb.TokenizeRequest(), "prompt", "one of text and chat"),
        (pb.TokenizeRequest(text=""), "text", "at least one character"),
        (pb.TokenizeRequest(chat=generation_pb2.ChatMessages()), "chat.messages", "at least one message"),
        (
            pb.TokenizeRequest(chat=generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="x")])),
            "chat.messages[0].role",
            "one of system, user, assistant, tool",
        ),
        (pb.DetokenizeRequest(token_ids=[1, 997]), "token_ids", "token ids from 0 to 996"),
        (pb.DetokenizeRequest(token_ids=[2**32 - 1] * 300), "token_ids", "token ids from 0 to 996"),
        (pb.DetokenizeRequest(token_ids=[1] * (MAX_MODEL_LEN + 1)), "token_ids", f"at most {MAX_MODEL_LEN}"),
    ],
)
async def test_bad_input(serving: Serving, asked: Any, field: str, allowed: str) -> None:
    method = type(asked).__name__.removesuffix("Request")
    error = await failure(getattr(stub_of(serving), method)(asked))
    assert error.code() is INVALID
    assert allowed in (error.details() or "")
    [violation] = details_of(error)["BadRequest"].field_violations  # type: ignore[attr-defined]
    assert violation.field == field


async def test_as_many_tokens_as_a_completion_may_have(serving: Serving) -> None:
    answer = await stub_of(serving).Detokenize(pb.DetokenizeRequest(token_ids=[1] * MAX_MODEL_LEN))
    assert len(answer.text) == MAX_MODEL_LEN


async def test_it_answers_while_the_server_drains(serving: Serving) -> None:
    await serving.server.drain(0)
    assert (await stub_of(serving).Tokenize(pb.TokenizeRequest(text="a"))).token_ids == [97]
