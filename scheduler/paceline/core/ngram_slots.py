"""Which drafts by n-grams join a step: chosen anew for each, since what they have to propose is known for one alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from paceline.core.depth import NOTHING, Chosen, DepthCandidate, Offer, offer_by
from paceline.core.method import DRAFT_MODEL, NGRAM
from paceline.core.prices import Prices, gains
from paceline.core.slots import ASKED


class NgramProblem:
    """Who drafts by n-grams in this step instead of doing what stands for it, and how deep?

    A request copies if, alone, it gains more by n-grams. Those that copy get the likeliest of their slots, as many as
    pay together for what they cost beside the drafts of all others; every count is looked at, since costs rise in
    stairs. If that is worth less than going on as it stood, all go on.

    Args:
        standing: what each would do by its draft model.
        prices: of the step without the drafts of any of these.
    """

    def __init__(
        self, candidates: Sequence[DepthCandidate], standing: list[Chosen], prices: Prices, max_depth: int
    ) -> None:
        self.candidates = candidates
        self.standing = standing
        self.prices = prices
        self.max_depth = max_depth

    def solve(self) -> list[Chosen]:
        copying = self._copying()
        if not copying:
            return self.standing
        slots = self._slots(copying)
        rows, budget = self._beside(copying)
        slots = slots[: max(0, budget)]
        drafted = sum([self.standing[index].depth for index in copying])
        costs = self.prices.of_slots(rows, max(len(slots), drafted))
        worth = gains([survival for _, _, survival in slots], costs)
        asked = len([rank for rank, _, _ in slots if rank < -1.0])
        count = worth.index(max(worth[asked:]), asked)
        if not asked and worth[count] <= self._gain_as_it_stood(copying, costs[drafted]):
            return self.standing
        depths = Counter([index for _, index, _ in slots[:count]])
        chosen = list(self.standing)
        for index in copying:
            chosen[index] = Chosen(NGRAM, depths[index]) if depths[index] else NOTHING
        return chosen

    def _copying(self) -> dict[int, Offer]:
        """Their offers by n-grams, by index. Bounds are for the draft model to keep, where there is one."""
        alone: list[float] = []
        copying = {}
        for index, candidate in enumerate(self.candidates):
            offer, by_model = offer_by(NGRAM, candidate), offer_by(DRAFT_MODEL, candidate)
            if offer is None or (by_model is not None and candidate.lowest):
                continue
            alone = alone or self.prices.of_slots(self.prices.load.rows, self.max_depth)
            depth = self.standing[index].depth
            gain = -math.inf
            if by_model is not None and depth:
                gain = sum(by_model.survivals[:depth]) - alone[depth]
                gain -= self.prices.of_drafting(candidate, by_model, depth)
            if max(gains(offer.survivals[: candidate.reach(self.max_depth)], alone)) > gain:
                copying[index] = offer
        return copying

    def _beside(self, copying: dict[int, Offer]) -> tuple[int, int]:
        """Rows of all others, their drafts included, and rows that are left."""
        rows, budget = self.prices.load.rows, self.prices.load.budget
        for index, choice in enumerate(self.standing):
            if choice.depth and index not in copying:
                by_model = offer_by(DRAFT_MODEL, self.candidates[index])
                rows += choice.depth
                budget -= choice.depth + (by_model.catch_up if by_model else 0)
        return rows, budget

    def _slots(self, copying: dict[int, Offer]) -> list[tuple[float, int, float]]:
        """Rank, index and survival of each, in the order in which they are taken: a prefix of each offer."""
        slots = []
        for index, offer in copying.items():
            candidate = self.candidates[index]
            for position, survival in enumerate(offer.survivals[: candidate.reach(self.max_depth)]):
                rank = position - ASKED if position < candidate.lowest else -survival
                slots.append((rank, index, survival))
        slots.sort()
        return slots

    def _gain_as_it_stood(self, copying: dict[int, Offer], price_of_slots: float) -> float:
        """What the draft model would bring to those that copy, beyond what its drafts cost."""
        gain = -price_of_slots
        for index in copying:
            candidate, depth = self.candidates[index], self.standing[index].depth
            by_model = offer_by(DRAFT_MODEL, candidate)
            if by_model is not None and depth:
                gain += sum(by_model.survivals[:depth]) - self.prices.of_drafting(candidate, by_model, depth)
        return gain
