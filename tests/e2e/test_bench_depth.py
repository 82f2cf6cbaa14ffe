"""`paceline bench depth`: settings take turns by steps in one engine, and learn nothing from each other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from paceline.bench import depth, setting, synthetic, trim, turns
from paceline.cli import app
from paceline.core import cost_model
from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.cost_model import CostModel
from paceline.core.depth_policy import FixedDepth
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.core.plan import SequenceWork
from paceline.core.speculation import SpeculationControl
from paceline.core.speculation_counts import SpeculationCounts
from paceline.engine import Engine, GenerationRequest
from paceline.errors import FailedPrecondition, InvalidArgument
from paceline.runner import Draft
from paceline.wiring import EngineSettings, build_engine
from support.launching import LaunchingRunner
from support.pairs import tiny_pair

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [(5, 6, 7), (8, 9)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair(tmp_path_factory.mktemp("bench"), vocab_size=320)


def _engine(pair: tuple[Path, Path], **options: Any) -> Engine:
    return build_engine(EngineSettings(model=str(pair[0]), draft=str(pair[1]), dtype="float32", **options))


# -- turns -------------------------------------------------------------------------------------------------------------


class Watched(turns.Lane):
    """Tells who took a step and what all had before it, and what its requests came to."""

    lanes: ClassVar[list[Watched]]
    steps: ClassVar[list[tuple[int, list[int]]]]
    texts: ClassVar[list[list[list[int]]]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lanes.append(self)

    def step(self, watch: turns.Watch) -> bool:
        self.steps.append((self.lanes.index(self), [lane.tokens for lane in self.lanes]))
        return super().step(watch)

    def end(self) -> None:
        self.texts.append([list(request.output_token_ids) for request in self._requests])
        super().end()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    for name in ("lanes", "steps", "texts"):
        monkeypatch.setattr(Watched, name, [], raising=False)
    monkeypatch.setattr(turns, "Lane", Watched)
    return Watched


def _entrants(engine: Engine, names: str) -> list[tuple[SpeculationControl, SpeculationParams]]:
    return [(one.control(engine), one.bounds) for one in setting.parse_settings(names, Method.DRAFT_MODEL)]


BATCH = [((5, 6, 7), GREEDY), ((8, 9), GREEDY)]


@pytest.mark.parametrize("first", [0, 1, 5])
def test_the_next_step_is_of_whom_has_the_fewest_tokens(
    pair: tuple[Path, Path], watched: type[Watched], first: int
) -> None:
    engine = _engine(pair, max_depth=3)  # nor does auto draft more, whatever its prices are here
    served = turns.serve_batch(engine, BATCH, _entrants(engine, "off,3,auto"), 24, first)
    order = [(first + turn) % 3 for turn in range(3)]
    made = [watched.lanes[lane] for lane in range(3)]
    assert [lane for lane, _ in watched.steps[:3]] == order, "each has a step at least"
    for lane, tokens in watched.steps[3:]:
        assert lane == min(order, key=lambda one: tokens[one])
    assert [one.tokens for one in served] == [lane.tokens for lane in made]
    assert max(one.tokens for one in served) - min(one.tokens for one in served) <= (3 + 1) * len(BATCH)


def test_nobody_meets_the_requests_of_another_setting(pair: tuple[Path, Path], watched: type[Watched]) -> None:
    """Greedy, all write the same text, each with its own depths; and in the end the engine is as it was."""
    engine = _engine(pair)
    own, running = engine.scheduler.speculation, engine.scheduler.running
    off, two, auto = turns.serve_batch(engine, BATCH, _entrants(engine, "off,2,auto"), 24)
    assert off.counts.drafted == 0 < auto.counts.drafted
    assert 1 < two.counts.drafted / two.counts.verify_steps <= 2
    for texts in zip(*watched.texts, strict=True):
        shortest = min(map(len, texts))
        assert shortest > 4
        assert len({tuple(text[:shortest]) for text in texts}) == 1
    assert engine.scheduler.speculation is own
    assert engine.scheduler.running is running
    assert not engine.has_work
    engine.check_invariants()


def test_nobody_learns_from_another_setting(pair: tuple[Path, Path]) -> None:
    engine = _engine(pair)
    (off, _), (two, _), (auto, _) = entrants = _entrants(engine, "off,2,auto")
    assert auto is engine.scheduler.speculation
    prices = [control.costs for control in (off, two, auto)]
    assert len({id(price) for price in prices}) == 3
    assert None not in prices
    turns.serve_batch(engine, BATCH, entrants[:2], 24)
    observed = [any(record.acceptance.is_observed for record in one.drafters.values()) for one in (off, two, auto)]
    assert observed == [False, True, False]
    assert auto.totals.verify_steps == 0 < two.totals.verify_steps


def test_what_is_exact_about_a_batch(pair: tuple[Path, Path]) -> None:
    """It counts from the last first token to the first end of any."""
    engine = _engine(pair, max_num_seqs=8, max_num_batched_tokens=64)
    # The second prompt needs a second step, which is the first stream's second token; of the second setting none does,
    # because the prompts are known by then.
    batch = [((5,) * 40, GREEDY), ((6,) * 60, GREEDY)]
    first, second = turns.serve_batch(engine, batch, _entrants(engine, "off,auto")[:1] * 2, 8)
    assert (first.tokens, first.counts.verify_steps) == (2 * (8 - 2), (8 - 1) + (8 - 2))
    assert (second.tokens, second.counts.verify_steps) == (2 * (8 - 3), 2 * (8 - 3)), (
        "the first one's end is its end too"
    )
    for one in (first, second):
        assert 0 < one.policy_seconds < one.control_seconds < one.seconds
        assert one.counts.drafted == 0
    assert not engine.has_work


def test_a_pool_that_is_too_small_is_named(pair: tuple[Path, Path]) -> None:
    """Four streams, whose four blocks have one in common: 16 blocks for one setting, 28 for two, and some kept back."""
    batch = [((number + 3,) * 20, GREEDY) for number in range(4)]
    for blocks, most in ((20, 0), (21, 1), (32, 1), (33, 2), (44, 2), (45, 3)):
        engine = _engine(pair, max_model_len=64, kv_cache_memory=blocks << 14)
        assert engine.scheduler.config.num_blocks == blocks
        entrants = _entrants(engine, "off,2,auto,1")
        if most:
            served = turns.serve_batch(engine, batch, entrants[:most], 40)
            assert min(one.tokens for one in served) > 4
        with pytest.raises(FailedPrecondition, match=f"{most + 1} settings with 4 streams need .* there are {blocks}"):
            turns.serve_batch(engine, batch, entrants[: most + 1], 40)
        assert not engine.has_work
        engine.check_invariants()


# -- cells -------------------------------------------------------------------------------------------------------------


def test_depth_compares_auto_with_everything_else(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At prices that stay: a row lengthens a step by two fifths, so that trimming has something to trim."""
    for gain in ("GAIN", "FIRST_DOUBT"):
        monkeypatch.setattr(cost_model, gain, 0.0)
    engine = _engine(pair)
    costs = CostModel.from_functions(lambda rows: 0.01 * (1 + 0.4 * rows), lambda count: 1e-4)
    policy = AdaptiveDepth(costs, max_depth=engine.scheduler.config.max_depth)
    engine.scheduler.speculation = SpeculationControl(policy, costs)
    settings = setting.parse_settings("off,2,auto,realizar,draft-full-then-trim", Method.DRAFT_MODEL)
    cells = list(
        depth.measure(
            engine, PROMPTS, [1, 2], settings, max_tokens=16, prompts_per_cell=3, explore=1, rounds=2, sampling=GREEDY
        )
    )
    assert [cell.streams for cell in cells] == [1, 2]
    for cell in cells:
        assert list(cell.arms) == ["off", "2", "auto", "realizar", "draft-full-then-trim"]
        assert cell.arms["auto"].speculation is engine.scheduler.speculation
        for name, arm in cell.arms.items():
            assert len(arm.explored) == 1
            assert len(arm.compared) == (2 if name in ("auto", "off", cell.best) else 0)
            assert arm.rate > 0
        assert cell.arms["off"].depth == 0
        assert 1 < cell.arms["2"].depth <= 2
        assert cell.arms["realizar"].depth > 1
        assert 0.5 < cell.arms["draft-full-then-trim"].depth < 3
    depth.render(cells, title="a title")
    assert "auto / best fixed" in capsys.readouterr().out


