"""Which drafts by the draft model go on between two decisions, by those who have drafted since."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.depth import Chosen, DepthCandidate, Offer, within_bounds
from paceline.core.prices import Prices
from paceline.core.slot_order import Run, best_depths, least_rise, that_may_pay


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
    runs = []
    tokens, taken, count = 0.0, 0, 0
    for index, (candidate, offer) in enumerate(zip(candidates, offers)):
        survivals = offer.survivals[: candidate.reach(max_depth)]
        gains = [survival - prices.passes[min(position, last)] for position, survival in enumerate(survivals)]
        asked = min(max(candidate.lowest, int(not candidate.steps_without_model)), len(gains))
        runs.append(Run(index, asked, gains))
        tokens += sum(survivals)
        taken += asked
        count += len(gains)
    slot_prices = prices.of_slots(rows, count, taken, tokens)
    least = least_rise(slot_prices)
    for run in runs:
        run.gains = that_may_pay(run.gains, least, run.asked)
    depths = best_depths(runs, budget, slot_prices)
    return [
        within_bounds(candidate, offer, depths[index])
        for index, (candidate, offer) in enumerate(zip(candidates, offers))
    ]
