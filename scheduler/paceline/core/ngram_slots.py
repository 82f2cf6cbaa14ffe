"""Which drafts by n-grams join a step, for those whose n-grams promise something new."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.core.depth import NOTHING, Chosen, DepthCandidate, offer_by, passes_of, slots_of
from paceline.core.method import DRAFT_MODEL, NGRAM
from paceline.core.prices import Prices
from paceline.core.slot_order import Run, best_count, best_depths, cut, in_all


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
        self.drafts = slots_of(standing)

    def solve(self) -> list[Chosen]:
        offered = self._offered()
        if not offered:
            return self.standing
        count, asked, tokens = in_all(offered)
        slot_prices = self.prices.of_slots(self.prices.load.rows, self.drafts + count, self.drafts + asked, tokens)
        cut(offered, slot_prices)
        promising = [run for run in offered if run.gains]
        if not promising:
            return self.standing
        # Who drafts may copy nothing, and leave the draft passes with others.
        drafting = [run for run in offered if self.standing[run.index].depth] if self.drafts else []
        if not drafting:
            return self._joined(promising, slot_prices)
        matched = [run for run in offered if run.gains or self.standing[run.index].depth]
        copying = self._copying(matched, slot_prices)
        bound = any([run.asked for run in copying])
        best, value = self.standing, -math.inf if bound else self._value(self.standing, slot_prices)
        for some in [copying] + [matched] * (len(matched) > len(copying)):
            chosen = self._joined(some, slot_prices)
            if chosen is not self.standing and (worth := self._value(chosen, slot_prices)) > value:
                best, value = chosen, worth
        return best

    def _offered(self) -> list[Run]:
        """What n-grams offer. Bounds are for the draft model to keep, where there is one."""
        runs = []
        for index, candidate in enumerate(self.candidates):
            offer = offer_by(NGRAM, candidate)
            if offer is not None and not (candidate.lowest and offer_by(DRAFT_MODEL, candidate)):
                survivals = offer.survivals[: candidate.reach(self.max_depth)]
                runs.append(Run(index, min(candidate.lowest, len(survivals)), survivals))
        return runs

    def _copying(self, matched: list[Run], slot_prices: list[float]) -> list[Run]:
        """Those of whom nothing stands, or that alone gain more by n-grams."""
        copying = []
        for run in matched:
            candidate, depth = self.candidates[run.index], self.standing[run.index].depth
            by_model = offer_by(DRAFT_MODEL, candidate)
            if by_model is not None and depth:
                drafting = self.prices.of_drafting(candidate, by_model, depth)
                gain = max(0.0, sum(by_model.survivals[:depth]) - slot_prices[depth] - drafting)
                _, by_ngram = best_count(run.gains, slot_prices)
                if by_ngram <= gain:
                    continue
            copying.append(run)
        return copying

    def _joined(self, copying: list[Run], slot_prices: list[float]) -> list[Chosen]:
        """The best if these copy; as it stood if that is not to draft at all."""
        drafts, budget = self._beside(copying)
        depths = best_depths(copying, budget, slot_prices[drafts:] if drafts else slot_prices)
        chosen, copies = self.standing[:], 0
        for run, depth in zip(copying, depths):
            chosen[run.index] = Chosen(NGRAM, depth) if depth else NOTHING
            copies += depth
        return chosen if copies else self.standing

    def _beside(self, copying: list[Run]) -> tuple[int, int]:
        """Drafts of all others, and rows that are left."""
        drafts, budget = 0, self.prices.load.budget
        if not self.drafts:
            return drafts, budget
        indices = {run.index for run in copying}
        for index, choice in enumerate(self.standing):
            if choice.depth and index not in indices:
                by_model = offer_by(DRAFT_MODEL, self.candidates[index])
                drafts += choice.depth
                budget -= choice.depth + (by_model.catch_up if by_model else 0)
        return drafts, budget

    def _value(self, chosen: list[Chosen], slot_prices: list[float]) -> float:
        """Tokens that drafts bring beyond what they cost, verified and drafted."""
        value, slots, forward = 0.0, 0, 0.0
        depths: list[int] = []  # by the draft model
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
                depths.append(choice.depth)
        return value - forward - slot_prices[slots] - self.prices.of_passes(passes_of(depths))
