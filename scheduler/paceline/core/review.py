"""Which drafts by the draft model go on between two decisions, by those who have drafted since."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.depth import Chosen, DepthCandidate, Offer, within_bounds
from paceline.core.prices import Prices
from paceline.core.slot_order import Run, best_depths, that_may_pay


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
    most = sum([len(offer.survivals) for offer in offers])
    least = prices.least_rise(rows, most)
    runs = []
    for index, (candidate, offer) in enumerate(zip(candidates, offers)):
        survivals = offer.survivals[: candidate.reach(max_depth)]
        gains = [survival - prices.passes[min(position, last)] for position, survival in enumerate(survivals)]
        asked = max(candidate.lowest, int(not candidate.steps_without_model))
        runs.append(Run(index, asked, that_may_pay(gains, least, asked)))
    depths = best_depths(runs, budget, prices.of_slots(rows, sum([len(run.gains) for run in runs])))
    return [
        within_bounds(candidate, offer, depths[index])
        for index, (candidate, offer) in enumerate(zip(candidates, offers))
    ]
