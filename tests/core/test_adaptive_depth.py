"""Depth policies: what they choose, and the bounds, budgets and shares that they keep."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.core.adaptive_depth import DWELL, LEAST_SHARE, AdaptiveDepth
from paceline.core.cost_model import CostModel, StepKind, StepShape
from paceline.core.depth import NOTHING, Chosen, DepthCandidate, Offer, Outcome, StepLoad
from paceline.core.depth_choices import choose_depths
from paceline.core.depth_policy import DepthPolicy, FixedDepth
from paceline.core.method import Method
from paceline.core.priced_step import PricedStep
from paceline.core.prices import Prices
from paceline.core.probes import (
    LEAST_CREDIT,
    LEAST_PLAIN_INTERVAL,
    PLAIN_CREDIT,
    PLAIN_INTERVAL,
    PLAIN_SHARE,
    PROBE_CREDIT,
    PROBE_SHARE,
)
from paceline.core.review import review

MODEL, NGRAM = Method.DRAFT_MODEL, Method.NGRAM
relaxed = settings(deadline=None, derandomize=True, database=None, max_examples=150)


MOST_ROWS = 128  # beyond which formulas go on as a line


def costs_by(
    by_rows: Callable[[int], float] = lambda rows: 1.0 + 0.1 * rows,
    by_sequences: Callable[[int], float] = lambda count: 0.1,
    start: float = 0.0,
    per_draft_row: float = 0.0,
) -> CostModel:
    """Prices by formula, exact at every count that `by_rows` knows.

    Args:
        start: of drafting, per step.
    """
    seconds = []
    for rows in range(1, MOST_ROWS + 1):
        try:
            seconds.append(float(by_rows(rows)))
        except IndexError:
            break
    counts = list(range(1, MOST_ROWS + 1))
    passes = [float(by_sequences(count)) for count in counts]
    return CostModel(
        counts[: len(seconds)],
        seconds,
        sequences=counts,
        pass_seconds=passes,
        per_draft_row=per_draft_row,
        first_seconds=[start + one for one in passes],
    )


def adaptive(costs: CostModel | None = None, max_depth: int = 8) -> AdaptiveDepth:
    return AdaptiveDepth(costs or costs_by(), max_depth=max_depth)


def geometric(acceptance: float, depth: int = 8) -> list[float]:
    return [acceptance**position for position in range(1, depth + 1)]


def candidate(
    acceptance: float,
    request_id: int = 0,
    lowest: int = 0,
    highest: int = 8,
    method: Method = MODEL,
    without: int = 0,
    catch_up: int = 0,
) -> DepthCandidate:
    offer = Offer(method, geometric(acceptance, highest), catch_up)
    return DepthCandidate(request_id, (offer,), lowest, highest, without)


def changed(candidate: DepthCandidate, **changes: object) -> DepthCandidate:
    """Another candidate, which differs in these."""
    names = ("request_id", "offers", "lowest", "highest", "steps_without_model", "match", "tokens_to_serve")
    return DepthCandidate(**{name: changes.get(name, getattr(candidate, name)) for name in names})  # type: ignore[arg-type]


def load_of(candidates: Sequence[DepthCandidate], prompts: int = 0, budget: int = 1000) -> StepLoad:
    return StepLoad(len(candidates) + prompts, 0, len(candidates), budget)


def choose(policy: DepthPolicy, *candidates: DepthCandidate, budget: int = 1000, slot_price: float = 0.0) -> list[int]:
    chosen = ask(policy, candidates, load_of(candidates, budget=budget), slot_price)
    return [choice.depth for choice in chosen]


def ask(
    policy: DepthPolicy, candidates: Sequence[DepthCandidate], load: StepLoad, slot_price: float = 0.0
) -> list[Chosen]:
    """As a step does."""
    ids = [one.request_id for one in candidates]
    highest = [{offer.method: min(one.highest, len(offer.survivals)) for offer in one.offers} for one in candidates]

    def at(indices: Sequence[int]) -> list[DepthCandidate]:
        return [candidates[index] for index in indices]

    # Where a test names no match, each step may have another.
    matches = [one.match or int(any(offer.method is NGRAM for offer in one.offers)) for one in candidates]
    return choose_depths(policy, load, ids, highest, matches, at, slot_price=slot_price)


def standing(policy: AdaptiveDepth, load: StepLoad) -> set[int]:
    """Requests of whom something stands."""
    choices = policy.standing(load)
    return set(choices.by_model) if choices else set()


def shape_of(candidates: Sequence[DepthCandidate], chosen: Sequence[Chosen], load: StepLoad) -> StepShape:
    models = [choice.depth for choice in chosen if choice.method is MODEL]
    passes = tuple(sum(depth >= level for depth in models) for level in range(1, max(models, default=0) + 1))
    return StepShape(load.rows + sum(choice.depth for choice in chosen), 0, passes, catch_up_of(candidates, chosen))


def catch_up_of(candidates: Sequence[DepthCandidate], chosen: Sequence[Chosen]) -> int:
    return sum(
        offer.catch_up
        for one, choice in zip(candidates, chosen, strict=True)
        for offer in one.offers
        if offer.method is choice.method
    )


def worth(
    candidates: Sequence[DepthCandidate],
    chosen: Sequence[Chosen],
    load: StepLoad,
    costs: CostModel,
    second: float,
    slot_price: float = 0.0,
) -> float:
    """Expected tokens less the price of slots and time."""
    tokens = float(load.sampling)
    for one, choice in zip(candidates, chosen, strict=True):
        for offer in one.offers:
            if offer.method is choice.method:
                tokens += sum(offer.survivals[: choice.depth]) - slot_price * choice.depth
    return tokens - second * costs.step(shape_of(candidates, chosen, load))


def all_choices(candidates: Sequence[DepthCandidate], budget: int) -> Iterator[tuple[Chosen, ...]]:
    """Whatever keeps the bounds and the budget."""
    options = []
    for one in candidates:
        mine = {Chosen(o.method, k) for o in one.offers for k in range(max(one.lowest, 1), len(o.survivals) + 1)}
        options.append([*mine, *([NOTHING] if one.lowest == 0 else [])])
    for chosen in itertools.product(*options):
        if sum(choice.depth for choice in chosen) + catch_up_of(candidates, chosen) <= budget:
            yield chosen


def learned(policy: AdaptiveDepth, gain: float) -> None:
    """Let it have earned `gain` times what the same sequences earn without drafts, for long."""
    shape = StepShape(1, 0)
    for _ in range(200):
        policy.observe(Outcome(shape, 0.0, policy.costs.step(shape) / gain, 1, 1, ()))


def with_ngrams(one: DepthCandidate, acceptance: float) -> DepthCandidate:
    """It may copy too."""
    return changed(one, offers=(Offer(NGRAM, geometric(acceptance, one.highest)), *one.offers))


# -- the best choice -------------------------------------------------------------------------------------------------

rates = st.floats(0.0, 1.0, allow_nan=False)


def random_run(generator: np.random.Generator, longest: int = 3) -> list[float]:
    length = generator.integers(1, longest + 1)
    return [float(survival) for survival in generator.uniform(0.3, 1.0, length).cumprod()]


def stairs_of(generator: np.random.Generator, rows: int) -> NDArray[np.float64]:
    """Seconds of a step by rows: some cost nothing, or no row does."""
    rises = generator.uniform(0.0, 0.6, rows) * (generator.uniform(size=rows) < 0.4)
    return 1.0 + np.cumsum(rises + generator.choice([0.0, 0.2]))


def with_both(generator: np.random.Generator, request_id: int) -> DepthCandidate:
    return DepthCandidate(request_id, (Offer(NGRAM, random_run(generator)), Offer(MODEL, random_run(generator))), 0, 3)


def check_best(
    policy: AdaptiveDepth, costs: CostModel, candidates: Sequence[DepthCandidate], load: StepLoad, price: float
) -> None:
    """Against every choice that keeps bounds and budget."""
    chosen = policy.choose(candidates, load, slot_price=price)
    second = policy.decision.price_of_time
    possible = list(all_choices(candidates, load.budget))
    assert chosen in [list(one) for one in possible] or not possible
    if possible:
        best = max(worth(candidates, one, load, costs, second, price) for one in possible)
        assert worth(candidates, chosen, load, costs, second, price) == pytest.approx(best, abs=1e-9)


@pytest.fixture
def no_savings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be lost for learning: what is chosen is what is thought best."""
    monkeypatch.setattr("paceline.core.probes.PROBE_CREDIT", 0.0)
    monkeypatch.setattr("paceline.core.probes.PROBE_SHARE", 0.0)


