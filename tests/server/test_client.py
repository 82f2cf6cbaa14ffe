"""The client library against a real gRPC server without an engine."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import text_format
from grpc_health.v1 import health_pb2

from fake_server import FakeServer, fake_server
from paceline import errors
from paceline.client import (
    AsyncClient,
    ChatMessage,
    Completion,
    Delta,
    Finished,
    FinishReason,
    Generation,
    HealthStatus,
    RpcError,
    SpeculationStats,
    Started,
    Timing,
    TokenLogprobs,
    Usage,
    build_request,
)
from paceline.client.errors import error_for, from_grpc
from paceline.v1 import generation_pb2 as pb
from support.serving import Serving

STARTED = Started(request_id="r-1", model="demo", prompt_tokens=5, cached_prompt_tokens=2, seed=None)
FINISHED = Finished(
    reason=FinishReason.STOP_STRING,
    stop_string="END",
    stop_token_id=None,
    usage=Usage(prompt_tokens=5, cached_prompt_tokens=2, completion_tokens=4),
    speculation=SpeculationStats("ngram", 2, 2, 6, 3, (2, 1, 0), 2.5, 0.5, 0.25, (0, 0, 0, 2), 1.5),
    timing=Timing(queue=0.25, time_to_first_token=1.0, total=2.5, preemptions=1),
)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with fake_server() as fake:
        yield fake


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address, max_retries=0) as connected:
        yield connected


async def handler_ended(server: FakeServer) -> None:
    async with asyncio.timeout(30):
        await server.ended.wait()


# ---- Reading -------------------------------------------------------------------------------------------------------


async def test_deltas_then_how_it_ended(client: AsyncClient) -> None:
    generation = client.generate("hello", max_tokens=4)
    assert (generation.started, generation.finished) == (None, None)
    deltas = [delta async for delta in generation]
    assert deltas == [Delta("a", (7,), 0), Delta("bc", (8, 9), 1), Delta("", (10,), 3)]
    assert (generation.started, generation.finished) == (STARTED, FINISHED)


async def test_complete_collects_everything(client: AsyncClient) -> None:
    assert await client.complete([1, 2, 3]) == Completion("abc", (7, 8, 9, 10), STARTED, FINISHED)


async def test_nothing_is_sent_before_it_is_read(client: AsyncClient, server: FakeServer) -> None:
    client.generate("never read")
    await client.complete("read")
    assert [request.prompt_text for request in server.requests] == ["read"]


async def test_a_generation_is_read_once(client: AsyncClient) -> None:
    generation = client.generate("hello")
    await generation.collect()
    with pytest.raises(RuntimeError, match="only once"):
        await generation.collect()


async def test_a_stream_without_its_end_is_an_error(client: AsyncClient) -> None:
    with pytest.raises(RpcError, match="INTERNAL: the stream ended without"):
        await client.complete("truncate")


async def test_deltas_say_whose_they_are(client: AsyncClient) -> None:
    generation = client.generate("several", n=2)
    deltas = [delta async for delta in generation]
    assert [(delta.choice, delta.text, delta.token_offset) for delta in deltas] == [
        (1, "x", 0),
        (0, "a", 0),
        (1, "y", 1),
        (0, "b", 1),
    ]
    assert generation.finished_by_choice.keys() == {0, 1}
    assert generation.finished_by_choice[1] == FINISHED
    assert generation.finished is generation.finished_by_choice[0]


async def test_all_choices_are_collected_in_their_order(client: AsyncClient) -> None:
    first, second = await client.complete_all("several", n=2)
    logprobs = TokenLogprobs(-0.5, 2, (9, 7), (-0.25, -0.5))
    assert second == Completion("xy", (7, 9), STARTED, FINISHED, (logprobs, logprobs))
    assert (first.text, first.token_ids, first.logprobs) == ("ab", (8, 10), ())
    assert (first.finished.reason, first.finished.detail) == (FinishReason.DEAD_END, "no way on")
    assert first.started == STARTED


async def test_one_choice_is_collected_as_a_list_too(client: AsyncClient) -> None:
    assert await client.complete_all("hello") == [await client.complete("hello")]


async def test_several_choices_are_no_single_completion(client: AsyncClient, server: FakeServer) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"n = 2: must be 1 .* complete_all and collect_all"):
        await client.complete("several", n=2)
    assert server.requests == []


async def test_a_stream_without_the_end_of_a_choice_is_an_error(client: AsyncClient) -> None:
    with pytest.raises(RpcError, match=r"INTERNAL: .* without a `finished` message for choice 2"):
        await client.complete_all("several", n=3)


def test_every_finish_reason_of_the_contract_has_a_name() -> None:
    names = [name.removeprefix("FINISH_REASON_").lower() for name in pb.FinishReason.keys()]  # noqa: SIM118 not a mapping
    assert names == [reason.value for reason in FinishReason]


# ---- Leaving early -------------------------------------------------------------------------------------------------


async def test_break_cancels_the_rpc(client: AsyncClient, server: FakeServer) -> None:
    generation = client.generate("hang")
    async for delta in generation:
        assert delta.text == "a"
        break
    await handler_ended(server)
    assert generation.finished is None


async def test_an_exception_in_the_loop_cancels_the_rpc(client: AsyncClient, server: FakeServer) -> None:
    async def read() -> None:
        async for _ in client.generate("hang"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await read()
    await handler_ended(server)


async def test_leaving_the_context_cancels_the_rpc(client: AsyncClient, server: FakeServer) -> None:
    async with client.generate("hang") as generation:
        deltas = aiter(generation)  # held on to, so that no garbage collection closes it
        await anext(deltas)
    await handler_ended(server)
    with pytest.raises(errors.Cancelled):
        await anext(deltas)


async def test_cancelling_the_task_cancels_the_rpc(client: AsyncClient, server: FakeServer) -> None:
    reading = asyncio.Event()

    async def read() -> None:
        async for _ in client.generate("hang"):
            reading.set()

    task = asyncio.create_task(read())
    await reading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await handler_ended(server)


@pytest.mark.parametrize("what", ["generation", "client"])
async def test_closing_under_a_reader_is_an_error_to_it(client: AsyncClient, server: FakeServer, what: str) -> None:
    reading = asyncio.Event()

    async def read(generation: Generation) -> None:
        async for _ in generation:
            reading.set()

    generation = client.generate("hang")
    task = asyncio.create_task(read(generation))
    await reading.wait()
    await (generation if what == "generation" else client).aclose()
    with pytest.raises(errors.Cancelled):  # and not CancelledError: nobody cancelled the task
        await task
    await handler_ended(server)


async def test_a_closed_generation_is_never_sent(client: AsyncClient, server: FakeServer) -> None:
    generation = client.generate("hello")
    await generation.aclose()
    with pytest.raises(RuntimeError, match="only once"):
        await generation.collect()
    assert server.requests == []


async def test_a_closed_client_says_so(server: FakeServer) -> None:
    client = AsyncClient(server.address)
    await client.complete("hello")
    await client.aclose()
    await client.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await client.complete("hello")


# ---- Errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARGUMENT", errors.InvalidArgument),
        ("NOT_FOUND", errors.NotFound),
        ("ALREADY_EXISTS", errors.AlreadyExists),
        ("FAILED_PRECONDITION", errors.FailedPrecondition),
        ("RESOURCE_EXHAUSTED", errors.ResourceExhausted),
        ("UNAVAILABLE", errors.Unavailable),
        ("DEADLINE_EXCEEDED", errors.DeadlineExceeded),
        ("CANCELLED", errors.Cancelled),
        ("INTERNAL", RpcError),
        ("UNAUTHENTICATED", errors.Unauthenticated),
        ("PERMISSION_DENIED", errors.PermissionDenied),
    ],
)
async def test_a_status_becomes_the_error_of_the_tree(client: AsyncClient, code: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        await client.complete(f"fail {code}")
    error = caught.value
    assert isinstance(error, RpcError)
    assert isinstance(error, errors.PacelineError)
    assert (error.code, error.message, error.retry_after) == (grpc.StatusCode[code], f"no [{code}] today", None)
    assert str(error) == f"{code}: no [{code}] today"


@pytest.mark.parametrize(("pushback", "seconds"), [("300", 0.3), ("-1", -1.0), ("soon", -1.0)])
async def test_the_server_may_say_when_to_retry(client: AsyncClient, pushback: str, seconds: float) -> None:
    with pytest.raises(errors.Unavailable) as caught:
        await client.complete(f"fail UNAVAILABLE {pushback}")
    assert caught.value.retry_after == seconds  # type: ignore[attr-defined]


async def test_an_error_after_some_output(client: AsyncClient) -> None:
    deltas = aiter(client.generate("fail later"))
    assert (await anext(deltas)).text == "a"
    with pytest.raises(errors.Unavailable, match="engine lost") as caught:
        await anext(deltas)
    assert caught.value.request_id == "r-1"  # type: ignore[attr-defined]  # as `started` said


async def test_the_timeout_is_the_deadline_of_the_rpc(client: AsyncClient, server: FakeServer) -> None:
    with pytest.raises(errors.DeadlineExceeded):
        await client.complete("hang", timeout=0.2)
    await handler_ended(server)


async def test_nobody_listens() -> None:
    async with AsyncClient("127.0.0.1:1", max_retries=0) as client:
        with pytest.raises(errors.Unavailable):
            await client.complete("hello")


def test_an_rpc_error_survives_pickling() -> None:
    error = error_for(grpc.StatusCode.INVALID_ARGUMENT, "max_tokens = 0: must be at least 1", 1.5)
    error.reason = "INVALID_FIELD"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.retry_after, copy.reason) == (type(error), str(error), 1.5, "INVALID_FIELD")


async def test_what_the_server_adds_to_a_status(free: Serving) -> None:
    async with AsyncClient(free.address) as client:
        with pytest.raises(errors.InvalidArgument) as caught:
            await client.complete("hello", request_id="r-7", top_p=2.0)
    error = caught.value
    assert isinstance(error, RpcError)
    assert error.field == "sampling.top_p"
    assert (error.reason, error.request_id) == (errors.Reason.SAMPLING_PARAM_OUT_OF_RANGE, "r-7")


def test_details_that_are_none_are_left_out() -> None:
    failed = grpc.aio.AioRpcError(
        grpc.StatusCode.NOT_FOUND,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(("grpc-status-details-bin", b"\xff"), ("x-request-id", "r")),
        "nothing",
    )
    error = from_grpc(failed)
    assert (str(error), error.reason, error.request_id) == ("NOT_FOUND: nothing", "", "r")


# ---- Metadata ------------------------------------------------------------------------------------------------------

SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_call_names_itself_and_its_span(server: FakeServer) -> None:
    async with AsyncClient(server.address, metadata={"x-team": "blue"}) as client:
        await client.complete("hello", request_id="r-1", traceparent=SPAN)
        await client.complete("hello", request_id="not a header")
    first, second = server.metadata
    assert (first["x-request-id"], first["traceparent"], first["x-team"]) == ("r-1", SPAN, "blue")
    assert "x-request-id" not in second, "the message has it, and the server says what is wrong with it"
    assert "traceparent" not in second


async def test_a_span_that_is_none(client: AsyncClient, server: FakeServer) -> None:
    with pytest.raises(errors.InvalidArgument, match="traceparent = 'here'"):
        client.generate("hello", traceparent="here")
    with pytest.raises(errors.InvalidArgument, match="traceparent = 5: must be VERSION-TRACE-PARENT-FLAGS"):
        client.generate("hello", traceparent=5)  # type: ignore[arg-type]
    for request_id in ("a b", 5):
        with pytest.raises(errors.InvalidArgument, match=f"request_id = {request_id!r}: must be"):
            await client.models(request_id=request_id)  # type: ignore[arg-type]
    assert server.requests == []


# ---- Requests ------------------------------------------------------------------------------------------------------

DEFAULTS = "speculation {mode: SPECULATION_MODE_AUTO} output {content: OUTPUT_CONTENT_TEXT_AND_TOKEN_IDS}"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", "prompt_text: ''"),
        ("h\u00e9", "prompt_text: 'h\u00e9'"),
        ([1, 2], "prompt_tokens {ids: [1, 2]}"),
        ((), "prompt_tokens {}"),
        (range(2), "prompt_tokens {ids: [0, 1]}"),
        ([ChatMessage("user", "hi")], "chat {messages {role: 'user' content: 'hi'}}"),
        (
            [{"role": "system", "content": ""}, ChatMessage("user", "hi")],
            "chat {messages {role: 'system'} messages {role: 'user' content: 'hi'}}",
        ),
    ],
)
def test_prompts(prompt: Any, expected: str) -> None:
    request = build_request(prompt)
    for part in ("sampling", "stop"):
        assert not getattr(request, part).ByteSize(), "what was not asked for is not set"
        request.ClearField(part)
    assert request == text_format.Parse(f"{expected} {DEFAULTS}", pb.GenerateRequest())


def test_options() -> None:
    request = build_request(
        "x",
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        seed=2**64 - 1,
        max_tokens=0,
        stop="END",
        stop_token_ids=[3],
        ignore_eos=True,
        speculation="draft_model",
        max_draft_tokens=4,
        min_draft_tokens=0,
        content="text",
        request_id="r",
        min_p=None,
        logit_bias={3: -1.5},
        bad_words=["x", "y"],
        n=2,
        logprobs=0,
        logprobs_mode="processed",
        verification="block",
        json_schema={"type": "integer"},
        tenant="t",
        priority=-3,
        queue_timeout=1,
        time_to_first_token=0.25,
        time_per_output_token=1e-9,
        max_chunk_delay=0.5,
    )
    assert request == text_format.Parse(
        """
        request_id: "r" prompt_text: "x" n: 2
        sampling {
            temperature: 0 top_p: 0.5 top_k: 0 seed: 18446744073709551615
            logit_bias {key: 3 value: -1.5} bad_words: ["x", "y"]
        }
        stop {max_tokens: 0 strings: "END" token_ids: 3 ignore_eos: true}
        speculation {
            mode: SPECULATION_MODE_DRAFT_MODEL max_draft_tokens: 4 min_draft_tokens: 0
            verification: VERIFICATION_RULE_BLOCK
        }
        output {
            content: OUTPUT_CONTENT_TEXT logprobs: 0 logprobs_mode: LOGPROBS_MODE_PROCESSED
            max_chunk_delay {nanos: 500000000}
        }
        structured {json_schema: '{"type": "integer"}'}
        scheduling {
            tenant: "t" priority: -3 queue_timeout {seconds: 1} time_to_first_token {nanos: 250000000}
            time_per_output_token {nanos: 1}
        }
        """,
        pb.GenerateRequest(),
    )
    assert list(build_request("x", stop=["a", "b"]).stop.strings) == ["a", "b"]
    assert build_request("x", json_schema="{").structured.json_schema == "{", "the server judges it"
    assert build_request("x", choices=[]).structured.HasField("choice")


def nested(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("x", {"max_tokens": -1}, r"stop.max_tokens = -1: must be an integer in 0..2\^32-1"),
        ("x", {"max_tokens": 1.5}, "stop.max_tokens = 1.5: must be an integer"),
        ("x", {"temperature": "hot"}, "sampling.temperature = 'hot': must be a number"),
        ("x", {"n": -1}, r"n = -1: must be an integer in 1\.\.64"),
        ("x", {"n": 0}, r"n = 0: must be an integer in 1\.\.64"),
        ("x", {"n": 1.5}, r"n = 1.5: must be an integer in 1\.\.64"),
        ("x", {"n": np.int64(0)}, r"n = np.int64\(0\): must be an integer in 1\.\.64"),
        ("x", {"n": True}, "n = True: must be an integer"),
        ("x", {"max_tokens": True}, "stop.max_tokens = True: must be an integer"),
        ("x", {"temperature": False}, "sampling.temperature = False: must be a number"),
        ("x", {"logprobs": True}, "output.logprobs = True: must be an integer"),
        ("x", {"model": True}, "model = True: must be text"),
        ("x", {"allowed_token_ids": []}, r"sampling.allowed_token_ids = \[\]: must be at least one token id"),
        ("x", {"bad_words": "abc"}, "sampling.bad_words = 'abc': must be a sequence, each text"),
        ("x", {"logit_bias": {True: 1.0}}, "sampling.logit_bias = {True: 1.0}: must be a mapping of token ids to"),
        ("x", {"logit_bias": {3: True}}, "sampling.logit_bias = {3: True}: must be a mapping of token ids to"),
        ("x", {"logit_bias": {3: 10**400}}, "sampling.logit_bias = .*: must be a mapping of token ids to"),
        ("x", {"temperature": 10**400}, "sampling.temperature = .*: must be"),
        ("x", {"top_p": 1e300}, r"sampling.top_p = 1e\+300: must be a number that 32 bits can hold"),
        ("x", {"logit_bias": {3: -1e39}}, r"sampling.logit_bias = {3: -1e\+39}: must be .* that 32 bits can hold"),
        ("x", {"stop_token_ids": [True]}, r"stop.token_ids = \[True\]: must be a sequence, each"),
        ([True], {}, r"prompt_tokens.ids = \[True\]: must be a sequence, each"),
        ("x", {"logit_bias": [3]}, r"sampling.logit_bias = \[3\]: must be a mapping of token ids to numbers"),
        ("x", {"logit_bias": {-1: 0.5}}, "sampling.logit_bias = {-1: 0.5}: must be a mapping of token ids"),
        ("x", {"regex": "a", "choices": ["b"]}, "structured = 'regex and choices': must be one of json_schema, regex"),
        ("x", {"json_schema": {"const": {1}}}, "structured.json_schema = .*: must be JSON text, or what JSON can hold"),
        (
            "x",
            {"json_schema": nested(10_000)},
            "structured.json_schema = of type dict, too large to be shown: must be JSON",
        ),
        ("x", {"max_tokens": 10**5000}, "stop.max_tokens = of type int, too large to be shown: must be an integer"),
        ("x", {"choices": "ab"}, "structured.choice.values = 'ab': must be a sequence"),
        ("x", {"logprobs": -1}, "output.logprobs = -1: must be an integer"),
        ("x", {"logprobs_mode": "log"}, "output.logprobs_mode = 'log': must be one of raw, processed"),
        ("x", {"verification": "greedy"}, "speculation.verification = 'greedy': must be one of token_wise, block"),
        ("x", {"stop": ["a", 1]}, r"stop.strings = \['a', 1\]: must be a sequence, each text"),
        ("x", {"speculation": "fast"}, "speculation.mode = 'fast': must be one of auto, off, ngram, draft_model"),
        ("x", {"verification": ["block"]}, r"speculation.verification = \['block'\]: must be one of token_wise, block"),
        ("x", {"speculation": False}, "speculation.mode = False: must be one of auto, off"),
        ("x", {"speculation": ["off"]}, r"speculation.mode = \['off'\]: must be one of auto, off"),
        ("x", {"content": ""}, "output.content = '': must be one of text"),
        ("x", {"content": "html"}, "output.content = 'html': must be one of text, token_ids, text_and_token_ids"),
        ("x", {"priority": 2**31}, r"scheduling.priority = 2147483648: must be an integer in -2\^31"),
        ("x", {"priority": "high"}, "scheduling.priority = 'high': must be an integer"),
        ("x", {"queue_timeout": 0}, r"scheduling.queue_timeout = 0: must be seconds in \(0, 1e\+09\]"),
        ("x", {"queue_timeout": "1"}, "scheduling.queue_timeout = '1': must be seconds"),
        ("x", {"time_to_first_token": -0.5}, "scheduling.time_to_first_token = -0.5: must be seconds"),
        ("x", {"time_to_first_token": float("nan")}, "scheduling.time_to_first_token = nan: must be seconds"),
        ("x", {"time_per_output_token": float("inf")}, "scheduling.time_per_output_token = inf: must be seconds"),
        ("x", {"max_chunk_delay": -1}, r"output.max_chunk_delay = -1: must be seconds in \[0, 60\]$"),
        ("x", {"max_chunk_delay": 60.5}, r"output.max_chunk_delay = 60.5: must be seconds in \[0, 60\]$"),
        ("x", {"time_per_output_token": True}, "scheduling.time_per_output_token = True: must be seconds"),
        ("\ud800", {}, "prompt_text = .* must be text that UTF-8 can hold"),
        ([1, -2], {}, r"prompt_tokens.ids = \[1, -2\]: must be a sequence"),
        (None, {}, "prompt = None: must be text, token ids or chat messages"),
        (np.array(5), {}, r"prompt = array\(5\): must be text, token ids or chat messages"),
        (5, {}, "prompt = 5: must be text, token ids or chat messages"),
        ({1, 2}, {}, "prompt = {1, 2}: must be text, token ids or chat messages"),
        (b"x", {}, "prompt = b'x': must be text, token ids or chat messages"),
        ({"role": "user", "content": "x"}, {}, "must be text, token ids or chat messages"),
        ([{"role": "user"}], {}, r"chat.messages\[0\] = .*keys role and content"),
        ([{"role": "user", "content": 1}], {}, r"chat.messages\[0\].content = 1: must be text"),
        ([{"role": "assistant", "content": None}], {}, r"chat.messages\[0\].content = None: must be text"),
        ([ChatMessage("user", "x"), 3], {}, r"chat.messages\[1\] = 3"),
    ],
)
async def test_what_a_request_cannot_carry(client: AsyncClient, prompt: Any, options: Any, message: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        client.generate(prompt, **options)


def test_times_may_be_numbers_of_numpy() -> None:
    request = build_request("x", queue_timeout=np.float32(0.5), time_to_first_token=np.int64(2))  # type: ignore[arg-type]
    assert request.scheduling.queue_timeout.ToNanoseconds() == 500_000_000
    assert request.scheduling.time_to_first_token.ToNanoseconds() == 2_000_000_000


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match=r"unknown option max_token \(did you mean max_tokens\?\)$"):
        build_request("x", max_token=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"unknown option choice \(did you mean choices\?\), zzz$"):
        build_request("x", zzz=1, choice=["a"])  # type: ignore[call-arg]


# ---- Health --------------------------------------------------------------------------------------------------------


async def test_health(client: AsyncClient, server: FakeServer) -> None:
    assert await client.health(wait_for_ready=True) is HealthStatus.SERVING
    await server.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert await client.health() is HealthStatus.NOT_SERVING
    with pytest.raises(errors.NotFound):
        await client.health("no.such.Service")


# ---- Importing -----------------------------------------------------------------------------------------------------


def test_the_client_needs_nothing_of_the_engine() -> None:
    code = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "transformers", "tokenizers", "uvloop", "rich", "typer"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
import paceline.client
ours = {name for name in sys.modules if name.startswith("paceline.")}
allowed = tuple(f"paceline.{name}" for name in ("client", "v1", "errors", "options", "chat", "headers"))
print(sorted(name for name in ours if not name.startswith(allowed)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


def test_a_client_belongs_to_one_event_loop() -> None:
    async def ask() -> None:
        with suppress(RpcError):
            await client.models(timeout=1.0)

    client = AsyncClient("127.0.0.1:1", max_retries=0)
    asyncio.run(ask())
    with pytest.raises(RuntimeError, match="another event loop than before"):
        asyncio.run(ask())
