"""How much a request may hold: what is too much is refused before anybody spends time on it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import grpc
import pytest

from paceline.engine.engine import MAX_CHARS_PER_TOKEN
from paceline.errors import Reason
from paceline.server import ServerSettings
from paceline.server.convert import MAX_ITEMS
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import model_pb2, model_pb2_grpc
from support.serving import MAX_MODEL_LEN, Serving, details_of, failure, request
from support.serving import serving as serving_context

MOST_CHARS = MAX_CHARS_PER_TOKEN * MAX_MODEL_LEN
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def turns(*lengths: int) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x" * length) for length in lengths])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (request("x" * (MOST_CHARS + 1)), "prompt_text"),
        (request(chat=turns(MOST_CHARS, 1)), "chat.messages"),
    ],
    ids=["text", "chat"],
)
async def test_texts_that_no_tokenizer_makes_fit(
    free: Serving, message: pb.GenerateRequest, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(text: str) -> list[int]:
        raise AssertionError("it was tokenised")

    with monkeypatch.context() as patched:
        patched.setattr(free.engine.engine.tokenizer, "encode", encode)
        error = await failure(free.stub.Generate(message))
    assert error.code() is INVALID
    assert f"{field} = '{MOST_CHARS + 1} characters': must be at most {MOST_CHARS} characters" in str(error.details())
    assert details_of(error)["ErrorInfo"].reason == Reason.PROMPT_TOO_LONG  # type: ignore[attr-defined]
    if field == "prompt_text":  # the same for who only wants to know its tokens
        stub = model_pb2_grpc.ModelServiceStub(free.channel)
        with pytest.raises(grpc.aio.AioRpcError, match="65537 characters"):
            await stub.Tokenize(model_pb2.TokenizeRequest(text=message.prompt_text))
    assert free.idle


async def test_the_longest_text_is_judged_by_its_tokens(free: Serving) -> None:
    error = await failure(free.stub.Generate(request("x" * MOST_CHARS)))
    assert f"{MOST_CHARS} tokens" in (error.details() or "")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (request(prompt_tokens=pb.TokenIds(ids=[1] * (MAX_ITEMS + 1))), "prompt_tokens.ids"),
        (request(stop=pb.StopParams(token_ids=[1] * (MAX_ITEMS + 1))), "stop.token_ids"),
        (request(stop=pb.StopParams(strings=[""] * (MAX_ITEMS + 1))), "stop.strings"),
        (request(sampling=pb.SamplingParams(bad_words=[""] * (MAX_ITEMS + 1))), "sampling.bad_words"),
    ],
    ids=["prompt", "stop ids", "stop strings", "bad words"],
)
async def test_lists(free: Serving, message: pb.GenerateRequest, field: str) -> None:
    error = await failure(free.stub.Generate(message))
    assert error.code() is INVALID
    assert error.details() == f"{field} = '{MAX_ITEMS + 1} values': must be at most {MAX_ITEMS} values"


@pytest.fixture
async def narrow() -> AsyncIterator[Serving]:
    """A server of small messages."""
    async with serving_context(settings=ServerSettings(max_message_size=1000)) as served:
        served.runner.open()
        yield served


async def test_messages(narrow: Serving) -> None:
    error = await failure(narrow.stub.Generate(request("x" * 1000)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    said = r"the request has 10\d\d bytes, and this server takes at most 1000 \(--max-message-size\)"
    assert re.fullmatch(said, str(error.details()))
    assert details_of(error)["ErrorInfo"].reason == Reason.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "-1"
    assert [response async for response in narrow.stub.Generate(request("x" * 900))]


async def test_messages_that_the_library_refuses_unread(narrow: Serving) -> None:
    error = await failure(narrow.stub.Generate(request("x" * 4000)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max" in str(error.details())


async def test_the_largest_limit() -> None:
    async with serving_context(settings=ServerSettings(max_message_size=(1 << 31) - 1)) as served:
        served.runner.open()
        assert [response async for response in served.stub.Generate(request())]
