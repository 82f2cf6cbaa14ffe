"""A conversation on the embedded pair, turn by turn: what the cache brings, and that it changes nothing."""

from __future__ import annotations

import pytest

from paceline.core.params import SamplingParams, SchedulingParams, StopParams
from paceline.engine import ChatMessage, Engine, GenerationRequest
from paceline.engine.request import Prompt
from paceline.wiring import EngineSettings, build_engine
from support.native import device_of, needs_compiler

TURNS = 20
BLOCK = 16
QUESTIONS = [f"# part {turn}: write a function that adds {turn} to each number of a list" for turn in range(TURNS)]
GREEDY = SamplingParams(temperature=0.0)


def engine_of(backend: str, prefix_cache: str) -> Engine:
    settings = EngineSettings(
        model="demo",
        draft="demo",
        dtype="float32",
        backend=backend,
        reproducible=backend == "native",
        device=device_of(backend),
        max_model_len=2048,
        block_size=BLOCK,
        prefix_cache=prefix_cache,
        depth="3",
    )
    return build_engine(settings)


def complete(engine: Engine, prompt: Prompt, sampling: SamplingParams, tenant: str = "a") -> tuple[list[int], str, int]:
    """Tokens and text of the completion, and prompt tokens that were found."""
    engine.add(
        GenerationRequest(
            prompt, sampling, StopParams(max_tokens=24, ignore_eos=True), scheduling=SchedulingParams(tenant)
        )
    )
    token_ids: list[int] = []
    text, cached = "", 0
    while engine.has_work:
        for output in engine.step():
            token_ids.extend(output.token_ids)
            text += output.text
            if output.stats is not None:
                cached = output.stats.cached_prompt_tokens
    return token_ids, text, cached


def replay(engine: Engine, sampling: SamplingParams) -> tuple[list[list[int]], int, int]:
    """The chat by token ids: answers, tokens found, and tokens in full blocks that had been computed before."""
    history: tuple[int, ...] = ()
    answers, found, computed = [], 0, 0
    for question in QUESTIONS:
        history += tuple(engine.tokenizer.encode(question + "\n"))
        answer, _, cached = complete(engine, history, sampling)
        answers.append(answer)
        found += cached
        history += tuple(answer)
        # The newest token has no KV.
        computed += (len(history) - 1) // BLOCK * BLOCK if len(answers) < TURNS else 0
    return answers, found, computed


@needs_compiler
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=3)], ids=["greedy", "seed"])
def test_a_chat_by_token_ids_hits_its_history(sampling: SamplingParams) -> None:
    """And where one order of sums is kept, its answers are the same to the bit."""
    answers, found, computed = replay(engine_of("native", "tenant"), sampling)
    assert found >= 0.99 * computed > 5000
    without, not_found, _ = replay(engine_of("native", "off"), sampling)
    assert not_found == 0
    assert answers == without


def test_a_chat_by_text_hits_most_of_its_history() -> None:
    """Rendered anew by the template, an answer may be other tokens than those that were sampled."""
    engine = engine_of("torch", "tenant")
    messages: list[ChatMessage] = []
    found = prompts = 0
    for question in QUESTIONS:
        messages.append(ChatMessage("user", question))
        prompt = tuple(messages)
        before = prompts
        prompts += len(engine.prepare(GenerationRequest(prompt)).prompt_token_ids)
        _, text, cached = complete(engine, prompt, GREEDY)
        messages.append(ChatMessage("assistant", text))
        assert cached > 0 or not before
        found += cached
    assert found > 0.5 * prompts


def test_a_prompt_of_another_tenant_is_not_found() -> None:
    engine = engine_of("torch", "tenant")
    prompt = tuple(engine.tokenizer.encode("".join(QUESTIONS)))
    cached = [complete(engine, prompt, GREEDY, tenant)[2] for tenant in ("a", "b", "a", "b")]
    assert cached[:2] == [0, 0]
    assert cached[2] == cached[3] == (len(prompt) - 1) // BLOCK * BLOCK
