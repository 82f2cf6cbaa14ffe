"""A value that is not allowed is refused with its field as the client wrote it, what was given and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields

import pytest

from paceline.core.config import SchedulerConfig
from paceline.core.method import Method
from paceline.core.params import (
    Constraints,
    LogprobsParams,
    SamplingParams,
    SequenceParams,
    SpeculationParams,
    StopParams,
    Verification,
)
from paceline.engine import GenerationRequest
from paceline.errors import InvalidArgument

REFUSED: list[tuple[Callable[[], object], str, str, str]] = [
    (lambda: SamplingParams(temperature=-0.5), "sampling.temperature", "-0.5", ">= 0"),
    (lambda: SamplingParams(temperature=math.nan), "sampling.temperature", "nan", "finite"),
    (lambda: SamplingParams(temperature=math.inf), "sampling.temperature", "inf", "finite"),
    (lambda: SamplingParams(top_k=-1), "sampling.top_k", "-1", ">= 0"),
    (lambda: SamplingParams(top_p=0.0), "sampling.top_p", "0.0", "(0, 1]"),
    (lambda: SamplingParams(top_p=1.5), "sampling.top_p", "1.5", "(0, 1]"),
    (lambda: SamplingParams(top_p=math.nan), "sampling.top_p", "nan", "(0, 1]"),
    (lambda: SamplingParams(min_p=-0.1), "sampling.min_p", "-0.1", "[0, 1]"),
    (lambda: SamplingParams(min_p=1.1), "sampling.min_p", "1.1", "[0, 1]"),
    (lambda: SamplingParams(min_p=math.nan), "sampling.min_p", "nan", "[0, 1]"),
    (lambda: SamplingParams(typical_p=0.0), "sampling.typical_p", "0.0", "(0, 1]"),
    (lambda: SamplingParams(typical_p=1.1), "sampling.typical_p", "1.1", "(0, 1]"),
    (lambda: SamplingParams(typical_p=math.nan), "sampling.typical_p", "nan", "(0, 1]"),
    (lambda: SamplingParams(repetition_penalty=0.0), "sampling.repetition_penalty", "0.0", "> 0"),
    (lambda: SamplingParams(repetition_penalty=-1.0), "sampling.repetition_penalty", "-1.0", "> 0"),
    (lambda: SamplingParams(repetition_penalty=math.inf), "sampling.repetition_penalty", "inf", "finite"),
    (lambda: SamplingParams(repetition_penalty=math.nan), "sampling.repetition_penalty", "nan", "finite"),
    (lambda: SamplingParams(presence_penalty=2.1), "sampling.presence_penalty", "2.1", "between -2.0 and 2.0"),
    (lambda: SamplingParams(presence_penalty=-2.1), "sampling.presence_penalty", "-2.1", "between -2.0 and 2.0"),
    (lambda: SamplingParams(presence_penalty=math.nan), "sampling.presence_penalty", "nan", "between -2.0 and 2.0"),
    (lambda: SamplingParams(frequency_penalty=2.1), "sampling.frequency_penalty", "2.1", "between -2.0 and 2.0"),
    (lambda: SamplingParams(frequency_penalty=-2.1), "sampling.frequency_penalty", "-2.1", "between -2.0 and 2.0"),
    (lambda: SamplingParams(frequency_penalty=math.nan), "sampling.frequency_penalty", "nan", "between -2.0 and 2.0"),
    (lambda: SamplingParams(logit_bias=((7, 100.5),)), "sampling.logit_bias", "{7: 100.5}", "between -100.0 and 100.0"),
    (lambda: SamplingParams(logit_bias=((7, -101.0),)), "sampling.logit_bias", "{7: -101.0}", "between -100.0"),
    (lambda: SamplingParams(logit_bias=((7, math.nan),)), "sampling.logit_bias", "{7: nan}", "between -100.0"),
    (lambda: SamplingParams(logit_bias=((7, 1.0), (7, 2.0))), "sampling.logit_bias", "(7, 1.0)", "one bias for each"),
    (
        lambda: SamplingParams(logit_bias=tuple((token, 1.0) for token in range(1025))),
        "sampling.logit_bias",
        "1025 tokens",
        "at most 1024",
    ),
    (lambda: SamplingParams(bad_words=("ok", "")), "sampling.bad_words", "''", "1 to 256"),
    (lambda: SamplingParams(bad_words=("x" * 257,)), "sampling.bad_words", "xxx...", "1 to 256"),
    (lambda: SamplingParams(bad_words=("x",) * 1025), "sampling.bad_words", "1025 words", "at most 1024"),
    (lambda: SamplingParams(seed=-1), "sampling.seed", "-1", "0..2^64-1"),
    (lambda: SamplingParams(seed=1 << 64), "sampling.seed", "18446744073709551616", "0..2^64-1"),
    (lambda: StopParams(min_tokens=-1), "stop.min_tokens", "-1", ">= 0"),
    (lambda: StopParams(min_tokens=5, max_tokens=4), "stop.min_tokens", "5", "max_tokens (4)"),
    (lambda: LogprobsParams(completion=-1), "output.logprobs", "-1", ">= 0"),
    (lambda: LogprobsParams(prompt=-1), "output.prompt_logprobs", "-1", ">= 0"),
    (lambda: GenerationRequest("a", n=0), "n", "0", "1..64"),
    (lambda: GenerationRequest("a", n=65), "n", "65", "1..64"),
    (lambda: StopParams(max_tokens=0), "stop.max_tokens", "0", ">= 1"),
    (lambda: StopParams(strings=("a",) * 17), "stop.strings", "17 strings", "at most 16"),
    (lambda: StopParams(token_ids=(1,) * 257), "stop.token_ids", "257 ids", "at most 256"),
    (lambda: StopParams(strings=("ok", "")), "stop.strings", "''", "1 to 256"),
    (lambda: StopParams(strings=("x" * 257,)), "stop.strings", "xxx...", "1 to 256"),
    (lambda: SpeculationParams(min_depth=-1), "speculation.min_draft_tokens", "-1", ">= 0"),
    (lambda: SpeculationParams(max_depth=-1), "speculation.max_draft_tokens", "-1", "(0)"),
    (lambda: SpeculationParams(min_depth=3, max_depth=2), "speculation.max_draft_tokens", "2", "(3)"),
    (lambda: SchedulerConfig(num_blocks=0), "num_blocks", "0", ">= 1"),
    (lambda: SchedulerConfig(num_blocks=1, block_size=0), "block_size", "0", ">= 1"),
    (lambda: SchedulerConfig(num_blocks=1, max_num_seqs=0), "max_num_seqs", "0", ">= 1"),
    (lambda: SchedulerConfig(num_blocks=1, max_num_batched_tokens=0), "max_num_batched_tokens", "0", ">= 1"),
    (
        lambda: SchedulerConfig(num_blocks=1, max_num_batched_tokens=(1 << 20) + 1),
        "max_num_batched_tokens",
        "1048577",
        "at most 1048576",
    ),
    (lambda: SchedulerConfig(num_blocks=1, max_model_len=0), "max_model_len", "0", ">= 1"),
    (lambda: SchedulerConfig(num_blocks=1, max_queued=0), "max_queued", "0", ">= 1"),
    (lambda: SchedulerConfig(num_blocks=1, max_depth=-1), "max_depth", "-1", ">= 0"),
    (
        lambda: SchedulerConfig(num_blocks=1, max_num_batched_tokens=7, max_num_seqs=8),
        "max_num_batched_tokens",
        "7",
        "at least max_num_seqs (8)",
    ),
]


@pytest.mark.parametrize(("make", "field", "value", "allowed"), REFUSED)
def test_refused(make: Callable[[], object], field: str, value: str, allowed: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.field == field
    assert allowed in caught.value.allowed
    message = str(caught.value)
    assert message.startswith(f"{field} = ")
    assert value in message
    assert caught.value.allowed in message


@pytest.mark.parametrize(
    "make",
    [
        SamplingParams,
        StopParams,
        SpeculationParams,
        lambda: SamplingParams(temperature=0.0, top_k=0, top_p=1.0),
        lambda: SamplingParams(temperature=2.5, top_k=1, top_p=1e-9),
        lambda: SamplingParams(min_p=0.0, typical_p=1.0, repetition_penalty=1e-9),
        lambda: SamplingParams(min_p=1.0, typical_p=1e-9, presence_penalty=2.0, frequency_penalty=-2.0),
        lambda: SamplingParams(logit_bias=tuple((token, 100.0 - token % 201) for token in range(1024))),
        lambda: SamplingParams(bad_words=("x" * 256,) * 1024, seed=(1 << 64) - 1),
        lambda: SamplingParams(seed=0),
        lambda: StopParams(min_tokens=4, max_tokens=4),
        lambda: StopParams(min_tokens=1 << 40),
        lambda: LogprobsParams(completion=0, prompt=0),
        lambda: GenerationRequest("a", n=64),
        lambda: StopParams(max_tokens=1, strings=("x" * 256,) * 16),
        lambda: SpeculationParams(Method.NGRAM, min_depth=4, max_depth=4),
        lambda: SpeculationParams(max_depth=0),
        lambda: SchedulerConfig(num_blocks=1, max_num_seqs=8, max_num_batched_tokens=8, max_depth=0),
    ],
)
def test_the_limits_themselves_are_allowed(make: Callable[[], object]) -> None:
    make()


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-6).greedy


def test_a_long_value_is_shown_in_part() -> None:
    assert len(str(InvalidArgument("prompt", "x" * 10_000, "short"))) < 120


KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy with a seed": SamplingParams(temperature=0.0, seed=5),
    "seeded": SamplingParams(seed=0),
    "sampled": SamplingParams(),
}
RULES = {
    "greedy": (Verification.GREEDY, {Verification.GREEDY}),
    "greedy with a seed": (Verification.GREEDY, {Verification.GREEDY}),
    "seeded": (Verification.COUPLED, {Verification.COUPLED}),
    "sampled": (Verification.BLOCK, {Verification.BLOCK, Verification.TOKEN_WISE}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", [None, *Verification])
def test_temperature_and_seed_decide_the_rule_and_leave_some_a_choice(kind: str, wanted: Verification | None) -> None:
    own, possible = RULES[kind]
    speculation = SpeculationParams(verification=wanted)
    if wanted is None or wanted in possible:
        assert speculation.rule_for(KINDS[kind]) is (wanted or own)
        return
    with pytest.raises(InvalidArgument) as caught:
        speculation.rule_for(KINDS[kind])
    assert caught.value.field == "speculation.verification"
    assert f"= '{wanted}'" in str(caught.value)
    assert all(rule in caught.value.allowed for rule in possible)
    assert kind.split()[0] in caught.value.allowed
    # A request cannot ask for a rule that its kind alone has: the contract has no name for it.
    assert caught.value.allowed.startswith("unset, for a ") == (len(possible) == 1)


@pytest.mark.parametrize(
    ("sampling", "penalised", "truncated"),
    [
        (SamplingParams(), False, False),
        (SamplingParams(repetition_penalty=1.1), True, False),
        (SamplingParams(presence_penalty=-0.1), True, False),
        (SamplingParams(frequency_penalty=0.1), True, False),
        (SamplingParams(top_k=1), False, True),
        (SamplingParams(top_p=0.9), False, True),
        (SamplingParams(min_p=0.1), False, True),
        (SamplingParams(typical_p=0.9), False, True),
        (SamplingParams(logit_bias=((1, 1.0),), allowed_token_ids=(1,)), False, False),
    ],
)
def test_what_parameters_make_of_logits(sampling: SamplingParams, penalised: bool, truncated: bool) -> None:
    assert (sampling.penalised, sampling.truncated) == (penalised, truncated)


@pytest.mark.parametrize(
    ("params", "edits"),
    [
        (SequenceParams(), False),
        (SequenceParams(SamplingParams(0.5, 5, 0.9, 0.1, 0.9)), False),
        (SequenceParams(constraints=Constraints(stop_token_ids=(1,), ends_with_grammar=True)), False),
        (SequenceParams(SamplingParams(frequency_penalty=0.1)), True),
        (SequenceParams(SamplingParams(logit_bias=((1, 1.0),))), True),
        (SequenceParams(SamplingParams(allowed_token_ids=(1,))), True),
        (SequenceParams(constraints=Constraints(bad_words=((1,),))), True),
        (SequenceParams(constraints=Constraints(min_tokens=1)), True),
    ],
)
def test_which_parameters_edit_logits(params: SequenceParams, edits: bool) -> None:
    assert params.edits_logits is edits


@pytest.mark.parametrize(
    "params", [SamplingParams(), StopParams(), SpeculationParams(), LogprobsParams(), Constraints(), SequenceParams()]
)
def test_params_are_values(
    params: SamplingParams | StopParams | SpeculationParams | LogprobsParams | Constraints | SequenceParams,
) -> None:
    assert params == type(params)()
    with pytest.raises(FrozenInstanceError):
        setattr(params, fields(params)[0].name, None)
