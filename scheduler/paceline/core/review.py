"""Which drafts by the draft model go on between two decisions, by those who have drafted since."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.depth import Chosen, DepthCandidate, Offer, within_bounds
from paceline.core.prices import Prices
from paceline.core.slot_order import Run, best_depths, cut, in_all


def review(
    candidates: Sequence[DepthCandidate],
    offers: Sequence[Offer],
    prices: Prices,
    rows: int,
    budget: int,
    max_depth: int,
) -> list[Chosen]:
    """How deep does each of these draft now, if the number of passes, and what they cost, stand?

    Slots are worth what they bring beyond their part of a pass, and what one gives up on a step of the stairs is there
    for another. Bounds are kept, and so is one draft of each whose draft model is up to date: without it, that would
    fall behind, which is for the next decision.

    Args:
        offers: of each by its draft model.
        rows: of the step without the drafts of any of these.
    """
    last = len(prices.passes) - 1
    runs: list[Run] = []
    for index, (candidate, offer) in enumerate(zip(candidates, offers)):
        survivals = offer.survivals[: candidate.reach(max_depth)]
        asked = min(max(candidate.lowest, int(not candidate.steps_without_model)), len(survivals))
        runs.append(Run(index, asked, survivals))
    count, taken, tokens = in_all(runs)
    slot_prices = prices.of_slots(rows, count, taken, tokens)
    for run in runs:  # behind the sum of what all bring, which losses would make too low a bound
        run.gains = [gain - prices.passes[min(position, last)] for position, gain in enumerate(run.gains)]
    cut(runs, slot_prices)
    depths = best_depths(runs, budget, slot_prices)
    return [within_bounds(candidate, offer, depth) for candidate, offer, depth in zip(candidates, offers, depths)]
