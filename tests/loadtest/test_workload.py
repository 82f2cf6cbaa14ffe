"""Plans are pure functions of configuration, prompts and seed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

import pytest

from paceline.errors import InvalidArgument
from paceline_loadtest import LoadConfig, RequestOptions, plan
from paceline_loadtest.workload import arrivals

PROMPTS = tuple(f"prompt {i}" for i in range(10))


def gaps(config: LoadConfig) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *arrivals(config)])]


def test_the_same_seed_gives_the_same_plan() -> None:
    config = LoadConfig(num_prompts=20, num_warmups=3, request_rate=5, max_tokens=(1, 100), seed=7)
    assert plan(config, PROMPTS) == plan(config, PROMPTS)
    assert plan(config, PROMPTS) != plan(replace(config, seed=8), PROMPTS)


def test_a_plan_is_pinned() -> None:
    # Recorded once: results of different versions are only comparable while this holds.
    requests = plan(LoadConfig(num_prompts=3, request_rate=2, max_tokens=(8, 64), seed=1), PROMPTS).requests
    assert [(r.index, round(r.arrival, 6), r.prompt, r.max_tokens) for r in requests] == [
        (0, 0.351345, "prompt 7", 57),
        (1, 1.140203, "prompt 2", 49),
        (2, 1.5, "prompt 6", 59),
    ]


def test_other_lengths_leave_arrivals_and_prompts_alone() -> None:
    config = LoadConfig(num_prompts=20, request_rate=5)
    one, other = (plan(replace(config, max_tokens=range_), PROMPTS).requests for range_ in [(1, 2), (5, 900)])
    assert [(r.arrival, r.prompt) for r in one] == [(r.arrival, r.prompt) for r in other]


@pytest.mark.parametrize("shape", [0.05, 0.25, 1.0, 4.0, math.inf])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_mean_rate_is_exactly_what_was_asked_for(shape: float, seed: int) -> None:
    times = arrivals(LoadConfig(num_prompts=50, request_rate=4.0, burstiness=shape, seed=seed))
    assert times[-1] == pytest.approx(50 / 4.0)
    assert times == sorted(times)
    assert times[0] > 0


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(shape: float) -> None:
    sample = gaps(LoadConfig(num_prompts=20_000, request_rate=10.0, burstiness=shape))
    assert fmean(sample) == pytest.approx(0.1)
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
    assert pstdev(sample) / fmean(sample) == pytest.approx(1 / math.sqrt(shape), rel=0.05)


def test_infinite_burstiness_is_a_constant_gap() -> None:
    assert gaps(LoadConfig(num_prompts=4, request_rate=2.0, burstiness=math.inf)) == [0.5] * 4


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert arrivals(LoadConfig(num_prompts=3)) == [0.0, 0.0, 0.0]


def test_closed_loop_is_a_limit_without_a_rate() -> None:
    assert LoadConfig(max_concurrency=4).closed_loop
    assert not LoadConfig(max_concurrency=4, request_rate=1.0).closed_loop
    assert not LoadConfig().closed_loop


def test_every_prompt_is_used_once_before_any_is_repeated() -> None:
    workload = plan(LoadConfig(num_prompts=15, num_warmups=5), PROMPTS)
    chosen = [request.prompt for request in workload.requests + workload.warmups]
    assert set(Counter(chosen).values()) == {2}
    assert set(chosen[:10]) == set(PROMPTS)
    assert chosen[:10] != list(PROMPTS)


def test_warmups_take_other_prompts_than_the_measured_requests() -> None:
    workload = plan(LoadConfig(num_prompts=6, num_warmups=4), PROMPTS)
    assert [request.index for request in workload.warmups] == [6, 7, 8, 9]
    assert not {r.prompt for r in workload.warmups} & {r.prompt for r in workload.requests}


def test_lengths_cover_their_range() -> None:
    workload = plan(LoadConfig(num_prompts=300, max_tokens=(3, 5)), PROMPTS)
    assert {request.max_tokens for request in workload.requests} == {3, 4, 5}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_prompts", 0),
        ("num_warmups", -1),
        ("request_rate", 0.0),
        ("request_rate", math.nan),
        ("burstiness", -1.0),
        ("burstiness", 1e-5),
        ("burstiness", math.nan),
        ("max_concurrency", 0),
        ("max_tokens", (0, 5)),
        ("max_tokens", (6, 5)),
        ("temperature", -0.1),
        ("timeout", 0.0),
        ("timeout", math.nan),
        ("timeout", True),
    ],
)
def test_values_out_of_range_are_named(name: str, value: Any) -> None:
    options = {name: value}
    if name in {"temperature", "timeout"}:
        options = {"options": RequestOptions(**options)}
    with pytest.raises(InvalidArgument, match=f"^{name} = "):
        LoadConfig(**options)


def test_no_prompts() -> None:
    with pytest.raises(InvalidArgument, match=r"^prompts = "):
        plan(LoadConfig(), [])
