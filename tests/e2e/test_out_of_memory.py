"""A step that does not fit is computed in halves; a request that does not fit alone fails, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.grammar import GrammarKind, GrammarSpec
from paceline.core.method import Method
from paceline.core.params import LogprobsParams, SamplingParams, StopParams
from paceline.engine import AsyncEngine, Engine, GenerationRequest, Stream
from paceline.errors import ResourceExhausted
from paceline.llm import LLM
from paceline.models import Model
from paceline.runner import ModelRunner
from paceline.speculation import DraftModel
from paceline.wiring import EngineSettings, build_engine
from support.pairs import tiny_pair

TOKENS = 12
LONG = tuple(range(1, 41))
PROMPTS = [(3, 1, 4, 1, 5), (9,), LONG[:7], (2, 6, 5, 3)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = tiny_pair(tmp_path_factory.mktemp("pair"))
    return str(target), str(draft)


class Small:
    """A model on a device where a call of more than `most` rows runs out of memory."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.most = 10**9
        self.failures = 0
        for name in names:
            monkeypatch.setattr(model, name, self._limited(getattr(model, name)))

    def _limited(self, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def limited(rows: Tensor, *others: Any) -> Tensor:
            if len(rows) > self.most:
                self.failures += 1
                raise torch.OutOfMemoryError(f"CUDA out of memory: {len(rows)} rows")
            return call(rows, *others)

        return limited


@cache
def make(models: tuple[str, str], prefix_cache: str = "off", **settings: Any) -> tuple[Engine, ModelRunner]:
    engine = build_engine(
        EngineSettings(
            *models,
            **{"dtype": "float32", "backend": "torch", "depth": "3", "max_model_len": 128},
            prefix_cache=prefix_cache,
            **settings,
        )
    )
    assert isinstance(engine.runner, ModelRunner)
    return engine, engine.runner


def request(prompt: tuple[int, ...], **fields: Any) -> GenerationRequest:
    stop = StopParams(max_tokens=TOKENS, ignore_eos=True)
    return GenerationRequest(prompt, **{"sampling": SamplingParams(temperature=0.0), "stop": stop, **fields})


def run(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[int, list[int] | ResourceExhausted]:
    """What each came to, by its place."""
    ids = [engine.add(one) for one in requests]
    found: dict[int, list[int] | ResourceExhausted] = {place: [] for place in range(len(ids))}
    while engine.has_work:
        for output in engine.step():
            tokens = found[ids.index(output.request_id)]
            assert isinstance(tokens, list)
            tokens.extend(output.token_ids)
        for request_id, error in engine.take_refused():
            assert isinstance(error, ResourceExhausted)
            found[ids.index(request_id)] = error
        engine.check_invariants()
    return found


@pytest.mark.parametrize("part", ["forward", "logits"])
@pytest.mark.parametrize("draft", ["demo", "ngram", "none"])
def test_what_fits_in_halves_is_computed_in_halves(
    pair: tuple[str, str], part: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = (pair[0], pair[1] if draft == "demo" else draft)
    requests = [request(prompt) for prompt in PROMPTS]
    engine, runner = make(models)
    expected = run(engine, requests)
    small = Small(runner.model, monkeypatch, part)
    small.most = 8 if part == "forward" else 3 if draft == "none" else 4
    assert run(engine, requests) == expected
    assert small.failures > 0


def test_who_does_not_fit_alone_fails_alone(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make(pair)
    prompts = [*PROMPTS[:2], LONG, *PROMPTS[2:]]
    expected = run(engine, [request(prompt) for prompt in PROMPTS])
    small = Small(runner.model, monkeypatch, "forward")
    small.most = 20
    found = run(engine, [request(prompt) for prompt in prompts])
    error = found.pop(2)
    assert isinstance(error, ResourceExhausted)
    assert "out of memory" in str(error)
    assert list(found.values()) == list(expected.values())
    small.most = 100
    assert not isinstance(run(engine, [request(LONG)])[0], ResourceExhausted)
    assert not runner._failed


def test_a_chunk_that_fails_leaves_nothing_in_the_prefix_cache(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(make(pair)[0], [request(LONG)])
    engine, runner = make(pair, prefix_cache="shared", long_prefill_threshold=32)
    small = Small(runner.model, monkeypatch, "forward")
    small.most = 16
    assert isinstance(run(engine, [request(LONG)])[0], ResourceExhausted)
    small.most = 100
    assert run(engine, [request(LONG)]) == expected


def test_features_come_through_halves(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds, penalties, grammars and logprobs: nothing is booked twice."""
    engine, runner = make(pair)
    requests = [
        request((5, 6), sampling=SamplingParams(seed=3, temperature=0.9, frequency_penalty=0.5)),
        request((7,), grammar=GrammarSpec(GrammarKind.REGEX, "[a-z ]{30}")),
        request((8, 9), logprobs=LogprobsParams(completion=2, prompt=1)),
        request(LONG, sampling=SamplingParams(seed=4, top_p=0.8)),
    ]
    expected = [c.token_ids for c in LLM.from_engine(engine).complete(requests)]
    small = Small(runner.model, monkeypatch, "logits")
    small.most = 5
    found = LLM.from_engine(engine).complete(requests)
    assert small.failures > 0
    assert [c.token_ids for c in found] == expected
    assert len(found[2].logprobs) == len(found[2].token_ids)


def test_logprobs_may_run_out_too(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the verdicts, before the first is booked."""
    from paceline.runner import model_runner

    engine, _ = make(pair)
    requests = [request(prompt, logprobs=LogprobsParams(completion=1)) for prompt in PROMPTS]
    expected = run(engine, requests)
    original, calls = model_runner.completion_logprobs, iter(range(10**6))

    def now_and_then(*arguments: Any) -> Any:
        if next(calls) % 5 == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*arguments)

    monkeypatch.setattr(model_runner, "completion_logprobs", now_and_then)
    assert run(engine, requests) == expected


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("most", [1, 3, 12])
def test_while_drafting_drafts_are_left_out(
    pair: tuple[str, str], lag: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the next step is planned meanwhile, which believes that they were made."""
    engine, runner = make(pair)
    drafter = runner.drafters[Method.DRAFT_MODEL]
    assert isinstance(drafter, DraftModel)
    expected = list(run(engine, [request(prompt) for prompt in PROMPTS]).values())
    small = Small(drafter.model, monkeypatch, "forward")
    small.most = most
    found = asyncio.run(together(engine, [request(prompt) for prompt in PROMPTS], lag))
    assert small.failures > 0
    assert found == expected


@pytest.mark.parametrize("lag", [0, 1])
def test_a_failure_reaches_its_stream_alone(pair: tuple[str, str], lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make(pair)
    expected = list(run(engine, [request(prompt) for prompt in PROMPTS]).values())
    small = Small(runner.model, monkeypatch, "forward")
    small.most = 20
    *found, failed = asyncio.run(together(engine, [request(prompt) for prompt in [*PROMPTS, LONG]], lag))
    assert found == expected
    assert isinstance(failed, ResourceExhausted)
    assert not engine.has_work


async def together(engine: Engine, requests: list[GenerationRequest], lag: int) -> list[list[int] | ResourceExhausted]:
    async def read(stream: Stream) -> list[int] | ResourceExhausted:
        try:
            return [token async for delta in stream for token in delta.token_ids]
        except ResourceExhausted as error:
            return error

    serving = AsyncEngine(engine, lag=lag)
    serving.start()
    try:
        streams = [await serving.submit(asked) for asked in requests]
        return list(await asyncio.gather(*map(read, streams)))
    finally:
        await serving.stop()
