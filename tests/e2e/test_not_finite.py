"""Logits that are no numbers end the request that has them, and nobody else notices."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.client import RpcError
from paceline.core.method import Method
from paceline.core.params import LogprobsParams, SamplingParams, SpeculationParams, StopParams, Verification
from paceline.core.plan import StepPlan
from paceline.engine import Engine, GenerationRequest, StepLoop
from paceline.errors import FailedPrecondition, NotFinite, PacelineError
from paceline.runner import ModelRunner
from paceline.runner.device_runner import DeviceRunner
from paceline.runner.device_step import Part
from paceline.runner.drafter import Draft
from paceline.wiring import EngineSettings, build_engine
from support.backends import ENGINES
from support.model_serving import model_serving
from support.native import device_of
from support.pairs import tiny_pair

BAD, WORSE = 301, 302  # tokens that the model reads as NaN, and as infinity
TOKENS = 10
BLOCK = 8
PROMPTS = [(3, 1, 4, 1, 5), (9,), tuple(range(1, 20))]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    sound, draft = tiny_pair(folder)
    target = folder / "damaged"
    shutil.copytree(sound, target)
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD, 5] = torch.nan
    weights["model.embed_tokens.weight"][WORSE, 5] = torch.inf
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target, draft


@cache
def make(pair: tuple[Path, Path], backend: str, **settings: Any) -> Engine:
    wanted = {
        **{"dtype": "float32", "max_model_len": 64, "block_size": BLOCK, "kv_cache_memory": 1 << 20, "depth": "3"},
        "device": device_of(backend),
        **settings,
    }
    return build_engine(EngineSettings(str(pair[0]), str(pair[1]), backend=backend, **wanted))


def request(prompt: tuple[int, ...], sampling: SamplingParams = GREEDY, **fields: Any) -> GenerationRequest:
    # Those of some depth, so that runs have several rows.
    depth = {"speculation": SpeculationParams(min_depth=2, max_depth=3)}
    return GenerationRequest(prompt, sampling, StopParams(max_tokens=TOKENS, ignore_eos=True), **(depth | fields))


def run(engine: Engine, requests: list[GenerationRequest]) -> list[list[int] | PacelineError]:
    """What each came to."""
    ids = [engine.add(one) for one in requests]
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
    errors: dict[int, PacelineError] = {}
    steps = StepLoop(engine)
    while (done := steps.step()) is not None:
        for output in done.outputs:
            tokens[output.request_id].extend(output.token_ids)
        for request_id, error in engine.take_refused():
            assert request_id not in errors
            errors[request_id] = error
        engine.check_invariants()
    errors.update(engine.take_refused())
    return [errors.get(request_id, tokens[request_id]) for request_id in ids]


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("bad", [BAD, WORSE])
def test_it_ends_alone(pair: tuple[Path, Path], backend: str, bad: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(pair, backend)
    neighbours = [request(prompt) for prompt in PROMPTS]
    expected = run(engine, neighbours)
    free = engine.scheduler.kv.num_free_blocks
    sampled = request((2, bad), SamplingParams(temperature=0.8))
    seeded = request((2, bad), SamplingParams(seed=1), logprobs=LogprobsParams(completion=1, prompt=1))
    with caplog.at_level(logging.ERROR, "paceline"):
        found = run(engine, [neighbours[0], request((7, bad, 8)), neighbours[1], sampled, seeded, neighbours[2]])
    errors = [found.pop(4), found.pop(3), found.pop(1)]
    assert found == expected
    assert all(isinstance(error, NotFinite) for error in errors), errors
    assert "logits that are not finite" in str(errors[0])
    assert len(caplog.records) == 3, "each is told once"
    assert engine.scheduler.kv.num_free_blocks == free
    assert run(engine, neighbours) == expected, "in the blocks that it had"


def test_it_ends_alone_where_nobody_waits_for_the_device(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A step with it is launched already when the one before tells of it, and the next one releases it."""
    engine = make(pair, "triton")
    [expected] = run(make(pair, "torch"), [request((9,))])
    sampled = request((2, BAD), SamplingParams(temperature=0.8))
    with caplog.at_level(logging.ERROR, "paceline"):
        found = run(engine, [request((WORSE, 8)), request((9,)), sampled])
    assert [type(one) for one in (found[0], found[2])] == [NotFinite] * 2
    assert found[1] == expected
    assert len(caplog.records) == 2, "each is told once"