@pytest.mark.usefixtures("no_savings")
def test_the_choice_is_the_best_of_all() -> None:
    """By either drafter: verification on any stairs, a pass of any constant and any share for each sequence."""
    generator = np.random.default_rng(0)
    for method in (MODEL, NGRAM) * 150:
        stairs = stairs_of(generator, 20)
        constant, share, start = generator.uniform(0.0, 0.3, 3) * (generator.uniform(size=3) < 0.7)
        costs = costs_by(stairs.__getitem__, lambda n, a=constant, b=share: a + b * n, start)  # type: ignore[misc]
        candidates = []
        for i in range(generator.integers(1, 4)):
            run = random_run(generator)
            lowest = min(int(generator.choice([0, 0, 1, 2])), len(run))
            candidates.append(DepthCandidate(i, (Offer(method, run),), lowest, len(run)))
        policy = adaptive(costs)
        learned(policy, generator.uniform(0.4, 2.5))
        budget = int(generator.choice([4, 6, 1000]))
        check_best(policy, costs, candidates, load_of(candidates, budget=budget), generator.choice([0.0, 0.2]))


@pytest.mark.usefixtures("no_savings")
def test_of_two_offers_the_better_is_taken() -> None:
    """The best of all, where a row and a draft cost the same wherever they come."""
    generator = np.random.default_rng(0)
    for _ in range(150):
        per_row, share = generator.uniform(0.0, 0.4, 2)
        costs = costs_by(lambda n, a=per_row: 1.0 + a * n, lambda n, a=share: a * n)  # type: ignore[misc]
        policy = adaptive(costs)
        learned(policy, generator.uniform(0.4, 2.5))
        candidates = [with_both(generator, i) for i in range(generator.integers(1, 4))]
        check_best(policy, costs, candidates, load_of(candidates), 0.0)


@pytest.mark.usefixtures("no_savings")
@pytest.mark.parametrize("start", [0.0, 0.1, 0.3])
def test_of_two_offers_the_worse_costs_a_hair_at_most(start: float) -> None:
    """On stairs, and with passes that cost the same for any number: who copies leaves others to pay for them."""
    generator = np.random.default_rng(0)
    missed = []
    for _ in range(200):
        stairs = stairs_of(generator, 20)
        constant, share = generator.uniform(0.0, 0.2, 2)
        costs = costs_by(stairs.__getitem__, lambda n, a=constant, b=share: a + b * n, start)  # type: ignore[misc]
        policy = adaptive(costs)
        learned(policy, generator.uniform(0.8, 2.5))
        candidates = [with_both(generator, i) for i in range(generator.integers(1, 4))]
        load = load_of(candidates)
        chosen = policy.choose(candidates, load)
        second = policy.decision.price_of_time
        best = max(worth(candidates, one, load, costs, second) for one in all_choices(candidates, 1000))
        missed.append((best - worth(candidates, chosen, load, costs, second)) / load.sampling)
    assert np.mean(missed) < 0.003
    assert np.quantile(missed, 0.8) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.usefixtures("no_savings")
def test_passes_that_cost_more_for_many_cost_a_hair_at_most() -> None:
    """Where the order of slots is only nearly right: flat up to two sequences, a third dearer with the next."""
    generator = np.random.default_rng(0)
    costs = costs_by(lambda rows: 1.0 + 0.05 * max(0, rows - 5), lambda count: 0.1 + 0.03 * max(0, count - 2))
    missed = []
    for _ in range(60):
        survivals = generator.uniform(0.2, 1.0, (3, 3)).cumprod(axis=1).tolist()
        candidates = [DepthCandidate(i, (Offer(MODEL, run),), 0, 3) for i, run in enumerate(survivals)]
        load = load_of(candidates)
        policy = adaptive(costs)
        learned(policy, 1.5)
        chosen = policy.choose(candidates, load)
        second = policy.decision.price_of_time
        best = max(worth(candidates, one, load, costs, second) for one in all_choices(candidates, 1000))
        missed.append((best - worth(candidates, chosen, load, costs, second)) / load.sampling)
    assert max(missed) < 0.03
    assert np.mean(missed) < 0.003


def test_steps_that_cost_nothing_end_nobody() -> None:
    """As a file of measured costs might say."""
    policy = adaptive(CostModel([1, 8], [0.0, 0.0], 0.0, [1], [0.0]))
    for _ in range(2 * DWELL):
        choose(policy, candidate(0.9, highest=2))


def test_the_search_does_not_stop_at_the_first_drop() -> None:
    """A second row is dear, the third and fourth come with it."""
    costs = costs_by(lambda rows: 1.0 if rows == 1 else 1.6, lambda count: 0.0)
    assert choose(adaptive(costs), candidate(0.9, highest=3)) == [3]


def test_better_drafts_go_deeper_and_each_request_for_itself() -> None:
    depths = choose(adaptive(), *(candidate(a, i) for i, a in enumerate((0.1, 0.5, 0.7, 0.9))))
    assert depths == sorted(depths)
    assert depths[0] == 0
    assert len(set(depths)) >= 3


@relaxed
@given(acceptance=rates, other=rates, price=st.floats(0.0, 1.0), other_price=st.floats(0.0, 1.0))
def test_depth_rises_with_acceptance_and_falls_with_price(
    acceptance: float, other: float, price: float, other_price: float
) -> None:
    def depth(acceptance: float, slot_price: float) -> int:
        (depth,) = choose(adaptive(), candidate(acceptance), slot_price=slot_price)
        return depth

    assert depth(min(acceptance, other), price) <= depth(max(acceptance, other), price)
    assert depth(acceptance, max(price, other_price)) <= depth(acceptance, min(price, other_price))


def test_no_slot_at_a_high_price() -> None:
    policy = adaptive(costs_by(lambda rows: 1.0, lambda count: 0.0))
    candidates = [candidate(1.0, i) for i in range(4)]
    assert choose(policy, *candidates) == [8] * 4
    assert choose(policy, *candidates, slot_price=2.01) == [0] * 4
    for without in range(1, 200):
        idle = [changed(one, steps_without_model=without) for one in candidates]
        assert choose(policy, *idle, slot_price=1e9) == [0] * 4


def test_dear_time_makes_drafts_shallow() -> None:
    depths = []
    for gain in (1.0, 2.0, 3.0, 10.0):
        policy = adaptive()
        learned(policy, gain)
        depths += choose(policy, candidate(0.8))
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[1] > depths[-1] == 0


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_the_price_of_time_has_a_floor(asked: int) -> None:
    """Each of two requests that must draft earns .01 tokens for a row of .1; all of their passes take .1."""
    policy = adaptive()
    learned(policy, 0.4)
    choose(policy, *(candidate(0.01, i, lowest=i < asked) for i in range(2)))
    best = (2 + 0.01 * asked) / (1.2 + 0.1 * asked + 0.1 * (asked > 0))
    assert policy.decision.price_of_time == pytest.approx(LEAST_SHARE * best)


def test_a_step_that_was_disturbed_hardly_moves_the_price_of_time() -> None:
    policy = adaptive()
    learned(policy, 2.0)
    choose(policy, candidate(0.8))
    before = policy.decision.price_of_time
    policy.observe(Outcome(StepShape(1, 0), 0.0, 1e6, 1, 2, ()))
    policy.choose([candidate(0.8)], load_of([candidate(0.8)]))
    assert before * 0.8 < policy.decision.price_of_time < before


