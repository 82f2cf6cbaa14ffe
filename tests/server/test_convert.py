"""Messages to values and back, without a server."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from paceline import errors
from paceline.client import GenerateOptions, build_request
from paceline.client.results import Delta as ClientDelta
from paceline.client.results import TokenLogprobs as ClientTokenLogprobs
from paceline.client.results import read_delta, read_finished, read_started
from paceline.core.grammar import GrammarKind, GrammarSpec
from paceline.core.method import Method
from paceline.core.params import (
    LogprobsMode,
    LogprobsParams,
    SamplingParams,
    SchedulingParams,
    SpeculationParams,
    StopParams,
    Verification,
)
from paceline.core.plan import Finish, FinishReason, TokenLogprobs
from paceline.core.request import RequestStats
from paceline.engine import Delta, GenerationRequest, Stream
from paceline.server.convert import (
    LOGPROBS_MODES,
    MAX_CHAT_MESSAGES,
    METHODS,
    MODES,
    REASONS,
    RULES,
    WITH_TEXT,
    WITH_TOKEN_IDS,
    is_map,
    read_request,
    write_logprobs,
)
from paceline.server.delivery import Delivery
from paceline.server.status import STATUS_RULES, rule_for
from paceline.v1 import generation_pb2 as pb

DEFAULT = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)

# What the service itself looks at; everything else ends up in what the engine is asked to do.
OF_THE_SERVICE = {
    "request_id",
    "model",
    "output.content",
    "output.final_only",
    "output.max_chunk_delay.seconds",
    "output.max_chunk_delay.nanos",
}

# -- every field of the contract --------------------------------------------------------------------------------------

EXAMPLES: Mapping[int, object] = {
    FieldDescriptor.TYPE_UINT32: 3,
    FieldDescriptor.TYPE_UINT64: 3,
    FieldDescriptor.TYPE_INT32: 3,
    FieldDescriptor.TYPE_INT64: 3,
    FieldDescriptor.TYPE_FLOAT: 0.5,
    FieldDescriptor.TYPE_BOOL: True,
    FieldDescriptor.TYPE_STRING: "x",
}


def leaves(message: Any, path: str = "") -> Iterator[tuple[str, list[FieldDescriptor]]]:
    """All fields down to plain values: dotted path, and the fields on the way."""
    for field in message.fields:
        name = path + field.name
        if field.message_type is None or is_map(field):
            yield name, [field]
        else:
            for below, fields in leaves(field.message_type, name + "."):
                yield below, [field, *fields]


LEAVES = dict(leaves(pb.GenerateRequest.DESCRIPTOR))


def set_field(message: Message, fields: list[FieldDescriptor]) -> None:
    """Give a value to the last of `fields`, a way down from `message`, that is neither its default nor the model's."""
    field, *below = fields
    held = getattr(message, field.name)
    if below:
        set_field(held.add() if field.is_repeated else held, below)
    elif is_map(field):
        held[3] = 0.5
    elif field.message_type is not None:
        held.SetInParent()
    else:
        value = EXAMPLES[field.type] if field.enum_type is None else field.enum_type.values[-1].number
        if field.is_repeated:
            held.append(value)
        else:
            setattr(message, field.name, value)


@pytest.mark.parametrize("path", LEAVES)
def test_every_field_is_read(path: str) -> None:
    """A field that the contract gains fails here until somebody reads it."""
    message = pb.GenerateRequest(prompt_text="p")
    set_field(message, LEAVES[path])
    changed = read_request(message, DEFAULT) != read_request(pb.GenerateRequest(prompt_text="p"), DEFAULT)
    assert changed is (path not in OF_THE_SERVICE)


def test_lists_hold_no_enums() -> None:
    """`check_enums` does not look into them."""
    for fields in LEAVES.values():
        if any(field.is_repeated and field.message_type is not None for field in fields):
            assert fields[-1].enum_type is None