def test_what_fails_while_others_wait_for_it_writes_nowhere_else(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step with it is through only when the next one, which the host has a part in, waits for it."""
    engine = make(pair, "triton")
    [expected] = run(make(pair, "torch"), [request(PROMPTS[2])])
    launch = DeviceRunner._launch

    def checked(runner: DeviceRunner, plan: StepPlan, parts: list[Part], beside: Sequence[Part] = ()) -> Any:
        for part in (*parts, *beside):
            sequence = part.seat.sequence
            rows = sequence.num_computed + part.work.num_rows
            assert runner.host.failure(part.work.request_id) is None
            assert rows <= len(sequence.block_ids) * BLOCK, part.work
        return launch(runner, plan, parts, beside)

    monkeypatch.setattr(DeviceRunner, "_launch", checked)
    alone = {"speculation": SpeculationParams(Method.NONE)}
    neighbour = engine.add(request(PROMPTS[2], **alone))
    newcomers = {
        3: request((*range(3, 3 + BLOCK - 1), BAD), **alone),  # whose next token needs another block
        4: request((5, 6), logprobs=LogprobsParams(completion=1), **alone),
    }
    steps, tokens, refused = StepLoop(engine), list[int](), list[int]()
    for number in itertools.count(1):
        done = steps.step()
        if done is None:
            break
        tokens += [token for output in done.outputs if output.request_id == neighbour for token in output.token_ids]
        refused += [request_id for request_id, _ in engine.take_refused()]
        engine.check_invariants()
        if number in newcomers:
            engine.add(newcomers[number])
    assert refused == [neighbour + 1]
    assert tokens == expected


@pytest.mark.parametrize("backend", ENGINES)
def test_in_the_middle_of_a_completion(pair: tuple[Path, Path], backend: str) -> None:
    """Its own token breaks it; what came before is good."""
    only_bad = SamplingParams(temperature=0.0, allowed_token_ids=(BAD,))
    [error] = run(make(pair, backend), [request((5, 6), only_bad)])
    assert isinstance(error, NotFinite)


@pytest.mark.parametrize("backend", ENGINES)
def test_nobody_finds_its_blocks(pair: tuple[Path, Path], backend: str) -> None:
    """A prompt read in parts has told of the first before anybody looks at logits."""
    engine = make(pair, backend, prefix_cache="shared", long_prefill_threshold=BLOCK, max_num_batched_tokens=64)
    cache, good = engine.scheduler.kv.cache, tuple(range(40, 40 + 3 * BLOCK))
    [expected] = run(engine, [request(good)])
    num_known = len(cache)
    assert num_known > 0
    bad = (*range(100, 100 + BLOCK), BAD, *good)
    assert isinstance(run(engine, [request(bad), request(good)])[0], NotFinite)
    assert len(cache) == num_known, "those of the sound prompt, and no others"
    # The next has the blocks that are free now, those of the bad one first.
    assert run(engine, [request(good[1:]), request(good)])[1] == expected
    [error] = run(engine, [request(bad)])
    assert isinstance(error, NotFinite)


def test_nobody_finds_the_blocks_of_several_that_begin_alike(pair: tuple[Path, Path]) -> None:
    """The first that fails takes away those that they share, which those of the others stand behind."""
    engine = make(pair, "torch", prefix_cache="shared", long_prefill_threshold=BLOCK, max_num_batched_tokens=64)
    num_known = len(engine.scheduler.kv.cache)
    begin = (BAD, *range(240, 240 + BLOCK - 1))
    both = [request((*begin, *range(start, start + 2 * BLOCK + 1))) for start in (20, 60)]
    assert [type(one) for one in run(engine, both)] == [NotFinite] * 2
    assert len(engine.scheduler.kv.cache) == num_known


def test_blocks_that_were_left_by_one_that_was_aborted(pair: tuple[Path, Path]) -> None:
    """Whoever finds them fails, and is the last to find them."""
    engine = make(pair, "torch", prefix_cache="shared", long_prefill_threshold=BLOCK, max_num_batched_tokens=64)
    bad = (BAD, *range(200, 200 + 3 * BLOCK))
    request_id = engine.add(request(bad))
    StepLoop(engine).step()
    engine.abort(request_id)
    cache = engine.scheduler.kv.cache
    num_known = len(cache)
    assert isinstance(run(engine, [request(bad)])[0], NotFinite)
    assert len(cache) < num_known


def test_drafts_that_are_rejected_break_nothing(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind a rejection are nobody's. In torch's attention they reach those before them: 0 times NaN."""
    engine = make(pair, "native")
    assert isinstance(engine.runner, ModelRunner)
    expected = run(engine, [request(prompt) for prompt in PROMPTS])
    drafter, drafted = engine.runner.drafters[Method.DRAFT_MODEL], 0
    original = drafter.propose

    def bad_drafts(planned: Any) -> list[Draft]:
        nonlocal drafted
        drafts = original(planned)
        for draft in drafts:
            drafted += len(draft.token_ids)
            draft.token_ids[:] = [BAD] * len(draft.token_ids)
        return drafts

    monkeypatch.setattr(drafter, "propose", bad_drafts)
    assert run(engine, [request(prompt) for prompt in PROMPTS]) == expected
    assert drafted > 0


@pytest.fixture(scope="module")
def only_draft_damaged(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What the draft model computes behind WORSE is no number; its head is another matrix."""
    folder = tmp_path_factory.mktemp("damaged draft")
    sound, draft = tiny_pair(folder)
    damage(draft, "model.embed_tokens.weight", torch.inf, (WORSE, 5))
    return sound, draft


def damage(checkpoint: Path, name: str, value: float, where: Any = ...) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights[name][where] = value
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("backend", ENGINES)
def test_a_draft_model_that_computes_no_numbers_changes_no_output(
    only_draft_damaged: tuple[Path, Path], backend: str
) -> None:
    engine, prompt = make(only_draft_damaged, backend, depth="auto"), (2, WORSE)
    for sampling in (GREEDY, SamplingParams(seed=1)):
        alone = request(prompt, sampling, speculation=SpeculationParams(Method.NONE))
        assert run(engine, [request(prompt, sampling)]) == run(engine, [alone])
    for rule in (Verification.TOKEN_WISE, Verification.BLOCK):
        drafting = SpeculationParams(Method.DRAFT_MODEL, min_depth=2, max_depth=3, verification=rule)
        found = run(engine, [request(prompt, SamplingParams(), speculation=drafting)] * 100)
        tokens = [token for one in found if isinstance(one, list) for token in one]
        assert len(tokens) == 100 * TOKENS
        assert tokens.count(0) < len(tokens) / 10, "which a row without numbers has for a draft"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_draft_model_that_computes_no_numbers_at_all_is_refused(
    only_draft_damaged: tuple[Path, Path], tmp_path: Path, value: float
) -> None:
    draft = Path(shutil.copytree(only_draft_damaged[1], tmp_path / "draft"))
    damage(draft, "model.norm.weight", value)
    with pytest.raises(FailedPrecondition, match=r"the draft model .*draft is of no use: .* not finite .* damaged"):
        build_engine(EngineSettings(only_draft_damaged[0], draft, device="cpu", kv_cache_memory=1 << 20))


def test_a_model_that_computes_no_numbers_at_all_is_not_served(
    pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even measured: each of the steps that are would fail, and tell so in the log."""
    target = shutil.copytree(pair[0], tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    weights["model.norm.weight"][:] = torch.nan
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FailedPrecondition, match=r"its first request fails: .* not finite .* weights are damaged"):
        build_engine(EngineSettings(target, device="cpu", backend="torch", kv_cache_memory=1 << 20))
    failing = [record for record in caplog.records if "fails in a step" in record.getMessage()]
    assert len(failing) == 3, "one for each kind of request"


async def test_a_client_is_told(pair: tuple[Path, Path]) -> None:
    async with model_serving(str(pair[0]), draft=str(pair[1]), max_model_len=64) as serving:
        with pytest.raises(RpcError) as caught:
            await serving.client.complete([5, BAD], max_tokens=TOKENS, temperature=0.0)
        assert caught.value.code is grpc.StatusCode.INTERNAL
        assert caught.value.reason == "NOT_FINITE"
        assert "not finite" in str(caught.value)
        done = await serving.client.complete(list(PROMPTS[0]), max_tokens=TOKENS, temperature=0.0)
        assert len(done.token_ids) > 0
        await serving.until_idle()
        outcomes = [usage.outcomes for usage in serving.engine.engine.usage.report().values()]
        assert outcomes == [{"INTERNAL": 1, "OK": 1}]
