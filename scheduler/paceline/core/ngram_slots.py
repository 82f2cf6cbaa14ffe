"""Which drafts by n-grams join a step, for those whose n-grams promise something new."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.core.depth import NOTHING, Chosen, DepthCandidate, offer_by
from paceline.core.method import DRAFT_MODEL, NGRAM
from paceline.core.prices import Prices
from paceline.core.slot_order import Run, best_count, best_depths, least_rise, that_may_pay


class NgramProblem:
    """Who drafts by n-grams in this step instead of doing what stands for it, and how deep?

    Two sets of requests are looked at: those of whom nothing stands or that, alone, gain more by n-grams; and all who
    could copy, since what a draft pass costs besides its sequences is saved once nobody is left in it. Of either, the
    likeliest slots are taken, as many as pay together beside the drafts of all others; every count is looked at, since
    costs rise in stairs. What is worth the most is done: one of these, or all as it stood.

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
        self._slot_prices: list[float] = []  # of 0, 1, ... slots beside the step without drafts of any of these

    def solve(self) -> list[Chosen]:
        drafts = sum([choice.depth for choice in self.standing])
        matched = self._matched(drafts)
        if not any(matched.values()):
            return self.standing
        copying = self._copying(matched)
        if not any([self.standing[index].depth for index in matched]):
            return self._joined(copying)
        asked = any([self.candidates[index].lowest for index in copying])
        best, value = self.standing, -math.inf if asked else self._value(self.standing)
        for some in [copying] + [matched] * (len(matched) > len(copying)):
            chosen = self._joined(some)
            if chosen is not self.standing and (worth := self._value(chosen)) > value:
                best, value = chosen, worth
        return best

    def _matched(self, drafts: int) -> dict[int, list[float]]:
        """What n-grams offer that may pay, by index; and tells what slots cost. That may be nothing of those who draft:
        they can leave the draft passes with others. Bounds are for the draft model to keep, where there is one.

        Args:
            drafts: that stand.
        """
        offered = {}
        tokens, taken, count = 0.0, drafts, drafts
        for index, candidate in enumerate(self.candidates):
            offer = offer_by(NGRAM, candidate)
            if offer is not None and not (candidate.lowest and offer_by(DRAFT_MODEL, candidate)):
                survivals = offered[index] = offer.survivals[: candidate.reach(self.max_depth)]
                tokens += sum(survivals)
                taken += min(candidate.lowest, len(survivals))
                count += len(survivals)
        if not offered:
            return offered
        self._slot_prices = self.prices.of_slots(self.prices.load.rows, count, taken, tokens)
        least = least_rise(self._slot_prices)
        matched = {}
        for index, survivals in offered.items():
            gains = that_may_pay(survivals, least, self.candidates[index].lowest)
            if gains or self.standing[index].depth:
                matched[index] = gains
        return matched

    def _copying(self, matched: dict[int, list[float]]) -> dict[int, list[float]]:
        """Those of whom nothing stands, or that alone gain more by n-grams."""
        copying = {}
        for index, gains in matched.items():
            candidate, depth = self.candidates[index], self.standing[index].depth
            by_model = offer_by(DRAFT_MODEL, candidate)
            if by_model is not None and depth:
                drafting = self.prices.of_drafting(candidate, by_model, depth)
                gain = max(0.0, sum(by_model.survivals[:depth]) - self._slot_prices[depth] - drafting)
                _, by_ngram = best_count(gains, self._slot_prices)
                if by_ngram <= gain:
                    continue
            copying[index] = gains
        return copying

    def _joined(self, copying: dict[int, list[float]]) -> list[Chosen]:
        """The best if these copy; as it stood if that is not to draft at all."""
        runs = [Run(index, self.candidates[index].lowest, gains) for index, gains in copying.items()]
        drafts, budget = self._beside(copying)
        depths = best_depths(runs, budget, self._slot_prices[drafts:])
        if not any(depths.values()):
            return self.standing
        chosen = list(self.standing)
        for index, depth in depths.items():
            chosen[index] = Chosen(NGRAM, depth) if depth else NOTHING
        return chosen

    def _beside(self, copying: dict[int, list[float]]) -> tuple[int, int]:
        """Drafts of all others, and rows that are left."""
        drafts, budget = 0, self.prices.load.budget
        for index, choice in enumerate(self.standing):
            if choice.depth and index not in copying:
                by_model = offer_by(DRAFT_MODEL, self.candidates[index])
                drafts += choice.depth
                budget -= choice.depth + (by_model.catch_up if by_model else 0)
        return drafts, budget

    def _value(self, chosen: list[Chosen]) -> float:
        """Tokens that drafts bring beyond what they cost, verified and drafted."""
        value, slots, forward = 0.0, 0, 0.0
        drafting: list[int] = []  # sequences by draft pass
        for candidate, choice in zip(self.candidates, chosen):
            if not choice.depth:
                continue
            offer = offer_by(choice.method, candidate)
            assert offer is not None, "chosen of what was offered"
            slots += choice.depth
            value += sum(offer.survivals[: choice.depth])
            if choice.method is DRAFT_MODEL:
                rows, own = self.prices.of_rows_and_forward(candidate, offer)
                value, forward = value - rows, max(forward, own)
                drafting += [0] * (choice.depth - len(drafting))
                for number in range(choice.depth):
                    drafting[number] += 1
        return value - forward - self._slot_prices[slots] - self.prices.of_passes(drafting)
