"""What tenants have had: the sums agree with what every request was told, whatever becomes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from engine.toy import make_engine, make_request
from paceline.core.params import SchedulingParams
from paceline.core.plan import FinishReason, StepPlan, StepTimes
from paceline.core.request import Request, RequestStats
from paceline.core.tenant_policy import ONE_SHARE
from paceline.engine import Engine, GenerationRequest, usage
from paceline.engine.usage import ALL_OTHERS, TenantUsage
from paceline.sim import VirtualClock


def timed_engine(**settings: Any) -> Engine:
    """Its steps take half a second each, as the runner reports them, and the clock goes on with them."""
    engine = make_engine(**settings)
    clock = engine.clock
    assert isinstance(clock, VirtualClock)

    def times(plan: StepPlan) -> StepTimes:
        clock.advance(0.5)
        return StepTimes(total=0.5)

    engine.runner.times = times  # type: ignore[attr-defined]
    return engine


def of(tenant: str, prompt: str = "0123456789", max_tokens: int = 20, **scheduling: object) -> GenerationRequest:
    return replace(make_request(prompt, max_tokens), scheduling=SchedulingParams(tenant=tenant, **scheduling))  # type: ignore[arg-type]


def run(engine: Engine) -> dict[int, RequestStats]:
    """To the end of every request: their accounts."""
    accounts = {}
    while engine.has_work:
        for output in engine.step():
            if output.stats is not None:
                accounts[output.request_id] = output.stats
    return accounts


def test_sums_are_those_of_the_requests() -> None:
    engine = timed_engine(num_blocks=24)  # so few that some give way
    tenants = {engine.add(of(f"t{index % 3}", "x" * (4 + index), 30)): f"t{index % 3}" for index in range(9)}
    accounts = run(engine)
    report = engine.usage.report()
    assert report.keys() == {"t0", "t1", "t2"}
    assert sum(account.preemptions for account in accounts.values()) > 0, "the test asks too little"
    for name, had in report.items():
        own = [account for request_id, account in accounts.items() if tenants[request_id] == name]
        assert had.completions == len(own) == 3
        counts = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "draft_steps", "drafted_tokens")
        for field in (*counts, "accepted_tokens", "preemptions"):
            assert getattr(had, field) == sum(getattr(account, field) for account in own), field
        for field in ("engine_seconds", "queue_seconds", "rejected_seconds", "saved_seconds"):
            assert getattr(had, field) == pytest.approx(sum(getattr(account, field) for account in own)), field
    assert sum(had.completion_tokens for had in report.values()) == engine.totals.tokens == 270


def test_nothing_is_lost_or_told_twice_on_the_way() -> None:
    """A scraper's counters never go back, and live requests are in them."""
    engine = timed_engine(num_blocks=24)
    for index in range(6):
        engine.add(of("t", "x" * (4 + index), 30))
    before = TenantUsage()
    while engine.has_work:
        engine.step()
        now = engine.usage.report()["t"]
        assert now.completion_tokens == engine.totals.tokens
        for field in ("prompt_tokens", "cached_prompt_tokens", "drafted_tokens", "engine_seconds", "queue_seconds"):
            assert getattr(now, field) >= getattr(before, field), field
        assert now.running == len(engine.scheduler.running)
        assert now.running + now.waiting == len(engine.scheduler.requests)
        before = now
    assert before.completion_tokens == 180
    assert (before.running, before.waiting) == (0, 0)


def test_choices_count_their_prompt_each() -> None:
    engine = make_engine()
    engine.add(replace(of("t", "0123456789", 5), n=3))
    run(engine)
    had = engine.usage.report()["t"]
    assert (had.completions, had.prompt_tokens, had.completion_tokens) == (3, 30, 15)
    assert had.cached_prompt_tokens == 16, "two of them share the first two blocks"


