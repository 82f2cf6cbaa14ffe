"""The step loop: delivery, cancellation, death, draining; with and without a plan outstanding."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from engine.test_engine import EditedRunner, ToyCompiler, logprob_of, with_logprobs
from engine.toy import FailingRunner, GatedRunner, ToyTokenizer, expected, make_engine, make_request, num_free
from paceline.core.grammar import Grammar, GrammarKind, GrammarSpec
from paceline.core.params import LogprobsParams, SamplingParams, SchedulingParams
from paceline.core.plan import StepPlan, StepResult
from paceline.core.tenant_policy import ONE_SHARE, TenantPolicy
from paceline.engine import AsyncEngine, ChatMessage, Engine, GenerationRequest, Output, Stream, async_engine
from paceline.engine.engine import Prepared
from paceline.engine.fair_threads import FairThreads
from paceline.errors import (
    Cancelled,
    EngineDead,
    InvalidArgument,
    PacelineError,
    QueueTimeout,
    QuotaExceeded,
    ResourceExhausted,
    Unavailable,
)
from paceline.sim.clock import VirtualClock

lags = pytest.mark.parametrize("lag", [0, 1])
Completion = tuple[tuple[int, ...], str]


@asynccontextmanager
async def running(engine: Engine, lag: int = 0) -> AsyncIterator[AsyncEngine]:
    async_engine = AsyncEngine(engine, lag=lag)
    async_engine.start()
    try:
        yield async_engine
    finally:
        await async_engine.stop()


async def read(stream: Stream) -> Completion:
    token_ids: list[int] = []
    text = ""
    async for delta in stream:
        assert delta.token_offset == len(token_ids)
        token_ids += delta.token_ids
        text += delta.text
    assert delta.finish is not None
    assert delta.stats is not None
    assert delta.stats.completion_tokens == len(token_ids)
    return tuple(token_ids), text


async def read_choices(stream: Stream) -> list[Completion]:
    """The whole of every choice; the stream ends when all of them have."""
    token_ids: list[list[int]] = [[] for _ in range(stream.num_choices)]
    texts = [""] * stream.num_choices
    ended: set[int] = set()
    async for delta in stream:
        assert delta.choice not in ended
        assert delta.token_offset == len(token_ids[delta.choice])
        token_ids[delta.choice] += delta.token_ids
        texts[delta.choice] += delta.text
        if delta.finish is not None:
            ended.add(delta.choice)
    assert ended == set(range(stream.num_choices))
    return [(tuple(ids), text) for ids, text in zip(token_ids, texts, strict=True)]


async def until(condition: Callable[[], bool]) -> None:
    """Other threads take part, so turns of the loop cannot be counted; a test that never gets there times out."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@lags
async def test_concurrent_requests_get_their_own_completions(lag: int) -> None:
    engine = make_engine(num_blocks=40)  # tight: some are preempted
    prompts = [[seed, seed + 1] * (1 + seed % 7) for seed in range(20)]

    async def one(index: int, prompt: list[int]) -> tuple[Stream, Completion]:
        await turns(index)
        stream = await served.submit(make_request(prompt, 10 + index))
        return stream, await read(stream)

    async with running(engine, lag) as served:
        results = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
        assert [completion for _, completion in results] == [
            expected(prompt, 10 + index) for index, prompt in enumerate(prompts)
        ]
        assert [stream.prompt_tokens for stream, _ in results] == [len(prompt) for prompt in prompts]
        assert len({stream.request_id for stream, _ in results}) == 20
        assert served.num_live == 0
    assert num_free(engine) == 40


@lags
async def test_stop_strings_give_the_same_with_and_without_lag(lag: int) -> None:
    token_ids, text = expected([9], 60)
    string = next(text[at : at + 2] for at in range(20, 60) if text.find(text[at : at + 2]) == at)
    async with running(make_engine(), lag) as served:
        ids, shown = await read(await served.submit(make_request([9], 60, (string,))))
    assert shown == text[: text.find(string)]
    assert ids == token_ids[: len(ids)]
    assert expected([9], len(ids) - 1)[1].find(string) < 0


