"""What a request may ask for, over the wire and with a real model: the answers agree with themselves."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paceline import errors
from paceline.client import Completion, FinishReason, GenerateOptions, TokenLogprobs
from paceline.engine.fair_threads import FairThreads
from paceline.models.tokenizer import load_tokenizer
from paceline.server import delivery
from paceline.structured import LLGuidanceCompiler
from paceline.structured.trials import TrialLimits
from support.checkpoints import END_OF_TEXT, END_OF_TEXT_ID, tiny_checkpoint
from support.model_serving import PATIENCE, ModelServing, model_serving

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # the loop has no part in what is sampled

PROMPT = "A paceline is a line of"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b", "c"]}, "count": {"type": "integer"}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture
async def served(checkpoint: str) -> AsyncIterator[ModelServing]:
    async with model_serving(checkpoint, draft="ngram") as made:
        yield made
        await made.until_idle()


# -- seeds and choices ------------------------------------------------------------------------------------------------

SEEDED: GenerateOptions = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 20, "ignore_eos": True}


async def test_seeded_choices_outlive_the_server(checkpoint: str) -> None:
    ids = []
    for settings in ({"seed": 0}, {"seed": 1}):
        async with model_serving(checkpoint, draft="ngram", **settings) as served:
            for _ in range(2):
                completions = await served.client.complete_all(PROMPT, **SEEDED)
                ids.append([completion.token_ids for completion in completions])
                assert [completion.started.seed for completion in completions] == [7, 7, 7]
    assert all(again == ids[0] for again in ids)
    assert len(set(ids[0])) == 3
    assert all(len(token_ids) == 20 for token_ids in ids[0])


async def test_a_seeded_choice_does_not_depend_on_the_others(served: ModelServing) -> None:
    three = await served.client.complete_all(PROMPT, **SEEDED)
    one = await served.client.complete(PROMPT, **{**SEEDED, "n": 1})
    two = await served.client.complete_all(PROMPT, **{**SEEDED, "n": 2, "speculation": "off"})
    assert one.token_ids == three[0].token_ids
    assert [completion.token_ids for completion in two] == [completion.token_ids for completion in three[:2]]


async def test_leaving_several_choices_frees_everything(served: ModelServing) -> None:
    before = await served.client.complete(PROMPT, temperature=0.0, max_tokens=8)
    async for _ in served.client.generate(PROMPT, n=4, max_tokens=400, ignore_eos=True):
        break
    await served.until_idle()
    after = await served.client.complete(PROMPT, temperature=0.0, max_tokens=8)
    assert after.token_ids == before.token_ids


# -- logprobs ---------------------------------------------------------------------------------------------------------


def check_alternatives(token_id: int, told: TokenLogprobs, count: int) -> None:
    """What is told of one token is consistent in itself."""
    assert len(told.top_token_ids) == len(told.top_logprobs) == count
    assert list(told.top_logprobs) == sorted(told.top_logprobs, reverse=True)
    assert len(set(told.top_token_ids)) == count
    assert sum(map(math.exp, told.top_logprobs)) <= 1 + 1e-5
    if token_id in told.top_token_ids:
        place = told.top_token_ids.index(token_id)
        assert told.logprob == told.top_logprobs[place]
        assert told.rank <= place + 1
    else:
        assert told.rank > count or told.logprob == told.top_logprobs[-1]


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("speculation", ["off", "ngram"])
async def test_logprobs_belong_to_the_tokens(
    served: ModelServing, speculation: Any, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_thread:
        monkeypatch.setattr(delivery, "MANY_TOKENS", 0)
    options: GenerateOptions = {"logprobs": 5, "max_tokens": 20, "ignore_eos": True, "speculation": speculation}
    completions = await served.client.complete_all(PROMPT, **options, n=2, temperature=1.0, seed=1, final_only=True)
    completions.append(await served.client.complete(PROMPT, **options, temperature=0.0))
    for completion in completions:
        assert completion.finished.usage.completion_tokens == len(completion.token_ids) == 20
        assert len(completion.logprobs) == 20
        for token_id, told in zip(completion.token_ids, completion.logprobs, strict=True):
            check_alternatives(token_id, told, 5)
    assert {told.rank for told in completions[-1].logprobs} == {1}, "greedy"
    assert max(told.rank for told in completions[0].logprobs) > 1, "sampled"


async def test_a_completion_read_as_a_prompt_has_the_same_logprobs(served: ModelServing) -> None:
    """Entry i of the prompt's logprobs is of token i: what was told when it was generated, position by position."""
    prompt = (5, 80, 7)
    first = await served.client.complete(prompt, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=4)
    whole = prompt + first.token_ids
    second = await served.client.complete(whole, max_tokens=1, prompt_logprobs=4)
    told = second.started.prompt_logprobs
    assert len(told) == second.finished.usage.prompt_tokens == len(whole)
    assert told[0] is None
    for token_id, token in zip(whole[1:], told[1:], strict=True):
        assert token is not None
        check_alternatives(token_id, token, 4)
    for generated, read in zip(first.logprobs, told[len(prompt) :], strict=True):
        assert read is not None
        assert read.rank == generated.rank
        assert read.logprob == pytest.approx(generated.logprob, abs=1e-4)
        assert read.top_token_ids == generated.top_token_ids
    assert second.logprobs == ()