def test_drafts_in_full_depth_are_trimmed() -> None:
    class Full:
        def propose(self, batch: Any) -> list[Draft]:
            return [Draft(list(range(8))) for _ in batch]

        def release(self, request_id: int) -> None: ...

    works = [SequenceWork(7, 1, True, num_drafts=8), SequenceWork(8, 1, True, num_drafts=8), SequenceWork(9, 1, True)]
    trimmed = trim.TrimmedDrafter(Full(), {7: 3, 8: 1}).propose([(None, work) for work in works])  # type: ignore[misc]
    assert [draft.token_ids for draft in trimmed[:2]] == [[0, 1, 2], [0]]


def test_another_setting_leads_in_every_batch(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And in every repetition, where each is a single batch; samples are of all batches together."""
    led = []

    def serve_batch(engine: Engine, batch: Any, settings: list[Any], max_tokens: int, first: int = 0) -> Any:
        led.append(first % len(settings))
        counts = SpeculationCounts(steps={(len(led), 0): 1})
        return [turns.Served(10, len(led) + index, 0.5, 0.25, counts) for index in range(len(settings))]

    monkeypatch.setattr(depth, "serve_batch", serve_batch)
    engine = _engine(pair)
    settings = setting.parse_settings("off,2,auto", Method.DRAFT_MODEL)
    cell = depth.Cell(1, {one.name: depth.Arm.start(one, engine) for one in settings})
    batches = depth.workload([(5,), (6,)], streams=1, least=2, sampling=GREEDY)
    samples = [sample for _, sample in depth.serve(engine, batches, list(cell.arms.values()), max_tokens=8, first=2)]
    assert led == [2, 0]
    assert samples[0] == depth.Sample(rate=20 / (1 + 2), depth=(1 + 2) / 2, control=1 / (1 + 2), policy=0.5 / (1 + 2))
    assert samples[2] == depth.Sample(rate=20 / (3 + 4), depth=(1 + 2) / 2, control=1 / (3 + 4), policy=0.5 / (3 + 4))
    led.clear()
    depth.measure_cell(engine, cell, batches[:1], max_tokens=8, explore=2, rounds=3)
    assert led[2:] == [0, 1, 0, 1, 0], "two to warm up; then of three, of two"


def test_cells_come_one_after_the_other(pair: tuple[Path, Path]) -> None:
    """The first before the second has begun, and its prompts of two and a half blocks are read only once."""
    engine = _engine(pair)
    settings = setting.parse_settings("off,2,auto", Method.DRAFT_MODEL)
    prompts = [tuple(range(first, first + 40)) for first in (5, 105)]
    cells = depth.measure(
        engine, prompts, [1, 2], settings, max_tokens=6, prompts_per_cell=2, explore=1, rounds=2, sampling=GREEDY
    )
    usage = engine.usage.of("")
    for streams in (1, 2):
        before = usage.prompt_tokens
        assert next(cells).streams == streams
        assert usage.prompt_tokens > before
        assert usage.cached_prompt_tokens == 32 * (usage.prompt_tokens // 40 - len(prompts))


def test_workloads_are_whole_batches() -> None:
    prompts = [(1,), (2,), (3,)]
    batches = depth.workload(prompts, streams=2, least=3, sampling=GREEDY)
    assert batches == [[((1,), GREEDY), ((2,), GREEDY)], [((3,), GREEDY), ((1,), GREEDY)]]
    assert [len(batch) for batch in depth.workload(prompts, streams=16, least=8, sampling=GREEDY)] == [16]
    copying, wild = depth.MIXED
    assert depth.workload(prompts, streams=1, least=2, sampling=None) == [[((1,) * 4, copying)], [((2,), wild)]]


def test_seeds_count_up_over_the_streams_of_a_workload() -> None:
    seeded = SamplingParams(temperature=0.8, seed=5)
    batches = depth.workload([(1,), (2,)], streams=2, least=4, sampling=seeded)
    assert [[sampling.seed for _, sampling in batch] for batch in batches] == [[5, 6], [7, 8]]


def _cell(streams: int, **rates: tuple[list[float], list[float]]) -> depth.Cell:
    """Rates of exploring and of comparing repetitions by setting; fixed depths as d1, d2, ..."""
    arms = {}
    for key, (explored, compared) in rates.items():
        name = key.removeprefix("d")
        samples = [[depth.Sample(rate, 0.0, 0.0, 0.0) for rate in kind] for kind in (explored, compared)]
        control = SpeculationControl(FixedDepth(0))
        arms[name] = depth.Arm(setting.Setting(name, SpeculationParams()), control, *samples)
    return depth.Cell(streams, arms)


def test_the_best_is_chosen_in_other_repetitions_than_it_is_compared_in() -> None:
    cell = _cell(
        1,
        off=([1.0, 1.0], [3.0, 3.0]),
        d1=([3.0, 2.0], []),
        d2=([3.0, 4.0], [4.0, 2.0]),
        auto=([6.0, 4.0], [6.0, 3.0]),
    )
    assert cell.best == "2"
    assert cell.compare("2") == (1.5, 0.0)
    assert cell.compare("off").mean == 1.5
    assert cell.explored_ratio("1") == 2.0


def test_intervals_are_students() -> None:
    generator = np.random.default_rng(1)
    for count in (2, 6, 15):
        values = generator.normal(1.0, 0.1, count)
        low, high = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
        interval = depth.Interval.of(values.tolist())
        assert interval.mean == pytest.approx(values.mean())
        assert interval.half_width == pytest.approx((high - low) / 2, rel=0.005)
    assert depth.Interval.of([2.0]) == (2.0, math.inf)


def test_bounds_that_are_missed_are_named() -> None:
    good = _cell(2, off=([1.0], [1.0, 1.0]), d1=([1.2], []), d2=([2.0], [2.0, 2.0]), auto=([2.0], [2.0, 2.0]))
    other = _cell(4, off=([1.0], [1.0, 1.0]), d1=([2.0], [2.0, 2.0]), d2=([1.0], []), auto=([2.0], [2.0, 2.0]))
    assert depth.best_single([good, other]) == ("1", pytest.approx((2 / 1.2) ** 0.5))
    assert depth.missed([good, other]) == []
    assert depth.missed([good]) == [], "a single cell is no sweep"
    assert depth.missed([good, good]) == ["sweep: auto is 1.000 x the best single fixed depth (2), below 1.05"]
    slow = _cell(1, off=([2.0], [2.0, 2.0]), d1=([1.0], []), auto=([2.0], [1.9, 1.9]))
    unsure = _cell(8, off=([1.0], [1.0, 1.0]), d1=([2.0], [2.0, 2.0]), auto=([2.0], [1.8, 2.2]))
    assert depth.missed([slow]) == [
        "1 stream: auto is 0.950 +- 0.000 x the best fixed depth (off), below 0.97",
        "1 stream: auto is 0.950 +- 0.000 x off, below 0.98",
    ]
    assert depth.missed([unsure]) == ["8 streams: auto over the best fixed depth is known to 1.271, not 0.02"]


def test_the_command_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one drafter for all, who is the other one than by default; prompts are read once."""
    engines = []

    def build(settings: EngineSettings) -> Engine:
        engines.append(build_engine(settings))
        return engines[-1]

    monkeypatch.setattr("paceline.wiring.build_engine", build)
    target, draft = tiny_pair(tmp_path, max_position_embeddings=4096)
    command = ["bench", "depth", "--model", str(target), "--draft", str(draft), "--method", "ngram"]
    options = ["--concurrency", "1,2", "--depth", "off,1,2,auto,hf", "--max-tokens", "4", "--prompts-per-cell", "2"]
    files = ["--rounds", "2", "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, [*command, *options, *files])
    assert result.exit_code == 0, result.output
    said = json.loads((tmp_path / "out.json").read_text())
    assert [path.name for path in tmp_path.glob("out.json*")] == ["out.json"]
    assert engines[0].usage.of("").cached_prompt_tokens > 0
    assert said["settings"]["method"] == "ngram"
    assert [cell["streams"] for cell in said["cells"]] == [1, 2]
    for cell in said["cells"]:
        assert [run["depth"] for run in cell["depths"]] == ["off", "1", "2", "auto", "hf"]
        assert len(cell["auto_over_best_fixed"]["ratios"]) == len(cell["auto_over_off"]["ratios"]) == 2
    assert said["sweep"]["best_single"] in ("off", "1", "2")
    assert "auto / hf" in result.output


def test_a_method_restricts_auto_and_fixed_depths_alike() -> None:
    ngram = setting.parse_method("ngram")
    methods = {s.name: s.bounds.method for s in setting.parse_settings("off,3,auto,hf", ngram, ngram)}
    assert methods == {"off": Method.NONE, "3": Method.NGRAM, "auto": Method.NGRAM, "hf": Method.NGRAM}
    methods = {s.name: s.bounds.method for s in setting.parse_settings("off,3,auto", Method.DRAFT_MODEL)}
    assert methods == {"off": Method.NONE, "3": Method.DRAFT_MODEL, "auto": None}
    assert [setting.default_method(draft) for draft in ("demo", "ngram")] == [Method.DRAFT_MODEL, Method.NGRAM]
    with pytest.raises(InvalidArgument, match="method = 'none': must be auto, draft_model, ngram"):
        setting.parse_method("none")


def test_streams_of_two_kinds_have_no_seeds() -> None:
    result = CliRunner().invoke(app, ["bench", "depth", "--mixed", "--seed", "1"])
    assert isinstance(result.exception, InvalidArgument)
    assert "seed = 1: must be none with --mixed" in str(result.exception)


def test_unknown_depths_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="depth = 'deep': must be off, auto, a number, or one of"):
        setting.parse_settings("off,deep", None)
    with pytest.raises(InvalidArgument, match="depth = 'off,2': must be a list with auto and off in it"):
        setting.parse_settings("off,2", None)
    with pytest.raises(InvalidArgument, match=r"synthetic = '0.5,2': must be probabilities"):
        synthetic.parse_rates("0.5,2")


def test_synthetic_acceptance_is_as_decreed(pair: tuple[Path, Path]) -> None:
    engine = _engine(pair)
    stop = StopParams(max_tokens=13, ignore_eos=True)
    synthetic.decree(engine, [1.0, 0.0])
    bounds = SpeculationParams(Method.DRAFT_MODEL, 3, 3)
    first = engine.add(GenerationRequest((5, 6, 7), GREEDY, stop, bounds))
    second = engine.add(GenerationRequest((5, 6, 7), GREEDY, stop, bounds))
    stats = {}
    while engine.has_work:
        stats |= {output.request_id: output.stats for output in engine.step() if output.stats is not None}
    lucky, unlucky = (stats[first], stats[second]) if first % 2 == 0 else (stats[second], stats[first])
    assert lucky.accepted_tokens == lucky.drafted_tokens > 0
    assert unlucky.accepted_tokens == 0 < unlucky.drafted_tokens


def test_what_a_device_would_not_notice_is_refused(pair: tuple[Path, Path]) -> None:
    engine = build_engine(EngineSettings(str(pair[0]), str(pair[1]), depth="2"))
    engine.runner = LaunchingRunner(engine.runner)
    with pytest.raises(FailedPrecondition, match="kept by decree: on the host alone"):
        synthetic.decree(engine, [0.5])
    with pytest.raises(FailedPrecondition, match="trimmed: on the host alone"):
        trim.trimming(engine, trim.FullDepth(CostModel([1], [1.0]), 2)).__enter__()