def test_aborted_requests_have_had_what_they_had() -> None:
    engine = timed_engine()
    aborted, goes_on = engine.add(of("a", max_tokens=50)), engine.add(of("b", max_tokens=50))
    for _ in range(4):
        engine.step()
    request = engine.scheduler.requests[aborted]
    tokens, seconds = len(request.output_token_ids), request.charged_seconds
    assert tokens > 0
    assert seconds > 0
    live = engine.usage.report()["a"]
    assert engine.abort(aborted)
    assert not engine.abort(aborted)
    for had in (live, engine.usage.report()["a"]):
        assert (had.completion_tokens, had.engine_seconds) == (tokens, seconds)
    run(engine)
    assert engine.usage.report()["a"].completion_tokens == tokens
    assert engine.usage.report()["b"].completion_tokens == 50
    assert not engine.abort(goes_on)


def test_who_never_ran_has_had_nothing() -> None:
    engine = timed_engine(max_num_seqs=1, max_num_batched_tokens=8, min_run_seconds=1000)
    engine.add(of("runs", max_tokens=100))
    engine.step()
    engine.add(of("late", deadline=engine.clock() + 3.0))
    aborted = engine.add(of("gone"))
    engine.step()
    engine.abort(aborted)
    for _ in range(8):
        engine.step()
    assert engine.take_refused(), "the test refuses nothing"
    for name in ("late", "gone"):
        assert replace(engine.usage.report()[name], service_seconds=0.0) == TenantUsage(completions=1), name


def test_every_end_is_told_once() -> None:
    engine = timed_engine()
    ends = list[tuple[int, FinishReason | None, float]]()

    def observe(request: Request, reason: FinishReason | None, now: float) -> None:
        ends.append((request.request_id, reason, now))

    engine.on_end.append(observe)
    finishes, aborted = engine.add(of("", max_tokens=1)), engine.add(of("", max_tokens=90))
    refused = engine.add(of("", max_tokens=90, deadline=2.25))
    engine.step()
    engine.abort(aborted)
    run(engine)
    engine.take_refused()
    assert ends == [(finishes, FinishReason.MAX_TOKENS, 0.5), (aborted, None, 0.5), (refused, None, 2.5)]


def test_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_TENANTS", 3)
    engine = make_engine(num_blocks=200)
    engine.scheduler.tenants.set_policies({"named": ONE_SHARE}, ONE_SHARE, 0.0)
    names = [f"t{index}" for index in range(6)] + ["named"]
    for name in names:
        engine.add(of(name, max_tokens=4))
    for _ in range(2):  # while they live, and when they have ended
        report = engine.usage.report()
        assert report.keys() == {"t0", "t1", "t2", ALL_OTHERS, "named"}
        assert report[ALL_OTHERS].completions == 3
        assert Counter(had.completions for had in report.values()) == {1: 4, 3: 1}
        run(engine)
    assert report.keys() == engine.usage.report().keys()
    assert engine.usage.report()[ALL_OTHERS].completion_tokens == 12


def test_a_tenant_that_is_named_while_its_request_lives_has_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_TENANTS", 1)
    engine = make_engine()
    engine.add(of("first", max_tokens=4))
    engine.add(of("later", max_tokens=4))
    engine.step()
    engine.scheduler.tenants.set_policies({"later": ONE_SHARE}, ONE_SHARE, 0.0)
    assert engine.usage.report()["later"].completion_tokens == 1
    run(engine)
    assert engine.usage.report()["later"].completion_tokens == 4


def test_a_report_is_a_copy() -> None:
    engine = make_engine()
    engine.usage.of("t").outcomes["OK"] += 1
    report = engine.usage.report()
    report["t"].outcomes["OK"] += 1
    report["t"].completions += 1
    assert engine.usage.report()["t"] == TenantUsage(outcomes=Counter(OK=1))


def test_forgotten_after_a_warm_up() -> None:
    engine = make_engine()
    engine.add(of("t"))
    run(engine)
    engine.forget()
    assert engine.usage.report() == {}
    assert engine.totals.tokens == 0
    engine.add(of("u"))
    assert engine.usage.report().keys() == {"u"}
