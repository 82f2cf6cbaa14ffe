"""Grammars and other constraints in runs of drafts: what the chi-squares and the oracle do not reach."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from paceline.core.grammar import GrammarKind, GrammarSpec
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.core.plan import LONGEST_MATCH, Finish, FinishReason, SequenceResult, SequenceWork, StepPlan, StepResult
from paceline.engine import Engine, GenerationRequest
from paceline.speculation import Ngram
from paceline.wiring import EngineSettings, build_engine
from runner.rows import make_sequence
from support.checkpoints import END_OF_TEXT_ID
from support.pairs import tiny_pair

MAX_LEN = 96
BLOCK_SIZE = 8
PATTERNS = (r"[a-z ]{4,30}\.", r"(yes|no)( [a-z]{1,3}){1,3}", r'\{"size": [0-9]{1,3}\}', r"[0-9]{2,4}-[0-9]{2}")
DRAFTING = (Method.NGRAM, Method.DRAFT_MODEL)


@dataclass(frozen=True)
class Ended:
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    accepted: int
    preemptions: int


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair(tmp_path_factory.mktemp("features"), noise=0.01)


def build(pair: tuple[Path, Path], *, small: bool = False) -> Engine:
    """`small`: KV memory for one long request, so that some are preempted."""
    settings = EngineSettings(
        model=str(pair[0]), draft=str(pair[1]), dtype="float32", max_model_len=MAX_LEN, block_size=BLOCK_SIZE
    )
    engine = build_engine(replace(settings, kv_cache_memory=1 << 21))
    if not small:
        return engine
    per_block = (1 << 21) // engine.scheduler.config.num_blocks
    return build_engine(replace(settings, kv_cache_memory=MAX_LEN // BLOCK_SIZE * per_block))


@pytest.fixture(scope="module")
def engine(pair: tuple[Path, Path]) -> Engine:
    return build(pair)


def speculation(method: Method) -> SpeculationParams:
    depth = 0 if method is Method.NONE else 4
    return SpeculationParams(method=method, min_depth=depth, max_depth=depth)


def regex(pattern: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, pattern)


def choice(*texts: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.CHOICE, choices=texts)


def generate(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Ended]:
    """Completions, the n of each request side by side."""
    firsts = [engine.add(request) for request in requests]
    ids = [first + number for first, request in zip(firsts, requests, strict=True) for number in range(request.n)]
    texts = dict.fromkeys(ids, "")
    tokens: dict[int, tuple[int, ...]] = dict.fromkeys(ids, ())
    ended: dict[int, Ended] = {}
    while engine.has_work:
        for output in engine.step():
            key = output.request_id
            texts[key] += output.text
            tokens[key] += output.token_ids
            if output.finish is not None:
                assert output.stats is not None
                stats = output.stats
                ended[key] = Ended(texts[key], tokens[key], output.finish, stats.accepted_tokens, stats.preemptions)
        engine.check_invariants()
    return [ended[key] for key in ids]


def grammar_requests(method: Method, stop: StopParams = StopParams()) -> list[GenerationRequest]:
    """Greedy, seeded and drawn ones for each pattern."""
    rng = random.Random(4)
    kinds = (SamplingParams(temperature=0.0), SamplingParams(seed=5), SamplingParams())
    return [
        GenerationRequest(
            tuple(rng.randrange(1, 300) for _ in range(rng.randint(1, 30))),
            replace(kind, presence_penalty=0.2),
            stop,
            speculation(method),
            grammar=regex(pattern),
        )
        for pattern in PATTERNS
        for kind in kinds
        for _ in range(2)
    ]


@pytest.mark.parametrize("small", [False, True], ids=["", "preempted"])
@pytest.mark.parametrize("method", list(Method))
def test_peer_18_completions_match_their_grammar(pair: tuple[Path, Path], method: Method, small: bool) -> None:
    """Masks belong to positions, matchers move by what was accepted, and come back after a preemption."""
    found = generate(build(pair, small=small), grammar_requests(method))
    requests = grammar_requests(method)
    for request, ended in zip(requests, found, strict=True):
        assert request.grammar is not None
        assert ended.finish.reason is FinishReason.EOS
        assert re.fullmatch(request.grammar.text, ended.text), (request.grammar.text, ended.text)
        assert ended.token_ids[-1] == END_OF_TEXT_ID
    assert any(ended.preemptions for ended in found) == small
    assert any(ended.accepted for ended in found) == (method is not Method.NONE)
    off = generate(build(pair), grammar_requests(Method.NONE))
    for request, ended, alone in zip(requests, found, off, strict=True):
        if request.sampling.greedy or request.sampling.seed is not None:
            assert ended.token_ids == alone.token_ids


@pytest.mark.parametrize("method", list(Method))
def test_peer_18_a_grammar_ends_within_a_run(engine: Engine, method: Method) -> None:
    """No end-of-sequence id may say so: the completion ends behind the last token that the grammar leaves room for."""
    stop = StopParams(ignore_eos=True)
    prompt = tuple(range(20, 32))
    requests = [
        GenerationRequest(prompt, SamplingParams(seed=seed), stop, speculation(method), grammar=regex(pattern))
        for seed in range(4)
        for pattern in (r"[0-9]{2}-[0-9]{2}", r'\{"size": [0-9]\}', r"[a-f]{6}")
    ]
    for request, ended in zip(requests, generate(engine, requests), strict=True):
        assert request.grammar is not None
        assert re.fullmatch(request.grammar.text, ended.text)
        assert END_OF_TEXT_ID not in ended.token_ids
        assert ended.finish == Finish(FinishReason.EOS)


@pytest.mark.parametrize("method", list(Method))
def test_an_id_that_ends_a_grammar_is_no_part_of_its_text(engine: Engine, method: Method) -> None:
    """Where the text might go on such an id may end it all the same, whatever is ignored and shown elsewhere."""
    stop = StopParams(ignore_eos=True, include_special_tokens=True)
    sampling = SamplingParams(temperature=0.0, logit_bias=((END_OF_TEXT_ID, 100.0),))
    request = GenerationRequest((5, 6), sampling, stop, speculation(method), grammar=regex("[a-f]{3,30}"))
    [ended] = generate(engine, [request])
    assert ended.token_ids[-1] == END_OF_TEXT_ID
    assert re.fullmatch("[a-f]{3,30}", ended.text)
    assert ended.finish == Finish(FinishReason.EOS, stop_token_id=END_OF_TEXT_ID)


@pytest.mark.parametrize("method", DRAFTING)
def test_what_a_grammar_forces_is_drafted_and_accepted(engine: Engine, method: Method) -> None:
    """Whatever the drafter would have said."""
    text = "a line of cyclists who draft each other in turn"
    request = GenerationRequest((5, 6), SamplingParams(), StopParams(), speculation(method), grammar=choice(text))
    [ended] = generate(engine, [request])
    assert ended.text == text
    # Of every 5 tokens 4 are drafts, but for the first token and the last run.
    assert ended.accepted >= (len(ended.token_ids) - 1) * 4 // 5


def steps_of(
    engine: Engine, request: GenerationRequest, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[SequenceWork, SequenceResult]]:
    """Of one request alone, generated to its end."""
    steps: list[tuple[SequenceWork, SequenceResult]] = []
    execute = engine.runner.execute

    def recording(plan: StepPlan) -> StepResult:
        result = execute(plan)
        steps.extend(zip(plan.work, result.sequences, strict=True))
        return result

    monkeypatch.setattr(engine.runner, "execute", recording)
    generate(engine, [request])
    return steps


@pytest.mark.parametrize("method", [None, *DRAFTING])
def test_ngrams_tell_how_they_go_on_and_how_they_would_have(
    engine: Engine, method: Method | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each result has the match of the text as it then is, and scores unless n-grams drafted."""
    prompt = (7, 8, 9, 10, 11, 7, 8, 9)
    request = GenerationRequest(
        prompt, SamplingParams(temperature=0.0), StopParams(40, ignore_eos=True), SpeculationParams(method=method)
    )
    text, scored = list(prompt), 0
    for work, result in steps_of(engine, request, monkeypatch):
        before = make_sequence(text)
        text.extend(result.token_ids)
        by_ngrams = work.num_drafts and work.method is Method.NGRAM
        if method is Method.DRAFT_MODEL:
            assert (result.match, result.scored) == (0, ())
            continue
        assert result.match == Ngram().match(make_sequence(text))
        assert result.scored == (() if by_ngrams else Ngram().score(before, result.token_ids))
        scored += len(result.scored)
    assert scored or method is Method.DRAFT_MODEL


