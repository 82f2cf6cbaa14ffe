"""The control of depth alone: the simulator keeps its chances and prices, the search finds the best, and the grid's
bars hold where they are checked here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline.bench.policy import ADAPTIVE, Score, measure, missed, parse_rates, parse_ratios, render, to_json
from paceline.cli import app
from paceline.core.acceptance import Residual
from paceline.core.cost_model import LARGEST_BUCKET, CostModel
from paceline.core.depth import Chosen, DepthCandidate, Outcome, StepLoad
from paceline.core.depth_policy import DepthPolicy, FixedDepth
from paceline.core.method import Method
from paceline.errors import InvalidArgument
from paceline.sim.control import Population, best_stationary, roofline, simulate_control

COSTS = roofline(target_pass=10.0, free_rows=4, ratio=0.1)


def alike(size: int, rate: float, highest: int = 4, tokens: int | None = None) -> Population:
    return Population(size, ((rate,) * highest,), tokens)


@dataclass
class Script(DepthPolicy):
    """Depths by step, the same for all within their bounds; remembers all that it is told."""

    depths: Sequence[int]
    seen: list[Sequence[DepthCandidate]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        depth = self.depths[len(self.seen) % len(self.depths)]
        self.seen.append(candidates)
        return [Chosen(Method.DRAFT_MODEL, min(depth, candidate.highest)) for candidate in candidates]

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)


@dataclass
class Notes:
    """Stands in for an AcceptanceModel: remembers what it is shown, and says that every draft is a coin."""

    observed: list[list[float]] = field(default_factory=list)
    known: list[float] = field(default_factory=list)  # of the request, whenever somebody asks

    def survivals(self, tenant: str, request: Residual, depth: int) -> list[float]:
        self.known.append(request.information)
        return [0.5**j for j in range(1, depth + 1)]

    def observe(self, tenant: str, request: Residual, reached: Sequence[float], shared: bool = True) -> None:
        self.observed.append(list(reached))
        request.information = 1.0


@pytest.mark.parametrize(("size", "rate", "depth"), [(1, 0.8, 4), (6, 0.5, 1), (6, 0.9, 3), (3, 0.7, 0)])
def test_a_fixed_depth_earns_what_the_formula_says(size: int, rate: float, depth: int) -> None:
    steps = 3000
    trace = simulate_control(alike(size, rate), COSTS, FixedDepth(depth), steps)
    mean = (1 - rate ** (depth + 1)) / (1 - rate)
    seconds = 10.0 * max(1.0, size * (1 + depth) / 4) + depth * 1.0
    assert trace.seconds == pytest.approx(seconds)
    assert trace.expected_tokens == pytest.approx(size * mean)
    assert trace.expected_rate(steps // 2) == pytest.approx(size * mean / seconds)
    deviation = (depth + 1) / (steps * size) ** 0.5  # above that of one request's mean
    assert trace.rate == pytest.approx(size * mean / seconds, abs=2 * deviation * size / seconds + 1e-12)
    assert trace.histogram.tolist() == [steps * size * (k == depth) for k in range(5)]
    assert trace.mean_depth == depth


def test_classes_take_places_in_turn() -> None:
    trace = simulate_control(Population(3, ((1.0, 1.0), (0.0, 0.0))), COSTS, Script([2]), 5)
    assert trace.tokens.tolist() == [3 + 1 + 3] * 5


def test_the_same_seed_draws_the_same() -> None:
    def run(seed: int) -> list[int]:
        return simulate_control(alike(4, 0.7, tokens=20), COSTS, Script([3, 1, 0]), 60, seed=seed).tokens.tolist()

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_only_reached_positions_are_shown() -> None:
    """The second draft is rejected, so the third is not reached, though it would have been accepted."""
    notes = Notes()
    policy = Script([4, 1, 0])
    simulate_control(Population(1, ((1.0, 0.0, 1.0, 1.0),)), COSTS, policy, 4, notes)
    assert notes.observed == [[1.0, 0.0], [1.0], [1.0, 0.0]]
    assert notes.known[:3] == [0.0, 1.0, 1.0]
    assert 0.0 < notes.known[3] < 1.0, "what is not observed ages"
    assert [outcome.drafts for outcome in policy.outcomes] == [((0, 4, 1),), ((0, 1, 1),), (), ((0, 4, 1),)]
    assert list(policy.seen[0][0].offers[0].survivals) == [0.5, 0.25, 0.125, 0.0625]


def test_without_an_estimator_the_truth_is_shown() -> None:
    policy = Script([0])
    simulate_control(Population(1, ((0.5, 0.8),)), COSTS, policy, 1)
    assert policy.seen[0][0].offers[0].survivals == pytest.approx([0.5, 0.4])


def test_the_draft_model_catches_up_at_its_price() -> None:
    policy = Script([0, 0, 2])
    trace = simulate_control(alike(2, 0.0), COSTS, policy, 4)
    assert [[c.offers[0].catch_up for c in seen] for seen in policy.seen] == [[0, 0], [1, 1], [2, 2], [0, 0]]
    assert [[c.steps_without_model for c in seen] for seen in policy.seen] == [[0, 0], [1, 1], [2, 2], [0, 0]]
    shape = policy.outcomes[2].shape
    assert (shape.rows, shape.draft_passes, shape.draft_rows) == (6, (2, 2), 4)
    assert trace.seconds.tolist() == pytest.approx([10.0, 10.0, 15.0 + 2 * 1.0 + 4 * 0.25, 10.0])
    assert policy.outcomes[2].draft_seconds == pytest.approx(3.0)


def test_known_prices_learn_and_true_ones_do_not() -> None:
    known = roofline(target_pass=7.0, free_rows=4, ratio=0.1)
    trace = simulate_control(alike(2, 0.5), COSTS, FixedDepth(1), 200, known=known)
    assert known.target(4, 0) == pytest.approx(10.0, rel=0.01)
    assert COSTS.target(4, 0) == 10.0
    assert set(trace.seconds.tolist()) == {11.0}


def test_requests_end_at_their_length_and_others_come() -> None:
    policy = Script([4])
    trace = simulate_control(alike(2, 0.6, tokens=7), COSTS, policy, 200)
    tokens: dict[int, int] = {}
    for outcome in policy.outcomes:
        for request_id, _, accepted in outcome.drafts:
            tokens[request_id] = tokens.get(request_id, 0) + accepted + 1
    ended = set(policy.forgotten)
    assert len(ended) == len(policy.forgotten) > 50
    # A last token has no room for a draft.
    assert {tokens[request_id] for request_id in ended} == {6, 7}
    assert all(len(c.offers[0].survivals) == c.highest > 0 for seen in policy.seen for c in seen)
    assert len(tokens) - len(ended) <= 2
    plain = sum(outcome.decodes - len(outcome.drafts) for outcome in policy.outcomes)
    assert sum(tokens.values()) + plain == trace.tokens.sum()


def brute_force(survivals: np.ndarray, costs: CostModel) -> float:
    """The best rate of every vector of depths."""
    size, highest = survivals.shape
    rates = []
    for depths in itertools.product(range(highest + 1), repeat=size):
        tokens = size + sum(survivals[i, :depth].sum() for i, depth in enumerate(depths))
        passes = sum(
            (costs.draft_passes if j else costs.first_passes)(size)[sum(k > j for k in depths)]
            for j in range(max(depths))
        )
        rates.append(tokens / (costs.target(size + sum(depths), 0, size) + passes))
    return float(max(rates))


@pytest.mark.parametrize("free_rows", [2, 5, 30])
@pytest.mark.parametrize("ratio", [0.02, 0.2])
def test_the_search_equals_brute_force(free_rows: int, ratio: float) -> None:
    generator = np.random.default_rng(free_rows)
    rows = [1, free_rows, 2 * free_rows]
    costs = CostModel(rows, [1.0, 1.0, 2.0], 0.0, [1], [ratio], per_sequence=0.1, first_seconds=[2 * ratio])
    for _ in range(12):
        survivals = np.cumprod(generator.uniform(0.2, 1.0, (3, 4)), axis=1)
        assert best_stationary(survivals, costs).rate == pytest.approx(brute_force(survivals, costs))


def test_the_search_does_not_stop_at_the_first_drop() -> None:
    """Rows 3 and 4 cost as much as 5 do: one slot loses, four gain."""
    costs = CostModel([1, 2, 5, 6], [1.0, 2.2, 2.2, 99.0], sequences=[1], pass_seconds=[0.0])
    assert best_stationary(np.full((1, 4), 0.9), costs).depths == (4,)
    assert best_stationary(np.full((1, 1), 0.9), costs).depths == (0,)


@pytest.mark.parametrize("pass_seconds", [(0.05, 0.05), (0.05, 0.10)])
def test_the_best_depths_earn_the_best_rate(pass_seconds: tuple[float, float]) -> None:
    """Two classes, of one or of eight sequences in a draft pass: the likelier drafts go deeper, and in the simulator
    those depths earn what the search says.
    """

    class Best(DepthPolicy):
        def choose(
            self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0
        ) -> list[Chosen]:
            return [Chosen(Method.DRAFT_MODEL, depth) for depth in best.depths]

    population = Population(6, ((0.9,) * 8, (0.4,) * 8))
    costs = CostModel([1, 16, 32], [1.0, 1.0, 2.0], sequences=[1, 8], pass_seconds=pass_seconds)
    best = best_stationary(population.survivals(), costs)
    assert min(best.depths[::2]) > max(best.depths[1::2])
    assert simulate_control(population, costs, Best(), 10).expected_rate() == pytest.approx(best.rate)


def test_deep_drafts_lose_where_rows_are_dear() -> None:
    population = alike(32, 0.5)
    deep, off = (simulate_control(population, COSTS, FixedDepth(depth), 50).expected_rate() for depth in (4, 0))
    assert deep < 0.5 * off
    assert best_stationary(population.survivals(), COSTS).depths == (0,) * 32


@pytest.mark.parametrize(
    ("acceptance", "size", "ratio"),
    [
        ((0.8,), 1, 0.05),
        ((0.3,), 4, 0.4),
        ((0.9,), 16, 0.1),
        ((0.3, 0.9), 16, 0.05),
        ((0.5,), 4, 0.4),
        ((0.8,), 16, 0.4),
        ((0.9,), 16, 0.2),
    ],
)
def test_the_adaptive_rule_is_near_the_best_and_never_far_below_off(
    acceptance: tuple[float, ...], size: int, ratio: float
) -> None:
    cells = measure([acceptance], [size], [ratio], free_rows=24, steps=2000)
    assert not missed(cells), cells
    scores = cells[0].scores
    assert {ADAPTIVE, "fixed-4", "off"} <= scores.keys()
    assert scores["off"].regret == pytest.approx(0.0)
    assert scores["off"].share == pytest.approx(cells[0].off_rate / cells[0].best_rate)
    assert json.loads(json.dumps(to_json(cells, {"steps": 2000})))["cells"][0]["scores"][ADAPTIVE]


def test_rows_that_never_cost_anything() -> None:
    assert roofline(1.0, 10**6, 0.1).target(2048, 0) == 1.0
    costs = roofline(1.0, LARGEST_BUCKET * 3 // 4, 0.1)
    assert costs.target(LARGEST_BUCKET * 3 // 2, 0) == pytest.approx(2.0)


@pytest.mark.parametrize("options", [["--seed", "-1"], ["--steps", "1000000000000"]])
def test_options_that_cannot_be(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "policy", *options])
    assert result.exit_code == 2
    assert options[0] in result.output


def test_a_cell_that_misses_is_found_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    cells = measure([(0.5,)], [4], [0.1], free_rows=24, steps=10)
    cells[0].scores[ADAPTIVE] = Score(share=0.98, regret=0.01, mean_depth=1.0)
    assert missed(cells) == []
    render(cells, "title")
    assert "within both bounds" in capsys.readouterr().out
    for score in (Score(0.96, 0.01, 1.0), Score(0.98, 0.03, 1.0)):
        cells[0].scores[ADAPTIVE] = score
        assert missed(cells) == cells
        render(cells, "title")
        _, _, table = capsys.readouterr().out.partition("best depth")
        assert "0.5, 4, 0.1" in table


def test_options() -> None:
    assert parse_rates("0.3, 0.5/0.9") == [(0.3,), (0.5, 0.9)]
    assert parse_ratios("0.02,1") == [0.02, 1.0]
    for text in ("", "0.3,", "1.5", "-0.1", "nan", "0.3/x"):
        with pytest.raises(InvalidArgument):
            parse_rates(text)
    for text in ("", "0", "-1", "1e9", "inf", "nan", "x"):
        with pytest.raises(InvalidArgument):
            parse_ratios(text)


def test_without_matplotlib_nothing_is_simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("paceline.bench.policy.measure", lambda *_: pytest.fail("it was simulated"))
    monkeypatch.setattr("paceline.sim.report.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["bench", "policy", "--plot", str(tmp_path / "grid.png")])
    assert isinstance(result.exception, InvalidArgument)
    assert "paceline[plots]" in str(result.exception)
