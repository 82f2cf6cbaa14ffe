"""Completions that follow a JSON schema, by a real model, with every drafter and rule."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from jsonschema import Draft202012Validator

from paceline.core.grammar import GrammarKind, GrammarSpec
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, StopParams, Verification
from paceline.core.plan import FinishReason, StepPlan, StepResult, StepRunner
from paceline.engine import Engine, GenerationRequest
from paceline.llm import LLM, Completion
from paceline.wiring import EngineSettings, build_engine
from support.schemas import schema

SCHEMAS = 200
PROMPTS = ("import json\n\nexample = ", "def load(path):\n    return ", "# A document:\n", '"""Settings.\n\n')


class CountingRunner:
    """Counts the accepted drafts of another runner, by method and by whether a grammar forced them."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self.accepted: Counter[tuple[Method, bool]] = Counter()

    def execute(self, plan: StepPlan) -> StepResult:
        step = self.runner.execute(plan)
        for work, result in zip(plan.work, step.sequences, strict=True):
            self.accepted[work.method, result.is_forced] += result.num_accepted
        return step


@pytest.fixture(scope="module")
def engine() -> Engine:
    # So few rows a step that prompts are computed in chunks.
    settings = EngineSettings(model="demo", draft="demo", dtype="float32", max_num_seqs=32, max_num_batched_tokens=96)
    return build_engine(settings)


def _request(number: int) -> GenerationRequest:
    """Greedy, seeded, block and token-wise requests; drafts of a model, of n-grams and none, in turn."""
    rule = list(Verification)[number % 4]
    sampling = SamplingParams(
        temperature=0.0 if rule is Verification.GREEDY else 1.0,
        seed=number if rule is Verification.COUPLED else None,
        repetition_penalty=1.1 if number % 5 == 0 else 1.0,
        top_p=0.95 if number % 3 == 0 else 1.0,
    )
    speculation = SpeculationParams(
        method=list(Method)[number % 3],
        min_depth=3 if number % 3 else 0,
        verification=rule if rule in (Verification.BLOCK, Verification.TOKEN_WISE) else None,
    )
    return GenerationRequest(
        PROMPTS[number % len(PROMPTS)],
        sampling,
        StopParams(max_tokens=256),
        speculation,
        grammar=GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema(number))),
    )


@pytest.fixture(scope="module")
def counted(engine: Engine) -> tuple[list[Completion], Counter[tuple[Method, bool]]]:
    """The completions, and the drafts that they accepted."""
    runner, counting = engine.runner, CountingRunner(engine.runner)
    engine.runner = counting
    completions = LLM.from_engine(engine).complete([_request(number) for number in range(SCHEMAS)])
    engine.runner = runner
    return completions, counting.accepted


@pytest.fixture(scope="module")
def completions(counted: tuple[list[Completion], Counter[tuple[Method, bool]]]) -> list[Completion]:
    return counted[0]


def test_what_ended_validates(completions: list[Completion]) -> None:
    ended = 0
    for number, completion in enumerate(completions):
        if completion.finish.reason is FinishReason.EOS:
            ended += 1
            Draft202012Validator(schema(number)).validate(json.loads(completion.text))
        else:
            assert completion.finish.reason is FinishReason.MAX_TOKENS, completion.finish
    assert ended >= 0.9 * SCHEMAS, ended


def test_what_was_cut_off_is_a_prefix(engine: Engine, completions: list[Completion]) -> None:
    """By a fresh matcher, which has seen no draft and no rejection."""
    assert engine.grammars is not None
    for number, completion in enumerate(completions):
        if completion.finish.reason is FinishReason.MAX_TOKENS:
            request = _request(number)
            assert request.grammar is not None
            matcher = engine.grammars.compile(request.grammar).matcher()
            assert matcher.advance(completion.token_ids), (number, matcher.failure)


def test_drafts_were_accepted(counted: tuple[list[Completion], Counter[tuple[Method, bool]]]) -> None:
    """What a model or n-grams drafted and, apart from it, what the grammar forced in their stead."""
    _, accepted = counted
    for method in (Method.NGRAM, Method.DRAFT_MODEL):
        assert accepted[method, False] > 100, (method, accepted)
        assert accepted[method, True] > 100, (method, accepted)


@pytest.mark.parametrize("method", [Method.NGRAM, Method.DRAFT_MODEL])
@pytest.mark.parametrize("seed", [None, 11])
def test_equal_to_speculation_off(engine: Engine, method: Method, seed: int | None) -> None:
    """Greedy and seeded: masks at every position, rejections, forced drafts and all, the tokens are the same."""
    sampling = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed)
    stop = StopParams(max_tokens=96)

    def run(speculation: SpeculationParams) -> list[tuple[int, ...]]:
        requests = [
            GenerationRequest(
                PROMPTS[number % 4],
                sampling,
                stop,
                speculation,
                grammar=GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema(number))),
            )
            for number in range(16)
        ]
        return [completion.token_ids for completion in LLM.from_engine(engine).complete(requests)]

    off = run(SpeculationParams(method=Method.NONE))
    for depth in (1, 5):
        assert run(SpeculationParams(method=method, min_depth=depth, max_depth=depth)) == off


def test_forced_text_is_drafted_for_nothing(engine: Engine) -> None:
    """A constant: with one-hot drafts of what must follow, as many tokens as depth allows in every step."""
    request = GenerationRequest(
        PROMPTS[0],
        SamplingParams(),
        StopParams(max_tokens=64),
        SpeculationParams(method=Method.NGRAM, min_depth=4, max_depth=4),
        grammar=GrammarSpec(GrammarKind.CHOICE, choices=("a text that nobody would ever have written by accident",)),
    )
    [completion] = LLM.from_engine(engine).complete([request])
    assert completion.text == "a text that nobody would ever have written by accident"
    assert completion.stats.drafted_tokens == completion.stats.accepted_tokens > 8
