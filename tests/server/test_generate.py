"""`Generate` over a real port: what goes in comes out, in the form that was asked for."""

from __future__ import annotations

import asyncio
import itertools

import grpc
import pytest

from paceline.sim import reference_output
from paceline.v1 import generation_pb2 as pb
from support.serving import EOS, MODEL, Serving, failure, request, text_of

Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


async def read(serving: Serving, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in serving.stub.Generate(message)]


def ids_of(responses: list[pb.GenerateResponse]) -> list[int]:
    return [token_id for response in responses for token_id in response.token_ids]


def offsets_of(responses: list[pb.GenerateResponse]) -> list[int]:
    """Where the tokens of each message begin, if none is missing."""
    return list(itertools.accumulate((len(response.token_ids) for response in responses[:-1]), initial=0))


def text_in(responses: list[pb.GenerateResponse]) -> str:
    return "".join(response.text for response in responses)


async def test_text_and_ids_of_the_whole_completion(free: Serving) -> None:
    responses = await read(free, request("hello", max_tokens=40))
    wanted = reference_output(b"hello", 40)
    assert ids_of(responses) == wanted
    assert text_in(responses) == text_of(wanted)
    assert [response.token_offset for response in responses] == offsets_of(responses)


async def test_first_message_starts_and_last_one_finishes(free: Serving) -> None:
    responses = await read(free, request("hello", max_tokens=40, request_id="mine"))
    assert [response.HasField("started") for response in responses] == [True] + [False] * (len(responses) - 1)
    assert [response.HasField("finished") for response in responses] == [False] * (len(responses) - 1) + [True]
    assert responses[0].started == pb.Started(request_id="mine", model=MODEL, prompt_tokens=5)
    assert responses[0].token_ids
    assert responses[-1].token_ids
    finished = responses[-1].finished
    assert finished.reason == pb.FINISH_REASON_MAX_TOKENS
    assert finished.WhichOneof("matched") is None
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (5, 40)


async def test_speculation_and_timing_are_accounted_for(free: Serving) -> None:
    responses = await read(free, request("hello", max_tokens=40))
    stats, timing = responses[-1].finished.speculation, responses[-1].finished.timing
    assert stats.mode == pb.SPECULATION_MODE_NGRAM
    # The scripted drafts are all right and two deep: three tokens in most steps.
    assert stats.accepted_tokens > 20
    assert stats.drafted_tokens >= stats.accepted_tokens
    assert sum(stats.accepted_by_position) == stats.accepted_tokens
    assert stats.acceptance_length == pytest.approx(39 / stats.verify_steps)  # all but the first
    queue, first, total = (
        part.ToTimedelta().total_seconds() for part in (timing.queue, timing.time_to_first_token, timing.total)
    )
    assert 0 <= queue <= first <= total
    assert total > 0
    assert timing.preemptions == 0


async def test_speculation_off(free: Serving) -> None:
    off = pb.SpeculationParams(mode=pb.SPECULATION_MODE_OFF)
    responses = await read(free, request("hello", max_tokens=40, speculation=off))
    assert ids_of(responses) == reference_output(b"hello", 40)
    assert responses[-1].finished.speculation.mode == pb.SPECULATION_MODE_OFF
    assert responses[-1].finished.speculation.drafted_tokens == 0


async def test_depth_is_bounded_by_the_request(free: Serving) -> None:
    none = pb.SpeculationParams(max_draft_tokens=0)
    responses = await read(free, request("hello", max_tokens=40, speculation=none))
    assert responses[-1].finished.speculation.drafted_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ({"prompt_text": "né"}, list("né".encode())),
        ({"prompt_tokens": pb.TokenIds(ids=[1, 996, 3])}, [1, 996, 3]),
        (
            {"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])},
            list(b"user: hi\n"),
        ),
    ],
)
async def test_every_kind_of_prompt(free: Serving, prompt: dict[str, object], token_ids: list[int]) -> None:
    responses = await read(free, request(**prompt))
    assert responses[0].started.prompt_tokens == len(token_ids)
    assert ids_of(responses) == reference_output(token_ids, 8)


@pytest.mark.parametrize(
    ("content", "has_text", "has_ids"),
    [
        (pb.OUTPUT_CONTENT_UNSPECIFIED, True, False),
        (pb.OUTPUT_CONTENT_TEXT, True, False),
        (pb.OUTPUT_CONTENT_TOKEN_IDS, False, True),
        (pb.OUTPUT_CONTENT_TEXT_AND_TOKEN_IDS, True, True),
    ],
)
async def test_content(free: Serving, content: pb.OutputContent, has_text: bool, has_ids: bool) -> None:
    message = request("hello")
    message.output.content = content
    responses = await read(free, message)
    wanted = reference_output(b"hello", 8)
    assert ids_of(responses) == (wanted if has_ids else [])
    assert text_in(responses) == (text_of(wanted) if has_text else "")


async def test_final_only_is_one_message(free: Serving) -> None:
    [response] = await read(free, request("hello", max_tokens=40, output=pb.OutputParams(final_only=True)))
    assert list(response.token_ids) == reference_output(b"hello", 40)
    assert response.text == text_of(response.token_ids)
    assert response.token_offset == 0
    assert response.HasField("started")
    assert response.HasField("finished")


async def test_choices_are_told_apart(free: Serving) -> None:
    responses = await read(free, request("hello", max_tokens=40, n=3))
    assert [response.HasField("started") for response in responses] == [True] + [False] * (len(responses) - 1)
    wanted = reference_output(b"hello", 40)
    for choice in range(3):
        own = [response for response in responses if response.choice == choice]
        assert ids_of(own) == wanted
        assert text_in(own) == text_of(wanted)
        assert [response.token_offset for response in own] == offsets_of(own)
        assert [response.HasField("finished") for response in own] == [False] * (len(own) - 1) + [True]
        usage = own[-1].finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (5, 40)
    await free.until(lambda: free.idle)