def test_prompts_beside_do_not_make_time_cheaper() -> None:
    """They take what they take, at any depth: 100 rows, 10 seconds, beside one decode with two drafts."""
    prices = []
    for prompts in (0, 100):
        policy = adaptive()
        kind = StepKind.MIXED if prompts else StepKind.VERIFY
        shape = StepShape(3 + prompts, 0, (1, 1), kind=kind, sequences=2)
        for _ in range(200):
            policy.observe(Outcome(shape, 0.2, policy.costs.step(shape), 1, 2, ((0, 2, 1),)))
        policy.choose([candidate(0.8)], load_of([candidate(0.8)]))
        prices.append(policy.decision.price_of_time)
    assert prices[0] == pytest.approx(prices[1])
    assert prices[0] == pytest.approx(2 / 1.5, rel=1e-3)


def test_the_price_of_time_follows_the_load_at_once() -> None:
    """Without a request more seen: 64 sequences earn more than one, so slots are dearer beside them."""
    policy = adaptive(costs_by(lambda rows: 1.0))
    choose(policy, candidate(0.8))
    alone = policy.decision.price_of_time
    choose(policy, *(candidate(0.8, i) for i in range(64)))
    assert policy.decision.price_of_time == pytest.approx(64 * alone)


def test_ngram_needs_no_pass() -> None:
    costs = costs_by(lambda rows: 1.0, lambda count: 10.0)
    both = DepthCandidate(0, (Offer(NGRAM, geometric(0.3)), Offer(MODEL, geometric(0.9))), 0, 8)
    assert adaptive(costs).choose([both], load_of([both])) == [Chosen(NGRAM, 8)]
    assert adaptive(costs_by(lambda rows: 1.0, lambda count: 0.01)).choose([both], load_of([both])) == [
        Chosen(MODEL, 8)
    ]


@pytest.mark.usefixtures("no_savings")
def test_the_better_offer_is_taken() -> None:
    """By all choices there are, where a row costs the same wherever it comes; newcomers choose alike."""
    generator = np.random.default_rng(0)
    taken = []
    for _ in range(200):
        per_row, a_pass = generator.uniform(0.0, 0.3, 2)
        costs = costs_by(lambda n, a=per_row: 1.0 + a * n, lambda n, a=a_pass: a * n)  # type: ignore[misc]
        offers = (Offer(NGRAM, random_run(generator)), Offer(MODEL, random_run(generator)))
        policy = adaptive(costs)
        learned(policy, generator.uniform(0.4, 2.5))
        one = DepthCandidate(0, offers, 0, 3)
        [chosen] = policy.choose([one], load_of([one]))
        second = policy.decision.price_of_time
        prices = {NGRAM: second * per_row, MODEL: second * (per_row + a_pass)}
        values = {
            (offer.method, depth): sum(offer.survivals[:depth]) - prices[offer.method] * depth
            for offer in offers
            for depth in range(1, len(offer.survivals) + 1)
        }
        best = max(0.0, *values.values())
        assert values.get((chosen.method, chosen.depth), 0.0) == pytest.approx(best, abs=1e-9)
        taken.append(chosen.method)
        [joined] = policy.join([changed(one, request_id=1)], load_of([one]))
        assert values.get((joined.method, joined.depth), 0.0) == pytest.approx(best, abs=1e-9)
    assert {NGRAM, MODEL} <= set(taken)


def drafted(policy: AdaptiveDepth, *drafts: tuple[int, int, int], count: int = 1) -> None:
    """A step of `count` requests is over: id, drafts verified and kept of each that drafted."""
    rows = count + sum(depth for _, depth, _ in drafts)
    policy.observe(Outcome(StepShape(rows, 0), 0.0, 1.0, count, count + sum(kept for *_, kept in drafts), drafts))


def test_choices_are_reviewed_after_every_step_with_drafts() -> None:
    """What drafts bring changes with what they brought."""
    policy = adaptive(costs_by(lambda rows: 1.0 + 0.02 * rows))
    three = [candidate(0.8, i) for i in range(3)]
    load = load_of(three)
    depths = [choice.depth for choice in policy.choose(three, load)]
    assert standing(policy, load) == {0, 1, 2}
    drafted(policy, (0, depths[0], depths[0]), (1, depths[1], 0), count=3)
    assert standing(policy, load) == {2}
    assert policy.join(three[:2], load) == [Chosen(MODEL, depth) for depth in depths[:2]], "what still pays stays"
    assert standing(policy, load) == {0, 1, 2}


@pytest.mark.usefixtures("no_savings")
def test_ngrams_are_looked_at_in_every_step() -> None:
    """What stands meanwhile is what the draft model does."""
    policy = adaptive(costs_by(lambda rows: 1.0 + 0.05 * rows, lambda _: 0.05))
    by_model = Offer(MODEL, geometric(0.7))
    [usual] = ask(policy, [plain := DepthCandidate(0, (by_model,), 0, 8)], load_of([plain]))
    assert usual.method is MODEL
    for rate, expected in ((0.99, Chosen(NGRAM, 8)), (0.1, usual), (0.95, Chosen(NGRAM, 8))):
        both = changed(plain, offers=(by_model, Offer(NGRAM, geometric(rate))))
        assert ask(policy, [both], load_of([both])) == [expected]
        assert ask(policy, [plain], load_of([plain])) == [usual]


def beside_what_stands(generator: np.random.Generator) -> list[str]:
    """Three requests with n-grams, some with a draft model too, beside two with a draft model, on costs with stairs:
    what they draft is the best there is for those that copy, and better than if nobody did. Says how it went.
    """
    seconds = 1.0 + np.cumsum(generator.choice([0.0, 0.02, 0.5], 60, p=[0.5, 0.3, 0.2]))
    costs = costs_by(lambda rows: float(seconds[rows]), lambda count: 0.05 * count)
    policy, price = adaptive(costs), float(generator.choice([0.0, 0.1]))
    standing = [candidate(0.8, 10 + i, highest=1 + int(generator.integers(2))) for i in range(2)]
    own = [Offer(MODEL, random_run(generator)) if generator.uniform() < 0.7 else None for _ in range(3)]
    copying = [Offer(NGRAM, random_run(generator)) for _ in range(3)]
    before = [DepthCandidate(i, (offer,), 0, 3) for i, offer in enumerate(own) if offer]
    after = [DepthCandidate(i, (*([own[i]] if own[i] else []), copy), 0, 3) for i, copy in enumerate(copying)]  # type: ignore[arg-type]
    load = load_of([*standing, *after], prompts=3)
    first = ask(policy, [*standing, *before], load, price)
    by_model = dict(zip([one.request_id for one in before], first[2:], strict=True))
    stood = [by_model.get(i, NOTHING) for i in range(3)]
    chosen = ask(policy, [*standing, *after], load, price)
    assert chosen[:2] == first[:2]
    rows, second = load.rows + sum(choice.depth for choice in chosen[:2]), policy._price_of_time(load)

    def value(choices: Sequence[Chosen]) -> float:
        slots = sum(choice.depth for choice in choices)
        tokens = -slots * price - second * (costs.target(rows + slots, 0) - costs.target(rows, 0))
        for one, choice in zip(after, choices, strict=True):
            tokens += sum(sum(offer.survivals[: choice.depth]) for offer in one.offers if offer.method is choice.method)
            tokens -= second * 0.05 * choice.depth * (choice.method is MODEL)
        return tokens

    taken = chosen[2:]
    assert value(taken) >= value(stood) - 1e-9
    options = [
        [now, NOTHING, *(Chosen(NGRAM, k) for k in (1, 2, 3))] if now.method is NGRAM else [now] for now in taken
    ]
    options = [
        [choice for choice in mine if choice.depth <= len(offer.survivals) or choice.method is MODEL]
        for mine, offer in zip(options, copying, strict=True)
    ]
    assert value(taken) == pytest.approx(max(map(value, itertools.product(*options))), abs=1e-9)
    return [choice.method for choice in taken]


@pytest.mark.usefixtures("no_savings")
def test_slots_of_ngrams_are_the_best_there_are_in_every_step() -> None:
    generator = np.random.default_rng(1)
    taken = [beside_what_stands(generator) for _ in range(300)]
    assert {len(set(methods)) for methods in taken} == {1, 2, 3}


