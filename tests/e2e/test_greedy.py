"""Greedy output is the reference's, token for token: one batch, staggered arrivals, every drafter and backend, fp32.

The reference is transformers' `generate`, and with features transformers' logits and the oracle of the chain, which
`tests/runner/test_chain_oracle.py` holds against transformers' own processors.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline import demo
from paceline.core.grammar import GrammarKind, GrammarSpec
from paceline.core.method import Method
from paceline.core.params import Constraints, SamplingParams, SpeculationParams, StopParams, Verification
from paceline.core.token_counts import TokenCounts
from paceline.engine import Engine, GenerationRequest
from paceline.wiring import EngineSettings, build_engine
from support.backends import ENGINES
from support.chain import Mask
from support.checkpoints import END_OF_TEXT_ID
from support.pairs import tiny_pair
from support.reference import NEAR_TIE, Asked, Completed, complete, same_but_for_near_ties

NUM_PROMPTS = 32
MAX_NEAR_TIES = 2
MODELS = ("embedded", "llama", "qwen2", "qwen3")


@dataclass
class Case:
    """A pair of checkpoints, prompts, and what transformers makes of them."""

    engine: Engine
    reference: torch.nn.Module
    prompts: list[tuple[int, ...]]
    limits: list[int]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=ENGINES)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Case:
    target, draft = (
        (demo.TARGET, demo.DRAFT)
        if request.param == "embedded"
        else tiny_pair(tmp_path_factory.mktemp(request.param), request.param)
    )
    prompts, limits = _prompts(target, embedded=request.param == "embedded")
    reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    expected = [
        reference.generate(torch.tensor([p]), max_new_tokens=n, do_sample=False)[0, len(p) :].tolist()
        for p, n in zip(prompts, limits, strict=True)
    ]
    settings = EngineSettings(
        model=str(target),
        draft=str(draft),
        dtype="float32",
        backend=backend,
        max_model_len=512,
        max_num_seqs=NUM_PROMPTS,
        max_num_batched_tokens=256,  # long prompts come in chunks, beside decodes
        block_size=8,
    )
    return Case(build_engine(settings), reference, prompts, limits, expected)


def _prompts(target: Path, embedded: bool) -> tuple[list[tuple[int, ...]], list[int]]:
    """Prompts of 1 to 300 tokens, and 1 to 48 tokens to add."""
    rng = random.Random(5)
    lengths = [1, 2, 300, *(rng.randint(3, 120) for _ in range(NUM_PROMPTS - 3))]
    if embedded:
        tokenizer = AutoTokenizer.from_pretrained(target)
        text = tokenizer.encode("".join(demo.HELD_OUT_PROMPTS.read_text().splitlines()))
        starts = [rng.randrange(len(text) - 300) for _ in lengths]
        prompts = [tuple(text[start : start + n]) for start, n in zip(starts, lengths, strict=True)]
    else:
        prompts = [tuple(rng.randrange(1, 320) for _ in range(n)) for n in lengths]
    return prompts, [1, *(rng.randint(2, 48) for _ in range(NUM_PROMPTS - 1))]


def _generate(engine: Engine, requests: list[GenerationRequest]) -> list[list[int]]:
    """Add two requests before every step, so that prompts, decodes and drafts share batches."""
    waiting = list(enumerate(requests))[::-1]
    index_of: dict[int, int] = {}
    outputs: list[list[int]] = [[] for _ in requests]
    while waiting or engine.has_work:
        for _ in range(min(2, len(waiting))):
            index, request = waiting.pop()
            index_of[engine.add(request)] = index
        for output in engine.step():
            outputs[index_of[output.request_id]].extend(output.token_ids)
        engine.check_invariants()
    return outputs


def _num_accepted(engine: Engine, method: Method) -> float:
    return engine.scheduler.speculation.drafters[method, Verification.GREEDY].counts.accepted


@pytest.mark.parametrize("method", list(Method))
def test_equals_transformers(case: Case, method: Method, record_property: pytest.RecordProperty) -> None:
    requests = [
        GenerationRequest(
            prompt,
            SamplingParams(temperature=0.0),
            StopParams(max_tokens=limit),
            SpeculationParams(method=method, min_depth=index % 3),
        )
        for index, (prompt, limit) in enumerate(zip(case.prompts, case.limits, strict=True))
    ]
    accepted_before = _num_accepted(case.engine, method)
    outputs = _generate(case.engine, requests)
    near_ties = 0
    for prompt, found, expected in zip(case.prompts, outputs, case.expected, strict=True):
        if found == expected:
            continue
        same = next(i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b)
        with torch.inference_mode():
            logits = case.reference(torch.tensor([[*prompt, *expected[:same]]])).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        assert first - second < NEAR_TIE, f"differs at {same}: {found[same]} for {expected[same]}, no near-tie"
        near_ties += 1
    record_property("near_ties", near_ties)
    assert near_ties <= MAX_NEAR_TIES, "near-ties are rare: so many are a mistake"
    if method is not Method.NONE:
        assert _num_accepted(case.engine, method) > accepted_before, "nothing was ever accepted"


# -- with features -----------------------------------------------------------------------------------------------------

NUM_FEATURED = 64
# Nothing that a pattern forces has two spellings in the tiny vocabulary: all of it is single letters.
PATTERNS = (r"[a-z ]{4,30}\.", r"[yn]( [a-z]+){1,3}", r'\{"x": [0-9]{1,3}\}', r"[0-9]{2,4}-[0-9]{2}", r"[A-Z][a-z, ]*")


@dataclass
class Featured:
    """An engine, requests with features, and what the oracle makes of them.

    Attributes:
        request_of: the requests for a method.
    """

    engine: Engine
    request_of: Callable[[Method], list[GenerationRequest]]
    expected: list[Completed]


@pytest.fixture(scope="module")
def featured(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Featured:
    target, draft = tiny_pair(tmp_path_factory.mktemp("featured"), noise=0.01)
    tokenizer = AutoTokenizer.from_pretrained(target)
    reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    rng = random.Random(11)
    plain = [
        Asked(tuple(rng.randrange(1, 320) for _ in range(rng.randint(1, 40))), rng.randint(8, 24))
        for _ in range(NUM_FEATURED)
    ]
    made = [
        _add_features(rng, asked, completed.token_ids, tokenizer)
        for asked, completed in zip(plain, complete(reference, plain), strict=True)
    ]

    def request_of(method: Method) -> list[GenerationRequest]:
        return [
            replace(request, speculation=SpeculationParams(method=method, min_depth=index % 5))
            for index, (_, request) in enumerate(made)
        ]

    settings = EngineSettings(
        model=str(target),
        draft=str(draft),
        dtype="float32",
        backend=backend,
        max_model_len=128,
        max_num_seqs=NUM_FEATURED,
        max_num_batched_tokens=128,
        block_size=8,
    )
    return Featured(build_engine(settings), request_of, complete(reference, [asked for asked, _ in made]))


def _add_features(
    rng: random.Random, asked: Asked, plain: list[int], tokenizer: Any
) -> tuple[Asked, GenerationRequest]:
    """Each feature now and then, where possible such that it changes what greedy output would be without it."""

    def now_and_then(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.4 else otherwise

    words = [tokenizer.decode(plain[i : i + n]) for n in (1, 2) for i in (0, 3, 5)]
    words = [word for word in words if word.strip() and "\ufffd" not in word and "<" not in word]
    bad_words = now_and_then(tuple(words[:3]), ())
    spellings = tuple(
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for word in bad_words
        for text in (word, f" {word.lstrip()}")
    )
    sampling = SamplingParams(
        temperature=0.0,
        repetition_penalty=now_and_then(rng.choice([0.8, 1.3, 2.0]), 1.0),
        presence_penalty=now_and_then(rng.uniform(-2, 2), 0.0),
        frequency_penalty=now_and_then(rng.uniform(-2, 2), 0.0),
        logit_bias=now_and_then(tuple((token, rng.uniform(-3, 3)) for token in {*plain[:4], 5, 300}), ()),
        allowed_token_ids=now_and_then(tuple({END_OF_TEXT_ID, *plain[:2], *range(10, 280)}), ()),
        bad_words=bad_words,
    )
    pattern = now_and_then(rng.choice(PATTERNS), None)
    if pattern is not None:  # or no token may be left
        sampling, spellings = replace(sampling, allowed_token_ids=(), bad_words=()), ()
    min_tokens = now_and_then(rng.randint(1, 5), 0)
    stop_token_ids = tuple(plain[1:3])
    constraints = Constraints(spellings, min_tokens, (*stop_token_ids, END_OF_TEXT_ID))
    if pattern is not None:
        min_tokens, stop_token_ids, constraints = 0, (), Constraints()
    asked = replace(
        asked,
        sampling=sampling,
        constraints=constraints,
        ends=(*stop_token_ids, END_OF_TEXT_ID),
        allows=None if pattern is None else _allowed_by(pattern, tokenizer),
    )
    return asked, GenerationRequest(
        asked.prompt,
        sampling,
        StopParams(max_tokens=asked.max_tokens, token_ids=stop_token_ids, min_tokens=min_tokens),
        grammar=None if pattern is None else GrammarSpec(GrammarKind.REGEX, pattern),
    )


def _allowed_by(pattern: str, tokenizer: Any) -> Callable[[tuple[int, ...]], Mask]:
    """Tokens whose text leaves a match possible; the end where the text matches."""
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    compiled = regex.compile(pattern)

    @cache
    def allowed(output: tuple[int, ...]) -> Mask:
        before = "".join(texts[token] for token in output)
        mask = np.array([compiled.fullmatch(before + text, partial=True) is not None for text in texts])
        mask[END_OF_TEXT_ID] = compiled.fullmatch(before) is not None
        return mask

    return allowed


@pytest.mark.parametrize("method", list(Method))
def test_features_equal_the_oracle(featured: Featured, method: Method, record_property: pytest.RecordProperty) -> None:
    accepted_before = _num_accepted(featured.engine, method)
    outputs = _generate(featured.engine, featured.request_of(method))
    pairs = zip(outputs, featured.expected, strict=True)
    near_ties = sum(not same_but_for_near_ties(found, expected) for found, expected in pairs)
    record_property("near_ties", near_ties)
    assert near_ties <= MAX_NEAR_TIES, "near-ties are rare: so many are a mistake"
    if method is not Method.NONE:
        assert _num_accepted(featured.engine, method) > accepted_before, "nothing was ever accepted"


def test_peer_13_penalties_from_before_the_run_are_noticed(featured: Featured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above must be able to fail."""
    behind = TokenCounts.behind
    monkeypatch.setattr(TokenCounts, "behind", lambda self, drafts: behind(self, ()))
    outputs = _generate(featured.engine, featured.request_of(Method.DRAFT_MODEL))
    assert sum(found != expected.token_ids for found, expected in zip(outputs, featured.expected, strict=True)) > 5
