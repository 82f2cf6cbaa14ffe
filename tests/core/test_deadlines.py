"""In time, in order of slack, or refused: what is late is never served first."""

from __future__ import annotations

import math

import pytest

from core.harness import GREEDY, prompt_of
from core.test_tenants import Shop
from paceline.core.config import SchedulerConfig
from paceline.core.deadlines import PRIORITY_SECONDS, SLACK, Deadlines
from paceline.core.params import SchedulingParams, SequenceParams, SpeculationParams, StopParams
from paceline.core.plan import SequenceResult, SequenceWork
from paceline.core.request import Request, RequestStatus
from paceline.core.service_rate import ENDINGS_KEPT, LONGEST_WAIT, SHORTEST_WAIT, ServiceRate
from paceline.core.tenant_policy import TenantPolicy
from paceline.errors import DeadlineExceeded, InvalidArgument
from paceline.sim import reference_output


def request_of(prompt: int = 10, max_tokens: int = 20, arrival: float = 0.0, **scheduling: float) -> Request:
    return Request(
        0,
        (1,) * prompt,
        SequenceParams(GREEDY),
        StopParams(max_tokens=max_tokens),
        SpeculationParams(),
        arrival,
        methods=(),
        scheduling=SchedulingParams(**scheduling),  # type: ignore[arg-type]
        max_total_tokens=prompt + max_tokens,
    )


def rate_of(prompt_seconds: float = 1.0, token_seconds: float = 1.0, completion: float = 8.0) -> ServiceRate:
    rate = ServiceRate(budget=10)
    rate.prompt_seconds, rate.token_seconds, rate.completion_tokens = prompt_seconds, token_seconds, completion
    return rate


def test_a_first_token_takes_as_many_steps_as_its_prompt_has_chunks() -> None:
    """However many rows a step has."""
    shop = Shop({}, long_prefill_threshold=8)
    shop.add(8, 2)
    shop.drain()
    rate = shop.scheduler.rate
    assert rate.seconds_to_first_token(80) == pytest.approx(10 * rate.prompt_seconds)


# -- slack -----------------------------------------------------------------------------------------------------------


def test_slack_is_what_is_left_before_a_start() -> None:
    """10 prompt tokens take a second; completions have 8 tokens, or as many as they may have, at a second each."""
    deadlines = Deadlines(rate_of(), patience=1000.0)
    assert deadlines.rank(request_of(), 0, 5) == 1000.0
    assert deadlines.rank(request_of(deadline=50.0), 0, 0) == pytest.approx(50 - 1 - 8)
    assert deadlines.rank(request_of(deadline=50.0, max_tokens=3), 0, 0) == pytest.approx(50 - 1 - 3)
    assert deadlines.rank(request_of(time_to_first_token=5.0, arrival=2.0), 0, 0) == pytest.approx(2 + 5 - 1)
    assert deadlines.rank(request_of(queue_timeout=3.0), 0, 0) == pytest.approx(3.0)
    assert deadlines.rank(request_of(deadline=50.0), 2, 0) == pytest.approx(50 - 1 - 8 - 2 * PRIORITY_SECONDS)


def test_in_a_long_queue_the_short_go_first() -> None:
    """A request counts as if it could wait for as long as it would delay those that wait already."""
    rate = rate_of()
    rate.prompt_charge, rate.token_charge = 0.01, 0.05
    for max_tokens in (8, 20):
        rate.ended(max_tokens, max_tokens)
    deadlines = Deadlines(rate, patience=1000.0)
    short, long = request_of(deadline=40.0, max_tokens=8), request_of(deadline=45.0, max_tokens=20)
    assert deadlines.rank(long, 0, 0) < deadlines.rank(short, 0, 0)
    assert deadlines.rank(long, 0, 20) > deadlines.rank(short, 0, 20)
    assert deadlines.rank(short, 0, 20) - deadlines.rank(short, 0, 0) == pytest.approx(20 * (10 * 0.01 + 8 * 0.05))