@pytest.mark.usefixtures("no_savings")
def test_a_decision_while_a_request_copies_is_for_when_it_does_not() -> None:
    """One stream: without n-grams its draft model drafts, however the decision fell."""
    policy = adaptive(costs_by(lambda rows: 1.0 + 0.05 * rows, lambda _: 0.05))
    by_model = Offer(MODEL, geometric(0.7))
    plain = DepthCandidate(0, (by_model,), 0, 8)
    both = changed(plain, offers=(by_model, Offer(NGRAM, geometric(0.99))))
    assert ask(policy, [both], load_of([both])) == [Chosen(NGRAM, 8)]
    assert ask(policy, [plain], load_of([plain])) == adaptive(policy.costs).choose([plain], load_of([plain]))  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_savings")
def test_where_a_stair_is_too_high_to_copy_the_draft_model_goes_on() -> None:
    """Each of two alone had better copy three tokens than draft two; together they would need a seventh row."""
    policy = adaptive(costs_by(lambda rows: 1.0 if rows <= 6 else 5.0, lambda count: 0.0))
    by_model = Offer(MODEL, [0.9, 0.8])
    plain = [DepthCandidate(i, (by_model,), 0, 3) for i in range(2)]
    both = [changed(one, offers=(by_model, Offer(NGRAM, [0.6, 0.59, 0.58]))) for one in plain]
    assert ask(policy, plain[:1] + both[1:], load_of(plain)) == [Chosen(MODEL, 2)] * 2
    assert ask(policy, both, load_of(both)) == [Chosen(MODEL, 2)] * 2


@pytest.mark.parametrize("acceptance", [0.02, None])
def test_a_match_that_is_worth_nothing_stops_no_draft_model(acceptance: float | None) -> None:
    """A draft that does not quite pay goes on until the next decision, for which it was paid."""
    policy = adaptive(costs_by(lambda rows: 1.0 + 0.3 * rows, lambda count: 0.05))
    one, idle, methods = candidate(0.23, highest=3), 0, []
    for step in range(8):
        now = changed(one, steps_without_model=idle)
        [choice] = ask(policy, [with_ngrams(now, acceptance) if step and acceptance else now], load_of([now]))
        methods.append(choice.method)
        idle = 0 if choice.method is MODEL else idle + 1
        drafted(policy, (0, choice.depth, 0))
    assert methods == [MODEL] * 8


def test_who_copies_stands_as_it_was_decided() -> None:
    """Whatever was decided for those that do not quite pay, which go on."""
    generator = np.random.default_rng(0)
    for _ in range(1000):
        stairs = stairs_of(generator, 60)
        constant, share = generator.uniform(0.0, 0.2, 2)
        costs = costs_by(stairs.__getitem__, lambda n, a=constant, b=share: a + b * n)  # type: ignore[misc]
        gain, count = generator.uniform(0.8, 2.5), generator.integers(1, 5)
        both = [with_both(generator, index) for index in range(count)]
        plain = [changed(one, offers=one.offers[1:]) for one in both]
        decided, copying = adaptive(costs), adaptive(costs)
        for policy in (decided, copying):
            learned(policy, gain)
        ask(copying, both, load_of(both))
        decision = decided.choose(plain, load_of(plain))
        stands = ask(copying, plain, load_of(plain))
        assert all(now.depth >= before.depth for now, before in zip(stands, decision, strict=True) if before.depth > 1)


def test_a_newcomer_pays_where_nobody_drafted() -> None:
    """Nor do passes count that others, who have ended, had been worth."""
    costs = costs_by(lambda rows: 1.0 if rows <= 20 else 1.0 + 0.2 * (rows - 20), lambda count: 0.01)
    policy, few = adaptive(costs), [candidate(0.9, 100 + i) for i in range(2)]
    assert choose(policy, *few) == [8, 8]
    for one in few:
        policy.forget(one.request_id)
    copying = [candidate(0.1, 10 + i, method=NGRAM) for i in range(32)]
    choose(policy, *copying)
    assert [choose(policy, *copying, candidate(0.3, 1))[-1] for _ in range(7)] == [0] * 7


def test_a_newcomer_beside_one_that_drafts_pays_for_its_pass() -> None:
    """Which costs by the sequence."""
    policy = adaptive(costs_by(lambda rows: 1.0, lambda count: 0.05 * count))
    others = [candidate(0.01, 1 + i, highest=0) for i in range(8)]
    assert choose(policy, candidate(0.9, 0), *others)[0] > 0
    assert choose(policy, candidate(0.9, 0), *others[1:], candidate(0.3, 9))[-1] == 0


def test_a_newcomer_earns_the_price_of_slots() -> None:
    policy, one = adaptive(costs_by(lambda rows: 1.0)), candidate(0.9)
    assert choose(policy, one, slot_price=0.5)[0] > 1
    assert choose(policy, candidate(0.4, 1), slot_price=0.5) == [0]


def test_a_short_budget_is_for_the_first_drafts_that_bounds_ask_for() -> None:
    one, other = (candidate(acceptance, i, lowest=2, method=NGRAM) for i, acceptance in enumerate((0.9, 0.1)))
    policy = adaptive()
    assert [choose(policy, one, other, budget=2) for _ in range(2)] == [[1, 1]] * 2


def test_bounds_above_the_highest_depth_are_kept_in_every_step() -> None:
    policy = adaptive()
    one = candidate(0.1, lowest=10, highest=12, method=NGRAM)
    assert [choose(policy, one) for _ in range(3)] == [[10]] * 3


def test_a_newcomer_keeps_the_highest_depth_whatever_bounds_ask_of_others() -> None:
    policy = adaptive(costs_by(lambda rows: 1.0, lambda count: 0.0))
    deep = [candidate(0.99, i, lowest=12, highest=12) for i in range(9)]
    assert choose(policy, *deep) == [12] * 9
    joining = with_ngrams(candidate(0.99, 9, highest=12), 0.5)
    assert ask(policy, [*deep[1:], joining], load_of(deep))[-1] == Chosen(MODEL, 8)


def test_what_is_left_of_a_budget_is_all_that_ngrams_get() -> None:
    policy = adaptive(costs_by(lambda rows: 1.0))
    one = candidate(0.9, 0, highest=8)
    two = [candidate(0.9, 1 + i, method=NGRAM) for i in range(2)]
    assert choose(policy, one, *two, budget=11) == [8, 2, 1]
    assert policy.standing(load_of([one, *two], budget=11)) is not None
    assert choose(policy, one, *two, budget=11) == [8, 2, 1], "by who joins, not by another decision"


def test_ngrams_keep_bounds_in_every_step() -> None:
    policy = adaptive()
    one = candidate(0.01, lowest=2, method=NGRAM)
    assert [choose(policy, one) for _ in range(3)] == [[2]] * 3


@pytest.mark.usefixtures("no_savings")
def test_a_newcomer_whose_draft_model_has_much_to_read_does_not_draft() -> None:
    """As if all were decided on anew."""
    costs = costs_by(lambda rows: 1.0 + 0.01 * rows, lambda count: 0.05, per_draft_row=0.01)
    others = [candidate(0.8, 1 + i) for i in range(8)]
    for catch_up, drafts in ((1, True), (400, False)):
        policy, newcomer = adaptive(costs), candidate(0.8, 0, catch_up=catch_up)
        choose(policy, *others)
        assert (choose(policy, newcomer, *others)[0] > 0) is drafts
        assert (choose(adaptive(costs), newcomer, *others)[0] > 0) is drafts