async def test_prompt_logprobs_of_several_choices_come_once(served: ModelServing) -> None:
    generation = served.client.generate((5, 80, 7), n=3, prompt_logprobs=0, max_tokens=2, content="text")
    completions = await generation.collect_all()
    assert generation.started is not None
    first, *others = generation.started.prompt_logprobs
    assert first is None
    assert [token.top_token_ids for token in others if token is not None] == [(), ()]
    assert all(completion.started is generation.started for completion in completions)


async def test_logprobs_without_ids_and_with_text_held_back(served: ModelServing) -> None:
    held = "x" * 256  # never comes, but may always begin
    completion = await served.client.complete(
        PROMPT, logprobs=0, prompt_logprobs=0, content="text", stop=held, max_tokens=6, ignore_eos=True, temperature=0.0
    )
    assert completion.token_ids == ()
    assert len(completion.logprobs) == 6
    assert len(completion.started.prompt_logprobs) == completion.started.prompt_tokens


async def test_processed_logprobs_are_of_what_was_sampled(served: ModelServing) -> None:
    options: GenerateOptions = {"max_tokens": 6, "temperature": 0.5, "top_k": 2, "ignore_eos": True, "logprobs": 3}
    completion = await served.client.complete(PROMPT, **options, logprobs_mode="processed")
    assert len(completion.logprobs) == 6
    for told in completion.logprobs:
        best, second, cut = told.top_logprobs
        assert math.exp(best) + math.exp(second) == pytest.approx(1, abs=1e-5)
        assert cut == -math.inf
        assert told.rank in (1, 2)


# -- structured output ------------------------------------------------------------------------------------------------


def check_ended(completions: list[Completion]) -> None:
    assert {completion.finished.reason for completion in completions} == {FinishReason.EOS}


async def test_json_schema(served: ModelServing) -> None:
    options: GenerateOptions = {"json_schema": SCHEMA, "max_tokens": 300, "temperature": 1.0}
    completions = await served.client.complete_all(PROMPT, **options, n=4, seed=5)
    completions.append(await served.client.complete(PROMPT, **{**options, "temperature": 0.0}, bad_words=[" "]))
    check_ended(completions)
    for completion in completions:
        jsonschema.validate(json.loads(completion.text), SCHEMA)
    assert len({completion.text for completion in completions}) > 1


async def test_regex_grammar_and_choice(served: ModelServing) -> None:
    every: list[tuple[GenerateOptions, str]] = [
        ({"regex": "[0-9]{3}-[a-f]+"}, "[0-9]{3}-[a-f]+"),
        ({"grammar": 'start: "(" WORD ")"\nWORD: /[a-z]{2,5}/'}, r"\([a-z]{2,5}\)"),
        ({"choices": ["draft", "verify"]}, "draft|verify"),
    ]
    for options, pattern in every:
        completions = await served.client.complete_all(PROMPT, **options, n=4, seed=5, temperature=1.0, max_tokens=200)
        check_ended(completions)
        for completion in completions:
            assert re.fullmatch(pattern, completion.text)
        assert len({completion.text for completion in completions}) > 1


