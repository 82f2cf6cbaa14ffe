"""A value that is not allowed is refused with its field as the client wrote it, what was given and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields

import pytest

from paceline.core.config import SchedulerConfig
from paceline.core.params import Method, SamplingParams, SpeculationParams, StopParams
from paceline.errors import InvalidArgument

REFUSED: list[tuple[Callable[[], object], str, str, str]] = [
    (lambda: SamplingParams(temperature=-0.5), "sampling.temperature", "-0.5", ">= 0"),
    (lambda: SamplingParams(temperature=math.nan), "sampling.temperature", "nan", "finite"),
    (lambda: SamplingParams(temperature=math.inf), "sampling.temperature", "inf", "finite"),
    (lambda: SamplingParams(top_k=-1), "sampling.top_k", "-1", ">= 0"),
    (lambda: SamplingParams(top_p=0.0), "sampling.top_p", "0.0", "(0, 1]"),
    (lambda: SamplingParams(top_p=1.5), "sampling.top_p", "1.5", "(0, 1]"),
    (lambda: SamplingParams(top_p=math.nan), "sampling.top_p", "nan", "(0, 1]"),
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


@pytest.mark.parametrize("params", [SamplingParams(), StopParams(), SpeculationParams()])
def test_params_are_values(params: SamplingParams | StopParams | SpeculationParams) -> None:
    assert params == type(params)()
    with pytest.raises(FrozenInstanceError):
        setattr(params, fields(params)[0].name, None)
