"""Every bad request ends with the right code, field, value and allowed range, and disturbs nobody."""

from __future__ import annotations

import math

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from paceline.sim import reference_output
from paceline.v1 import generation_pb2 as pb
from support.serving import MAX_MODEL_LEN, MODEL, Serving, details_of, failure, request, serving

MESSAGES = pb.ChatMessages
INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION

# What is wrong: the request, the field that must be named, and what else the message must hold: value, allowed range.
INVALID_FIELDS = [
    (request(sampling=pb.SamplingParams(temperature=-0.7)), "sampling.temperature", ("-0.7:", ">= 0")),
    (request(sampling=pb.SamplingParams(temperature=math.nan)), "sampling.temperature", ("nan", "finite")),
    (request(sampling=pb.SamplingParams(temperature=math.inf)), "sampling.temperature", ("inf", "finite")),
    (request(sampling=pb.SamplingParams(top_p=0)), "sampling.top_p", ("0.0", "in (0, 1]")),
    (request(sampling=pb.SamplingParams(top_p=1.1)), "sampling.top_p", ("1.1:", "in (0, 1]")),
    (request(sampling=pb.SamplingParams(top_p=-1)), "sampling.top_p", ("-1.0", "in (0, 1]")),
    (request(sampling=pb.SamplingParams(top_p=math.nan)), "sampling.top_p", ("nan", "in (0, 1]")),
    (request(sampling=pb.SamplingParams(min_p=-0.1)), "sampling.min_p", ("-0.1:", "in [0, 1]")),
    (request(sampling=pb.SamplingParams(min_p=1.5)), "sampling.min_p", ("1.5", "in [0, 1]")),
    (request(sampling=pb.SamplingParams(min_p=math.nan)), "sampling.min_p", ("nan", "in [0, 1]")),
    (request(sampling=pb.SamplingParams(typical_p=0)), "sampling.typical_p", ("0.0", "in (0, 1]")),
    (request(sampling=pb.SamplingParams(typical_p=1.01)), "sampling.typical_p", ("1.01:", "in (0, 1]")),
    (request(sampling=pb.SamplingParams(typical_p=math.nan)), "sampling.typical_p", ("nan", "in (0, 1]")),
    (request(sampling=pb.SamplingParams(presence_penalty=2.1)), "sampling.presence_penalty", ("2.1:", "-2.0 and 2.0")),
    (
        request(sampling=pb.SamplingParams(presence_penalty=math.nan)),
        "sampling.presence_penalty",
        ("nan", "-2.0 and 2.0"),
    ),
    (
        request(sampling=pb.SamplingParams(frequency_penalty=-2.1)),
        "sampling.frequency_penalty",
        ("-2.1:", "-2.0 and 2.0"),
    ),
    (request(sampling=pb.SamplingParams(repetition_penalty=0)), "sampling.repetition_penalty", ("0.0", "> 0")),
    (request(sampling=pb.SamplingParams(repetition_penalty=math.inf)), "sampling.repetition_penalty", ("inf", "> 0")),
    (
        request(sampling=pb.SamplingParams(logit_bias={3: 100.1})),
        "sampling.logit_bias",
        ("{3: 100.1}", "-100.0 and 100.0"),
    ),
    (
        request(sampling=pb.SamplingParams(logit_bias={3: math.nan})),
        "sampling.logit_bias",
        ("{3: nan}", "-100.0 and 100.0"),
    ),
    (request(sampling=pb.SamplingParams(logit_bias={5: 1, 997: 1})), "sampling.logit_bias", ("997", "0 to 996")),
    (
        request(sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))),
        "sampling.logit_bias",
        ("1025 tokens", "at most 1024"),
    ),
    (
        request(sampling=pb.SamplingParams(allowed_token_ids=[5, 997])),
        "sampling.allowed_token_ids",
        ("997", "0 to 996"),
    ),
    (request(sampling=pb.SamplingParams(bad_words=["a", ""])), "sampling.bad_words", ("''", "1 to 256")),
    (request(sampling=pb.SamplingParams(bad_words=["x" * 257])), "sampling.bad_words", ("xxx...", "1 to 256")),
    (
        request(sampling=pb.SamplingParams(bad_words=["x"] * 1025)),
        "sampling.bad_words",
        ("1025 words", "at most 1024"),
    ),
    (request(max_tokens=0), "stop.max_tokens", ("0", ">= 1")),
    (request(max_tokens=8, stop=pb.StopParams(min_tokens=9)), "stop.min_tokens", ("9", "at most max_tokens (8)")),
    (
        pb.GenerateRequest(prompt_text="hello", stop=pb.StopParams(min_tokens=MAX_MODEL_LEN)),
        "stop.min_tokens",
        (f"{MAX_MODEL_LEN}:", f"at most {MAX_MODEL_LEN - 5}"),
    ),
    (request(stop=pb.StopParams(token_ids=[5, 997])), "stop.token_ids", ("997", "0 to 996")),
    (request(stop=pb.StopParams(strings=[""])), "stop.strings", ("''", "1 to 256")),
    (request(stop=pb.StopParams(strings=["x" * 257])), "stop.strings", ("xxx...", "1 to 256")),
    (request(stop=pb.StopParams(strings=["x"] * 17)), "stop.strings", ("17 strings", "at most 16")),
    (request(""), "prompt_text", ("''", "at least one character")),
    (request(prompt_tokens=pb.TokenIds()), "prompt_tokens.ids", ("[]", "at least one token")),
    (request(prompt_tokens=pb.TokenIds(ids=[1, 997])), "prompt_tokens.ids", ("997", "0 to 996")),
    (request(chat=MESSAGES()), "chat.messages", ("[]", "at least one message")),
    (
        request(chat=MESSAGES(messages=[pb.ChatMessage(role="robot", content="hi")])),
        "chat.messages[0].role",
        ("'robot'", "system, user, assistant, tool"),
    ),
    (pb.GenerateRequest(), "prompt", ("None", "prompt_text, prompt_tokens and chat")),
    (request("x" * MAX_MODEL_LEN), "prompt_text", (f"{MAX_MODEL_LEN} tokens", f"at most {MAX_MODEL_LEN - 1} tokens")),
    (
        request(speculation=pb.SpeculationParams(min_draft_tokens=3, max_draft_tokens=2)),
        "speculation.max_draft_tokens",
        ("2", ">= min_draft_tokens (3)"),
    ),
    (
        request(speculation=pb.SpeculationParams(mode=77)),  # type: ignore[arg-type]
        "speculation.mode",
        ("77", "SPECULATION_MODE_OFF"),
    ),
    (
        request(speculation=pb.SpeculationParams(verification=pb.VERIFICATION_RULE_BLOCK)),
        "speculation.verification",
        ("'block'", "unset, for a greedy request"),
    ),
    (
        request(
            speculation=pb.SpeculationParams(verification=pb.VERIFICATION_RULE_TOKEN_WISE),
            sampling=pb.SamplingParams(temperature=1, seed=0),
        ),
        "speculation.verification",
        ("'token_wise'", "unset, for a seeded request"),
    ),
    (
        request(speculation=pb.SpeculationParams(verification=9)),  # type: ignore[arg-type]
        "speculation.verification",
        ("9", "VERIFICATION_RULE_BLOCK"),
    ),
    (request(output=pb.OutputParams(content=9)), "output.content", ("9", "OUTPUT_CONTENT_TEXT")),  # type: ignore[arg-type]
    (
        request(output=pb.OutputParams(logprobs_mode=9)),  # type: ignore[arg-type]
        "output.logprobs_mode",
        ("9", "LOGPROBS_MODE_PROCESSED"),
    ),
    (request(output=pb.OutputParams(logprobs=21)), "output.logprobs", ("21", "0..20")),
    (request(output=pb.OutputParams(prompt_logprobs=21)), "output.prompt_logprobs", ("21", "0..20")),
    (
        request(output=pb.OutputParams(max_chunk_delay=Duration(seconds=60, nanos=1000))),
        "output.max_chunk_delay",
        ("60.000001:", "seconds in [0, 60]"),
    ),
    (
        request(output=pb.OutputParams(max_chunk_delay=Duration(nanos=-1000))),
        "output.max_chunk_delay",
        ("-1e-06:", "seconds in [0, 60]"),
    ),
    (request(n=65), "n", ("65", "1..64")),
    (request(structured=pb.StructuredOutput(regex="")), "structured.regex", ("''", "at least one character")),
    (request(structured=pb.StructuredOutput(choice=pb.Choices())), "structured.choice", ("[]", "at least one text")),
    (request(scheduling=pb.SchedulingParams(tenant="two words")), "scheduling.tenant", ("'two words'", "1 to 128")),
    (request(scheduling=pb.SchedulingParams(priority=1001)), "scheduling.priority", ("1001:", "-1000..1000")),
    (request(scheduling=pb.SchedulingParams(priority=-1001)), "scheduling.priority", ("-1001:", "-1000..1000")),
    (
        request(scheduling=pb.SchedulingParams(queue_timeout=Duration(seconds=1, nanos=-5))),
        "scheduling.queue_timeout",
        ("1 s -5 ns", "of the same sign"),
    ),
    (
        request(output=pb.OutputParams(max_chunk_delay=Duration(nanos=10**9))),
        "output.max_chunk_delay",
        ("0 s 1000000000 ns", "less than a second of ns"),
    ),
    (
        request(scheduling=pb.SchedulingParams(queue_timeout={})),
        "scheduling.queue_timeout",
        ("0.0:", "seconds in (0, 1e+09]"),
    ),
    (
        request(scheduling=pb.SchedulingParams(queue_timeout=Duration(seconds=1_000_000_001))),
        "scheduling.queue_timeout",
        ("1000000001.0:", "seconds in (0, 1e+09]"),
    ),
    (
        request(scheduling=pb.SchedulingParams(queue_timeout=Duration(seconds=-3))),
        "scheduling.queue_timeout",
        ("-3.0:", "seconds in (0, 1e+09]"),
    ),
    (
        request(scheduling=pb.SchedulingParams(time_to_first_token=Duration(nanos=-500_000_000))),
        "scheduling.time_to_first_token",
        ("-0.5:", "seconds in (0, 1e+09]"),
    ),
    (
        request(scheduling=pb.SchedulingParams(time_per_output_token={})),
        "scheduling.time_per_output_token",
        ("0.0:", "seconds in (0, 1e+09]"),
    ),
    (request(request_id="two words"), "request_id", ("'two words'", "1 to 128 printable ASCII")),
    (request(request_id="x" * 129), "request_id", ("xxx...", "1 to 128 printable ASCII")),
    (request(request_id="né"), "request_id", ("'né'", "1 to 128 printable ASCII")),
]