async def test_final_only_is_one_message_for_each_choice(free: Serving) -> None:
    responses = await read(free, request("hello", max_tokens=40, n=3, output=pb.OutputParams(final_only=True)))
    assert sorted(response.choice for response in responses) == [0, 1, 2]
    assert [response.HasField("started") for response in responses] == [True, False, False]
    for response in responses:
        assert list(response.token_ids) == reference_output(b"hello", 40)
        assert response.token_offset == 0
        assert response.HasField("finished")


async def test_a_seed_is_confirmed(free: Serving) -> None:
    responses = await read(free, request(sampling=pb.SamplingParams(seed=0)))
    assert responses[0].started.HasField("seed")
    assert responses[0].started.seed == 0
    assert not (await read(free, request()))[0].started.HasField("seed")


async def test_messages_that_would_carry_nothing_are_not_sent(free: Serving) -> None:
    text = text_of(reference_output(b"hello", 20))
    held = text + "!"  # never comes, but keeps all text back until the end
    message = request("hello", max_tokens=20, stop=pb.StopParams(strings=[held]))
    message.output.content = pb.OUTPUT_CONTENT_TEXT
    [response] = await read(free, message)
    assert response.text == text


async def test_stop_string(free: Serving) -> None:
    text = text_of(reference_output(b"hello", 40))
    stop = text[10:13]
    cut = text[: text.index(stop)]
    message = request("hello", max_tokens=40, stop=pb.StopParams(strings=[stop]))
    responses = await read(free, message)
    assert text_in(responses) == cut
    finished = responses[-1].finished
    assert (finished.reason, finished.stop_string) == (pb.FINISH_REASON_STOP_STRING, stop)
    assert finished.usage.completion_tokens == len(ids_of(responses))
    message.stop.include_stop_string = True
    assert text_in(await read(free, message)) == cut + stop


async def test_stop_token(free: Serving) -> None:
    wanted = reference_output(b"hello", 40)
    stop = wanted[10]
    responses = await read(free, request("hello", max_tokens=40, stop=pb.StopParams(token_ids=[stop])))
    assert ids_of(responses) == wanted[: wanted.index(stop) + 1]
    finished = responses[-1].finished
    assert (finished.reason, finished.stop_token_id) == (pb.FINISH_REASON_STOP_TOKEN, stop)


async def test_end_of_sequence_and_context_length(free: Serving) -> None:
    start = next(token_id for token_id in range(997) if EOS in reference_output([token_id], 20))
    message = request(prompt_tokens=pb.TokenIds(ids=[start]), max_tokens=20)
    message.stop.ignore_eos = False
    responses = await read(free, message)
    assert ids_of(responses)[-1] == EOS
    assert responses[-1].finished.reason == pb.FINISH_REASON_EOS

    message = request("hello")
    message.stop.ClearField("max_tokens")
    responses = await read(free, message)
    assert responses[-1].finished.reason == pb.FINISH_REASON_CONTEXT_LENGTH


async def test_request_id_is_in_the_headers(free: Serving) -> None:
    call: Call = free.stub.Generate(request(request_id="tenant-7/42"))
    assert ("x-request-id", "tenant-7/42") in list(await call.initial_metadata())
    assert [response async for response in call]


async def test_request_ids_are_made_up_and_free_again_afterwards(free: Serving) -> None:
    first, second = [(await read(free, request()))[0].started.request_id for _ in range(2)]
    assert first
    assert first != second
    for _ in range(2):
        assert (await read(free, request(request_id="again")))[0].started.request_id == "again"


async def test_calls_of_one_trace(serving: Serving) -> None:
    """They have the same "x-request-id". Who asked for an id by name gets that one or none."""
    trace = (("x-request-id", "trace"),)
    calls: list[Call] = []
    for _ in range(3):
        calls.append(serving.stub.Generate(request(), metadata=trace))
        await serving.until(lambda: serving.engine.num_live == len(calls))
    for name in ("trace", "trace-2"):
        error = await failure(serving.stub.Generate(request(request_id=name)))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    serving.runner.open()
    for call, name in zip(calls, ("trace", "trace-2", "trace-3"), strict=True):
        assert ("x-request-id", name) in list(await call.initial_metadata())
        first, *_ = [response async for response in call]
        assert first.started.request_id == name
        assert ("x-request-id", name) in list(await call.trailing_metadata())
    first, *_ = [response async for response in serving.stub.Generate(request(), metadata=trace)]
    assert first.started.request_id == "trace"


async def test_nothing_is_sent_before_the_first_token(serving: Serving) -> None:
    call: Call = serving.stub.Generate(request())
    headers = asyncio.ensure_future(call.initial_metadata())
    await serving.until(lambda: serving.scheduler.has_requests)
    assert not headers.done()
    serving.runner.open()
    await headers
    assert [response async for response in call]


async def test_many_streams_at_once(free: Serving) -> None:
    messages = [request(f"prompt {index}", max_tokens=5 + 7 * index) for index in range(24)]
    answers = await asyncio.gather(*(read(free, message) for message in messages))
    for message, answer in zip(messages, answers, strict=True):
        assert ids_of(answer) == reference_output(message.prompt_text.encode(), message.stop.max_tokens)
    await free.until(lambda: free.idle)


async def test_model_name_may_be_given(free: Serving) -> None:
    assert (await read(free, request(model=MODEL)))[0].started.model == MODEL