def test_nothing_is_known_before_the_first_step() -> None:
    """Nobody is refused for an estimate that nobody has made."""
    deadlines = Deadlines(ServiceRate(10), patience=10.0)
    deadlines.check(request_of(deadline=0.001), 0.0, busy=True)


def test_the_estimate_is_told() -> None:
    deadlines = Deadlines(rate_of(), patience=10.0)
    deadlines.check(request_of(deadline=9.5), 0.0, busy=True)
    with pytest.raises(DeadlineExceeded, match=r"too late: it would take about 9\.00 s, and 8\.50 s are left"):
        deadlines.check(request_of(deadline=9.5), 1.0, busy=True)
    deadlines.check(request_of(deadline=9.5), 1.0, busy=False)
    with pytest.raises(DeadlineExceeded):
        deadlines.check(request_of(deadline=9.5), 9.5, busy=False)


def test_rates_are_means() -> None:
    rate = ServiceRate(10)
    for _ in range(20):
        rate.step((), (), [], 2.0)
        rate.step((), (), [], 3.0)
        rate.ended(10, 20)
    assert rate.completion_tokens == pytest.approx(10)
    assert rate.seconds_until_ends(3) == pytest.approx(15)
    assert rate.seconds_until_ends(1000) == LONGEST_WAIT
    assert ServiceRate(10).seconds_until_ends(5) == SHORTEST_WAIT


def seconds_of(rate: ServiceRate, max_tokens: int | None) -> float:
    """Of a whole completion, where a token takes a second and the model has room for 1000."""
    rate.token_seconds = 1.0
    return rate.seconds_to_end(0, 1000 if max_tokens is None else max_tokens, max_tokens)


def test_completions_are_as_long_as_those_of_their_kind() -> None:
    """By about as many tokens that they might have, or by what those had who chose no limit."""
    rate = ServiceRate(10)
    assert seconds_of(rate, None) == 0.0
    for _ in range(40):
        rate.ended(4, 4)
        rate.ended(30, 300)
    assert [seconds_of(rate, most) for most in (4, 6, 260, 500)] == pytest.approx([4, 6, 26, 50])
    usual = rate.completion_tokens
    assert 4 < usual < 30
    assert [seconds_of(rate, most) for most in (3, 100, None)] == pytest.approx([3, usual, usual])
    rate.ended(200, None)
    assert [seconds_of(rate, most) for most in (4, 260, None)] == pytest.approx([4, 26, 200])


def test_what_keeps_a_kind_away_is_forgotten() -> None:
    """By it they would be refused as long as others run, and it would never be put right."""
    rate = ServiceRate(10)
    rate.ended(900, None)
    for _ in range(ENDINGS_KEPT - 1):
        rate.ended(4, 4)
    assert seconds_of(rate, None) == pytest.approx(900)
    rate.ended(4, 4)
    assert seconds_of(rate, None) == rate.completion_tokens < 10
    rate.ended(50, None)
    assert seconds_of(rate, None) == pytest.approx(50)


# -- in the scheduler ------------------------------------------------------------------------------------------------


def experienced(max_num_seqs: int) -> Shop:
    """One that knows how long its requests take: 10 tokens, a second each."""
    shop = Shop(max_num_seqs=max_num_seqs)
    for _ in range(3):
        shop.add_for("a", max_tokens=10)
        shop.drain()
    return shop


def test_the_most_urgent_goes_first() -> None:
    shop = Shop(max_num_seqs=1, patience=500.0)
    shop.add_for("a", max_tokens=3)
    shop.step()
    late, soon, whenever = (
        shop.add(4, 3, scheduling=SchedulingParams("a", deadline=deadline)) for deadline in (100.0, 50.0, None)
    )
    shop.drain()
    admitted = [admission.request_id for plan in shop.plans for admission in plan.admitted]
    assert admitted[1:] == [soon.request_id, late.request_id, whenever.request_id]