def test_a_draft_model_goes_as_deep_as_pays_until_the_next_decision() -> None:
    """But not to nothing, or it would fall behind, unless it has already. Who is alone in a pass pays for it."""
    costs = costs_by(lambda rows: 1.0 + 0.01 * rows, lambda count: 0.1 + 0.01 * count)
    for count in (1, 8):
        policy = adaptive(costs)
        batch = [candidate(0.6, i) for i in range(count)]
        (before, *_) = choose(policy, *batch)
        assert 1 < before < 8
        depths = []
        for chance in (0.6, 0.95, 0.01, 0.6):
            drafted(policy, (0, before, 0), count=count)
            depths.append(choose(policy, candidate(chance, 0), *batch[1:])[0])
        assert depths[0] == depths[3] == before
        assert depths[1] > before if count == 1 else depths[1] == before, "nobody else shares a pass behind the last"
        assert depths[2] == 1
        drafted(policy, (0, before, 0), count=count)  # by n-grams
        assert choose(policy, candidate(0.01, 0, without=3), *batch[1:])[0] == 0
    costs = costs_by(lambda rows: 1.0, lambda count: 0.3 + 0.01 * count)
    alone, together = (adaptive(costs) for _ in range(2))
    choose(alone, candidate(0.95, 0))
    choose(together, *(candidate(0.95, i) for i in range(8)))
    cut = []
    for policy, count in ((alone, 1), (together, 8)):
        drafted(policy, (0, 8, 0), count=count)
        cut.append(choose(policy, candidate(0.6, 0), *(candidate(0.95, i) for i in range(1, count)))[0])
    assert cut[0] < cut[1], "what others go through is cheap to be in"


@pytest.mark.usefixtures("no_savings")
def test_nobody_gets_deeper_than_the_highest_depth_between_decisions() -> None:
    policy = adaptive(costs_by(lambda rows: 1.0))
    sure = geometric(0.99, 20)
    one = DepthCandidate(0, (Offer(MODEL, sure), Offer(NGRAM, geometric(0.5, 20))), 0, 20)
    assert choose(policy, one) == [8]
    drafted(policy, (0, 8, 8))
    assert choose(policy, one) == [8]
    assert choose(policy, changed(one, offers=(one.offers[0], Offer(NGRAM, sure)))) == [8]


def test_what_one_gives_up_on_a_stair_is_there_for_another() -> None:
    policy = adaptive(costs_by(lambda rows: 1.0 if rows <= 8 else 5.0, lambda count: 0.01))
    one, other = candidate(0.8, 0), candidate(0.8, 1)
    assert choose(policy, one, other) == [3, 3]
    drafted(policy, (0, 3, 0), (1, 3, 3), count=2)
    assert choose(policy, candidate(0.1, 0), other) == [1, 5]
    assert policy.standing(load_of([one, other])) is not None, "by a review, not by a decision"


def test_a_review_is_the_best_there_is_at_its_prices() -> None:
    """Against every choice within bounds and budget that keeps up-to-date draft models going."""
    generator = np.random.default_rng(0)
    for _ in range(300):
        stairs = stairs_of(generator, 30)
        costs = costs_by(stairs.__getitem__)
        passes = np.sort(generator.uniform(0.0, 0.5, 3)).tolist()
        candidates = [
            DepthCandidate(i, (Offer(MODEL, random_run(generator)),), 0, 3, int(generator.integers(2)))
            for i in range(generator.integers(1, 5))
        ]
        offers = [one.offers[0] for one in candidates]
        load = load_of(candidates)
        budget = int(generator.integers(4, 12))
        prices = Prices(costs, load, generator.uniform(0.3, 2.0), 0.0, passes)  # type: ignore[arg-type]

        def value(depths: Sequence[int]) -> float:
            gained = sum(
                sum(offer.survivals[:depth]) - sum(passes[:depth])  # noqa: B023
                for offer, depth in zip(offers, depths, strict=True)  # noqa: B023
            )
            return gained - prices.of_slots(load.rows, sum(depths), 0, math.inf)[-1]  # noqa: B023

        chosen = [one.depth for one in review(candidates, offers, prices, load.rows, budget, 3)]
        ranges = [
            range(int(not one.steps_without_model), len(offer.survivals) + 1)
            for one, offer in zip(candidates, offers, strict=True)
        ]
        possible = [depths for depths in itertools.product(*ranges) if sum(depths) <= budget]
        assert tuple(chosen) in possible
        assert value(chosen) == pytest.approx(max(map(value, possible)), abs=1e-9)


def test_bounds_that_leave_no_choice_are_not_reviewed() -> None:
    policy = adaptive()
    one = candidate(0.1, lowest=3, highest=3)
    assert choose(policy, one) == [3]
    drafted(policy, (0, 3, 0))
    assert standing(policy, load_of([one])) == {0}


@pytest.mark.parametrize("method", [MODEL, NGRAM])
def test_a_stair_behind_a_choice_does_not_end_it(method: Method) -> None:
    """Five drafts for nothing, and a sixth that doubles the step: the five go on as long as they may pay."""
    policy = adaptive(costs_by(lambda rows: 1.0 if rows <= 6 else 2.0))
    one = candidate(0.8, method=method)
    assert choose(policy, one) == [5]
    for _ in range(3):
        drafted(policy, (0, 5, 2))
        assert choose(policy, one) == [5]


# -- bounds and budget -----------------------------------------------------------------------------------------------


@st.composite
def any_candidate(draw: st.DrawFn, request_id: int) -> DepthCandidate:
    lowest = draw(st.integers(0, 4))
    highest = draw(st.integers(max(lowest, 1), 10))
    methods = draw(st.sampled_from([(MODEL,), (NGRAM,), (NGRAM, MODEL), (MODEL, NGRAM)]))
    offers = tuple(
        Offer(method, geometric(draw(rates), highest), draw(st.integers(0, 12)) if method is MODEL else 0)
        for method in methods
    )
    return DepthCandidate(request_id, offers, lowest, highest, draw(st.integers(0, 600)))


@relaxed
@given(data=st.data(), budget=st.integers(0, 60))
def test_bounds_and_budget_are_kept_over_many_steps(data: st.DataObject, budget: int) -> None:
    policy = adaptive(costs_by(per_draft_row=0.01))
    for _ in range(6):
        ids = data.draw(st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=6))
        candidates = [data.draw(any_candidate(request_id)) for request_id in ids]
        chosen = policy.choose(candidates, load_of(candidates, budget=budget))
        assert sum(choice.depth for choice in chosen) + catch_up_of(candidates, chosen) <= budget
        enough = budget >= sum(c.highest + sum(o.catch_up for o in c.offers) for c in candidates)
        for one, choice in zip(candidates, chosen, strict=True):
            assert (choice.depth == 0) == (choice.method is Method.NONE)
            assert choice.depth <= one.highest
            assert choice.depth >= one.lowest or not enough


def test_what_bounds_ask_for_is_shared_when_rows_are_short() -> None:
    assert choose(adaptive(), *(candidate(0.5, i, lowest=3) for i in range(3)), budget=6) == [2, 2, 2]


def test_a_run_that_is_too_long_to_catch_up_does_not_hold_up_others() -> None:
    behind = candidate(1.0, 0, catch_up=50)
    assert choose(adaptive(costs_by(lambda rows: 1.0)), behind, candidate(0.9, 1), budget=20) == [0, 8]


def test_catching_up_is_paid_over_many_steps_by_a_request_that_was_idle() -> None:
    costs = costs_by(lambda rows: 1.0, per_draft_row=0.1)
    assert choose(adaptive(costs), candidate(0.8, catch_up=40)) == [0], "4 passes for at most 9 tokens, every step"
    assert choose(adaptive(costs), candidate(0.8, catch_up=40, without=40))[0] > 1
    assert choose(adaptive(costs), candidate(0.8, catch_up=4000, without=4000), budget=5000) == [0]


@pytest.mark.parametrize(
    ("tokens", "drafts"), [(1.0, False), (2.0, False), (6.0, False), (12.0, True), (math.inf, True)]
)
def test_catching_up_is_paid_over_the_steps_to_come(tokens: float, drafts: bool) -> None:
    """It takes 4 seconds, and then two steps of 1.5 bring what six without drafts do."""
    costs = costs_by(lambda rows: 1.0, per_draft_row=0.1)
    behind = changed(candidate(0.8, catch_up=40, without=40), tokens_to_serve=tokens)
    assert (choose(adaptive(costs), behind)[0] > 1) == drafts, "one is a probe"


def test_nobody_to_choose_for() -> None:
    assert adaptive().choose([], StepLoad(10, 0, 0, 10)) == []


# -- from step to step -----------------------------------------------------------------------------------------------


