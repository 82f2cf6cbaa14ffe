"""Messages to values and back, without a server."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor

from paceline import errors
from paceline.core.params import Method, SamplingParams, SpeculationParams, StopParams
from paceline.core.plan import FinishReason
from paceline.server.convert import MODES, REASONS, UNSUPPORTED, read_request
from paceline.server.status import STATUS_RULES, rule_for
from paceline.v1 import generation_pb2 as pb

DEFAULT = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)

SUPPORTED = {
    "request_id",
    "model",
    "prompt_tokens.ids",
    "prompt_text",
    "chat.messages.role",
    "chat.messages.content",
    "sampling.temperature",
    "sampling.top_p",
    "sampling.top_k",
    "stop.max_tokens",
    "stop.strings",
    "stop.token_ids",
    "stop.ignore_eos",
    "stop.include_stop_string",
    "speculation.mode",
    "speculation.max_draft_tokens",
    "speculation.min_draft_tokens",
    "output.content",
    "output.final_only",
    "n",
}


def leaves(descriptor: Descriptor, path: str = "") -> Iterator[str]:
    """Dotted paths of all fields, down to those of `UNSUPPORTED` or to plain values."""
    for field in descriptor.fields:
        name = path + field.name
        if field.message_type is None or name in UNSUPPORTED:
            yield name
        else:
            yield from leaves(field.message_type, name + ".")


def test_every_field_of_a_request_is_supported_or_refused() -> None:
    assert set(leaves(pb.GenerateRequest.DESCRIPTOR)) == SUPPORTED | UNSUPPORTED
    assert not SUPPORTED & UNSUPPORTED


def test_unset_means_the_default() -> None:
    made = read_request(pb.GenerateRequest(prompt_text="p"), DEFAULT)
    assert made.prompt == "p"
    assert made.sampling == DEFAULT
    assert made.stop == StopParams()
    assert made.speculation == SpeculationParams()


def test_zero_means_zero() -> None:
    message = pb.GenerateRequest(
        prompt_text="p",
        sampling=pb.SamplingParams(temperature=0, top_k=0),
        speculation=pb.SpeculationParams(max_draft_tokens=0, min_draft_tokens=0),
    )
    made = read_request(message, DEFAULT)
    assert made.sampling == SamplingParams(temperature=0.0, top_k=0, top_p=0.95)
    assert made.speculation == SpeculationParams(min_depth=0, max_depth=0)


@pytest.mark.parametrize("value", [0.7, 0.1, 1.3, 1e-3, 0.0, 2.0, 1 / 3])
def test_floats_mean_what_was_written(value: float) -> None:
    made = read_request(pb.GenerateRequest(prompt_text="p", sampling={"temperature": value}), DEFAULT)  # type: ignore[arg-type]
    # The same float32, and exactly the decimal if it has few digits.
    assert struct.pack("f", made.sampling.temperature) == struct.pack("f", value)
    assert value == 1 / 3 or made.sampling.temperature == value


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


def test_every_method_and_reason_has_a_number() -> None:
    assert MODES.keys() == set(Method)
    assert REASONS.keys() == set(FinishReason)
    assert len(set(REASONS.values())) == len(REASONS)


def test_every_error_has_a_status() -> None:
    ours = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PacelineError)]
    assert set(ours) == set(STATUS_RULES)


def test_subclasses_share_the_status_of_their_parent() -> None:
    class Narrower(errors.NotFound):
        pass

    assert rule_for(Narrower("x")) is STATUS_RULES[errors.NotFound]


def test_no_pushback_is_zero() -> None:
    """Some clients hang on 0 until their deadline."""
    assert 0 not in {rule.retry_ms for rule in STATUS_RULES.values()}
