"""Logprobs are the model's, or those of what was sampled from; speculation changes none of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.core.method import Method
from paceline.core.params import (
    Constraints,
    LogprobsMode,
    LogprobsParams,
    SamplingParams,
    SpeculationParams,
    StopParams,
)
from paceline.core.plan import StepPlan, StepResult, TokenLogprobs
from paceline.core.request import RequestStatus
from paceline.engine import Engine, GenerationRequest
from paceline.engine.delta import PromptLogprobs
from paceline.wiring import EngineSettings, build_engine
from support.chain import ChainState, Row, distribution, log_softmax, process
from support.native import needs_compiler
from support.pairs import tiny_pair

VOCAB = 320
TOP = 5
TOLERANCE = 1e-4
MAX_LEN = 128
BLOCK_SIZE = 8
STOP = StopParams(max_tokens=16, ignore_eos=True)
# Half of the requests are penalised, biased and cut off; greedy, seeded and drawn ones take turns.
FEATURES = SamplingParams(
    top_k=30, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.4, logit_bias=((7, 2.0), (9, -3.0))
)


@dataclass(frozen=True)
class Told:
    """One completion, and what was told of it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: PromptLogprobs
    preemptions: int


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair(tmp_path_factory.mktemp("logprobs"), noise=0.01)


@pytest.fixture(scope="module")
def model(pair: tuple[Path, Path]) -> torch.nn.Module:
    found: torch.nn.Module = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    return found


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(8)
    return [tuple(rng.randrange(1, VOCAB) for _ in range(n)) for n in (1, 2, 8, 9, 17, 33, 60, 90, 5, 12, 40, 70)]


def sampling(index: int) -> SamplingParams:
    kind = (
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": index},
        {"temperature": 0.9},
    )[index % 3]
    return replace(FEATURES if index % 2 else SamplingParams(), **kind)  # type: ignore[arg-type]


def requests(method: Method, logprobs: LogprobsParams, n: int = 1, stop: StopParams = STOP) -> list[GenerationRequest]:
    depth = 0 if method is Method.NONE else 4
    speculation = SpeculationParams(method=method, min_depth=depth, max_depth=depth)
    return [
        GenerationRequest(prompt, sampling(index), stop, speculation, logprobs, n=n)
        for index, prompt in enumerate(prompts())
    ]


def build(
    pair: tuple[Path, Path],
    *,
    reproducible: bool = False,
    max_num_seqs: int = 16,
    rows: int = 2048,
    kv_cache_memory: int | None = None,
) -> Engine:
    settings = EngineSettings(
        model=str(pair[0]),
        draft=str(pair[1]),
        dtype="float32",
        max_model_len=MAX_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rows,
        block_size=BLOCK_SIZE,
        kv_cache_memory=kv_cache_memory,
        reproducible=reproducible,
        device="cpu" if reproducible else "auto",
    )
    return build_engine(settings)


def generate(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Told]:
    """Completions, the n of each request side by side."""
    firsts = [engine.add(request) for request in requests]
    ids = [first + choice for first, request in zip(firsts, requests, strict=True) for choice in range(request.n)]
    told = {request_id: Told((), (), (), 0) for request_id in ids}
    while engine.has_work:
        for output in engine.step():
            before = told[output.request_id]
            assert len(output.logprobs) in (0, len(output.token_ids))
            assert not (before.prompt_logprobs and output.prompt_logprobs), "told twice"
            told[output.request_id] = Told(
                before.token_ids + output.token_ids,
                before.logprobs + output.logprobs,
                before.prompt_logprobs or output.prompt_logprobs,
                0 if output.stats is None else output.stats.preemptions,
            )
    return [told[request_id] for request_id in ids]


@torch.inference_mode()
def logits_of(model: torch.nn.Module, text: Sequence[int]) -> list[Row]:
    """transformers' logits behind each token of a text."""
    return list(model(torch.tensor([text])).logits[0].double().numpy())