def test_a_decision_stands_for_some_steps_and_new_requests_join_it() -> None:
    policy = adaptive()
    good, bad = candidate(0.9, 1), candidate(0.05, 2)
    others = [candidate(0.9, 10 + i) for i in range(8)]
    (first, *_) = choose(policy, good, *others)
    assert choose(policy, changed(good, offers=bad.offers), *others)[0] == first
    newcomer, clipped = choose(policy, candidate(0.05, 3), changed(good, highest=2), *others[1:])[:2]
    assert (newcomer, clipped) == (0, 2)
    for _ in range(DWELL - 3):
        assert choose(policy, candidate(0.9, 4), *others)[0] == first
    assert choose(policy, changed(good, offers=bad.offers), *others)[0] == 0, "the next decision"


def test_those_who_join_do_not_take_more_than_there_is() -> None:
    policy = adaptive(costs_by(lambda rows: 1.0))
    candidates = [candidate(0.9, i) for i in range(16)]
    assert sum(choose(policy, *candidates, budget=130)) == 128
    assert sum(choose(policy, candidate(0.9, 16), *candidates, budget=130)) == 130


@pytest.mark.parametrize("after", ["prompts", "few prompts", "requests", "price"])
def test_another_load_is_decided_for_at_once(after: str) -> None:
    costs = costs_by(lambda rows: 1.0 if rows <= 9 else 1.0 + 2.0 * (rows - 9))
    policy = adaptive(costs)
    one = candidate(0.9)
    assert choose(policy, one) == [8]
    if after == "prompts":
        assert ask(policy, [one], load_of([one], prompts=9))[0].depth == 0
    elif after == "few prompts":
        assert ask(policy, [one], load_of([one], prompts=4))[0].depth == 4
    elif after == "requests":
        assert max(choose(policy, *(candidate(0.9, i) for i in range(10)))) == 0
    else:
        assert choose(policy, one, slot_price=2.0) == [0]


@pytest.mark.parametrize("left", [0, 1, 9])
def test_what_was_decided_for_want_of_rows_does_not_stand_once_there_are_enough(left: int) -> None:
    """As beside the last piece of a prompt, where a row costs what it does elsewhere."""
    policy = adaptive()
    candidates = [candidate(0.95, i) for i in range(4)]
    wanted = choose(policy, *candidates)
    assert sum(wanted) > 9 + len(candidates)
    assert sum(choose(policy, *candidates, budget=left)) == left
    assert choose(policy, *candidates) == wanted


def test_rows_that_are_always_short_call_for_no_decisions() -> None:
    policy = adaptive()
    candidates = [candidate(0.95, i) for i in range(4)]
    choose(policy, *candidates, budget=3)
    for budget in (5, 4, 6, 3):
        assert policy.standing(load_of(candidates, budget=budget)) is not None


def test_prompts_that_do_not_change_what_a_slot_costs_are_no_other_load() -> None:
    policy = adaptive(costs_by(lambda rows: 1.0 + 0.001 * rows))
    good, others = candidate(0.9, 1), [candidate(0.9, 10 + i) for i in range(8)]
    (first, *_) = choose(policy, good, *others)
    worse = [changed(good, offers=candidate(0.05, 2).offers), *others]
    assert ask(policy, worse, load_of(worse, prompts=500))[0].depth == first > 0


def test_depth_does_not_flap_between_choices_that_are_nearly_as_good() -> None:
    """Noise of 2 % around the acceptance at which one more pass begins to pay."""
    costs = costs_by(lambda rows: 1.0, lambda count: 0.25)
    policy = adaptive(costs)
    learned(policy, 1.2)
    noise = np.random.default_rng(1).normal(0.0, 0.01, 400)
    depths, free = [], []
    for shift in noise:
        choose(policy, candidate(min(0.55 + shift, 1.0), highest=4))
        depths.append(policy.decision.depth)
    for shift in noise:
        fresh = adaptive(costs)
        learned(fresh, 1.2)
        free += choose(fresh, candidate(min(0.55 + shift, 1.0), highest=4))
    changes = [
        sum(a != b for a, b in itertools.pairwise(depths[s] for s in range(0, 400, 4))) for depths in (depths, free)
    ]
    assert changes[0] <= changes[1] / 3


@pytest.mark.usefixtures("no_savings")
def test_a_lasting_small_gain_is_taken_in_the_end() -> None:
    costs = costs_by(lambda rows: 1.0, lambda count: 0.3)
    policy = adaptive(costs)
    assert choose(policy, candidate(0.2, highest=1, without=1)) == [0]
    depths = [choose(policy, candidate(0.315, highest=1, without=1))[0] for _ in range(60)]
    assert depths[0] == depths[8] == 0
    assert depths[-1] == 1


def test_the_same_history_gives_the_same_choices() -> None:
    def run() -> list[int]:
        policy = adaptive()
        generator = np.random.default_rng(3)
        depths = []
        for step in range(200):
            candidates = [candidate(float(generator.uniform()), i, without=step) for i in range(5)]
            depths += choose(policy, *candidates)
            emitted = int(generator.integers(5, 20))
            policy.observe(Outcome(StepShape(5, 0), 0.0, 2.0, 5, emitted, ((0, 1, 1),) * 5))
        return depths

    assert run() == run()


# -- probes ----------------------------------------------------------------------------------------------------------


def idle_steps(policy: AdaptiveDepth, count: int, steps: int, acceptance: float = 0.004) -> list[list[int]]:
    """The requests that draft in each of so many steps, if nobody's acceptance is worth a draft."""
    waits = [0] * count
    probes = []
    for _ in range(steps):
        depths = choose(policy, *(candidate(acceptance, i, without=waits[i], catch_up=0) for i in range(count)))
        probes.append([i for i, depth in enumerate(depths) if depth])
        waits = [0 if depth else wait + 1 for wait, depth in zip(waits, depths, strict=True)]
    return probes


def test_idle_requests_probe_ever_more_rarely() -> None:
    steps = [
        step
        for step, who in enumerate(idle_steps(adaptive(costs_by(lambda rows: 1.0, lambda count: 0.01)), 1, 4000))
        if who
    ]
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert gaps == sorted(gaps)
    assert 513 <= gaps[-1] <= 512 + DWELL
    assert len(steps) > 8


def test_requests_that_stopped_together_do_not_probe_together() -> None:
    """Each waits for a time of its own. No step becomes much longer: where rows cost something, few come along."""
    gaps = []
    for request_id in range(4):
        policy = adaptive(costs_by(lambda rows: 1.0, lambda count: 0.01))
        for _ in range(20 * DWELL):
            choose(policy, candidate(0.004, request_id, without=10**4))
        gaps.append(next(w for w in range(2000) if choose(policy, candidate(0.004, request_id, without=w)) == [1]))
    assert min(abs(a - b) for a, b in itertools.combinations(gaps, 2)) >= 50

    policy = adaptive(costs_by(lambda rows: 1.0 + 0.1 * rows, lambda count: 0.1))
    probes = idle_steps(policy, 16, 2000)
    assert {i for who in probes for i in who} == set(range(16))
    assert max(len(who) for who in probes) <= 7
    late = [step for step, who in enumerate(probes) if who and step > 1000]
    assert late[-1] - late[0] > 200


@pytest.mark.parametrize("count", [1, 4, 40])
def test_probes_take_no_more_than_their_share(count: int) -> None:
    costs = costs_by(lambda rows: 1.0 + 0.05 * rows, lambda count: 0.5)
    policy, steps = adaptive(costs), 3000
    plain = costs.target(count, 0)
    spent = 0.0
    for who in idle_steps(policy, count, steps):
        spent += costs.target(count + len(who), 0) - plain + (0.5 if who else 0.0)
    credit = max(LEAST_CREDIT, PROBE_CREDIT / count)
    assert 0.0 < spent <= (PROBE_SHARE * steps + credit) * plain * (1 + 1e-9)
    assert PROBE_SHARE <= 0.02


def test_a_probe_that_pays_makes_the_request_draft() -> None:
    policy = adaptive()
    assert choose(policy, candidate(0.01)) == [0]
    assert [choose(policy, candidate(0.9))[0] for _ in range(DWELL)][-1] > 1