def test_deadlines_do_not_jump_over_other_tenants() -> None:
    """Slack orders the requests of one tenant. Between tenants, shares do."""
    shop = Shop(max_num_seqs=1)
    for _ in range(3):
        shop.add_for("a")
    while shop.service("a") < 9:
        shop.step()
    other = shop.add_for("b")
    hurried = shop.add(4, 3, scheduling=SchedulingParams("a", deadline=60.0))
    shop.step_until(lambda: other.first_scheduled is not None)
    assert hurried.status is RequestStatus.WAITING
    shop.drain()


def test_what_can_no_longer_be_met_is_refused_before_it_is_served() -> None:
    shop = experienced(max_num_seqs=1)
    shop.add_for("a", max_tokens=30)
    shop.step()
    now = shop.now
    # The place is taken for 30 seconds; ten more would be needed.
    hopeless = shop.add(4, 10, scheduling=SchedulingParams("a", deadline=now + 35))
    fine = shop.add(4, 10, scheduling=SchedulingParams("a", deadline=now + 60))
    shop.drain()
    assert set(shop.refused) == {hopeless.request_id}
    assert "it would take about" in str(shop.refused[hopeless.request_id])
    assert hopeless.first_scheduled is None
    assert fine.request_id in shop.finished


def test_what_could_never_be_met_is_not_even_queued() -> None:
    shop = experienced(max_num_seqs=2)
    shop.add_for("a", max_tokens=10)
    shop.step()
    before = len(shop.requests)
    with pytest.raises(DeadlineExceeded, match="it would take about"):
        shop.add(4, 10, scheduling=SchedulingParams("a", deadline=shop.now + 5))
    assert len(shop.requests) == before == len(shop.scheduler.running) + 3
    shop.drain()
    # Where nothing runs it is tried: an estimate that is wrong would never be put right.
    tried = shop.add(4, 10, scheduling=SchedulingParams("a", deadline=shop.now + 5))
    shop.drain()
    assert tried.output_token_ids


def test_one_slow_step_is_no_reason_to_refuse() -> None:
    rate = ServiceRate(10)
    works, results = (SequenceWork(0, 1, True),), (SequenceResult(0, (1,)),)
    for seconds in (0.05, 60.0, 0.05):
        rate.step(works, results, [seconds], seconds)
    assert rate.token_seconds < 0.06


@pytest.mark.parametrize("max_tokens", [None, 180])
def test_tiny_completions_tell_nothing_of_long_ones(max_tokens: int | None) -> None:
    """They used all that they might have: no share of what others may have, or of what the model has room for."""
    shop = Shop(max_num_seqs=2)
    for _ in range(20):
        shop.add_for("a", max_tokens=2)
    shop.drain()
    shop.add_for("a", max_tokens=190)
    shop.step()
    prompt = prompt_of(4)
    stop_ids = tuple(reference_output(prompt, 5)[4:])
    soon = shop.add(prompt, max_tokens, stop_ids=stop_ids, scheduling=SchedulingParams("a", deadline=shop.now + 20))
    shop.drain()
    assert soon.request_id in shop.finished


def test_without_max_tokens_others_without_tell_how_long_it_takes() -> None:
    shop = Shop(max_num_seqs=2)
    shop.add(4, None, tenant="a")
    shop.drain()
    for _ in range(20):
        shop.add_for("a", max_tokens=2)
    shop.drain()
    shop.add_for("a", max_tokens=190)
    shop.step()
    with pytest.raises(DeadlineExceeded, match="it would take about"):
        shop.add(4, None, scheduling=SchedulingParams("a", deadline=shop.now + 100))
    shop.add(4, 2, scheduling=SchedulingParams("a", deadline=shop.now + 100))
    # More than the model has room for is no choice either.
    with pytest.raises(DeadlineExceeded, match="it would take about"):
        shop.add(4, 1000, scheduling=SchedulingParams("a", deadline=shop.now + 100))
    shop.drain()


