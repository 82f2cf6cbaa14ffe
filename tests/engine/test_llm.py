"""The library form, around an engine that exists."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from engine.toy import FailingRunner, decode, expected, make_engine, num_free
from paceline import client
from paceline.core.params import SamplingParams
from paceline.core.plan import FinishReason, StepPlan, StepResult, StepRunner
from paceline.core.tenant_policy import TenantPolicy
from paceline.engine import ChatMessage
from paceline.errors import EngineDead, FailedPrecondition, InvalidArgument
from paceline.llm import LLM, build_request


def test_completions_come_in_the_order_of_prompts() -> None:
    engine = make_engine(max_queued=3)  # fewer than there are prompts
    prompts = [[n] * (1 + n % 5) for n in range(20)]
    completions = LLM.from_engine(engine).generate(prompts, max_tokens=15, temperature=0.0)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert (completion.token_ids, completion.text) == expected(prompt, 15)
        assert completion.finish_reason is FinishReason.MAX_TOKENS
        assert (completion.stats.prompt_tokens, completion.stats.completion_tokens) == (len(prompt), 15)
    assert num_free(engine) == 64


@pytest.mark.parametrize(
    ("prompts", "token_ids"),
    [
        ("hi", [list(b"hi")]),
        ([4, 5], [[4, 5]]),
        ((4, 5), [[4, 5]]),
        ([ChatMessage("user", "hi")], [list(b"<user>hi<assistant>")]),
        (["a", [7, 8], [ChatMessage("user", "x")]], [list(b"a"), [7, 8], list(b"<user>x<assistant>")]),
        ([], []),
    ],
)
def test_one_prompt_or_many(prompts: list[str], token_ids: list[list[int]]) -> None:
    completions = LLM.from_engine(make_engine()).generate(prompts, max_tokens=4)
    assert [completion.token_ids for completion in completions] == [expected(prompt, 4)[0] for prompt in token_ids]


@pytest.mark.parametrize("max_queued", [2, 100])
def test_the_completions_of_a_prompt_stand_together(max_queued: int) -> None:
    engine = make_engine(max_queued=max_queued)
    prompts = [[n] * (1 + n % 11) for n in range(9)]
    ended: list[int] = []
    completions = LLM.from_engine(engine).generate(prompts, n=2, max_tokens=15, temperature=0.0, on_finish=ended.append)
    assert [completion.choice for completion in completions] == [0, 1] * 9
    for index, completion in enumerate(completions):
        assert (completion.token_ids, completion.text) == expected(prompts[index // 2], 15)
        assert completion.stats.prompt_tokens == len(prompts[index // 2])
    assert sorted(ended) == list(range(18))
    assert any(completion.stats.cached_prompt_tokens for completion in completions)
    assert num_free(engine) == 64


def test_text_streams_by_completion() -> None:
    shown = [""] * 6

    def on_text(index: int, text: str) -> None:
        shown[index] += text

    completions = LLM.from_engine(make_engine()).generate([[1], [2]], n=3, max_tokens=20, on_text=on_text)
    assert shown == [completion.text for completion in completions]


def test_more_completions_than_the_queue_holds_run_none() -> None:
    engine = make_engine(max_queued=2)
    with pytest.raises(InvalidArgument, match="n = 3: must be at most 2"):
        LLM.from_engine(engine).generate([[1], [2]], n=3)
    assert engine.totals.steps == 0
    assert not engine.has_work


def test_text_streams_by_prompt() -> None:
    shown = ["", ""]

    def on_text(index: int, text: str) -> None:
        shown[index] += text

    completions = LLM.from_engine(make_engine()).generate([[1], [2]], max_tokens=20, on_text=on_text)
    assert shown == [completion.text for completion in completions]


def test_a_stop_string_given_as_such() -> None:
    token_ids, text = expected([9], 40)
    string = text[10:12]
    [completion] = LLM.from_engine(make_engine()).generate([9], max_tokens=40, stop=string)
    assert completion.text == text[: text.find(string)]
    assert completion.finish.stop_string == string
    assert decode(token_ids[: len(completion.token_ids)]).startswith(completion.text + string)


def test_one_bad_prompt_runs_none() -> None:
    engine = make_engine()
    with pytest.raises(InvalidArgument, match=r"prompt_tokens\.ids"):
        LLM.from_engine(engine).generate([[1], [5000]])
    with pytest.raises(FailedPrecondition):
        LLM.from_engine(make_engine(method=engine.scheduler.config.method.NGRAM)).generate(
            [1], speculation="draft_model"
        )
    assert engine.totals.steps == 0
    assert not engine.has_work


def test_ids_of_numpy_are_one_prompt_as_others_are() -> None:
    llm = LLM.from_engine(make_engine())
    ids = [np.int64(5), np.int64(6)]
    [one] = llm.generate(ids, max_tokens=9)  # type: ignore[arg-type]
    [same] = llm.generate([5, 6], max_tokens=9)
    assert one.token_ids == same.token_ids


@pytest.mark.parametrize(
    "prompts", [np.array([4, 5]), [np.array([4, 5])], np.array([[4, 5]]), np.array([[4, 5]], dtype=np.uint16)]
)
def test_arrays_of_numpy_are_prompts_as_lists_are(prompts: Any) -> None:
    [completion] = LLM.from_engine(make_engine()).generate(prompts, max_tokens=4)
    assert completion.token_ids == expected([4, 5], 4)[0]


def test_numbers_of_numpy_are_as_others_are() -> None:
    """Others fail where they meet what is compiled, or in the middle of a step, and the engine with it."""
    whole = ["max_tokens", "min_tokens", "n", "seed", "top_k", "logprobs", "prompt_logprobs", "max_draft_tokens"]
    options: dict[str, Any] = dict.fromkeys(whole, 3) | {"temperature": 0.5, "ignore_eos": True}
    options |= {"stop_token_ids": [3], "allowed_token_ids": [3, 4], "logit_bias": {3: 0.5}}
    given = {name: _of_numpy(value) for name, value in options.items()}
    requests = [build_request("hi", SamplingParams(), made) for made in (given, options)]  # type: ignore[arg-type]
    assert repr(requests[0]) == repr(requests[1])
    [completion] = LLM.from_engine(make_engine()).generate([9], max_tokens=np.int64(3))  # type: ignore[arg-type]
    assert len(completion.token_ids) == 3


def _of_numpy(value: Any) -> Any:
    match value:
        case bool():
            return value
        case int():
            return np.int64(value)
        case float():
            return np.float32(value)
        case dict():
            return {_of_numpy(key): _of_numpy(held) for key, held in value.items()}
    return np.array(value)


@pytest.mark.parametrize(
    "message", [ChatMessage("user", "hi"), client.ChatMessage("user", "hi"), {"role": "user", "content": "hi"}]
)
def test_a_message_is_one_as_the_client_takes_it(message: ChatMessage) -> None:
    request = build_request([message], SamplingParams(), {})
    assert request.prompt == [ChatMessage("user", "hi")]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user"}, r"chat.messages\[0\] = .*: must be a ChatMessage, or a mapping"),
        ({"role": "user", "content": "x", "name": "y"}, r"chat.messages\[0\] = .*: must be a ChatMessage"),
        ({}, r"chat.messages\[0\] = .*: must be a ChatMessage, or a mapping"),
        ({"role": "user", "content": 1}, r"chat.messages\[0\].content = 1: must be text"),
    ],
)
def test_a_message_without_what_makes_it_one_is_refused(message: dict[str, object], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        LLM.from_engine(make_engine()).generate([message])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"speculation": "none"}, "speculation"),
        ({"speculation": 3}, "speculation"),
        ({"temperature": True}, "temperature"),
        ({"verification": 3}, "verification"),
        ({"verification": math.nan}, "verification"),
        ({"stop": math.nan}, "stop"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"seed": 1.5}, "seed"),
        ({"n": 2.0}, "n"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"min_tokens": 0.5}, "min_tokens"),
        ({"max_draft_tokens": 1.5}, "max_draft_tokens"),
        ({"logprobs": 2.5}, "logprobs"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"regex": 5}, "regex"),
        ({"stop": 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids"),
        ({"stop_token_ids": [False]}, "stop_token_ids"),
        ({"logit_bias": {True: 1.0}}, "logit_bias"),
        ({"logit_bias": {3: 10**400}}, "logit_bias"),
        ({"temperature": 10**400}, "temperature"),
        ({"bad_words": "abc"}, "bad_words"),
        ({"choices": [1, 2]}, "choices"),
        ({"logit_bias": [(1, 2.0)]}, "logit_bias"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"logit_bias": {5: "x"}}, "logit_bias"),
        ({"json_schema": {"enum": {1}}}, "json_schema"),
        ({"json_schema": {"const": math.nan}}, "json_schema"),
    ],
)
def test_a_value_of_another_type_is_named_and_runs_nothing(options: Any, field: str) -> None:
    engine = make_engine()
    with pytest.raises(InvalidArgument) as caught:
        LLM.from_engine(engine).generate([1], **options)
    assert caught.value.field == field
    assert engine.totals.steps == 0
    assert LLM.from_engine(engine).generate([1], max_tokens=5)[0].token_ids == expected([1], 5)[0]


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize("prompt", [[1, 2.5], [1, MESSAGE], [1.5], [b"ab"], [None], None, 5, {}, {1, 2}])
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        LLM.from_engine(make_engine()).generate(prompt)
    assert caught.value.field == "prompt"


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match=r"unknown option top_q \(did you mean top_p\?\)"):
        LLM.from_engine(make_engine()).generate([1], top_q=0.5)  # type: ignore[call-arg]


def test_a_callback_that_raises_ends_everything_and_the_engine_lives_on() -> None:
    engine = make_engine()
    llm = LLM.from_engine(engine)

    def on_text(index: int, text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2], [3]], max_tokens=20, on_text=on_text)
    assert num_free(engine) == 64
    assert llm.generate([1], max_tokens=5)[0].token_ids == expected([1], 5)[0]


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where it is ignored, as in what a shell runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class InterruptedRunner:
    """Ctrl-C comes so many times within the third step."""

    def __init__(self, runner: StepRunner, times: int) -> None:
        self.runner = runner
        self.times = times
        self.steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        if self.steps == 3:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
        return self.runner.execute(plan)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_within_a_step_comes_behind_it_and_the_engine_lives_on() -> None:
    engine = make_engine(wrap=lambda runner: InterruptedRunner(runner, times=1))
    llm, before = LLM.from_engine(engine), signal.getsignal(signal.SIGINT)
    shown: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2], [3]], max_tokens=20, on_text=lambda index, text: shown.append(text))
    assert shown
    assert engine.totals.steps == 3
    assert num_free(engine) == 64
    assert signal.getsignal(signal.SIGINT) is before
    assert llm.generate([1], max_tokens=5)[0].token_ids == expected([1], 5)[0]


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_a_second_ctrl_c_does_not_wait() -> None:
    engine = make_engine(wrap=lambda runner: InterruptedRunner(runner, times=2))
    llm, before = LLM.from_engine(engine), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2], [3]], max_tokens=20)
    assert engine.has_failed
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_within_a_step_that_fails_comes_all_the_same() -> None:
    engine = make_engine(wrap=lambda runner: InterruptedRunner(FailingRunner(runner, at_step=2), times=1))
    with pytest.raises(KeyboardInterrupt) as caught:
        LLM.from_engine(engine).generate([1], max_tokens=20)
    assert isinstance(caught.value.__context__, RuntimeError)
    assert engine.has_failed


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_while_tokens_are_waited_for_does_not_wait_with_them() -> None:
    engine = make_engine()
    limited = TenantPolicy(tokens_per_second=1e-3, burst_tokens=1.0)
    engine.scheduler.tenants.set_policies({}, limited, 0.0)
    engine.scheduler.tenants.get("", 0.0).spend(10, 0.0)

    def wait(seconds: float) -> None:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")

    engine.wait = wait
    with pytest.raises(KeyboardInterrupt):
        LLM.from_engine(engine).generate([1, 2, 3], max_tokens=20)
    assert not engine.has_failed
    assert num_free(engine) == 64


def test_in_another_thread_signals_are_left_alone() -> None:
    llm = LLM.from_engine(make_engine())
    with ThreadPoolExecutor(1) as pool:
        [completion] = pool.submit(llm.generate, [1], max_tokens=5).result()
    assert completion.token_ids == expected([1], 5)[0]


def test_a_call_within_a_call_is_refused_and_the_first_goes_on() -> None:
    llm = LLM.from_engine(make_engine())
    refused: list[str] = []

    def on_text(index: int, text: str) -> None:
        with pytest.raises(RuntimeError, match="generating already") as error:
            llm.generate([2], max_tokens=5)
        refused.append(str(error.value))

    [completion] = llm.generate([1], max_tokens=20, on_text=on_text)
    assert refused
    assert completion.token_ids == expected([1], 20)[0]
    assert llm.generate([2], max_tokens=5)[0].token_ids == expected([2], 5)[0]


def test_a_step_that_fails_is_raised_and_the_engine_is_dead() -> None:
    llm = LLM.from_engine(make_engine(wrap=lambda runner: FailingRunner(runner, at_step=2)))
    with pytest.raises(RuntimeError):
        llm.generate([[1], [2]], max_tokens=50)
    with pytest.raises(EngineDead):
        llm.generate([1], max_tokens=5)


def test_what_an_engine_died_of_is_not_hidden_by_what_its_books_are_like(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(wrap=lambda runner: FailingRunner(runner, at_step=2))

    def abort(request_id: int) -> bool:
        raise AssertionError("the books do not balance")

    monkeypatch.setattr(engine, "abort", abort)
    with pytest.raises(RuntimeError):
        LLM.from_engine(engine).generate([[1], [2]], max_tokens=50)


def test_what_speculation_does_is_told() -> None:
    llm = LLM("demo", "demo", depth="2")
    llm.generate(["def add(a, b):", "class A:"], max_tokens=12, temperature=0.0)
    report = llm.speculation_report()
    assert report.totals.emitted == 22
    assert report.totals.depths[2] > 0
    assert set(report.tenants) == {""}
    assert not report.requests