@pytest.mark.parametrize("count", [1, 4, 40])
def test_requests_go_on_while_what_they_lose_together_is_paid_for(count: int) -> None:
    """A pass for all costs half a step, which they earn in part: .1 of a step is lost each time, at once by as many."""
    policy = adaptive(costs_by(lambda rows: 1.0, lambda _: 0.5))
    depths = []
    for _ in range(200):
        depths.append(choose(policy, *(candidate(0.4, i) for i in range(count))))
        if not any(depths[-1]):
            policy.observe(Outcome(StepShape(count, 0), 0.0, 1.0, count, count, ()))
    # A step without drafts, to check what they save, is not the end.
    ended = next(step for step in range(200) if not any(map(any, depths[step : step + DWELL])))
    lasted = depths[:ended].count([1] * count)
    assert ended - lasted == depths[:ended].count([0] * count) <= ended // LEAST_PLAIN_INTERVAL
    credit = max(LEAST_CREDIT, PROBE_CREDIT / count)
    assert (lasted > 0) == (credit >= 0.1 * DWELL), "a decision stands for so many steps, and is paid for whole"
    assert 0.1 * lasted == pytest.approx(credit, abs=0.1 * DWELL + 0.1 * credit)
    assert sum(map(any, depths[ended:])) <= 0.01 / 0.1 * (200 - ended) + DWELL


def test_prompts_beside_the_first_decision_buy_no_probes() -> None:
    """They make that step 200 times as long."""
    policy = adaptive(costs_by(lambda rows: 1.0 * rows))
    candidates = [candidate(0.01)]
    policy.choose(candidates, load_of(candidates, prompts=199))
    assert policy._probes.seconds <= PROBE_CREDIT + PROBE_SHARE * 200


def test_nothing_is_saved_for_probes_while_bounds_decide() -> None:
    policy = adaptive(costs_by(lambda rows: 1.0))
    saved = []
    for lowest in (2, 0):
        for _ in range(4 * DWELL):
            choose(policy, candidate(0.01, method=NGRAM, lowest=lowest, highest=2))
        saved.append(policy._probes.seconds)
    assert saved == [
        PROBE_CREDIT,
        pytest.approx(PROBE_CREDIT + 4 * DWELL * PROBE_SHARE, abs=DWELL * PROBE_SHARE + 1e-9),
    ]


@pytest.mark.parametrize(("survival", "likely"), [(0.79, False), (0.81, True), (1.0, True)])
def test_prompts_are_read_along_where_one_draft_each_earns_nine_tenths_of_none(survival: float, likely: bool) -> None:
    """Four rows take 4 seconds, eight take 6, and a pass of four takes 2."""
    policy = adaptive(costs_by(lambda rows: max(4.0, rows * 0.75), lambda count: 0.5 * count))
    assert policy.reads_along(1000, 1.0, survival, 4, 0) == likely, "where reading takes no time"


@pytest.mark.parametrize(("tokens", "pays"), [(44.9, False), (45.1, True), (math.inf, True)])
def test_prompts_are_read_along_for_those_who_have_tokens_enough_to_come(tokens: float, pays: bool) -> None:
    """A step takes four of them 4 seconds, which count as 4 / .9, and brings two tokens each with a draft that is kept.
    What that saves of a token takes the draft model to read one.
    """
    saved = (4.0 / 0.9 - 4.0 / 2.0) / 4
    policy = adaptive(costs_by(lambda rows: max(4.0, rows * 0.25), lambda count: 0.0, per_draft_row=saved))
    assert policy.reads_along(45, tokens, 1.0, 4, 0) == pays


def test_only_those_go_on_that_earn_half_of_what_they_cost() -> None:
    policy = adaptive(costs_by(lambda rows: 1.0, lambda count: 0.5))
    assert choose(policy, *(candidate(0.24, i) for i in range(4))) == [0] * 4

    by_row = adaptive(costs_by(lambda rows: 0.5 + 0.5 * rows, lambda count: 0.0))
    acceptances = (0.02, 0.6, 0.01, 0.55)
    assert choose(by_row, *(candidate(a, i) for i, a in enumerate(acceptances))) == [0, 1, 0, 1]


def test_one_of_the_deepest_tries_one_more_now_and_then() -> None:
    policy = adaptive(costs_by(lambda rows: 1.0 + 0.02 * rows, lambda count: 0.05))
    candidates = [candidate(0.5, i) for i in range(4)]
    copying = candidate(0.99, 4, method=NGRAM)
    history = [choose(policy, *candidates, copying)[:4] for _ in range(300)]
    usual = history[0]
    odd = [depths for depths in history if depths != usual and any(depths)]  # plain steps are another matter
    assert 5 <= len(odd) <= 10
    assert all(sum(depths) == sum(usual) + 1 and max(depths) == max(usual) + 1 for depths in odd)
    assert len({depths.index(max(depths)) for depths in odd}) == 4, "each in turn"


def test_bounds_hold_for_probes() -> None:
    policy = adaptive()
    for without in range(600):
        assert choose(policy, DepthCandidate(0, (Offer(MODEL, [0.01]),), 0, 0, without)) == [0]
    assert choose(adaptive(), candidate(0.01, without=10**6), budget=0) == [0]


def test_forgotten_requests_leave_nothing() -> None:
    policy = adaptive()
    idle_steps(policy, 5, 200)
    assert policy._probes._intervals
    for request_id in range(6):
        policy.forget(request_id)
    assert not policy._probes._intervals
    assert not policy._standing.by_model
    assert not policy._standing.looks


# -- summary and the fixed policy ------------------------------------------------------------------------------------


def test_the_last_decision_is_told() -> None:
    costs = costs_by(lambda rows: 1.0 + 0.01 * rows, lambda count: 0.1, start=0.05, per_draft_row=0.01)
    policy = adaptive(costs)
    candidates = [candidate(0.6, 0, catch_up=1), candidate(0.9, 1)]
    load = load_of(candidates)
    for _ in range(3):
        chosen = policy.choose(candidates, load)
        last = policy.decision
        assert (last.depth, last.slots) == (max(c.depth for c in chosen), sum(c.depth for c in chosen))
        step = PricedStep(candidates, chosen, load, costs)
        assert step.seconds == pytest.approx(costs.step(shape_of(candidates, chosen, load)))
        assert step.tokens == pytest.approx(worth(candidates, chosen, load, costs, second=0.0))


def test_fixed_depth_is_fixed() -> None:
    candidates = [candidate(0.0), candidate(1.0, 1), candidate(0.5, 2, highest=2), candidate(0.5, 3, lowest=5)]
    assert choose(FixedDepth(3), *candidates) == [3, 3, 2, 5]
    assert FixedDepth(0).choose(candidates[:1], load_of(candidates)) == [NOTHING]


def test_fixed_depth_takes_the_first_offer_as_far_as_it_goes() -> None:
    both = DepthCandidate(0, (Offer(MODEL, geometric(0.5, 2)), Offer(NGRAM, geometric(0.9))), 0, 8)
    assert FixedDepth(3).choose([both], load_of([both])) == [Chosen(MODEL, 2)]


def plain_steps(policy: AdaptiveDepth, steps: int, seconds: Callable[[int], float], **options: Any) -> list[int]:
    """Which of so many steps of one request, every draft of which is kept, had none."""
    plain = []
    for step in range(steps):
        (depth,) = choose(policy, candidate(0.9, **options))
        kind = StepKind.VERIFY if depth else StepKind.DECODE
        drafts = ((0, depth, depth),) if depth else ()
        policy.observe(Outcome(StepShape(1 + depth, 0, kind=kind), 0.0, seconds(1 + depth), 1, 1 + depth, drafts))
        if not depth:
            plain.append(step)
    return plain


def test_now_and_then_a_step_is_taken_without_drafts_to_check_what_they_save() -> None:
    """After one to begin with, rarely where that loses a lot."""
    plain = plain_steps(adaptive(costs_by(lambda rows: 1.0)), 4 * PLAIN_INTERVAL, lambda rows: 1.0)
    assert plain[0] < 2 * LEAST_PLAIN_INTERVAL
    between = [later - earlier for earlier, later in itertools.pairwise(plain)]
    assert len(between) > 3
    assert all(PLAIN_INTERVAL / 3 < steps <= PLAIN_INTERVAL for steps in between)
    fixed = adaptive(costs_by(lambda rows: 1.0))
    assert not plain_steps(fixed, 2 * PLAIN_INTERVAL, lambda rows: 1.0, lowest=1)


