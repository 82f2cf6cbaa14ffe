"""Steps launched ahead on the device: the same output as step by step in torch, whatever is drafted."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import wiring
from paceline.core.depth import Chosen, DepthCandidate, StepLoad, within_bounds
from paceline.core.depth_policy import DepthPolicy
from paceline.core.grammar import GrammarKind, GrammarSpec
from paceline.core.method import Method
from paceline.core.params import (
    Constraints,
    LogprobsParams,
    SamplingParams,
    SequenceParams,
    SpeculationParams,
    StopParams,
    Verification,
)
from paceline.core.plan import SequenceResult, StepPlan
from paceline.engine import Engine, GenerationRequest, Output, StepLoop
from paceline.errors import FailedPrecondition
from paceline.runner import ModelRunner
from paceline.runner.device_passes import DevicePasses
from paceline.runner.device_runner import DeviceRunner
from paceline.runner.device_step import Part
from paceline.runner.seats import is_plain
from paceline.speculation.ngram_index import NgramIndex
from paceline.wiring import EngineSettings, build_engine
from paceline_kernels import sampling
from paceline_kernels.triton import sampling as triton_sampling
from paceline_kernels.triton.state import Column, SequenceTable
from support import quick_start
from support.pairs import letter_pair, tiny_pair

MAX_LEN = 64
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair(tmp_path_factory.mktemp("device"), noise=0.01)


def build(pair: tuple[Path, Path], backend: str, **settings: object) -> Engine:
    common = {"dtype": "float32", "max_model_len": MAX_LEN, "block_size": 8, "kv_cache_memory": 1 << 21, "depth": "3"}
    paths = {"model": str(pair[0]), "draft": str(pair[1])}
    return build_engine(EngineSettings(backend=backend, **(paths | common | settings)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(pair: tuple[Path, Path]) -> Engine:
    return build(pair, "triton")


@pytest.fixture(scope="module")
def oracle(pair: tuple[Path, Path]) -> Engine:
    return build(pair, "torch", depth="off")


@dataclass
class Text:
    token_ids: list[int]
    accepted: int = 0
    drafted: int = 0


def request(number: int, sampling: SamplingParams, method: Method, depth: int, **more: object) -> GenerationRequest:
    choose = random.Random(number)
    period = [choose.randrange(1, 200) for _ in range(4)]  # n-grams have something to find
    return GenerationRequest(
        prompt=tuple(period * 3)[: choose.randint(1, 12)],
        sampling=sampling,
        stop=StopParams(max_tokens=choose.randint(4, 8), ignore_eos=True),
        speculation=SpeculationParams(method=method, min_depth=depth, max_depth=depth),
        **more,  # type: ignore[arg-type]
    )


def drive(engine: Engine) -> Iterator[list[Output]]:
    """Until no request is live; the books are checked after every step."""
    steps = StepLoop(engine)
    while (done := steps.step()) is not None:
        yield done.outputs
        engine.check_invariants()


def generate(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Text]:
    ids = [engine.add(one) for one in requests]
    texts = {request_id: Text([]) for request_id in ids}
    for outputs in drive(engine):
        for output in outputs:
            texts[output.request_id].token_ids.extend(output.token_ids)
            if output.stats is not None:
                texts[output.request_id].accepted = output.stats.accepted_tokens
                texts[output.request_id].drafted = output.stats.drafted_tokens
    return [texts[request_id] for request_id in ids]


def off(one: GenerationRequest) -> GenerationRequest:
    return GenerationRequest(
        prompt=one.prompt,
        sampling=one.sampling,
        stop=one.stop,
        speculation=SpeculationParams(method=Method.NONE),
        grammar=one.grammar,
    )


def counted_steps(patch: pytest.MonkeyPatch) -> Counter[str]:
    """From now on: "device", those that were launched there, and "host", those in which it had a part."""
    steps: Counter[str] = Counter()
    launch, compute = DeviceRunner._launch, ModelRunner.compute

    def on_device(runner: DeviceRunner, *args: Any) -> Any:
        steps["device"] += 1
        return launch(runner, *args)

    def on_host(runner: ModelRunner, plan: StepPlan, *logits_of: Any) -> Any:
        steps["host"] += bool(plan.work)
        return compute(runner, plan, *logits_of)

    patch.setattr(DeviceRunner, "_launch", on_device)
    patch.setattr(ModelRunner, "compute", on_host)
    return steps


MIXES = {
    "greedy": [(GREEDY, Method.DRAFT_MODEL, depth) for depth in (0, 1, 3)],
    "seeded": [
        (SamplingParams(seed=1), Method.DRAFT_MODEL, 3),
        (SamplingParams(seed=2, temperature=0.7, top_k=20, top_p=0.9), Method.DRAFT_MODEL, 2),
        (SamplingParams(seed=3, min_p=0.05, typical_p=0.95), Method.NONE, 0),
    ],
    "n-grams": [(GREEDY, Method.NGRAM, 4), (SamplingParams(seed=4), Method.NGRAM, 2), (GREEDY, Method.DRAFT_MODEL, 2)],
    "beside sampled ones": [
        (GREEDY, Method.DRAFT_MODEL, 3),
        (SamplingParams(), Method.DRAFT_MODEL, 3),
        (SamplingParams(seed=5), Method.NONE, 0),
    ],
}


@pytest.mark.parametrize("mix", MIXES)
def test_texts_are_those_without_drafts(engine: Engine, oracle: Engine, mix: str) -> None:
    requests = [request(i, *what) for i, what in enumerate(MIXES[mix])]
    found, expected = generate(engine, requests), generate(oracle, [off(one) for one in requests])
    for one, ours, theirs in zip(requests, found, expected, strict=True):
        assert len(ours.token_ids) == one.stop.max_tokens
        if one.sampling.greedy or one.sampling.seed is not None:
            assert ours.token_ids == theirs.token_ids, one
    assert sum(text.accepted for text in found) > 0


def test_sequences_that_ask_the_host_go_beside_the_others(engine: Engine, oracle: Engine) -> None:
    requests = [
        request(0, GREEDY, Method.DRAFT_MODEL, 3),
        request(1, SamplingParams(temperature=0.0, bad_words=("a", "the")), Method.DRAFT_MODEL, 2),
        request(2, SamplingParams(seed=7), Method.DRAFT_MODEL, 2, logprobs=LogprobsParams(completion=2)),
        request(4, SamplingParams(temperature=0.0, frequency_penalty=0.5), Method.DRAFT_MODEL, 2),
        request(3, GREEDY, Method.NONE, 0),
    ]
    found, expected = generate(engine, requests), generate(oracle, [off(one) for one in requests])
    assert [text.token_ids for text in found] == [text.token_ids for text in expected]


EDITS: list[tuple[SamplingParams, Method, int]] = [
    (SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25), Method.DRAFT_MODEL, 3),
    (SamplingParams(temperature=0.0, repetition_penalty=1.5), Method.NGRAM, 3),
    (SamplingParams(seed=6, repetition_penalty=1.2, logit_bias=((7, 2.0), (11, -1.0))), Method.DRAFT_MODEL, 2),
    (SamplingParams(seed=7, temperature=0.7, top_k=30, presence_penalty=-0.5), Method.NONE, 0),
    (SamplingParams(temperature=0.0, logit_bias=tuple((token, 0.01 * token) for token in range(100))), Method.NGRAM, 2),
]


@pytest.mark.parametrize("beside", [None, LogprobsParams(completion=0)])
def test_edited_logits_need_no_host(
    engine: Engine, oracle: Engine, monkeypatch: pytest.MonkeyPatch, beside: LogprobsParams | None
) -> None:
    """Beside one that does, for a while, they stay on the device, and wait for it."""
    logits_of = DevicePasses.logits

    def together(passes: DevicePasses, first: int, end: int) -> Any:
        steps["together"] += 1
        steps["of the host"] += end - first
        return logits_of(passes, first, end)

    requests = [
        replace(request(i, *what), stop=StopParams(max_tokens=9, ignore_eos=True)) for i, what in enumerate(EDITS)
    ]
    if beside is not None:
        short = StopParams(max_tokens=3, ignore_eos=True)
        requests.append(replace(request(9, GREEDY, Method.NONE, 0, logprobs=beside), stop=short))
    expected = generate(oracle, [off(one) for one in requests])
    # Its first two tokens would end it, were they not forbidden so early.
    stops = tuple(expected[0].token_ids[:2])
    requests[0] = replace(requests[0], stop=StopParams(max_tokens=9, token_ids=stops, min_tokens=4))
    expected[0] = generate(oracle, [off(requests[0])])[0]
    with monkeypatch.context() as patch:
        steps = counted_steps(patch)
        patch.setattr(DevicePasses, "logits", together)
        found = generate(engine, requests)
    assert [text.token_ids for text in found] == [text.token_ids for text in expected]
    assert len(found[0].token_ids) >= 4
    assert sum(text.accepted for text in found) > 0
    assert steps["device"] > 3
    assert (steps["host"] > 1) == (beside is not None)
    assert steps["together"] == steps["host"]
    assert steps["of the host"] == (0 if beside is None else 3), "a row of its own for each token"
    generate(engine, requests[-1:])
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    assert not runner._launched, "nor where the host has all of a step"


@pytest.mark.parametrize("ends", ["before", "behind", "rows"])
def test_where_the_host_has_to_compute_its_own_logits(
    engine: Engine, oracle: Engine, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Memory ends before the shared step is launched, or behind it, or a step has more rows than logits are kept of."""
    runner, calls = engine.runner, itertools.count()
    assert isinstance(runner, DeviceRunner)
    owner, name = {
        "before": (runner._passes, "verify"),
        "behind": (runner.host.verifier, "verify"),
        "rows": (runner._passes, "bring_back"),
    }[ends]
    whole = getattr(owner, name)

    def sometimes(*args: object) -> object:
        # Behind, it is enough for one: whoever does not fit alone fails.
        if next(calls) % 2 == 0 and (ends == "before" or (ends == "behind" and len(args[1]) > 1)):  # type: ignore[arg-type]
            raise torch.OutOfMemoryError("made up")
        return whole(*args)

    monkeypatch.setattr(owner, name, sometimes)
    if ends == "rows":
        monkeypatch.setattr(DevicePasses, "most_logits", 2)
    wanted = LogprobsParams(completion=1)
    requests = [
        request(0, GREEDY, Method.DRAFT_MODEL, 2),
        request(1, GREEDY, Method.DRAFT_MODEL, 2, logprobs=wanted),
        request(2, SamplingParams(seed=7), Method.NGRAM, 2, logprobs=wanted),
        request(3, SamplingParams(temperature=0.0, presence_penalty=0.5), Method.NONE, 0),
    ]
    found, expected = generate(engine, requests), generate(oracle, [off(one) for one in requests])
    assert [text.token_ids for text in found] == [text.token_ids for text in expected]
    assert next(calls) > 4


