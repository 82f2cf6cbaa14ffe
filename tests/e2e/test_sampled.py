"""Sampled output follows the target's exact distribution, with speculation off and on."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from paceline.core.params import Method, SamplingParams, SpeculationParams, StopParams
from paceline.engine import GenerationRequest
from paceline.runner import verification
from paceline.wiring import EngineSettings, build_engine
from support.pairs import tiny_pair

VOCAB = 16
DRAWS = 20_000
TOKENS = 3
PROMPT = (3, 1, 4, 1, 5)
SAMPLING = SamplingParams(temperature=0.8, top_k=12, top_p=0.95)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair(tmp_path_factory.mktemp("sampled"), vocab_size=VOCAB, noise=0.05, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def exact(pair: tuple[Path, Path]) -> dict[tuple[int, ...], float]:
    """Every run of three tokens and its probability, by enumeration with transformers' logits."""
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        prefixes = list(probabilities)
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT + prefix for prefix in prefixes])).logits[:, -1]
        longer = {}
        for prefix, row in zip(prefixes, logits, strict=True):
            for token, p in enumerate(_processed(row)):
                if p > 0:
                    longer[(*prefix, token)] = probabilities[prefix] * p
        probabilities = longer
    return probabilities


def _processed(logits: torch.Tensor) -> list[float]:
    """Temperature, top-k, top-p by their definitions."""
    order = (-logits).argsort(stable=True).tolist()[: SAMPLING.top_k]
    weights = (logits.double() / SAMPLING.temperature).exp()
    mass, kept, before = float(weights[order].sum()), [], 0.0
    for token in order:
        if before >= SAMPLING.top_p:
            break
        kept.append(token)
        before += float(weights[token]) / mass
    total = float(weights[kept].sum())
    return [float(weights[t]) / total if t in kept else 0.0 for t in range(VOCAB)]


def _draw(pair: tuple[Path, Path], method: Method) -> Counter[tuple[int, ...]]:
    """The first three tokens of 20,000 requests through the engine. Two more follow, so that depth 2 is reached."""
    engine = build_engine(
        EngineSettings(
            model=str(pair[0]), draft=str(pair[1]), dtype="float32", max_model_len=16, max_num_seqs=500, seed=17
        )
    )
    request = GenerationRequest(
        PROMPT,
        SAMPLING,
        StopParams(max_tokens=TOKENS + 2, ignore_eos=True),
        SpeculationParams(method=method, min_depth=2, max_depth=2),
    )
    outputs: dict[int, list[int]] = {engine.add(request): [] for _ in range(4000)}
    while len(outputs) < DRAWS or engine.has_work:
        while len(outputs) < DRAWS and len(engine.scheduler.waiting) < 1000:
            outputs[engine.add(request)] = []
        for output in engine.step():
            outputs[output.request_id].extend(output.token_ids)
    if method is not Method.NONE:
        assert engine.scheduler.drafter_acceptance[method].accepted > 0
    return Counter(tuple(tokens[:TOKENS]) for tokens in outputs.values())


def _pvalue(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """Chi-square over runs; the rare ones, expected less than 5 times, share a cell."""
    assert not counts.keys() - exact.keys(), "a run of probability 0 was drawn"
    common = [run for run, p in exact.items() if p * DRAWS >= 5]
    observed = [counts[run] for run in common]
    expected = [exact[run] * DRAWS for run in common]
    rest = DRAWS - sum(expected)
    if rest > 1e-6:
        observed.append(DRAWS - sum(observed))
        expected.append(rest)
    return float(chisquare(observed, expected).pvalue)


@pytest.mark.parametrize("method", list(Method))
def test_chi_square(pair: tuple[Path, Path], exact: dict[tuple[int, ...], float], method: Method) -> None:
    assert _pvalue(_draw(pair, method), exact) > 0.001


def test_a_wrong_residual_is_noticed(
    pair: tuple[Path, Path], exact: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above must be able to fail: recovered tokens drawn from p instead of norm(max(p - q, 0))."""
    monkeypatch.setattr(verification, "residual", lambda p, q: p)
    assert _pvalue(_draw(pair, Method.DRAFT_MODEL), exact) < 1e-6


def test_the_enumeration_is_complete(exact: dict[tuple[int, ...], float]) -> None:
    assert sum(exact.values()) == pytest.approx(1.0)
    assert all(len(run) == TOKENS and set(run) <= set(range(VOCAB)) for run in exact)
    assert len(exact) > len(list(itertools.product(range(3), repeat=TOKENS)))
