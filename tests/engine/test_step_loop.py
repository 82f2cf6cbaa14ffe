"""Steps without an event loop, and with one where the runner launches them: the next one while one runs."""

from __future__ import annotations

import pytest

from engine.test_waiting import FEW, metered, of
from engine.toy import FailingRunner, expected, make_engine, make_request, num_free
from paceline.core.plan import StepPlan, StepResult
from paceline.engine import AsyncEngine, Engine, Output, StepLoop
from paceline.errors import EngineDead, QueueTimeout
from paceline.llm import LLM
from paceline.sim import VirtualClock
from support.launching import LaunchingRunner

PROMPTS = ((1, 2, 3), (4, 5), (6, 7, 8, 9, 10))
launches = pytest.mark.parametrize("launches", [False, True])


def make(launches: bool, **settings: int) -> Engine:
    return make_engine(wrap=LaunchingRunner, **settings) if launches else make_engine(**settings)


def run(engine: Engine) -> dict[int, tuple[int, ...]]:
    """All tokens by request; the books are checked after every step."""
    tokens: dict[int, list[int]] = {}
    steps = StepLoop(engine)
    while (finished := steps.step()) is not None:
        assert len(finished.result.sequences) == len(finished.plan.work)
        for output in finished.outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check_invariants()
    return {request_id: tuple(ids) for request_id, ids in tokens.items()}


@launches
def test_every_request_gets_its_tokens(launches: bool) -> None:
    engine = make(launches)
    ids = [engine.add(make_request(prompt)) for prompt in PROMPTS]
    assert run(engine) == {i: expected(prompt, 20)[0] for i, prompt in zip(ids, PROMPTS, strict=True)}
    assert not engine.has_work


def test_a_runner_that_launches_has_the_next_step_while_one_runs() -> None:
    engine = make_engine(wrap=LaunchingRunner)
    engine.add(make_request())
    run(engine)
    runner = engine.runner
    assert isinstance(runner, LaunchingRunner)
    assert runner.most == 2
    assert not runner.running


@launches
def test_requests_come_and_go_between_steps(launches: bool) -> None:
    engine = make(launches)
    gone, kept = engine.add(make_request(PROMPTS[0])), engine.add(make_request(PROMPTS[1]))
    steps = StepLoop(engine)
    first = steps.step()
    assert first is not None
    before = {output.request_id: output.token_ids for output in first.outputs}
    engine.abort(gone)
    late = engine.add(make_request(PROMPTS[2]))
    tokens = {request_id: list(before.get(request_id, ())) for request_id in (kept, late)}
    while (finished := steps.step()) is not None:
        for output in finished.outputs:
            tokens[output.request_id].extend(output.token_ids)
        engine.check_invariants()
    assert tuple(tokens[kept]) == expected(PROMPTS[1], 20)[0]
    assert tuple(tokens[late]) == expected(PROMPTS[2], 20)[0]


@launches
def test_what_is_under_way_can_be_drained(launches: bool) -> None:
    engine = make(launches)
    request_id = engine.add(make_request(max_tokens=100))
    steps = StepLoop(engine)
    steps.step()
    engine.abort(request_id)
    assert [finished.outputs for finished in steps.drain()] == [[]] * launches
    assert steps.drain() == []
    assert steps.step() is None
    assert num_free(engine) == 64
    engine.check_invariants()


@launches
def test_a_step_that_fails_is_the_end(launches: bool) -> None:
    """Also of what was launched before: nobody asks for that any more."""
    engine = make_engine(wrap=lambda runner: FailingRunner(runner, 3))
    if launches:
        engine.runner = LaunchingRunner(engine.runner)
    engine.add(make_request(max_tokens=100))
    steps = StepLoop(engine)
    assert all(steps.step() is not None for _ in range(3))
    with pytest.raises(RuntimeError, match="secret of the house"):
        steps.step()
    assert steps.drain() == []
    with pytest.raises(EngineDead):
        engine.add(make_request())


