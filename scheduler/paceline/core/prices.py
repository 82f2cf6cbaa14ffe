"""What drafts cost a step, in the tokens that its time could earn."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.cost_model import CostModel
from paceline.core.depth import DepthCandidate, Offer, StepLoad
from paceline.core.slots import reading_seconds


class Prices:
    """Of one step.

    Attributes:
        load: the step.
        second: tokens that a second is worth.
        slot_price: of a slot, besides its time.
        passes: what one sequence adds to each draft pass, at least one; passes behind cost as much as the last.
    """

    __slots__ = ("costs", "load", "passes", "second", "slot_price")

    def __init__(self, costs: CostModel, load: StepLoad, second: float, slot_price: float, passes: list[float]) -> None:
        self.costs = costs
        self.load = load
        self.second = second
        self.slot_price = slot_price
        self.passes = passes

    def of_slots(self, rows: int, count: int, taken: int, tokens: float) -> list[float]:
        """Of 0, 1, ... `count` slots beside so many rows, as far as they can pay: up to the first that costs more than
        `tokens`, which all of them bring, beyond those that are taken anyway.
        """
        return self.costs.rises(rows, count, self.second, self.slot_price, taken, tokens)

    def of_drafting(self, candidate: DepthCandidate, offer: Offer, depth: int) -> float:
        """What the draft model adds for so many drafts of one request, what it has to read before included."""
        last = len(self.passes) - 1
        passes = sum([self.passes[min(number, last)] for number in range(depth)])
        return passes + self.of_reading(candidate, offer)

    def of_passes(self, drafting: Sequence[int]) -> float:
        """Of draft passes by so many sequences each, and no others."""
        return self.second * self.costs.passes(drafting)

    def of_reading(self, candidate: DepthCandidate, offer: Offer) -> float:
        """Where nobody else has to read."""
        rows, forward = self.of_rows_and_forward(candidate, offer)
        return rows + forward

    def of_rows_and_forward(self, candidate: DepthCandidate, offer: Offer) -> tuple[float, float]:
        """Of what the draft model reads, and of the forward for that, which all who have to share."""
        rows, forward = reading_seconds(self.costs, candidate, offer)
        return self.second * rows, self.second * forward