class Bystander:
    """A stream that is under way, and must go on as if nothing had happened."""

    def __init__(self, served: Serving) -> None:
        self.served = served
        self.responses = aiter(served.stub.Generate(request("bystander", max_tokens=60, request_id="bystander")))
        self.token_ids: list[int] = []

    async def begin(self) -> None:
        self.served.runner.allow(2)
        self.token_ids += (await anext(self.responses)).token_ids

    async def check(self) -> None:
        self.served.runner.open()
        async for response in self.responses:
            self.token_ids += response.token_ids
        assert self.token_ids == reference_output(b"bystander", 60)
        await self.served.until(lambda: self.served.idle)


@pytest.fixture
async def bystander(serving: Serving) -> Bystander:
    live = Bystander(serving)
    await live.begin()
    return live


@pytest.mark.asyncio(loop_factories=["uvloop"])  # which loop it is has no part in a refusal, and there are many
@pytest.mark.parametrize(("message", "field", "said"), INVALID_FIELDS, ids=[row[1] for row in INVALID_FIELDS])
async def test_invalid_fields(
    serving: Serving, bystander: Bystander, message: pb.GenerateRequest, field: str, said: tuple[str, ...]
) -> None:
    error = await failure(serving.stub.Generate(message))
    assert error.code() is INVALID
    text = error.details() or ""
    assert text.startswith(f"{field} = ")
    for part in said:
        assert part in text
    details = details_of(error)
    [violation] = details["BadRequest"].field_violations  # type: ignore[attr-defined]
    assert (violation.field, violation.description) == (field, text)
    assert details["ErrorInfo"].domain == "paceline"  # type: ignore[attr-defined]
    await bystander.check()


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff", b"\x22\x7fcut off", b"\x22\x02\xff\xfe", b"\x0a\x01\xff"],
    ids=["garbage", "truncated", "prompt is not UTF-8", "request id is not UTF-8"],
)
async def test_malformed_messages(serving: Serving, bystander: Bystander, data: bytes) -> None:
    raw = serving.channel.unary_stream("/paceline.v1.GenerationService/Generate")
    error = await failure(raw(data))
    assert error.code() is INVALID
    assert f"request = '{len(data)} bytes'" in (error.details() or "")
    assert "UTF-8" in (error.details() or "")
    await bystander.check()