def test_a_step_that_fails_while_it_is_drained_is_the_end_too() -> None:
    engine = make_engine(wrap=lambda runner: LaunchingRunner(FailingRunner(runner, 2)))
    request_id = engine.add(make_request(max_tokens=100))
    steps = StepLoop(engine)
    for _ in range(2):
        steps.step()
    engine.abort(request_id)
    with pytest.raises(RuntimeError, match="secret of the house"):
        steps.drain()
    with pytest.raises(EngineDead):
        engine.add(make_request())


@launches
def test_it_waits_for_tenants_tokens_and_tells_of_who_is_refused(launches: bool) -> None:
    engine = metered(1e-3)
    if launches:
        engine.runner = LaunchingRunner(engine.runner)
    clock = engine.clock
    assert isinstance(clock, VirtualClock)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        clock.advance(seconds)

    engine.wait = wait
    engine.scheduler.tenants.get("a", clock()).spend(10, clock())
    refused = engine.add(of("a", queue_timeout=1.0))
    steps = StepLoop(engine)
    while not engine.scheduler.refused:
        assert steps.step() is None
        assert len(waits) < FEW
    waited = len(waits)
    assert steps.step() is None
    assert len(waits) == waited, "somebody is to be told first"
    [(request_id, error)] = engine.take_refused()
    assert request_id == refused
    assert isinstance(error, QueueTimeout)


def test_a_model_that_is_called_launches_too() -> None:
    engine = make_engine(wrap=LaunchingRunner)
    completions = LLM.from_engine(engine).generate(list(PROMPTS), temperature=0.0, max_tokens=20)
    assert [one.token_ids for one in completions] == [expected(prompt, 20)[0] for prompt in PROMPTS]
    assert isinstance(engine.runner, LaunchingRunner)
    assert engine.runner.most == 2


def test_whoever_breaks_off_leaves_nothing_under_way() -> None:
    engine = make_engine(wrap=LaunchingRunner)
    llm = LLM.from_engine(engine)

    def stop(index: int, text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", max_tokens=100, on_text=stop)
    assert isinstance(engine.runner, LaunchingRunner)
    assert not engine.runner.running
    assert num_free(engine) == 64
    [completion] = llm.generate([PROMPTS[0]], temperature=0.0, max_tokens=20)
    assert completion.token_ids == expected(PROMPTS[0], 20)[0]


async def test_the_event_loop_launches_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests come and go meanwhile."""
    engine = make_engine(wrap=LaunchingRunner)
    under_way: list[int] = []  # steps, whenever one more is planned or finished
    plan, finish = engine.plan, engine.finish

    def counted_plan() -> StepPlan | None:
        planned = plan()
        under_way.append((under_way or [0])[-1] + (planned is not None))
        return planned

    def counted_finish(done: StepPlan, result: StepResult) -> list[Output]:
        under_way.append(under_way[-1] - 1)
        return finish(done, result)

    monkeypatch.setattr(engine, "plan", counted_plan)
    monkeypatch.setattr(engine, "finish", counted_finish)
    serving = AsyncEngine(engine)
    serving.start()
    try:
        assert serving.lag == 1
        streams = [await serving.submit(make_request(prompt)) for prompt in PROMPTS]
        gone = await serving.submit(make_request((9, 9), max_tokens=100))
        assert serving.abort(gone.request_id)
        for stream, prompt in zip(streams, PROMPTS, strict=True):
            tokens = [token for delta in [delta async for delta in stream] for token in delta.token_ids]
            assert tuple(tokens) == expected(prompt, 20)[0]
    finally:
        await serving.stop()
    assert max(under_way) == 2
    assert under_way[-1] == 0
    engine.check_invariants()


async def test_a_launch_that_fails_is_the_end_of_all_streams() -> None:
    def wrap(runner: object) -> LaunchingRunner:
        return LaunchingRunner(FailingRunner(runner, 2))  # type: ignore[arg-type]

    serving = AsyncEngine(make_engine(wrap=wrap))
    serving.start()
    try:
        streams = [await serving.submit(make_request(prompt)) for prompt in PROMPTS]
        for stream in streams:
            with pytest.raises(EngineDead):
                async for _ in stream:
                    pass
    finally:
        await serving.stop()