def test_too_many_messages_are_refused_by_their_number() -> None:
    message = pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage()] * (MAX_CHAT_MESSAGES + 1)))
    with pytest.raises(errors.InvalidArgument, match=rf"^chat\.messages = '{MAX_CHAT_MESSAGES + 1} messages'"):
        read_request(message, DEFAULT)
    del message.chat.messages[0]
    assert len(read_request(message, DEFAULT).prompt) == MAX_CHAT_MESSAGES


def test_fields_of_the_service_exist() -> None:
    assert LEAVES.keys() >= OF_THE_SERVICE


def set_leaves(message: Message, path: str = "") -> Iterator[str]:
    for field, value in message.ListFields():
        if field.message_type is None or is_map(field):
            yield path + field.name
        else:
            for part in value if field.is_repeated else [value]:
                yield from set_leaves(part, f"{path}{field.name}.")


EVERYTHING: GenerateOptions = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "typical_p": 0.8,
    "presence_penalty": -0.3,
    "frequency_penalty": 1.9,
    "repetition_penalty": 1.3,
    "logit_bias": {7: -99.9, 3: 0.1},
    "allowed_token_ids": [3, 7, 9],
    "bad_words": ["b", "a"],
    "seed": 2**64 - 1,
    "n": 64,
    "json_schema": {"type": "null"},
    "max_tokens": 9,
    "min_tokens": 2,
    "stop": ["END"],
    "stop_token_ids": [4],
    "ignore_eos": True,
    "include_stop_string": True,
    "speculation": "ngram",
    "max_draft_tokens": 4,
    "min_draft_tokens": 1,
    "verification": "token_wise",
    "content": "token_ids",
    "include_special_tokens": True,
    "final_only": True,
    "max_chunk_delay": 2.5,
    "logprobs": 0,
    "prompt_logprobs": 5,
    "logprobs_mode": "processed",
    "request_id": "r",
    "tenant": "team-a",
    "priority": 2,
    "queue_timeout": 1.5,
    "time_to_first_token": 2.25,
    "time_per_output_token": 3.05,
    "model": "m",
}


def test_what_a_client_writes_is_what_the_engine_reads() -> None:
    """Every option at once, each float exactly as written."""
    assert read_request(build_request("p", **EVERYTHING), DEFAULT) == GenerationRequest(
        "p",
        SamplingParams(
            temperature=0.7,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            typical_p=0.8,
            presence_penalty=-0.3,
            frequency_penalty=1.9,
            repetition_penalty=1.3,
            logit_bias=((3, 0.1), (7, -99.9)),
            allowed_token_ids=(3, 7, 9),
            bad_words=("b", "a"),
            seed=2**64 - 1,
        ),
        StopParams(9, ("END",), (4,), True, True, min_tokens=2, include_special_tokens=True),
        SpeculationParams(Method.NGRAM, 1, 4, Verification.TOKEN_WISE),
        LogprobsParams(0, 5, LogprobsMode.PROCESSED),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "null"}'),
        n=64,
        scheduling=SchedulingParams(
            "team-a",
            priority=2,
            queue_timeout=1.5,
            time_to_first_token=2.25,
            time_per_output_token=3.05,
        ),
    )


def test_a_client_can_ask_for_all_that_is_served() -> None:
    prompts: list[Any] = ["p", [1], [{"role": "user", "content": "hi"}]]
    structures: list[GenerateOptions] = [{"regex": "a"}, {"grammar": "a"}, {"choices": ["a"]}]
    messages = [build_request("p", **EVERYTHING), *map(build_request, prompts)]
    messages += [build_request("p", **options) for options in structures]
    assert {path for message in messages for path in set_leaves(message)} == LEAVES.keys()
    assert EVERYTHING.keys() | {"regex", "grammar", "choices"} == GenerateOptions.__annotations__.keys()


# -- requests ---------------------------------------------------------------------------------------------------------


def test_unset_means_the_default() -> None:
    made = read_request(pb.GenerateRequest(prompt_text="p"), DEFAULT)
    assert made.prompt == "p"
    assert made.sampling == DEFAULT
    assert made.stop == StopParams()
    assert made.speculation == SpeculationParams()
    assert made.logprobs == LogprobsParams()
    assert made.grammar is None
    assert made.n == 1