@pytest.mark.parametrize("name", ["other", "other" * 10_000])
async def test_unknown_model(serving: Serving, bystander: Bystander, name: str) -> None:
    error = await failure(serving.stub.Generate(request(model=name)))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert f"'{name[:80]}'" in (error.details() or "")
    assert f"'{MODEL}'" in (error.details() or "")
    await bystander.check()


async def test_request_id_that_is_live(serving: Serving, bystander: Bystander) -> None:
    error = await failure(serving.stub.Generate(request(request_id="bystander")))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "'bystander'" in (error.details() or "")
    await bystander.check()


async def test_method_that_is_not_loaded(serving: Serving, bystander: Bystander) -> None:
    mode = pb.SpeculationParams(mode=pb.SPECULATION_MODE_DRAFT_MODEL)
    error = await failure(serving.stub.Generate(request(speculation=mode)))
    assert error.code() is PRECONDITION
    assert "speculation.mode = draft_model" in (error.details() or "")
    await bystander.check()


async def test_top_k_beyond_the_vocabulary_is_fine(free: Serving) -> None:
    call = free.stub.Generate(request(sampling=pb.SamplingParams(top_k=2**32 - 1)))
    assert [response async for response in call]


async def test_full_queue_is_worth_a_retry() -> None:
    async with serving(max_queued=1) as served:
        running = served.stub.Generate(request("runs"))
        await served.until(lambda: len(served.scheduler.running) == 1)
        waiting = served.stub.Generate(request("waits"))
        await served.until(lambda: len(served.scheduler.waiting) == 1)
        error = await failure(served.stub.Generate(request("too many")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert ("grpc-retry-pushback-ms", "100") in list(error.trailing_metadata() or ())
        delay = details_of(error)["RetryInfo"].retry_delay  # type: ignore[attr-defined]
        assert delay.ToMilliseconds() == 100, "nobody has ended yet"
        served.runner.open()
        for call in (running, waiting):
            assert [response async for response in call]


async def test_bugs_are_logged_and_not_told(
    serving: Serving, bystander: Bystander, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(request: object) -> None:
        raise ValueError("a secret")

    monkeypatch.setattr(serving.engine.engine, "prepare", broken)
    error = await failure(serving.stub.Generate(request(request_id="unlucky")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(error)
    assert "unlucky" in (error.details() or "")
    assert ("x-request-id", "unlucky") in list(error.trailing_metadata() or ())
    assert "a secret" in caplog.text
    assert "unlucky" in caplog.text
    await bystander.check()


async def test_messages_without_content_ask_for_nothing(free: Serving) -> None:
    call = free.stub.Generate(request(scheduling=pb.SchedulingParams(), sampling=pb.SamplingParams(), n=1))
    assert [response async for response in call]
