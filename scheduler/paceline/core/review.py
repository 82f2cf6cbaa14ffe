"""Which drafts by the draft model go on between two decisions, by those who have drafted since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.core.depth import Chosen, DepthCandidate, Offer, within_bounds
from paceline.core.prices import Prices, gains
from paceline.core.slots import ASKED


class Review:
    """How deep does each of these draft now, if the number of passes, and what they cost, stand?

    Their slots stand in one order, by what they bring beyond their part of a pass, and every count is looked at: costs
    rise in stairs, and what one gives up on a step of them is there for another. First come the slots that bounds ask
    for, and one of each whose draft model is up to date: without it, that would fall behind, which is for the next
    decision.

    Args:
        offers: of each by its draft model.
        rows: of the step without the drafts of any of these.
    """

    def __init__(
        self,
        candidates: Sequence[DepthCandidate],
        offers: Sequence[Offer],
        prices: Prices,
        rows: int,
        budget: int,
        max_depth: int,
    ) -> None:
        self.candidates = candidates
        self.offers = offers
        self.prices = prices
        self.rows = rows
        self.budget = budget
        self.max_depth = max_depth

    def solve(self) -> list[Chosen]:
        slots = self._slots()[: max(0, self.budget)]
        worth = gains([gain for _, _, gain in slots], self.prices.of_slots(self.rows, len(slots)))
        asked = len([rank for rank, _, _ in slots if rank < -1.0])
        count = worth.index(max(worth[asked:]), asked)
        depths = Counter([index for _, index, _ in slots[:count]])
        return [
            within_bounds(candidate, offer, depths[index])
            for index, (candidate, offer) in enumerate(zip(self.candidates, self.offers))
        ]

    def _slots(self) -> list[tuple[float, int, float]]:
        """Rank, index and gain of each, in the order in which they are taken: a prefix of each offer."""
        passes = self.prices.passes
        slots = []
        for index, (candidate, offer) in enumerate(zip(self.candidates, self.offers)):
            asked, worst = max(candidate.lowest, int(not candidate.steps_without_model)), 1.0
            for position, survival in enumerate(offer.survivals[: candidate.reach(self.max_depth)]):
                gain = survival - passes[min(position, len(passes) - 1)]
                if gain <= 0.0 and position >= max(asked, 1):
                    break  # nor does anything behind it gain
                worst = min(worst, gain)  # nothing stands before what it builds on
                slots.append((position - ASKED if position < asked else -worst, index, gain))
        slots.sort()
        return slots