def test_zero_means_zero() -> None:
    message = pb.GenerateRequest(
        prompt_text="p",
        sampling=pb.SamplingParams(temperature=0, top_k=0, min_p=0, seed=0),
        speculation=pb.SpeculationParams(max_draft_tokens=0, min_draft_tokens=0),
        output=pb.OutputParams(logprobs=0, prompt_logprobs=0),
        n=0,
    )
    made = read_request(message, DEFAULT)
    assert made.sampling == SamplingParams(temperature=0.0, top_k=0, top_p=0.95, repetition_penalty=1.1, seed=0)
    assert made.speculation == SpeculationParams(min_depth=0, max_depth=0)
    assert made.logprobs == LogprobsParams(completion=0, prompt=0)
    assert made.n == 1


@pytest.mark.parametrize("value", [0.7, 0.1, 1.3, 1e-3, 0.0, 2.0, 1 / 3])
def test_floats_mean_what_was_written(value: float) -> None:
    sampling = pb.SamplingParams(temperature=value, logit_bias={3: value})
    made = read_request(pb.GenerateRequest(prompt_text="p", sampling=sampling), DEFAULT).sampling
    for read in (made.temperature, dict(made.logit_bias)[3]):
        # The same float32, and exactly the decimal if it has few digits.
        assert struct.pack("f", read) == struct.pack("f", value)
        assert value == 1 / 3 or read == value


@pytest.mark.parametrize(
    ("mode", "method"),
    [
        (pb.SPECULATION_MODE_UNSPECIFIED, None),
        (pb.SPECULATION_MODE_AUTO, None),
        (pb.SPECULATION_MODE_OFF, Method.NONE),
        (pb.SPECULATION_MODE_NGRAM, Method.NGRAM),
        (pb.SPECULATION_MODE_DRAFT_MODEL, Method.DRAFT_MODEL),
    ],
)
def test_speculation_modes(mode: pb.SpeculationMode, method: Method | None) -> None:
    message = pb.GenerateRequest(prompt_text="p", speculation=pb.SpeculationParams(mode=mode))
    assert read_request(message, DEFAULT).speculation.method is method


@pytest.mark.parametrize(
    ("structured", "spec"),
    [
        (pb.StructuredOutput(), None),
        (pb.StructuredOutput(json_schema="{}"), GrammarSpec(GrammarKind.JSON_SCHEMA, "{}")),
        (pb.StructuredOutput(regex="a+"), GrammarSpec(GrammarKind.REGEX, "a+")),
        (pb.StructuredOutput(grammar='start: "a"'), GrammarSpec(GrammarKind.GRAMMAR, 'start: "a"')),
        (
            pb.StructuredOutput(choice=pb.Choices(values=["b", "a"])),
            GrammarSpec(GrammarKind.CHOICE, choices=("b", "a")),
        ),
    ],
)
def test_structures(structured: pb.StructuredOutput, spec: GrammarSpec | None) -> None:
    assert read_request(pb.GenerateRequest(prompt_text="p", structured=structured), DEFAULT).grammar == spec


@pytest.mark.parametrize(
    ("field", "structured"),
    [
        ("structured.json_schema", pb.StructuredOutput(json_schema="")),
        ("structured.regex", pb.StructuredOutput(regex="")),
        ("structured.grammar", pb.StructuredOutput(grammar="")),
        ("structured.choice", pb.StructuredOutput(choice=pb.Choices())),
    ],
)
def test_a_structure_without_content(field: str, structured: pb.StructuredOutput) -> None:
    with pytest.raises(errors.InvalidArgument, match="at least one") as caught:
        read_request(pb.GenerateRequest(prompt_text="p", structured=structured), DEFAULT)
    assert caught.value.field == field