def assert_tells(told: TokenLogprobs, token: int, logprobs: Row, top: int) -> None:
    """`told` is what `logprobs`, [vocab], say of the token, but for rounding."""
    assert told.logprob == pytest.approx(logprobs[token], abs=TOLERANCE)
    # Within rounding, ranks and places may be exchanged.
    assert 1 + (logprobs > logprobs[token] + TOLERANCE).sum() <= told.rank
    assert told.rank <= 1 + (logprobs > logprobs[token] - TOLERANCE).sum()
    assert len(told.top_token_ids) == len(set(told.top_token_ids)) == len(told.top_logprobs) == top
    np.testing.assert_allclose(told.top_logprobs, logprobs[list(told.top_token_ids)], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(told.top_logprobs, np.sort(logprobs)[::-1][:top], rtol=0, atol=TOLERANCE)


# -- of completions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(LogprobsMode))
@pytest.mark.parametrize("method", list(Method))
def test_peer_14_each_token_has_its_own(
    pair: tuple[Path, Path], model: torch.nn.Module, method: Method, mode: LogprobsMode
) -> None:
    """Not 0, not those of the position before, and not refused; also in the middle of an accepted run."""
    wanted = LogprobsParams(completion=TOP, mode=mode)
    asked = requests(method, wanted)
    engine = build(pair)
    for request, told in zip(asked, generate(engine, asked), strict=True):
        prompt = tuple(request.prompt)
        assert len(told.logprobs) == len(told.token_ids) == STOP.max_tokens
        rows = logits_of(model, prompt + told.token_ids)[len(prompt) - 1 : -1]
        for index, (token, row, item) in enumerate(zip(told.token_ids, rows, told.logprobs, strict=True)):
            state = ChainState(prompt, told.token_ids[:index])
            assert_tells(item, token, _expected(row, request.sampling, state, mode), TOP)
    if method is not Method.NONE:
        assert engine.scheduler.speculation.totals.accepted > 0


def _expected(row: Row, params: SamplingParams, state: ChainState, mode: LogprobsMode) -> Row:
    """Logprobs, [vocab]. Greedy requests cut nothing away: what is processed is what the argmax was taken of."""
    if mode is LogprobsMode.RAW:
        return log_softmax(row)
    edited = process(row, params, Constraints(), state)
    if params.greedy:
        return log_softmax(edited)
    with np.errstate(divide="ignore"):
        return np.log(distribution(edited, params))


@needs_compiler
@pytest.mark.parametrize("mode", list(LogprobsMode))
def test_reproducible_logprobs_are_the_same_to_the_bit(pair: tuple[Path, Path], mode: LogprobsMode) -> None:
    """Of greedy and seeded requests, with speculation off and on."""
    engine = build(pair, reproducible=True)
    off, *on = (
        [told for i, told in enumerate(generate(engine, requests(method, LogprobsParams(TOP, 2, mode)))) if i % 3 != 2]
        for method in Method
    )
    for found in on:
        assert found == off


def test_only_the_chosen_token_and_no_others(pair: tuple[Path, Path]) -> None:
    for told in generate(build(pair), requests(Method.DRAFT_MODEL, LogprobsParams(completion=0))):
        assert all(item.top_token_ids == item.top_logprobs == () and item.rank >= 1 for item in told.logprobs)
        assert all(item.logprob < 0 for item in told.logprobs)
        assert len(told.logprobs) == STOP.max_tokens


def test_who_does_not_ask_is_told_nothing(pair: tuple[Path, Path]) -> None:
    asked = requests(Method.DRAFT_MODEL, LogprobsParams())
    asked[0] = replace(asked[0], logprobs=LogprobsParams(completion=1, prompt=1))
    first, *others = generate(build(pair), asked)
    assert (len(first.logprobs), len(first.prompt_logprobs)) == (STOP.max_tokens, 1)
    assert all(told.logprobs == told.prompt_logprobs == () for told in others)


def test_a_greedy_choice_is_the_first(pair: tuple[Path, Path]) -> None:
    """Processed, that is; its raw rank may be another, as penalties moved it."""
    asked = requests(Method.DRAFT_MODEL, LogprobsParams(completion=1, mode=LogprobsMode.PROCESSED))
    greedy = [told for i, told in enumerate(generate(build(pair), asked)) if i % 3 == 0]
    assert all(
        item.rank == 1 and item.top_token_ids == (t,)
        for told in greedy
        for t, item in zip(told.token_ids, told.logprobs, strict=True)
    )


def test_tokens_cut_away_have_no_probability(pair: tuple[Path, Path]) -> None:
    params = SamplingParams(temperature=0.7, top_k=3)
    request = requests(Method.DRAFT_MODEL, LogprobsParams(completion=TOP, mode=LogprobsMode.PROCESSED))[4]
    [told] = generate(build(pair), [replace(request, sampling=params)])
    assert len(told.logprobs) == STOP.max_tokens
    for item in told.logprobs:
        assert item.rank <= 3
        assert sum(map(math.exp, item.top_logprobs[:3])) == pytest.approx(1.0, abs=1e-5)
        assert item.top_logprobs[3:] == (-math.inf, -math.inf)


# -- of prompts --------------------------------------------------------------------------------------------------------


@cache
def _block_bytes(pair: tuple[Path, Path]) -> int:
    engine = build(pair, kv_cache_memory=1 << 20)
    return (1 << 20) // engine.scheduler.config.num_blocks


@pytest.mark.parametrize("method", [Method.NONE, Method.DRAFT_MODEL])
@pytest.mark.parametrize("circumstances", ["whole", "chunked", "preempted", "n = 3"])
def test_prompt_logprobs_are_transformers(
    pair: tuple[Path, Path], model: torch.nn.Module, method: Method, circumstances: str
) -> None:
    """Told once, by the first choice, and aligned with the prompt."""
    engine = build(
        pair,
        rows=16 if circumstances in ("chunked", "preempted") else 2048,
        kv_cache_memory=_block_bytes(pair) * MAX_LEN // BLOCK_SIZE if circumstances == "preempted" else None,
    )
    n = 3 if circumstances == "n = 3" else 1
    # Long completions grow until they have to give way.
    stop = StopParams(max_tokens=36, ignore_eos=True) if circumstances == "preempted" else STOP
    asked = requests(method, LogprobsParams(prompt=TOP), n, stop)
    found = generate(engine, asked)
    assert any(told.preemptions for told in found) == (circumstances == "preempted")
    for index, request in enumerate(asked):
        first, *others = found[n * index : n * (index + 1)]
        assert all(told.prompt_logprobs == () for told in others)
        assert_prompt_told(model, request, first)


@pytest.mark.parametrize("method", [Method.NONE, Method.DRAFT_MODEL])
def test_prompt_logprobs_of_a_prompt_that_began_twice(
    pair: tuple[Path, Path], model: torch.nn.Module, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt in small chunks is preempted before its end."""
    engine = build(pair, max_num_seqs=4, rows=4, kv_cache_memory=_block_bytes(pair) * MAX_LEN // BLOCK_SIZE)
    first = requests(method, LogprobsParams(), 1, StopParams(max_tokens=60, ignore_eos=True))[3]
    rng = random.Random(2)
    prompt = tuple(rng.randrange(1, VOCAB) for _ in range(100))
    second = replace(requests(method, LogprobsParams(prompt=TOP))[0], prompt=prompt)
    outputs_at_preemption = []
    execute = engine.runner.execute

    def watch(plan: StepPlan) -> StepResult:
        requests = engine.scheduler.requests.values()
        outputs_at_preemption.extend(
            len(one.output_token_ids) for one in requests if one.status is RequestStatus.PREEMPTED
        )
        return execute(plan)

    monkeypatch.setattr(engine.runner, "execute", watch)
    _, told = generate(engine, [first, second])
    assert 0 in outputs_at_preemption
    assert_prompt_told(model, second, told)


def assert_prompt_told(model: torch.nn.Module, request: GenerationRequest, told: Told) -> None:
    prompt = [token for token in request.prompt if isinstance(token, int)]
    assert len(told.prompt_logprobs) == len(prompt)
    assert told.prompt_logprobs[0] is None
    rows = logits_of(model, prompt)[:-1]
    for token, row, item in zip(prompt[1:], rows, told.prompt_logprobs[1:], strict=True):
        assert item is not None
        assert_tells(item, token, log_softmax(row), TOP)


def test_prompt_logprobs_of_processed_mode_are_the_models_own(pair: tuple[Path, Path]) -> None:
    """Nothing was sampled there."""
    raw, processed = (
        [told.prompt_logprobs for told in generate(build(pair), requests(Method.NONE, LogprobsParams(None, TOP, mode)))]
        for mode in LogprobsMode
    )
    assert raw == processed