async def test_readers_of_streams_take_turns() -> None:
    async with running(make_engine()) as served:
        streams = [await served.submit(make_request()) for _ in range(3)]
        assert {stream._sleeper._turns for stream in streams} == {served._turns}
        for stream in streams:
            stream.close()


async def test_with_lag_the_next_step_is_planned_while_one_runs() -> None:
    for lag, most in ((0, 1), (1, 2)):
        engine = make_engine()
        gated = engine.runner = GatedRunner(engine.runner)
        async with running(engine, lag) as served:
            stream = await served.submit(make_request())
            await until(lambda gated=gated: gated.started == 1)  # type: ignore[misc]
            await turns()
            assert len(engine.scheduler._outstanding) == most
            gated.gate.release(1000)
            await read(stream)


@lags
async def test_an_abort_during_a_forward_frees_the_blocks_at_once(lag: int) -> None:
    engine = make_engine()
    gated = engine.runner = GatedRunner(engine.runner)
    async with running(engine, lag) as served:
        kept = await served.submit(make_request([1, 2]))
        gone = await served.submit(make_request([3, 4]))
        gated.gate.release(1)
        await until(lambda: gated.started == 2)
        assert engine.scheduler.kv.table(gone.request_id)
        assert served.abort(gone.request_id)
        assert not served.abort(gone.request_id)
        assert not engine.scheduler.kv.table(gone.request_id)
        assert engine.scheduler.kv.table(kept.request_id)
        engine.check_invariants()
        gated.gate.release(1000)
        with pytest.raises(Cancelled):
            await read(gone)
        assert await read(kept) == expected([1, 2], 20)