async def test_a_dead_end_ends_its_request_alone(served: ModelServing) -> None:
    bystander = served.client.generate(PROMPT, temperature=0.0, max_tokens=60, ignore_eos=True)
    deltas = aiter(bystander)
    token_ids = (await anext(deltas)).token_ids
    completion = await served.client.complete(PROMPT, choices=["yes"], allowed_token_ids=[END_OF_TEXT_ID])
    assert (completion.text, completion.token_ids) == ("", ())
    assert completion.finished.reason is FinishReason.DEAD_END
    assert completion.finished.detail
    async for delta in deltas:
        token_ids += delta.token_ids
    again = await served.client.complete(PROMPT, temperature=0.0, max_tokens=60, ignore_eos=True)
    assert token_ids == again.token_ids


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"json_schema": "{"}, "structured.json_schema"),
        ({"json_schema": {"type": "no such type"}}, "structured.json_schema"),
        ({"json_schema": {"type": "integer", "minimum": 2, "maximum": 1}}, "structured.json_schema"),
        ({"regex": "("}, "structured.regex"),
        ({"regex": ""}, "structured.regex"),
        ({"regex": "a" * 8193}, "structured.regex"),
        ({"grammar": "start: nothing"}, "structured.grammar"),
        ({"choices": []}, "structured.choice"),
    ],
)
async def test_structures_that_cannot_be(served: ModelServing, options: GenerateOptions, field: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=rf"^INVALID_ARGUMENT: {field} = .*: must be "):
        await served.client.complete(PROMPT, **options)
    assert not served.engine.engine.has_work
    assert (await served.client.complete(PROMPT, max_tokens=2, ignore_eos=True)).token_ids


def conjunction(terms: int) -> str:
    """A grammar that takes twice as much to compile for each term."""
    return "start: ALL\nALL: " + " & ".join(f"/(.*a.{{{gap}}}b.*)/" for gap in range(1, terms + 1))


@pytest.fixture
def limited(checkpoint: str, served: ModelServing) -> Iterator[Callable[[TrialLimits], LLGuidanceCompiler]]:
    """Gives the server other limits for its grammars."""
    made: list[LLGuidanceCompiler] = []

    def limit(limits: TrialLimits) -> LLGuidanceCompiler:
        tokenizer = load_tokenizer(Path(checkpoint))
        made.append(LLGuidanceCompiler(tokenizer, served.engine.engine.vocab_size, [END_OF_TEXT_ID], limits))
        served.engine.engine.grammars = made[-1]
        return made[-1]

    yield limit
    for compiler in made:
        compiler.close()


async def test_a_grammar_that_takes_too_much_ends_its_request_alone(
    served: ModelServing, limited: Callable[[TrialLimits], LLGuidanceCompiler]
) -> None:
    await asyncio.to_thread(limited, TrialLimits(cpu_seconds=0.5))
    bystander = asyncio.create_task(served.client.complete(PROMPT, max_tokens=200, ignore_eos=True))
    for grammar in (conjunction(40), conjunction(41)):
        with pytest.raises(errors.InvalidArgument, match=r"more than 0\.5 s of CPU to compile") as error:
            await served.client.complete(PROMPT, grammar=grammar)
        assert error.value.field == "structured.grammar"
    assert (await served.client.complete(PROMPT, choices=["yes"])).text == "yes"
    assert len((await bystander).token_ids) == 200


async def test_slow_grammars_of_one_tenant_keep_no_other_waiting(
    served: ModelServing, limited: Callable[[TrialLimits], LLGuidanceCompiler]
) -> None:
    compiler = await asyncio.to_thread(limited, TrialLimits(cpu_seconds=600.0, num_bytes=2 << 30))
    assert compiler._trials is not None
    served.engine._threads = FairThreads(3)
    slow = [
        asyncio.create_task(served.client.complete(PROMPT, tenant="flood", grammar=conjunction(40 + number)))
        for number in range(5)
    ]
    async with asyncio.timeout(PATIENCE):
        while len(compiler._trials._processes) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert (await served.client.complete(PROMPT, tenant="calm", choices=["yes"])).text == "yes"
    assert not any(task.done() for task in slow)
    assert (await served.client.admin.load()).waiting_requests == 5
    [flood] = (await served.client.admin.stats("flood")).tenants
    assert (flood.running_requests, flood.waiting_requests) == (0, 5)
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)