def test_what_a_grammar_forces_is_no_label_for_ngrams(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would have asked what they go on from; what is drafted in their stead is as sure as the longest match."""
    bounds = SpeculationParams(min_depth=1, max_depth=1)  # by the draft model
    free, forced = (
        steps_of(
            engine, GenerationRequest((5, 6), SamplingParams(), StopParams(24), bounds, grammar=grammar), monkeypatch
        )
        for grammar in (regex("(la|lo){12,}"), choice("lalalalalalalalalalalala"))
    )
    assert all(result.match == LONGEST_MATCH and not result.scored for _, result in forced[1:-1])
    assert len(forced) > 4
    assert any(result.scored for _, result in free)
    assert any(0 < result.match < LONGEST_MATCH for _, result in free)


@pytest.mark.parametrize("method", list(Method))
def test_choices_of_a_request_follow_the_grammar_each_for_itself(engine: Engine, method: Method) -> None:
    words = ("the group", "the rider", "a line", "a leader")
    request = GenerationRequest(
        tuple(range(40, 60)),
        SamplingParams(temperature=2.0),
        StopParams(),
        speculation(method),
        grammar=choice(*words),
        n=16,
    )
    texts = {ended.text for ended in generate(engine, [request])}
    assert texts <= set(words)
    assert len(texts) > 1


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_is_allowed_the_completion_ends(engine: Engine, method: Method, temperature: float) -> None:
    """At once, or behind what could still be said; and the neighbours go on."""
    kind = SamplingParams(temperature=temperature)
    plain = GenerationRequest(
        (7, 8, 9), replace(kind, temperature=0.0), StopParams(max_tokens=12, ignore_eos=True), speculation(method)
    )
    [undisturbed] = generate(engine, [plain])
    requests = [
        plain,
        replace(plain, sampling=replace(kind, bad_words=("q",)), grammar=choice("xyq")),
        replace(plain, sampling=replace(kind, allowed_token_ids=(1, 2, 3)), grammar=choice("xyq")),
        replace(plain, sampling=replace(kind, allowed_token_ids=(END_OF_TEXT_ID,)), stop=StopParams(min_tokens=1)),
    ]
    first, *dead = generate(engine, requests)
    assert first.token_ids == undisturbed.token_ids
    assert [ended.text for ended in dead] == ["xy", "", ""]
    for ended in dead:
        assert ended.finish.reason is FinishReason.DEAD_END
        assert ended.finish.detail == "no token is allowed here by the grammar and the other constraints together"


@pytest.mark.parametrize("method", list(Method))
def test_min_tokens_count_tokens_and_not_steps(engine: Engine, method: Method) -> None:
    """Everything but the end is made improbable, and a grammar or not: the end comes at the first place it may."""
    for min_tokens in range(1, 8):
        request = GenerationRequest(
            (7, 8, 9),
            SamplingParams(temperature=0.0, logit_bias=((END_OF_TEXT_ID, 100.0),)),
            StopParams(min_tokens=min_tokens),
            speculation(method),
        )
        ended = generate(engine, [request, replace(request, grammar=regex("[a-z]{1,20}"))])
        assert [len(one.token_ids) for one in ended] == [min_tokens + 1] * 2
        assert [one.token_ids[-1] for one in ended] == [END_OF_TEXT_ID] * 2
