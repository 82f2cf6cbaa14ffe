"""Where live requests cannot run yet, or never in time: the step loop waits, wakes, and tells those it refuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

import pytest

from engine.toy import GatedRunner, decode, expected, make_engine, make_request, num_free
from paceline.core.params import SchedulingParams
from paceline.core.plan import StepPlan, StepTimes
from paceline.core.tenant_policy import ONE_SHARE, TenantPolicy
from paceline.engine import AsyncEngine, Delta, Engine, GenerationRequest, Stream
from paceline.errors import Cancelled, DeadlineExceeded, InvalidArgument, QueueTimeout, ResourceExhausted, Unavailable
from paceline.llm import LLM
from paceline.sim import ScriptedRunner, VirtualClock

lags = pytest.mark.parametrize("lag", [0, 1])
PATIENCE = 60.0  # seconds after which a test that waits has failed
FEW = 20  # looks that find nothing to plan; a loop that spins makes thousands


def of(
    tenant: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 20, **scheduling: float
) -> GenerationRequest:
    params = SchedulingParams(tenant, **scheduling)  # type: ignore[arg-type]
    return replace(make_request(prompt, max_tokens), scheduling=params)


def metered(tokens_per_second: float) -> Engine:
    """Tenant a's bucket holds one token and has this rate."""
    engine = make_engine()
    policy = TenantPolicy(tokens_per_second=tokens_per_second, burst_tokens=1.0)
    engine.scheduler.tenants.set_policies({"a": policy}, ONE_SHARE, 0.0)
    return engine


def clock_of(engine: Engine) -> VirtualClock:
    assert isinstance(engine.clock, VirtualClock)
    return engine.clock


def plans_of(engine: Engine) -> list[StepPlan | None]:
    """Every attempt to plan a step from now on."""
    plans: list[StepPlan | None] = []
    plan = engine.plan

    def kept() -> StepPlan | None:
        plans.append(plan())
        return plans[-1]

    engine.plan = kept  # type: ignore[method-assign]
    return plans


@asynccontextmanager
async def running(engine: Engine, lag: int = 0) -> AsyncIterator[AsyncEngine]:
    served = AsyncEngine(engine, lag=lag)
    served.start()
    try:
        async with asyncio.timeout(PATIENCE):
            yield served
    finally:
        await served.stop()


async def read(stream: Stream) -> tuple[tuple[int, ...], str]:
    deltas: list[Delta] = [delta async for delta in stream]
    return tuple(token for delta in deltas for token in delta.token_ids), "".join(delta.text for delta in deltas)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


# -- step by step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0.0, 1e6, 1e9])
def test_a_step_waits_for_tokens(start: float) -> None:
    """However coarse the clock is, as one is that has run for long: rounding may not make it wait for ever."""
    engine = metered(3.0)
    clock = engine.clock = VirtualClock(start)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        clock.advance(seconds)

    engine.wait = wait
    tokens: dict[int, list[int]] = {engine.add(of("a", max_tokens=21)): [], engine.add(of("a", (4, 5), 7)): []}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        engine.check_invariants()
        assert len(waits) < FEW
    assert list(map(tuple, tokens.values())) == [expected((1, 2, 3), 21)[0], expected((4, 5), 7)[0]]
    assert sum(waits) == pytest.approx((3 + 21 - 1) / 3.0, abs=0.01)


def test_a_step_does_not_wait_while_somebody_is_refused() -> None:
    engine = metered(1e-3)
    engine.wait = lambda seconds: pytest.fail("it waited")
    engine.scheduler.tenants.get("a", engine.clock()).spend(10, engine.clock())
    refused = engine.add(of("a", queue_timeout=1.0))
    kept = engine.add(of("a"))
    clock_of(engine).advance(1.0)
    assert engine.step() == []
    engine.check_invariants()
    [(request_id, error)] = engine.take_refused()
    assert isinstance(error, QueueTimeout)
    assert (request_id, str(error)) == (refused, "not admitted within scheduling.queue_timeout, 1 s")
    assert engine.take_refused() == []
    assert engine.scheduler.requests.keys() == {kept}
    engine.check_invariants()