async def test_nobody_waits_for_a_grammar_when_the_server_stops(
    served: ModelServing, limited: Callable[[TrialLimits], LLGuidanceCompiler]
) -> None:
    compiler = await asyncio.to_thread(limited, TrialLimits(cpu_seconds=600.0, num_bytes=2 << 30))
    assert compiler._trials is not None
    slow = asyncio.create_task(served.client.complete(PROMPT, grammar=conjunction(40)))
    async with asyncio.timeout(PATIENCE):
        while not compiler._trials._processes:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        [process] = compiler._trials._processes
        await served.client.admin.drain()
        with pytest.raises(errors.Unavailable, match="the server is shutting down") as error:
            await slow
    assert error.value.reason == errors.Reason.DRAINING
    assert process.returncode is not None
    assert not compiler._trials._processes


# -- the rest, in one effect each -------------------------------------------------------------------------------------


async def test_bias_and_allowed_tokens(served: ModelServing) -> None:
    biased = await served.client.complete(PROMPT, temperature=0.0, max_tokens=6, logit_bias={77: 100.0})
    assert biased.token_ids == (77,) * 6
    allowed = await served.client.complete(PROMPT, temperature=1.0, max_tokens=6, allowed_token_ids=[77, 78])
    assert set(allowed.token_ids) <= {77, 78}
    word = biased.text[: len(biased.text) // 6]
    other = await served.client.complete(
        PROMPT, temperature=0.0, max_tokens=6, logit_bias={77: 100.0}, bad_words=[word]
    )
    assert 77 not in other.token_ids


async def odds(served: ModelServing, **penalty: Any) -> float:
    """Log odds of token 77 to 78, the only ones allowed, behind a completion that consists of 77."""
    completion = await served.client.complete(
        (5, 9),
        temperature=0.0,
        max_tokens=2,
        allowed_token_ids=[77, 78],
        logit_bias={77: 50.0},
        logprobs=2,
        logprobs_mode="processed",
        **penalty,
    )
    assert completion.token_ids == (77, 77)
    told = completion.logprobs[1]
    of = dict(zip(told.top_token_ids, told.top_logprobs, strict=True))
    return of[77] - of[78]


async def test_penalties_shift_the_odds(served: ModelServing) -> None:
    plain = await odds(served)
    assert plain - await odds(served, presence_penalty=1.5) == pytest.approx(1.5, abs=1e-4)
    assert plain - await odds(served, frequency_penalty=-0.25) == pytest.approx(-0.25, abs=1e-4)
    assert plain - await odds(served, repetition_penalty=2.0) > 20, "half of a logit above 40"


async def test_min_tokens_holds_the_end_back(served: ModelServing) -> None:
    options: GenerateOptions = {"temperature": 0.0, "max_tokens": 9, "logit_bias": {END_OF_TEXT_ID: 100.0}}
    completion = await served.client.complete(PROMPT, **options, min_tokens=4)
    assert completion.finished.reason is FinishReason.EOS
    assert len(completion.token_ids) == 5
    assert completion.token_ids.index(END_OF_TEXT_ID) == 4


@pytest.mark.parametrize(("shown", "text"), [(False, ""), (True, 3 * END_OF_TEXT)])
async def test_special_tokens_on_request(served: ModelServing, shown: bool, text: str) -> None:
    options: GenerateOptions = {"temperature": 0.0, "max_tokens": 3, "logit_bias": {END_OF_TEXT_ID: 100.0}}
    completion = await served.client.complete(PROMPT, **options, ignore_eos=True, include_special_tokens=shown)
    assert completion.token_ids == (END_OF_TEXT_ID,) * 3
    assert completion.text == text


@pytest.mark.parametrize("rule", ["token_wise", "block"])
async def test_verification_rules(served: ModelServing, rule: Any) -> None:
    completion = await served.client.complete(
        PROMPT, temperature=1.0, max_tokens=20, ignore_eos=True, verification=rule, min_draft_tokens=2
    )
    assert len(completion.token_ids) == 20