def test_every_number_has_a_meaning_and_every_value_a_number() -> None:
    assert METHODS.keys() == set(pb.SpeculationMode.values())
    assert RULES.keys() == set(pb.VerificationRule.values())
    assert LOGPROBS_MODES.keys() == set(pb.LogprobsMode.values())
    assert set(LOGPROBS_MODES.values()) == set(LogprobsMode)
    assert MODES.keys() == set(Method)
    assert REASONS.keys() == set(FinishReason)
    assert set(REASONS.values()) == set(pb.FinishReason.values()) - {pb.FINISH_REASON_UNSPECIFIED}


# -- responses --------------------------------------------------------------------------------------------------------

STATS = RequestStats(
    prompt_tokens=5,
    cached_prompt_tokens=4,
    completion_tokens=2,
    method=Method.NGRAM,
    verify_steps=1,
    draft_steps=1,
    drafted_tokens=2,
    accepted_tokens=1,
    accepted_by_position=(1,),
    depths=(0, 0, 1),
    saved_seconds=0.125,
    rejected_seconds=0.0625,
    engine_seconds=0.75,
    acceptance_length=2.0,
    preemptions=0,
    queue_seconds=0.25,
    time_to_first_token=0.5,
    total_seconds=1.0,
)
DELTA = Delta(
    text="ab",
    token_ids=(1, 2),
    token_offset=3,
    finish=Finish(FinishReason.DEAD_END, detail="no token is allowed"),
    stats=STATS,
    logprobs=(TokenLogprobs(-0.5, 2, (7, 1), (-0.25, -0.5)), TokenLogprobs(-1.5, 1, (2, 9), (-1.5, -math.inf))),
    choice=2,
)


def delivery(content: pb.OutputContent) -> Delivery:
    return Delivery(Stream(0, 5, lambda request_id: None), pb.Started(), content)


def test_what_the_engine_says_is_what_a_client_reads() -> None:
    message = pb.GenerateResponse()
    delivery(pb.OUTPUT_CONTENT_TEXT_AND_TOKEN_IDS).write(DELTA, message)
    assert read_delta(message) == ClientDelta(
        text="ab",
        token_ids=(1, 2),
        token_offset=3,
        choice=2,
        logprobs=(
            ClientTokenLogprobs(-0.5, 2, (7, 1), (-0.25, -0.5)),
            ClientTokenLogprobs(-1.5, 1, (2, 9), (-1.5, -math.inf)),
        ),
    )
    finished = read_finished(message.finished)
    assert (finished.reason.value, finished.detail) == ("dead_end", "no token is allowed")
    assert (finished.usage.prompt_tokens, finished.usage.cached_prompt_tokens) == (5, 4)
    assert (finished.usage.completion_tokens, finished.timing.total) == (2, 1.0)


def test_logprobs_come_with_every_content() -> None:
    for content in pb.OutputContent.values():
        message = pb.GenerateResponse()
        delivery(content).write(DELTA, message)
        assert len(message.logprobs) == 2
        assert bool(message.text) is (content in WITH_TEXT)
        assert bool(message.token_ids) is (content in WITH_TOKEN_IDS)


def test_the_first_prompt_token_has_no_logprobs() -> None:
    told = TokenLogprobs(-0.5, 1, (7,), (-0.5,))
    started = read_started(pb.Started(prompt_logprobs=write_logprobs([None, told])))
    assert started.prompt_logprobs == (None, ClientTokenLogprobs(-0.5, 1, (7,), (-0.5,)))


# -- errors -----------------------------------------------------------------------------------------------------------


def test_every_error_has_a_status() -> None:
    ours = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PacelineError)]
    assert len(ours) > 10
    assert {kind.reason for kind in ours} <= STATUS_RULES.keys() == set(errors.Reason)


def test_subclasses_share_the_status_of_their_parent() -> None:
    class Narrower(errors.NotFound):
        pass

    assert rule_for(Narrower("x")) is STATUS_RULES[errors.Reason.NOT_FOUND]


def test_no_pushback_is_zero() -> None:
    """Some clients hang on 0 until their deadline."""
    assert 0 not in {rule.retry_ms for rule in STATUS_RULES.values()}
