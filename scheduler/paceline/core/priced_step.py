"""One step as chosen: what it costs, what it brings, and what one draft more would add."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from paceline.core.cost_model import CostModel
from paceline.core.depth import Chosen, DepthCandidate, Offer, StepLoad, offer_by, passes_of
from paceline.core.method import DRAFT_MODEL

SHORTEST: Final = 1e-9  # seconds that any step takes


def plain_seconds(costs: CostModel, load: StepLoad) -> float:
    """Of its decodes without drafts, whatever prompts stand beside."""
    return max(costs.target(load.sampling, load.context, load.sampling), SHORTEST)


class PricedStep:
    """A choice, what it costs and what it brings.

    Attributes:
        slots, catch_up: rows for drafts, and rows that the draft model reads before.
        tokens: expected, all sequences.
        seconds: predicted.
    """

    def __init__(
        self, candidates: list[DepthCandidate], chosen: list[Chosen], load: StepLoad, costs: CostModel
    ) -> None:
        self.candidates = candidates
        self.chosen = chosen
        self.load = load
        self.costs = costs
        self.slots = 0
        self.catch_up = 0
        self.tokens = float(load.sampling)
        self._passes = passes_of([choice.depth for choice in chosen if choice.method is DRAFT_MODEL])
        for candidate, choice in zip(candidates, chosen):
            offer = offer_by(choice.method, candidate)
            if choice.depth and offer is not None:
                self.tokens += sum(offer.survivals[: choice.depth])
                self.slots += choice.depth
                self.catch_up += offer.catch_up
        self.seconds = self._predict()

    def seconds_of_one_more(self, index: int, offer: Offer) -> float:
        """By how much one more draft of a request makes the step longer; infinite if there is no row for it."""
        depth = self.chosen[index].depth
        catch_up = offer.catch_up if depth == 0 else 0
        if self.slots + self.catch_up + 1 + catch_up > self.load.budget:
            return math.inf
        before, after = self.costs.targets(self.load.rows + self.slots, 1, self.load.context)
        seconds = after - before
        if offer.method is DRAFT_MODEL:
            count = self._passes[depth] if depth < len(self._passes) else 0
            seconds += self.costs.draft_pass(depth, count + 1) - self.costs.draft_pass(depth, count)
            seconds += self.costs.draft_rows(self.catch_up + catch_up) - self.costs.draft_rows(self.catch_up)
        return seconds

    def seconds_of_first_drafts(self, offers: Sequence[Offer]) -> list[float]:
        """By how much the step becomes longer if the first 1, 2, ... of these requests, idle ones, draft once by the
        draft model; infinite where there is no row for them.
        """
        drafting = self._passes[0] if self._passes else 0
        targets = self.costs.targets(self.load.rows + self.slots, len(offers), self.load.context)
        passes = self.costs.first_passes(drafting + len(offers))[drafting:]
        seconds, behind = [], 0
        for number, offer in enumerate(offers, 1):
            behind += offer.catch_up
            fits = self.slots + self.catch_up + number + behind <= self.load.budget
            reading = self.costs.draft_rows(self.catch_up + behind) - self.costs.draft_rows(self.catch_up)
            more = targets[number] - targets[0] + passes[number] - passes[0] + reading
            seconds.append(more if fits else math.inf)
        return seconds

    def draft_one_more(self, index: int, offer: Offer) -> None:
        depth = self.chosen[index].depth
        self.chosen[index] = Chosen(offer.method, depth + 1)
        self.slots += 1
        if offer.method is not DRAFT_MODEL:
            return
        if depth == 0:
            self.catch_up += offer.catch_up
        if depth == len(self._passes):
            self._passes.append(0)
        self._passes[depth] += 1

    def _predict(self) -> float:
        load = self.load
        seconds = self.costs.target(load.rows + self.slots, load.context, load.sampling)
        return max(seconds + self.costs.drafting(self._passes, self.catch_up), SHORTEST)