def test_completions_are_added_together_however_fast_time_goes() -> None:
    """The estimate that refuses one refuses all of them."""
    engine = make_engine()
    engine.add(of("b"))
    engine.step()  # where nothing runs, an estimate refuses nobody
    engine.scheduler.rate.token_seconds, engine.scheduler.rate.completion_tokens = 1.0, 20.0
    added = 0
    for late in range(-3, 4):
        before = set(engine.scheduler.requests)
        clock = VirtualClock(100.0)

        def ticking(clock: VirtualClock = clock) -> float:
            clock.advance(1.0)
            return clock()

        engine.clock = ticking
        try:
            engine.add(replace(of("a", deadline=122.0 + late), n=3))
        except DeadlineExceeded:
            assert engine.scheduler.requests.keys() == before
        else:
            assert len(engine.scheduler.requests) == len(before) + 3
            added += 1
        engine.check_invariants()
        for request_id in engine.scheduler.requests.keys() - before:
            engine.abort(request_id)
    assert 0 < added < 7


@pytest.mark.parametrize("bound", ["queue_timeout", "time_to_first_token"])
def test_a_request_that_has_begun_has_begun_with_all_its_completions(bound: str) -> None:
    """Its stream may have been read, and cannot be asked for again."""
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
    prompt = tuple(range(3, 43))  # the others wait until the first has read it
    first = engine.add(replace(of("a", prompt, **{bound: 2.0}), n=3))
    tokens: dict[int, list[int]] = {first + choice: [] for choice in range(3)}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        clock_of(engine).advance(1.0)
        assert engine.take_refused() == []
        engine.check_invariants()
    assert list(map(tuple, tokens.values())) == [expected(prompt, 20)[0]] * 3


def timed(runner: ScriptedRunner) -> ScriptedRunner:
    """Steps take a second."""
    runner.times = lambda plan: StepTimes(total=1.0)  # type: ignore[method-assign]
    return runner


def test_a_prompt_that_another_completion_has_read_takes_no_time() -> None:
    """By the estimate that refuses who comes too late: here the prompt takes 5 s, and what follows 4."""

    engine = make_engine(depth=0, max_num_batched_tokens=8, wrap=timed)
    engine.add(of("a", tuple(range(50, 90)), 4))  # from which it is known
    for _ in range(8):
        engine.step()
    assert not engine.has_work
    clock_of(engine).advance(100.0)
    engine.add(replace(of("a", tuple(range(3, 43)), 4, deadline=111.0), n=2))
    finished = 0
    while engine.has_work:
        finished += sum(output.finish is not None for output in engine.step())
        clock_of(engine).advance(1.0)
        assert engine.take_refused() == []
    assert (finished, engine.clock()) == (2, 109.0)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_prompt_that_is_known_takes_no_time_when_it_comes(is_known: bool) -> None:
    engine = make_engine(depth=0, max_num_batched_tokens=8, wrap=timed)
    engine.add(of("a", tuple(range(50, 90)), 4))
    while engine.has_work:
        engine.step()
    engine.add(of("a", (1, 2, 3), 20))
    engine.step()
    prompt = tuple(range(50, 90)) if is_known else tuple(range(3, 43))
    with nullcontext() if is_known else pytest.raises(DeadlineExceeded, match="it would take about 9"):
        engine.add(of("a", prompt, 4, deadline=engine.clock() + 8.0))


def test_what_is_refused_when_added() -> None:
    engine = make_engine()
    engine.scheduler.tenants.set_policies({"a": TenantPolicy(max_queued=2)}, None, 0.0)
    clock_of(engine).advance(10.0)
    with pytest.raises(InvalidArgument, match=r"scheduling\.tenant = 'b'"):
        engine.add(of("b"))
    with pytest.raises(DeadlineExceeded, match="the time is over"):
        engine.add(of("a", deadline=9.0))
    with pytest.raises(InvalidArgument, match="n = 3: must be at most 2"):
        engine.add(replace(of("a"), n=3))
    assert engine.has_room_for(replace(of("a"), n=2))
    engine.add(of("a"))
    assert not engine.has_room_for(replace(of("a"), n=2))
    with pytest.raises(ResourceExhausted, match="1 requests of tenant 'a' are waiting, and its max_queued is 2"):
        engine.add(replace(of("a"), n=2))
    engine.check_invariants()