def test_what_a_grammar_forces_is_verified_beside_the_others(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    pair = letter_pair(tmp_path, "abcdefgh ", noise=0.01)
    choices = ("abc defgh abc", "bad cafe bad", "cab")
    requests = [
        GenerationRequest(
            prompt=(1, 2, 3, 4)[: i + 1],
            sampling=GREEDY,
            stop=StopParams(max_tokens=12, ignore_eos=i == 1),
            speculation=SpeculationParams(min_depth=2, max_depth=3),
            grammar=None if i == 1 else GrammarSpec(GrammarKind.CHOICE, choices=choices[i // 2 :]),
        )
        for i in range(3)
    ]
    engine = build(pair, "triton")
    found, expected = (
        generate(engine, requests),
        generate(build(pair, "torch", depth="off"), [off(r) for r in requests]),
    )
    assert [text.token_ids for text in found] == [text.token_ids for text in expected]
    assert found[0].accepted > 4, "all but where there is a choice is forced"


@pytest.mark.parametrize("vocab", [3, 600])
def test_what_edits_too_much_is_left_to_the_host(vocab: int) -> None:
    """More tokens than the table has room for, or all that there are."""
    biased = tuple((token, 1.0) for token in range(vocab))
    assert is_plain(SequenceParams(SamplingParams(logit_bias=biased[:2])), vocab)
    assert not is_plain(SequenceParams(SamplingParams(logit_bias=biased)), vocab)
    ends = Constraints(min_tokens=2, stop_token_ids=tuple(range(vocab)))
    assert not is_plain(SequenceParams(constraints=ends), vocab)


def test_steps_of_the_host_sample_by_the_same_kernels(
    engine: Engine, oracle: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the logits lie on a GPU; here it is pretended."""
    wanted = LogprobsParams(completion=0)
    cuts = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
    requests = [
        request(0, GREEDY, Method.DRAFT_MODEL, 3, logprobs=wanted),
        request(1, SamplingParams(seed=7, **cuts), Method.DRAFT_MODEL, 2, logprobs=wanted),
        request(2, SamplingParams(seed=8), Method.NONE, 0),
        request(3, SamplingParams(**cuts), Method.DRAFT_MODEL, 2, logprobs=wanted),
    ]
    launched: list[str] = []
    launch = triton_sampling._launch
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "_on_gpu", lambda logits: True)
        patch.setattr(
            triton_sampling,
            "_launch",
            lambda kernel, *a, **k: (launched.append(kernel.__name__), launch(kernel, *a, **k)),
        )
        found = generate(engine, requests)
    expected = generate(oracle, [off(one) for one in requests])
    assert [text.token_ids for text in found[:3]] == [text.token_ids for text in expected[:3]]
    assert {"_argmax_kernel", "_distribution_kernel", "_gumbel_kernel", "_draw_kernel"} <= set(launched)


@pytest.mark.parametrize("alone", [{"draft": "none"}, {"depth": "off"}])
def test_without_a_draft_model(pair: tuple[Path, Path], oracle: Engine, alone: dict[str, str]) -> None:
    engine = build(pair, "triton", **alone)
    methods = [Method.NGRAM, Method.NONE] if "draft" in alone else [Method.NONE]
    requests = [request(i, GREEDY, method, 2 * (method is Method.NGRAM)) for i, method in enumerate(methods)]
    requests.append(request(3, SamplingParams(), methods[-1], 0))
    found, expected = generate(engine, requests), generate(oracle, [off(one) for one in requests])
    assert [text.token_ids for text in found[:-1]] == [text.token_ids for text in expected[:-1]]


def test_a_step_without_memory_is_computed_again(
    engine: Engine, oracle: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps do not fit on the device as they are launched: they go the general way, with blocks and seats as they
    were.
    """
    runner, calls = engine.runner, itertools.count()
    assert isinstance(runner, DeviceRunner)
    whole = runner._passes.verify

    def sometimes(*args: object) -> None:
        if next(calls) % 3 == 1:
            raise torch.OutOfMemoryError("made up")
        whole(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(runner._passes, "verify", sometimes)
    requests = [request(i, GREEDY, Method.DRAFT_MODEL, depth) for i, depth in enumerate((0, 2, 3))]
    found, expected = generate(engine, requests), generate(oracle, [off(one) for one in requests])
    assert [text.token_ids for text in found] == [text.token_ids for text in expected]
    assert next(calls) > 3


class AnyDepth(DepthPolicy):
    """Another method and depth for each request in every step."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self.depths: Counter[int] = Counter()

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        chosen = []
        for candidate in candidates:
            offer = self._random.choice(candidate.offers)
            chosen.append(within_bounds(candidate, offer, self._random.choice((0, 0, 1, 2, 3))))
            self.depths[chosen[-1].depth] += 1
        return chosen


def test_draft_models_catch_up_with_whatever_was_planned(tmp_path: Path) -> None:
    """Depths and methods that change with every step, few rows, and now and then a step that goes the general way. A
    draft model that is the target is always right, if it has read all that it should have.
    """
    pair = tiny_pair(tmp_path, noise=0.0)
    engine, oracle = build(pair, "triton", max_num_batched_tokens=12, max_num_seqs=4), build(pair, "torch", depth="off")
    engine.scheduler.speculation.policy = policy = AnyDepth()
    requests = [
        GenerationRequest(
            prompt=tuple(range(10 * i + 1, 10 * i + 3)) * (2 + 4 * i),
            sampling=GREEDY,
            logprobs=LogprobsParams(completion=0 if i == 2 else None),
            stop=StopParams(max_tokens=4 if i == 2 else 14, ignore_eos=True),
            speculation=SpeculationParams(max_depth=3),
        )
        for i in range(4)
    ]
    found, expected = generate(engine, requests), generate(oracle, [off(one) for one in requests])
    assert [text.token_ids for text in found] == [text.token_ids for text in expected]
    assert set(policy.depths) == {0, 1, 2, 3}
    counts = engine.scheduler.speculation.drafters[Method.DRAFT_MODEL, Verification.GREEDY].counts
    assert counts.accepted == counts.drafted > 10


class Mirrors:
    """Compares what the table holds behind each step with what the host makes of its result. Without a GPU, where steps
    are through once they are launched.
    """

    def __init__(self, runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compared = Counter[tuple[Method, bool]]()  # by method, with drafts or without
        launch, commit, tables = runner._launch, runner._commit, runner._seats.table
        seen: dict[int, tuple[torch.Tensor, ...]] = {}

        def launched(plan: StepPlan, *parts: Any) -> object:
            step = launch(plan, *parts)
            for part in step.parts:
                seen[id(part)] = tuple(
                    table.clone() for table in (tables.facts, tables.texts, tables.proposals, tables.counts)
                )
            return step

        def committed(part: Part, *args: Any) -> SequenceResult:
            before = list(part.seat.sequence.token_ids)
            result = commit(part, *args)
            (facts, texts, proposals, counts), row = seen.pop(id(part)), part.seat.index
            sequence, work = part.seat.sequence, part.work
            assert facts[row, Column.COMPUTED] == sequence.num_computed, work
            assert facts[row, Column.DRAFT_COMPUTED] == sequence.num_draft_computed, work
            assert texts[row, : len(sequence)].tolist() == sequence.token_ids, work
            if sequence.counts is not None:
                output = sequence.output
                expected = [2 * output.count(t) + (t in sequence.token_ids) for t in range(counts.shape[1])]
                assert counts[row].tolist() == expected, work
            if work.samples and work.scores_ngram:
                index = NgramIndex()
                index.read(sequence.token_ids)
                assert result.match == index.match(sequence.token_ids) == facts[row, Column.MATCH], work
                count = proposals.shape[1] if result.match else 0
                assert proposals[row, :count].tolist() == index.continuation(sequence.token_ids, count)
                index = NgramIndex()
                index.read(before)
                drafted = work.num_drafts and work.method is Method.NGRAM
                assert result.scored == (() if drafted else index.score(before, result.token_ids)), work
            self.compared[work.method, work.num_drafts > 0] += 1
            return result

        monkeypatch.setattr(runner, "_launch", launched)
        monkeypatch.setattr(runner, "_commit", committed)


def test_the_table_and_its_mirrors_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever drafts, at any depth, with prompts in chunks, and where memory ends before or behind the verdicts."""
    if torch.cuda.is_available():
        pytest.skip("a step is not through when it is launched")
    pair = letter_pair(tmp_path, "abcde", noise=0.0)
    engine, oracle = build(pair, "triton", max_num_batched_tokens=12, max_num_seqs=4), build(pair, "torch", depth="off")
    engine.scheduler.config = replace(engine.scheduler.config, hybrid=True)
    engine.scheduler.speculation.policy = AnyDepth()
    runner, calls = engine.runner, itertools.count()
    assert isinstance(runner, DeviceRunner)
    mirrors, whole = Mirrors(runner, monkeypatch), runner._passes.verify

    def verify(*args: Any) -> None:
        number = next(calls)
        if number % 8 == 2:
            raise torch.OutOfMemoryError("made up")
        whole(*args)
        if number % 8 == 6:
            raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(runner._passes, "verify", verify)
    requests = [
        GenerationRequest(
            prompt=tuple(range(1, 2 + i % 4)) * (1 + 2 * i),
            sampling=SamplingParams(temperature=0.0, frequency_penalty=0.5 * (i % 2)),
            logprobs=LogprobsParams(completion=0 if i == 2 else None),
            stop=StopParams(max_tokens=3 if i == 2 else 16, ignore_eos=True),
            speculation=SpeculationParams(max_depth=3),
        )
        for i in range(6)
    ]
    found, expected = generate(engine, requests), generate(oracle, [off(one) for one in requests])
    assert [text.token_ids for text in found] == [text.token_ids for text in expected]
    for method in (Method.DRAFT_MODEL, Method.NGRAM):
        counts = engine.scheduler.speculation.drafters[method, Verification.GREEDY].counts
        assert counts.accepted > 5, (method, counts, mirrors.compared)
        assert mirrors.compared[method, True] > 2, mirrors.compared


def test_preempted_sequences_come_back(pair: tuple[Path, Path], engine: Engine, oracle: Engine) -> None:
    per_block = (1 << 21) // engine.scheduler.config.num_blocks
    small = build(pair, "triton", kv_cache_memory=per_block * 4, max_model_len=32, max_num_seqs=3)
    requests = [
        GenerationRequest(
            prompt=tuple(range(i + 1, i + 8)),
            sampling=GREEDY,
            stop=StopParams(max_tokens=6, ignore_eos=True),
            speculation=SpeculationParams(method=Method.DRAFT_MODEL, min_depth=2, max_depth=2),
        )
        for i in range(3)
    ]
    found, expected = generate(small, requests), generate(oracle, [off(one) for one in requests])
    assert [text.token_ids for text in found] == [text.token_ids for text in expected]


def test_aborted_sequences_leave_their_seats(engine: Engine) -> None:
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    ids = [engine.add(request(i, GREEDY, Method.DRAFT_MODEL, 2)) for i in range(3)]
    for number, _ in enumerate(drive(engine)):
        if number == 2:
            engine.abort(ids[0])
            engine.abort(ids[1])
    assert generate(engine, [request(5, GREEDY, Method.DRAFT_MODEL, 1)])[0].token_ids
    assert len(runner._seats._taken) <= 1  # whom the next plan releases


def test_the_warm_up_takes_both_ways(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the device, and those of the host, with every kernel that these have."""
    launched: set[tuple[str, bool, bool]] = set()
    launch_kernel = triton_sampling._launch

    def launches(kernel: Any, *args: Any, **constants: bool) -> None:
        launched.add((kernel.__name__, constants.get("TRUNCATE", False), constants.get("NORMALISE", False)))
        launch_kernel(kernel, *args, **constants)

    steps = counted_steps(monkeypatch)
    monkeypatch.setattr(sampling, "_on_gpu", lambda logits: True)
    monkeypatch.setattr(triton_sampling, "_launch", launches)
    monkeypatch.setattr(wiring, "_warm_up", quick_start.warm_up)
    build(pair, "triton")
    assert steps["device"] > 2
    assert steps["host"] > 2
    distributions = {("_distribution_kernel", *flags) for flags in ((True, False), (False, True), (True, True))}
    others = {(f"_{name}_kernel", False, False) for name in ("argmax", "gumbel", "draw")}
    assert launched == distributions | others


@pytest.mark.parametrize("ends", ["table", "graphs"])
def test_a_start_without_memory_is_told_in_words(
    ends: str, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("made up")

    owner, name = (SequenceTable, "allocate") if ends == "table" else (DeviceRunner, "record")
    monkeypatch.setattr(owner, name, fail)
    words = rf"{ends}.* does not fit .*kv_cache_memory.*max_num_seqs \(now 64\) or max_depth \(now \d+\).*made up"
    with pytest.raises(FailedPrecondition, match=words):
        build(pair, "triton")