def test_what_a_draft_takes_is_checked_while_a_request_only_goes_on() -> None:
    """Or else an error about it would keep it going."""
    policy = adaptive(costs_by(lambda rows: 1.0, lambda _: 0.5))
    depths = []
    for _ in range(40):
        (depth,) = choose(policy, candidate(0.45))
        depths.append(depth)
        kind = StepKind.VERIFY if depth else StepKind.DECODE
        policy.observe(Outcome(StepShape(1 + depth, 0, kind=kind), 0.0, 1.0 + 0.5 * depth, 1, 1, ()))
    assert depths[0] == depths[-1] == 1
    assert 1 <= depths.count(0) <= 40 // LEAST_PLAIN_INTERVAL


def test_where_drafts_hardly_pay_steps_without_them_are_frequent() -> None:
    """And lose no more than their share of the time."""

    def seconds(rows: int) -> float:
        return 1.0 + 0.5 * (rows > 1) + 10.0 * (rows > 2)  # at a chance of nine in ten, 1.9 tokens in 1.5 seconds

    plain = plain_steps(adaptive(costs_by(seconds, lambda count: 0.0)), 3000, seconds)
    lost = len(plain) * (1.0 - 1.5 / 1.9)
    assert len(plain) > 20
    assert lost <= PLAIN_CREDIT * 1.5 + PLAIN_SHARE * 3000 * 1.5 + 1e-9


def test_a_forward_in_which_many_read_is_paid_once() -> None:
    """What each would pay for alone, all of them share: they draft, and what is predicted is what it takes."""
    costs = CostModel([1, 256], [1.0, 1.1], 0.0, [1, 64], [0.1, 0.1], first_rows=2, reading_seconds=0.2)
    many = [candidate(0.8, number, highest=3, catch_up=1) for number in range(32)]
    assert choose(adaptive(costs), *many) == [3] * 32
    step = PricedStep(many, [Chosen(MODEL, 3)] * 32, load_of(many), costs)
    assert step.seconds == pytest.approx(costs.target(128, 0, 32) + 0.3 + 0.2)
    one_more = PricedStep(many[:2], [Chosen(MODEL, 1), NOTHING], load_of(many[:2]), costs)
    assert one_more.seconds_of_one_more(1, many[1].offers[0]) == pytest.approx(0.1 / 255), "the others read anyway"


def test_what_stands_is_not_done_where_it_is_offered_no_more() -> None:
    """A request has come behind the reach of its draft model since the decision, and copies."""
    policy = adaptive()
    by_model = candidate(0.9)
    assert choose(policy, by_model) != [0]
    by_ngram = changed(by_model, offers=(Offer(NGRAM, [0.01]),))
    load = load_of([by_ngram])
    assert policy.standing(load) is not None
    assert policy.join([by_ngram], load) == [NOTHING]


def copying(promise: float, match: int, request_id: int = 0) -> DepthCandidate:
    """A request whose n-grams promise that much a draft, behind a match of so many tokens."""
    return DepthCandidate(request_id, (Offer(NGRAM, geometric(promise)),), 0, 8, 0, match)


def held(policy: AdaptiveDepth, candidate: DepthCandidate, budget: int = 1000) -> Chosen | None:
    standing = policy.standing(load_of([candidate], budget=budget))
    assert standing is not None
    return standing.of(candidate.request_id, candidate.match)


def test_ngrams_that_did_not_pay_are_looked_at_again_once_they_match_more() -> None:
    policy = adaptive()
    assert ask(policy, [copying(0.01, 2)], load_of([copying(0.01, 2)])) == [NOTHING]
    assert held(policy, copying(0.01, 1)) == NOTHING
    assert held(policy, copying(0.99, 3)) is None
    assert ask(policy, [copying(0.99, 3)], load_of([copying(0.99, 3)])) == [Chosen(NGRAM, 8)]


def test_who_copies_to_the_end_goes_on_while_all_is_kept() -> None:
    policy = adaptive()
    one = copying(0.99, 3)
    assert ask(policy, [one], load_of([one])) == [Chosen(NGRAM, 8)]
    drafted(policy, (0, 8, 8))
    assert held(policy, copying(0.01, 12)) == Chosen(NGRAM, 8), "nobody asks what it promises"
    assert held(policy, copying(0.01, 2)) is None
    drafted(policy, (0, 8, 7))
    assert held(policy, copying(0.01, 12)) is None


def test_who_may_get_deeper_by_a_longer_match_is_looked_at() -> None:
    policy = adaptive()
    one = copying(0.5, 3)
    [choice] = ask(policy, [one], load_of([one]))
    assert 0 < choice.depth < 8
    drafted(policy, (0, choice.depth, choice.depth))
    assert held(policy, copying(0.5, 3)) is None


def idled() -> tuple[AdaptiveDepth, list[DepthCandidate]]:
    """Two who draft in a pass that costs the same for one, of whom the first copies as well; the other has a match."""
    policy = adaptive(costs_by(lambda rows: 1.0 + 0.1 * rows, lambda count: 0.3))
    offers = [(0.9, 0.99), (0.5, 0.05)]
    pairs = [(Offer(MODEL, [model]), Offer(NGRAM, [ngram])) for model, ngram in offers]
    return policy, [DepthCandidate(index, pair, 0, 1, 0, 2) for index, pair in enumerate(pairs)]


@pytest.mark.usefixtures("no_savings")
def test_nobody_is_left_alone_in_a_pass_because_its_ngrams_do_not_pay() -> None:
    policy, both = idled()
    assert ask(policy, both, load_of(both)) == [Chosen(NGRAM, 1), NOTHING]


@pytest.mark.usefixtures("no_savings")
def test_who_left_a_pass_with_others_is_looked_at_with_them() -> None:
    """It does not draft alone as soon as nobody asks."""
    policy, both = idled()
    ask(policy, both, load_of(both))
    for _ in range(DWELL - 1):
        drafted(policy, (0, 1, 1), count=2)
        assert ask(policy, both, load_of(both)) == [Chosen(NGRAM, 1), NOTHING]


@pytest.mark.parametrize("budget", [0, 7])
def test_ngrams_for_which_there_were_no_rows_are_looked_at_again(budget: int) -> None:
    """What did not pay is not what did not fit."""
    policy = adaptive(costs_by(lambda rows: 1.0 if rows == 1 else 8.2))
    one = copying(0.99, 3)
    assert ask(policy, [one], load_of([one], budget=budget)) == [NOTHING]
    assert held(policy, one, budget) is None
    assert ask(policy, [one], load_of([one])) == [Chosen(NGRAM, 8)]


@pytest.mark.parametrize(
    ("seconds", "count", "dwell"),
    [(1.0, 1, DWELL), (0.01, 1, DWELL), (0.0004, 1, 7 * DWELL), (0.01, 256, 8 * DWELL), (0.1, 256, DWELL)],
)
def test_decisions_stand_longer_where_steps_are_short_beside_them(seconds: float, count: int, dwell: int) -> None:
    policy = adaptive(costs_by(lambda rows: seconds + 1e-9 * rows, lambda count: seconds))
    many = [candidate(0.01, number) for number in range(count)]
    load = load_of(many)
    assert policy.standing(load) is None
    policy.choose(many, load)
    assert [policy.standing(load) is None for _ in range(dwell)] == [False] * (dwell - 1) + [True]


def test_a_decision_about_steps_that_cost_nothing_does_not_stand_for_ever() -> None:
    """As before anything was measured."""
    policy, one = adaptive(CostModel([1, 8], [0.0, 0.0], 0.0, [1], [0.0])), candidate(0.9)
    policy.choose([one], load_of([one]))
    assert any(policy.standing(load_of([one])) is None for _ in range(PLAIN_INTERVAL))