def test_outputs_say_what_was_cached() -> None:
    engine = make_engine()
    prompt = tuple(range(3, 14))
    for cached in (0, 8):
        engine.add(of("a", prompt, 6))
        while engine.has_work:
            assert {output.cached_prompt_tokens for output in engine.step()} <= {cached}


def test_offline_generation_waits_and_is_refused() -> None:
    engine = metered(30.0)
    engine.wait = clock_of(engine).advance
    llm = LLM.from_engine(engine)
    texts = [completion.text for completion in llm.complete([of("a"), of("a", (4, 5), 7)])]
    assert texts == [decode(expected((1, 2, 3), 20)[0]), decode(expected((4, 5), 7)[0])]
    with pytest.raises(QueueTimeout, match="not admitted"):
        llm.complete([of("b"), of("a", queue_timeout=0.1)])
    assert not engine.has_work
    engine.check_invariants()


# -- in the loop ------------------------------------------------------------------------------------------------------


@lags
async def test_tokens_come_with_time(lag: int) -> None:
    engine = metered(400.0)
    engine.clock = time.monotonic
    plans = plans_of(engine)
    async with running(engine, lag) as served:
        streams = [await served.submit(of("a")) for _ in range(3)]
        assert await asyncio.gather(*map(read, streams)) == [expected((1, 2, 3), 20)] * 3
    assert plans.count(None) < FEW + 3 * 20 * lag  # with a plan ahead, the last step of each leaves nothing to plan
    assert num_free(engine) == 64


@lags
async def test_who_comes_meanwhile_is_served(lag: int) -> None:
    engine = metered(1e-3)
    plans = plans_of(engine)
    async with running(engine, lag) as served:
        await read(await served.submit(of("a")))
        waiting = await served.submit(of("a"))
        for _ in range(5):
            before = len(plans)
            await until(lambda before=before: None in plans[before:] or len(plans) == before)  # type: ignore[misc]
            assert await read(await served.submit(of("b"))) == expected((1, 2, 3), 20)
        assert list(engine.scheduler.requests) == [waiting.request_id]
        await waiting.aclose()


@lags
async def test_who_comes_at_the_moment_it_falls_asleep_is_served(lag: int) -> None:
    engine = metered(1e-3)
    plan = engine.plan
    reading: list[asyncio.Task[object]] = []

    async def submit_and_read() -> object:
        return await read(await served.submit(of("b")))

    def comes_late() -> StepPlan | None:
        made = plan()
        if made is None and len(reading) < 5 and engine.has_work:
            reading.append(asyncio.create_task(submit_and_read()))
        return made

    async with running(engine, lag) as served:
        engine.scheduler.tenants.get("a", engine.clock()).spend(10, engine.clock())
        engine.plan = comes_late  # type: ignore[method-assign]
        stream = await served.submit(of("a"))
        await until(lambda: len(reading) == 5)
        assert await asyncio.gather(*reading) == [expected((1, 2, 3), 20)] * 5
        await stream.aclose()


async def test_many_who_have_to_wait_cost_a_look_each() -> None:
    engine = metered(1e-3)
    plans = plans_of(engine)
    async with running(engine) as served:
        engine.scheduler.tenants.get("a", engine.clock()).spend(10, engine.clock())
        streams = []
        for _ in range(50):
            streams.append(await served.submit(of("a")))
            for _ in range(20):
                await asyncio.sleep(0)
        assert 1 <= len(plans) <= 50 + FEW
        for stream in streams:
            await stream.aclose()


@lags
async def test_a_deadline_wakes_it(lag: int) -> None:
    engine = metered(1e-3)
    engine.clock = time.monotonic
    plans = plans_of(engine)
    async with running(engine, lag) as served:
        await read(await served.submit(of("a")))
        patient = await served.submit(of("a"))
        for bound in ("queue_timeout", "time_to_first_token", "deadline"):
            late = await served.submit(of("a", **{bound: 0.1 + (engine.clock() if bound == "deadline" else 0.0)}))
            with pytest.raises(QueueTimeout if bound == "queue_timeout" else DeadlineExceeded):
                await read(late)
        assert served.num_live == 1
        await patient.aclose()
    assert plans.count(None) < FEW + 20 * lag