def test_timers_of_ended_requests_are_dropped() -> None:
    shop = Shop(max_num_seqs=1)
    for _ in range(300):
        shop.abort(shop.add(4, 10, scheduling=SchedulingParams("a", deadline=shop.now + 1000)))
    shop.step()
    assert len(shop.scheduler.deadlines._timers) <= SLACK


@pytest.mark.parametrize("lag", [0, 1])
def test_an_expired_request_ends_wherever_it_is(lag: int) -> None:
    shop = Shop(max_num_seqs=1, lag=lag)
    running = shop.add(4, 100, scheduling=SchedulingParams("a", deadline=10.0))
    waiting = shop.add(4, 100, scheduling=SchedulingParams("a", deadline=12.0))
    shop.add_for("a", max_tokens=4)
    shop.drain()
    assert set(shop.refused) == {running.request_id, waiting.request_id}
    assert 0 < len(running.output_token_ids) < 12
    assert len(shop.finished) == 1


def test_the_queue_may_time_out() -> None:
    shop = Shop(max_num_seqs=1)
    shop.add_for("a", max_tokens=30)
    shop.step()
    waiting = shop.add(4, 4, scheduling=SchedulingParams("a", queue_timeout=5.0))
    shop.step_until(lambda: waiting.status is RequestStatus.FINISHED, 8)
    assert waiting.request_id in shop.refused
    shop.drain()


def test_once_begun_only_the_deadline_counts() -> None:
    shop = Shop(max_num_seqs=1)
    request = shop.add(4, 30, scheduling=SchedulingParams("a", queue_timeout=2.0, time_to_first_token=3.0))
    shop.drain()
    assert request.request_id in shop.finished


def test_deadlines_wake_who_waits_for_tokens() -> None:
    shop = Shop({"a": TenantPolicy(tokens_per_second=0.001, burst_tokens=1.0)})
    shop.add_for("a")
    shop.step_until(lambda: not shop.scheduler.has_requests)
    late = shop.add(4, 4, scheduling=SchedulingParams("a", deadline=shop.now + 20.0))
    assert shop.scheduler.wake_at(shop.now) == late.scheduling.deadline
    shop.drain()
    assert set(shop.refused) == {late.request_id}
    assert shop.scheduler.wake_at(shop.now) == math.inf


@pytest.mark.parametrize(
    ("scheduling", "said"),
    [
        ({"queue_timeout": 0.0}, "scheduling.queue_timeout = 0.0: must be a time > 0"),
        ({"time_to_first_token": -2.0}, "scheduling.time_to_first_token = -2.0"),
        ({"time_per_output_token": math.nan}, "scheduling.time_per_output_token = nan"),
        ({"priority": 5000}, "scheduling.priority = 5000: must be an integer in -1000..1000"),
    ],
)
def test_what_makes_no_sense_is_refused(scheduling: dict[str, float], said: str) -> None:
    shop = Shop()
    with pytest.raises(InvalidArgument, match=said):
        shop.add(4, 4, scheduling=SchedulingParams(**scheduling))  # type: ignore[arg-type]
    shop.drain()


@pytest.mark.parametrize("ago", [0.0, 1.0])
def test_whose_time_is_over_is_too_late(ago: float) -> None:
    shop = Shop()
    with pytest.raises(DeadlineExceeded, match="the time is over"):
        shop.add(4, 4, scheduling=SchedulingParams(deadline=shop.now - ago))
    shop.drain()


# -- how long decodes wait for prompts -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["patience", "min_run_seconds", "max_step_seconds", "long_prefill_threshold"])
def test_a_configuration_is_checked(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} = -1"):
        SchedulerConfig(8, **{name: -1})  # type: ignore[arg-type]