@lags
@pytest.mark.parametrize("seed", range(4))
async def test_readers_that_leave_at_random_moments_disturb_nobody(lag: int, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(num_blocks=48)
    kv = engine.scheduler.kv

    async def stays(prompt: list[int]) -> None:
        assert await read(await served.submit(make_request(prompt, 40))) == expected(prompt, 40)

    async def breaks(prompt: list[int], after: int) -> None:
        stream = await served.submit(make_request(prompt, 60))
        async with aclosing(stream):
            async for delta in stream:
                if delta.token_offset >= after:
                    break
        assert not kv.table(stream.request_id)

    async def is_cancelled(prompt: list[int], after: int) -> None:
        stream = await served.submit(make_request(prompt, 60))
        task = asyncio.create_task(read(stream))
        await turns(1 + after)  # a task that never began has nothing to clean up
        task.cancel()
        await asyncio.wait([task])
        assert not kv.table(stream.request_id)

    async def is_aborted(prompt: list[int], after: int) -> None:
        stream = await served.submit(make_request(prompt, 60))
        await turns(after)
        served.abort(stream.request_id)
        assert not kv.table(stream.request_id)

    async with running(engine, lag) as served, asyncio.TaskGroup() as group:
        for index in range(24):
            prompt = [rng.randrange(900) for _ in range(rng.randrange(1, 12))]
            if index % 3 == 0:
                group.create_task(stays(prompt))
            else:
                leaves = rng.choice([breaks, is_cancelled, is_aborted])
                group.create_task(leaves(prompt, rng.randrange(40)))
            await turns(rng.randrange(5))
    assert num_free(engine) == 48
    engine.check_invariants()


@lags
async def test_a_slow_reader_gets_everything_in_few_messages_and_holds_up_nobody(lag: int) -> None:
    async with running(make_engine(), lag) as served:
        slow = await served.submit(make_request([1], 100))
        assert await read(await served.submit(make_request([2], 100))) == expected([2], 100)
        await until(lambda: served.num_live == 0)
        deltas = [delta async for delta in slow]
    assert len(deltas) == 1
    assert (deltas[0].token_ids, deltas[0].text) == expected([1], 100)


class TestSeveralChoices:
    PROMPT = tuple(range(3, 14))

    def request(self, n: int = 3, max_tokens: int = 30) -> GenerationRequest:
        return replace(make_request(self.PROMPT, max_tokens), n=n)

    @lags
    async def test_one_stream_brings_all_of_them(self, lag: int) -> None:
        engine = make_engine(num_blocks=30)  # tight: some are preempted
        async with running(engine, lag) as served:
            streams = [await served.submit(self.request(n)) for n in (3, 1, 4)]
            assert served.num_live == 8
            results = await asyncio.gather(*map(read_choices, streams))
            assert served.num_live == 0
        assert results == [[expected(self.PROMPT, 30)] * n for n in (3, 1, 4)]
        assert num_free(engine) == 30

    @lags
    @pytest.mark.parametrize("seed", range(3))
    async def test_leaving_frees_all_of_them(self, lag: int, seed: int) -> None:
        rng = random.Random(seed)
        engine = make_engine(num_blocks=48)

        async def leaves(after: int) -> None:
            stream = await served.submit(self.request(4, 60))
            async with aclosing(stream):
                async for delta in stream:
                    if delta.token_offset >= after:
                        break
            assert not any(engine.scheduler.kv.table(stream.request_id + choice) for choice in range(4))

        async def stays() -> None:
            assert await read_choices(await served.submit(self.request())) == [expected(self.PROMPT, 30)] * 3

        async with running(engine, lag) as served, asyncio.TaskGroup() as group:
            for index in range(12):
                group.create_task(leaves(rng.randrange(40)) if index % 3 else stays())
                await turns(rng.randrange(5))
        assert num_free(engine) == 48
        engine.check_invariants()

    @lags
    async def test_an_abort_during_a_forward_ends_all_of_them_at_once(self, lag: int) -> None:
        engine = make_engine()
        gated = engine.runner = GatedRunner(engine.runner)
        async with running(engine, lag) as served:
            kept, gone = await served.submit(self.request()), await served.submit(self.request())
            gated.gate.release(3)
            await until(lambda: gated.started == 4)
            assert not served.abort(gone.request_id + 1), "not the id of a request"
            assert served.num_live == 6
            assert served.abort(gone.request_id)
            assert not served.abort(gone.request_id)
            assert served.num_live == 3
            assert not any(engine.scheduler.kv.table(gone.request_id + choice) for choice in range(3))
            engine.check_invariants()
            gated.gate.release(1000)
            with pytest.raises(Cancelled):
                await read_choices(gone)
            assert await read_choices(kept) == [expected(self.PROMPT, 30)] * 3

    async def test_all_or_none_are_queued(self) -> None:
        engine = make_engine(max_queued=3)
        gated = engine.runner = GatedRunner(engine.runner)
        async with running(engine) as served:
            stream = await served.submit(self.request(2))
            with pytest.raises(Unavailable):
                await served.submit(self.request(2))
            assert served.num_live == len(engine.scheduler.requests) == 2
            gated.gate.release(1000)
            assert len(await read_choices(stream)) == 2

    @lags
    @pytest.mark.parametrize("max_tokens", [1, 9])
    async def test_the_prompts_logprobs_are_known_with_the_first_delta(self, lag: int, max_tokens: int) -> None:
        """Only the first choice computes all of the prompt; of the others most is cached, so one could be earlier."""
        engine = make_engine(long_prefill_threshold=2, wrap=lambda runner: EditedRunner(runner, with_logprobs))
        whole = (None, *(logprob_of(token, position) for position, token in enumerate(self.PROMPT[1:], 1)))
        async with running(engine, lag) as served:
            await read(await served.submit(self.request(1)))
            request = replace(self.request(3, max_tokens), logprobs=LogprobsParams(prompt=0))
            stream = await served.submit(request)
            deltas = []
            async for delta in stream:
                assert stream.prompt_logprobs == whole
                deltas.append(delta)
        assert deltas[0].choice == 0
        assert deltas[0].prompt_logprobs == whole
        assert sum(len(delta.token_ids) for delta in deltas) == 3 * max_tokens

    @lags
    async def test_draining_waits_for_the_last_of_them(self, lag: int) -> None:
        async with running(make_engine(), lag) as served:
            reader = asyncio.create_task(read_choices(await served.submit(self.request(5))))
            await served.drain(60)
            assert await reader == [expected(self.PROMPT, 30)] * 5

    async def test_after_the_grace_the_stream_fails_once(self) -> None:
        engine = make_engine()
        gated = engine.runner = GatedRunner(engine.runner)
        async with running(engine) as served:
            stream = await served.submit(self.request(5))
            await until(lambda: gated.started == 1)
            await served.drain(0.0)
            assert served.num_live == 0
            assert num_free(engine) == 64
            with pytest.raises(Unavailable):
                await read_choices(stream)
            gated.gate.release(1000)

    @lags
    async def test_death_ends_the_stream_once(self, lag: int, caplog: pytest.LogCaptureFixture) -> None:
        engine = make_engine(wrap=lambda runner: FailingRunner(runner, 5))
        async with running(engine, lag) as served:
            streams = [await served.submit(self.request(n)) for n in (3, 2)]
            results = await asyncio.gather(*map(read_choices, streams), return_exceptions=True)
            assert [type(result) for result in results] == [EngineDead] * 2
            assert served.num_live == 0


class InlineExecutor(Executor):
    """Every result is in before anybody can wait for it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


async def test_the_loop_turns_between_steps_however_fast_they_are() -> None:
    engine = make_engine()
    served = AsyncEngine(engine, lag=1)
    served._worker = InlineExecutor()  # type: ignore[assignment]
    loop_turns = 0
    turns_at_step: list[int] = []
    finish = engine.finish

    def counted(plan: StepPlan, result: StepResult) -> list[Output]:
        turns_at_step.append(loop_turns)
        return finish(plan, result)

    engine.finish = counted  # type: ignore[method-assign]
    served.start()
    stream = await served.submit(make_request([1], 150))
    while served.num_live:
        loop_turns += 1
        await asyncio.sleep(0)
    assert len(turns_at_step) > 50
    assert all(before < after for before, after in pairwise(turns_at_step))
    await read(stream)
    await served.stop()


async def test_the_forward_runs_in_one_thread_that_is_not_the_loops() -> None:
    engine = make_engine()
    threads = set()
    execute = engine.runner.execute

    def watched(plan: StepPlan) -> StepResult:
        threads.add(threading.get_ident())
        return execute(plan)

    engine.runner.execute = watched  # type: ignore[method-assign]
    async with running(engine, lag=1) as served:
        await asyncio.gather(*[read(await served.submit(make_request([n]))) for n in range(5)])
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_when_idle_it_checks_its_books_once_and_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "IDLE_SECONDS", 0.0)
    engine = make_engine()
    calls = {"plan": 0, "check_invariants": 0}

    def spy(name: str, method: Callable[[], object]) -> object:
        calls[name] += 1
        return method()

    for name in calls:
        setattr(engine, name, partial(spy, name, getattr(engine, name)))
    async with running(engine) as served:
        await turns()
        assert calls["check_invariants"] == 1
        await read(await served.submit(make_request()))
        await turns()
        before = dict(calls)
        assert before["check_invariants"] == 2
        await turns(100)
        assert calls == before


class TestSubmit:
    async def test_what_is_refused_is_not_queued(self) -> None:
        engine = make_engine(num_blocks=8)
        async with running(engine) as served:
            with pytest.raises(InvalidArgument):
                await served.submit(make_request([5000]))
            with pytest.raises(ResourceExhausted, match="can never fit"):
                await served.submit(make_request([1] * 20, max_tokens=13))
            assert served.num_live == 0
            assert not engine.has_work
            assert served.healthy

    async def test_long_prompts_are_tokenised_outside_the_loops_thread(self) -> None:
        engine = make_engine(num_blocks=4000, max_model_len=15000, max_num_batched_tokens=8192)
        tokenizer = engine.tokenizer
        assert isinstance(tokenizer, ToyTokenizer)
        here = threading.current_thread().name
        chat = GenerationRequest((ChatMessage("user", "x" * 5000),), stop=make_request(max_tokens=1).stop)
        async with running(engine) as served:
            await read(await served.submit(make_request("short", 1)))
            await read(await served.submit(make_request("x" * 5000, 1)))
            await read(await served.submit(chat))
        assert tokenizer.threads[0] == here
        assert here not in tokenizer.threads[1:]
        assert len(tokenizer.threads) == 3

    @pytest.mark.parametrize(
        ("asked", "elsewhere"),
        [
            (make_request(), False),
            (replace(make_request(), sampling=SamplingParams(temperature=0.0, bad_words=("a",))), True),
            (make_request(strings=("x",) * 16), False),
            (make_request(strings=("x" * 256,) * 3), True),
            (replace(make_request(), prompt=[ChatMessage("user", "x")] * 3), False),
            (replace(make_request(), prompt=[ChatMessage("user", "x")] * 100), True),
        ],
        ids=["short", "bad words", "stop strings", "long stop strings", "messages", "many messages"],
    )
    async def test_what_takes_long_is_prepared_outside_the_loop(
        self, asked: GenerationRequest, elsewhere: bool
    ) -> None:
        engine = make_engine(num_blocks=4000, max_model_len=15000, max_num_batched_tokens=8192)
        threads: list[int] = []
        prepare = engine.prepare

        def noted(request: GenerationRequest) -> Prepared:
            threads.append(threading.get_ident())
            return prepare(request)

        engine.prepare = noted  # type: ignore[method-assign]
        async with running(engine) as served:
            await read(await served.submit(asked))
        assert [thread != threading.get_ident() for thread in threads] == [elsewhere]

    async def test_a_flood_of_what_takes_long_to_prepare_keeps_no_other_tenant_waiting(self) -> None:
        engine = make_engine()
        prepared: list[str] = []
        prepare, gate = engine.prepare, threading.Event()

        def noted(request: GenerationRequest) -> Prepared:
            prepared.append(request.scheduling.tenant)
            assert gate.wait(60)
            return prepare(request)

        engine.prepare = noted  # type: ignore[method-assign]
        asked = replace(make_request(), sampling=SamplingParams(temperature=0.0, bad_words=("a",)))
        async with running(engine) as served:
            served._threads = FairThreads(1)
            tasks = []
            for tenant in ["flood"] * 5 + ["calm"]:
                request = replace(asked, scheduling=SchedulingParams(tenant=tenant))
                tasks.append(asyncio.create_task(served.submit(request)))
                await asyncio.sleep(0)
            gate.set()
            for stream in await asyncio.gather(*tasks):
                await read(stream)
        assert prepared == ["flood", "flood", "calm", "flood", "flood", "flood"]

    async def test_nothing_is_prepared_for_a_full_queue(self) -> None:
        engine = make_engine(max_queued=1)
        prepare, prepared = engine.prepare, list[GenerationRequest]()

        def noted(request: GenerationRequest) -> Prepared:
            prepared.append(request)
            return prepare(request)

        engine.prepare = noted  # type: ignore[method-assign]
        asked = replace(make_request(), sampling=SamplingParams(temperature=0.0, bad_words=("a",)))
        async with running(engine) as served:
            waiting = await served.submit(asked)  # no step has run yet
            with pytest.raises(Unavailable, match="1 requests are waiting, and max_queued is 1"):
                await served.submit(asked)
            assert prepared == [asked]
            await read(waiting)
            await read(await served.submit(asked))

    @pytest.mark.parametrize("limit", ["server", "tenant"])
    async def test_what_is_prepared_counts_as_waiting(self, limit: str) -> None:
        engine, gate = slow_to_encode(max_queued=3 if limit == "server" else 64)
        if limit == "tenant":
            engine.scheduler.tenants.set_policies({"": TenantPolicy(max_queued=3)}, ONE_SHARE, 0.0)
        refusal: type[PacelineError] = Unavailable if limit == "server" else QuotaExceeded
        asked = make_request("x" * 5000)
        async with running(engine) as served:
            tasks = [asyncio.create_task(served.submit(one)) for one in (asked, replace(asked, n=2))]
            await turns()
            for late in (asked, replace(asked, n=2), make_request()):
                with pytest.raises(refusal, match=r"^3 requests .*are waiting, and .*max_queued is 3"):
                    await served.submit(late)
            with pytest.raises(InvalidArgument, match="n = 4: must be at most 3"):
                await served.submit(replace(asked, n=4))
            tasks[0].cancel()
            await asyncio.wait(tasks[:1])
            await read(await served.submit(make_request()))
            gate.set()
            await read_choices(await tasks[1])
            assert engine.scheduler.tenants.num_queued == 0

    async def test_whatever_becomes_of_it_its_places_are_given_back(self) -> None:
        engine, gate = slow_to_encode(max_queued=2)
        async with running(engine) as served:
            for prompt, error in (("x" * 190 + "\ud800" * 5000, InvalidArgument), ("x" * 16000, InvalidArgument)):
                tasks = [asyncio.create_task(served.submit(make_request(prompt))) for _ in range(2)]
                await turns()
                assert engine.scheduler.tenants.num_queued == 2
                gate.set()
                for task in tasks:
                    with pytest.raises(error):
                        await task
                assert engine.scheduler.tenants.num_queued == 0
                engine.check_invariants()
                gate.clear()

    async def test_who_is_being_prepared_gives_way(self) -> None:
        engine, gate = slow_to_encode(max_queued=4)
        async with running(engine) as served:
            flood = replace(make_request("x" * 5000), scheduling=SchedulingParams(tenant="flood"))
            tasks = [asyncio.create_task(served.submit(one)) for one in (flood, replace(flood, n=2), flood)]
            await turns()
            calm = replace(make_request(), n=2, scheduling=SchedulingParams(tenant="calm"))
            stream = await served.submit(calm)
            with pytest.raises(Unavailable, match="its tenant has more requests in it"):
                await tasks[2]
            with pytest.raises(Unavailable, match="its tenant has more requests in it"):
                await tasks[1]
            assert not gate.is_set(), "they have not waited for what they would lose"
            assert not tasks[0].done()
            await read_choices(stream)
            gate.set()
            await read(await tasks[0])
            engine.check_invariants()

    async def test_times_count_from_before_the_preparation(self) -> None:
        engine = make_engine()
        prepare, clock = engine.prepare, engine.clock
        assert isinstance(clock, VirtualClock)

        def slow(request: GenerationRequest) -> Prepared:
            clock.advance(3.0)
            return prepare(request)

        engine.prepare = slow  # type: ignore[method-assign]
        asked = replace(make_request(), sampling=SamplingParams(temperature=0.0, bad_words=("a",)))
        async with running(engine) as served:
            deltas = [delta async for delta in await served.submit(asked)]
            stats = deltas[-1].stats
            assert stats is not None
            assert (stats.queue_seconds, stats.time_to_first_token, stats.total_seconds) == (3.0, 3.0, 3.0)
            impatient = replace(asked, scheduling=SchedulingParams(queue_timeout=2.0))
            with pytest.raises(QueueTimeout, match=r"within scheduling.queue_timeout, 2 s"):
                await served.submit(impatient)
            assert not engine.has_work

    async def test_before_the_start(self) -> None:
        served = AsyncEngine(make_engine())
        assert not served.healthy
        with pytest.raises(Unavailable):
            await served.submit(make_request())
        await served.stop()

    async def test_cancelled_while_tokenising_it_leaves_nothing_behind(self) -> None:
        engine, gate = slow_to_encode()
        async with running(engine) as served:
            task = asyncio.create_task(served.submit(make_request("x" * 5000)))
            await turns()
            task.cancel()
            await asyncio.wait([task])
            gate.set()
            await turns()
            assert task.cancelled()
            assert not engine.has_work

    @pytest.mark.parametrize("draining", [False, True])
    async def test_no_grammar_is_waited_for_at_the_end(self, draining: bool) -> None:
        class Slow(ToyCompiler):
            def compile(self, spec: GrammarSpec) -> Grammar:
                self.specs.append(spec)
                assert self.closed.wait(60)
                raise Unavailable("closed")

        engine = make_engine()
        engine.grammars = compiler = Slow()
        async with running(engine) as served:
            asked = replace(make_request(), grammar=GrammarSpec(GrammarKind.REGEX, "a+"))
            task = asyncio.create_task(served.submit(asked))
            await until(lambda: bool(compiler.specs))
            await (served.drain(60) if draining else served.stop())
            with pytest.raises(Unavailable, match="shutting down"):
                await task
            assert compiler.closed.is_set(), "nor is a thread left that waits"
            assert not engine.has_work

    async def test_draining_while_tokenising_refuses_it(self) -> None:
        engine, gate = slow_to_encode()
        async with running(engine) as served:
            task = asyncio.create_task(served.submit(make_request("x" * 5000)))
            await turns()
            await served.drain(60)
            with pytest.raises(Unavailable):
                await task
            assert not gate.is_set(), "it has not waited for what nobody wants any more"
            gate.set()
            assert not engine.has_work

    async def test_who_is_being_prepared_hears_of_the_death(self) -> None:
        engine, gate = slow_to_encode(wrap=lambda runner: FailingRunner(runner, 0))
        async with running(engine) as served:
            task = asyncio.create_task(served.submit(make_request("x" * 5000)))
            await turns()
            for doomed in (read(await served.submit(make_request())), task):
                with pytest.raises(EngineDead):
                    await doomed
            gate.set()


def slow_to_encode(**settings: Any) -> tuple[Engine, threading.Event]:
    """An engine that prepares what takes long once the event is set."""
    engine = make_engine(num_blocks=4000, max_model_len=15000, **settings)
    gate = threading.Event()
    prepare = engine.prepare

    def slow(request: GenerationRequest) -> Prepared:
        assert not async_engine._takes_long(request) or gate.wait(60)
        return prepare(request)

    engine.prepare = slow  # type: ignore[method-assign]
    return engine, gate


class TestDeath:
    @lags
    @pytest.mark.parametrize("at_step", [0, 3])
    async def test_every_stream_ends_with_the_error_once(
        self, lag: int, at_step: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make_engine(wrap=lambda runner: FailingRunner(runner, at_step))
        told: list[EngineDead] = []

        def bad_callback(error: EngineDead) -> None:
            raise ValueError("a careless callback")

        async with running(engine, lag) as served:
            served.on_death += [bad_callback, told.append]
            assert served.healthy
            streams = [await served.submit(make_request([n], 100)) for n in range(5)]
            results = await asyncio.gather(*map(read, streams), return_exceptions=True)
            assert [type(result) for result in results] == [EngineDead] * 5
            assert len({id(result) for result in results}) == 5
            assert "secret" not in str(results[0])
            assert isinstance(results[0], EngineDead)
            assert isinstance(results[0].__cause__, RuntimeError)
            for stream in streams:
                assert [delta async for delta in stream] == []
            assert not served.healthy
            assert len(told) == 1
            assert served.num_live == 0
            with pytest.raises(EngineDead):
                await served.submit(make_request())
            await served.drain(60)
        assert [r.levelno for r in caplog.records if r.name.startswith("paceline")] == [logging.CRITICAL, logging.ERROR]

    async def test_a_step_behind_the_fatal_one_is_not_reported_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(logging.getLogger("paceline.engine.async_engine"), "disabled", True)  # records keep errors
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        async with running(make_engine(wrap=lambda runner: FailingRunner(runner, 2)), lag=1) as served:
            stream = await served.submit(make_request([1], 100))
            with pytest.raises(EngineDead):
                await read(stream)
        del served, stream
        gc.collect()
        await turns()
        assert errors == []

    async def test_tokens_that_came_before_are_delivered(self) -> None:
        engine = make_engine(wrap=lambda runner: FailingRunner(runner, 4))
        token_ids: list[int] = []
        async with running(engine) as served:
            stream = await served.submit(make_request([1], 100))
            await until(lambda: not served.healthy)
            with pytest.raises(EngineDead):  # noqa: PT012
                async for delta in stream:
                    token_ids += delta.token_ids
        assert token_ids
        assert tuple(token_ids) == expected([1], len(token_ids))[0]

    async def test_books_that_do_not_balance_are_fatal(self) -> None:
        engine = make_engine()
        async with running(engine) as served:
            engine.scheduler.kv.pool.allocate(1)  # nobody's
            await read(await served.submit(make_request()))
            await until(lambda: not served.healthy)

    async def test_cancelling_the_step_loop_ends_the_streams(self) -> None:
        engine = make_engine()
        gated = engine.runner = GatedRunner(engine.runner)
        async with running(engine) as served:
            stream = await served.submit(make_request())
            await until(lambda: gated.started == 1)
            assert served._task is not None
            served._task.cancel()
            with pytest.raises(EngineDead):
                await read(stream)
            assert not served.healthy
            gated.gate.release(1000)


class TestTheEnd:
    @lags
    async def test_draining_lets_the_live_ones_finish(self, lag: int) -> None:
        engine = make_engine()
        async with running(engine, lag) as served:
            streams = [await served.submit(make_request([n], 50)) for n in range(12)]
            readers = asyncio.gather(*map(read, streams))
            draining = asyncio.create_task(served.drain(60))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable):
                await served.submit(make_request())
            assert served.healthy
            await draining
            assert served.num_live == 0
            assert await readers == [expected([n], 50) for n in range(12)]

    @lags
    async def test_what_is_live_after_the_grace_fails(self, lag: int) -> None:
        engine = make_engine()
        gated = engine.runner = GatedRunner(engine.runner)
        async with running(engine, lag) as served:
            streams = [await served.submit(make_request([n], 50)) for n in range(12)]
            await until(lambda: gated.started == 1)
            await served.drain(0.0)
            for stream in streams:
                with pytest.raises(Unavailable):
                    await read(stream)
            assert num_free(engine) == 64
            gated.gate.release(1000)

    async def test_draining_ends_when_the_last_reader_leaves(self) -> None:
        engine = make_engine()
        gated = engine.runner = GatedRunner(engine.runner)
        async with running(engine) as served:
            stream = await served.submit(make_request())
            draining = asyncio.create_task(served.drain(3600))
            await turns()
            assert not draining.done()
            await stream.aclose()
            await draining
            gated.gate.release(1000)

    async def test_draining_an_idle_engine_returns(self) -> None:
        async with running(make_engine()) as served:
            await served.drain(60)

    @lags
    async def test_stopping_ends_live_requests_and_the_loop(self, lag: int) -> None:
        engine = make_engine()
        gated = engine.runner = GatedRunner(engine.runner)
        async with running(engine, lag) as served:
            stream = await served.submit(make_request())
            await until(lambda: gated.started == 1)
            stopping = asyncio.create_task(served.stop())
            with pytest.raises(Unavailable):
                await read(stream)
            assert not stopping.done()  # the forward still runs
            gated.gate.release(1000)
            await stopping
            assert not served.healthy
            with pytest.raises(Unavailable):
                await served.submit(make_request())
            await served.stop()
        engine.check_invariants()

    async def test_stopping_ends_the_worker_thread(self) -> None:
        async with running(make_engine()) as served:
            await read(await served.submit(make_request()))
            [worker] = served._worker._threads
        await until(lambda: not worker.is_alive())