@lags
async def test_a_deadline_ends_what_runs_and_nobody_else(lag: int) -> None:
    engine = make_engine()
    gated = engine.runner = GatedRunner(engine.runner)
    async with running(engine, lag) as served:
        late = await served.submit(replace(of("a", max_tokens=100, deadline=50.0), n=2))
        kept = await served.submit(of("a", deadline=100.0))
        gated.gate.release(4)
        await until(lambda: gated.started == 5)
        clock_of(engine).advance(50.0)
        gated.gate.release(1000)
        with pytest.raises(DeadlineExceeded, match="the time is over"):
            await read(late)
        assert await read(kept) == expected((1, 2, 3), 20)
    assert num_free(engine) == 64
    engine.check_invariants()


async def test_what_took_too_long_to_prepare() -> None:
    engine = make_engine(num_blocks=4000, max_model_len=15000)
    encode = engine.tokenizer.encode

    def slow(text: str) -> list[int]:
        clock_of(engine).advance(10.0)
        return encode(text)

    engine.tokenizer.encode = slow  # type: ignore[method-assign]
    async with running(engine) as served:
        for text in ("short", "long" * 2000):
            request = replace(make_request(text), scheduling=SchedulingParams(deadline=engine.clock() + 5.0))
            with pytest.raises(DeadlineExceeded, match="the time is over"):
                await served.submit(request)
        assert not engine.has_work


async def test_time_that_ends_at_any_moment_on_its_way_is_no_mistake() -> None:
    added = 0
    for left in range(7):
        engine = make_engine()
        clock = clock_of(engine)

        def ticking(clock: VirtualClock = clock) -> float:
            clock.advance(1.0)
            return clock()

        async with running(engine) as served:
            await asyncio.sleep(0)
            engine.clock = ticking
            try:
                stream = await served.submit(of("a", deadline=clock() + left))
            except DeadlineExceeded:
                assert not engine.has_work
            else:
                added += 1
                await stream.aclose()
    assert 0 < added < 7


# -- the end ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def asleep(lag: int) -> AsyncIterator[tuple[AsyncEngine, Stream]]:
    """An engine whose one request waits for tokens, for years."""
    engine = metered(1e-9)
    engine.scheduler.tenants.get("a", engine.clock()).spend(10, engine.clock())
    plans = plans_of(engine)
    async with running(engine, lag) as served:
        stream = await served.submit(of("a"))
        await until(lambda: None in plans)
        yield served, stream
    assert num_free(engine) == 64
    engine.check_invariants()


@lags
async def test_stopping(lag: int) -> None:
    async with asleep(lag) as (served, stream):
        await served.stop()
        with pytest.raises(Unavailable, match="shutting down"):
            await read(stream)


@lags
async def test_stopping_before_it_has_looked(lag: int) -> None:
    engine = metered(1e-9)
    async with running(engine, lag) as served:
        stream = await served.submit(of("a"))
        await served.stop()
        with pytest.raises(Unavailable, match="shutting down"):
            await read(stream)


@lags
async def test_draining_ends_with_the_grace(lag: int) -> None:
    async with asleep(lag) as (served, stream):
        await served.drain(0.0)
        with pytest.raises(Unavailable, match="shutting down"):
            await read(stream)
        assert served.healthy


@lags
async def test_draining_waits_for_tokens(lag: int) -> None:
    engine = metered(400.0)
    engine.clock = time.monotonic
    async with running(engine, lag) as served:
        readers = asyncio.gather(*[read(await served.submit(of("a"))) for _ in range(2)])
        await served.drain(PATIENCE)
        assert await readers == [expected((1, 2, 3), 20)] * 2


@lags
async def test_who_waits_may_leave(lag: int) -> None:
    async with asleep(lag) as (served, stream):
        assert served.abort(stream.request_id)
        with pytest.raises(Cancelled):
            await read(stream)
        assert await read(await served.submit(of("b"))) == expected((1, 2, 3), 20)


@lags
async def test_new_policies_wake_it(lag: int) -> None:
    """Who may go on now does not sleep for as long as the old ones would have had it."""
    async with asleep(lag) as (served, stream):
        served.set_policies({}, ONE_SHARE)
        assert await read(stream) == expected((1, 2, 3), 20)
