"""Which slots of the draft model earn the most, at a price of time: an exact search over draft passes and slots."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.cost_model import CostModel
from paceline.core.depth import NOTHING, Chosen, DepthCandidate, Offer, StepLoad, offer_by
from paceline.core.method import DRAFT_MODEL
from paceline.core.slot_order import ASKED

Array = NDArray[np.float64]

CATCH_UP_HORIZON: Final = 64  # steps over which a request that drafts again pays for what its draft model missed


@dataclass(frozen=True, slots=True)
class BestSlots:
    """The best slots for one number of draft passes.

    Attributes:
        passes: D.
        asked: slots among them that bounds ask for.
        value: expected tokens less what the time they take is worth.
        seconds: of the step.
        depths: slots of each run.
    """

    passes: int
    asked: int
    value: float
    seconds: float
    depths: NDArray[np.int64]


class SlotProblem:
    """Which slots, and how many draft passes D?

    A *run* is what the draft model could draft for one request. For a given D, which is paid for whole, slots at
    positions up to D stand in one order: first those that bounds ask for, then by what they bring. Survivals do not
    increase, so what is taken from its front is a prefix of each run. Every count is looked at: costs rise in stairs,
    so the first drop says nothing. If a pass costs a constant and a share for each of its sequences, the outcome is the
    best there is; where many rows must be read before drafts and the budget is short, a good one.

    Args:
        second: what a second is worth, in tokens.
        slot_price: what a slot must earn besides its time.
        passes: to look at in any case, as far as there are drafts.
    """

    def __init__(
        self,
        candidates: list[DepthCandidate],
        load: StepLoad,
        costs: CostModel,
        second: float,
        slot_price: float,
        max_depth: int,
        passes: int = 0,
    ) -> None:
        self.load = load
        self.second = second
        self.slot_price = slot_price
        runs = self.runs = _Runs(candidates, load.budget, costs, max_depth)
        self.more = max(1, len(runs.owners))  # slots, behind all of these, whose cost is looked at
        self.targets = costs.targets(load.rows, int(runs.lengths.sum()) + self.more, load.context, load.sampling)
        count = 1 + len(runs.owners)
        self.first_pass, self.later_pass = costs.first_passes(count), costs.draft_passes(count)
        self.pass_price = second * _mean_rise(self.later_pass[1:])  # of a slot, at the average
        self.max_passes = self._max_passes(passes)

    def solve(self) -> list[BestSlots]:
        """By number of passes, [D + 1]."""
        runs, second = self.runs, self.second
        rows, columns = np.nonzero(runs.inside)  # [slots]
        survivals = runs.survivals[rows, columns]
        is_asked = columns < runs.asked[rows]
        price = second * runs.reading / runs.lengths
        order = np.argsort(np.where(is_asked, columns - ASKED, price[rows] - survivals), kind="stable")
        rows, columns, survivals, is_asked = rows[order], columns[order], survivals[order], is_asked[order]

        # From here on one line for each number of passes: [D + 1, slots].
        passes = np.arange(self.max_passes + 1)[:, None]
        taken = columns < passes
        rows_taken = 1 + np.where(columns == 0, runs.catch_up[rows], 0)
        taken &= np.cumsum(taken * rows_taken, axis=1) <= self.load.budget
        counts = _from_zero(taken)
        drafting = self._drafting(taken, columns) + taken * np.where(columns == 0, runs.reading[rows], 0.0)
        seconds = self.targets[counts] + self._seconds_of_passes() + _from_zero(drafting)
        values = self.load.sampling - second * seconds + _from_zero(taken * (survivals - self.slot_price))
        asked = (taken & is_asked).sum(axis=1)
        values[counts < asked[:, None]] = -math.inf
        best = values.argmax(axis=1)
        return [
            BestSlots(
                d,
                int(asked[d]),
                float(values[d, end]),
                float(seconds[d, end]),
                np.bincount(rows[:end][taken[d, :end]], minlength=len(runs.lengths)),
            )
            for d, end in enumerate(best.tolist())
        ]

    def chosen(self, best: BestSlots, count: int) -> list[Chosen]:
        """What each of `count` candidates drafts."""
        chosen = [NOTHING] * count
        for run in np.flatnonzero(best.depths).tolist():
            chosen[self.runs.owners[run]] = Chosen(DRAFT_MODEL, int(best.depths[run]))
        return chosen

    def pass_prices(self, best: BestSlots) -> list[float]:
        """What one sequence adds to the cost of each draft pass, in tokens, if others go on as they are: all that the
        pass costs if it is alone in it, as it would be in the last of these.
        """
        depths = best.depths.tolist()
        alone = [self.second * float(table[1]) for table in (self.first_pass, self.later_pass)]
        shared = [self.second * _mean_rise(self.first_pass[1:]), self.pass_price]
        counts = [sum([depth > number for depth in depths]) for number in range(best.passes + 1)]
        return [(shared if count > 1 else alone)[min(number, 1)] for number, count in enumerate(counts)]

    def next_price(self, best: BestSlots) -> float:
        """What one more slot costs behind the best, verified, in tokens."""
        slots = int(best.depths.sum())
        return self.slot_price + self.second * _mean_rise(self.targets[slots : slots + 1 + self.more])

    def _max_passes(self, passes: int) -> int:
        """No more are looked at than bounds ask for, or than can pay: all drafts of one bring more than it costs."""
        runs = self.runs
        if not runs.owners:
            return 0
        pays = runs.survivals.sum(axis=0) > self.second * min(self.first_pass[1], self.later_pass[1])
        return max(int(runs.asked.max()), int(pays.sum()), min(passes, int(runs.lengths.max())))

    def _seconds_of_passes(self) -> Array:
        """Of 0, 1, ... passes with one sequence each, [D + 1, 1]."""
        seconds = np.zeros((self.max_passes + 1, 1))
        if self.max_passes:
            seconds[1:] = self.first_pass[1] + self.later_pass[1] * np.arange(self.max_passes)[:, None]
        return seconds

    def _drafting(self, taken: NDArray[np.bool_], columns: NDArray[np.int64]) -> Array:
        """Seconds that each slot adds to its draft pass, which has one sequence already: [D + 1, slots]."""
        added = np.zeros(taken.shape)
        if not taken.size:
            return added
        by_pass = np.argsort(columns, kind="stable")
        passes, inside = columns[by_pass], taken[:, by_pass]
        before = _from_zero(inside)
        in_pass = before[:, :-1] - before[:, np.searchsorted(passes, passes)]
        more = np.array([np.diff(table[1:], prepend=table[1:2]) for table in (self.first_pass, self.later_pass)])
        added[:, by_pass] = inside * more[np.minimum(passes, 1), in_pass]
        return added


class _Runs:
    """What the draft model offers within bounds, in arrays, less what does not fit the budget for all that must be read
    before, short ones first.

    Attributes:
        owners: index of the candidate of each.
        survivals: [runs, K], as far as bounds and the offer go; 0 behind.
        lengths, asked: slots, and how many of them bounds ask for.
        catch_up, reading: rows and seconds for catching up.
    """

    def __init__(self, candidates: list[DepthCandidate], budget: int, costs: CostModel, max_depth: int) -> None:
        offers = [offer_by(DRAFT_MODEL, candidate) for candidate in candidates]
        fitting = _fitting(offers, budget)
        self.owners: list[int] = []
        survivals, asked, catch_up, reading = [], [], [], []
        for owner, offer in enumerate(offers):
            if offer is None:
                continue
            candidate = candidates[owner]
            run = offer.survivals[: candidate.reach(max_depth)]
            if not run or (offer.catch_up and owner not in fitting):
                continue
            self.owners.append(owner)
            survivals.append(run)
            asked.append(min(candidate.lowest, len(run)))
            catch_up.append(offer.catch_up)
            reading.append(reading_seconds(costs, candidate, offer))
        self.lengths = np.array([len(run) for run in survivals], dtype=np.int64)
        self.asked = np.array(asked, dtype=np.int64)
        self.catch_up = np.array(catch_up, dtype=np.int64)
        self.reading = np.array(reading, dtype=np.float64)
        self.survivals = np.zeros((len(survivals), max(map(len, survivals), default=0)))
        self.survivals[self.inside] = np.fromiter(itertools.chain.from_iterable(survivals), np.float64)

    @property
    def inside(self) -> NDArray[np.bool_]:
        """Where there is a slot, [runs, K]."""
        inside: NDArray[np.bool_] = np.arange(self.survivals.shape[1]) < self.lengths[:, None]
        return inside


def reading_seconds(costs: CostModel, candidate: DepthCandidate, offer: Offer) -> float:
    """What catching up costs a step. What was missed while the draft model was idle serves many steps and is spread
    over them.
    """
    if not offer.catch_up:
        return 0.0
    seconds = costs.draft_rows(offer.catch_up)
    return seconds / CATCH_UP_HORIZON if candidate.steps_without_model else seconds


def _fitting(offers: list[Offer | None], budget: int) -> set[int]:
    """Of the requests whose draft model has to catch up, those for whom there are rows if the shortest go first."""
    behind = [(offer.catch_up, owner) for owner, offer in enumerate(offers) if offer is not None and offer.catch_up]
    fitting = set()
    for catch_up, owner in sorted(behind):
        if catch_up < budget:
            budget -= catch_up + 1
            fitting.add(owner)
    return fitting


def _from_zero(steps: NDArray[Any]) -> NDArray[Any]:
    """Sums of the first 0, 1, ... along the last axis, [..., n + 1]."""
    sums = np.zeros(
        (*steps.shape[:-1], steps.shape[-1] + 1), dtype=np.int64 if steps.dtype == np.bool_ else steps.dtype
    )
    np.cumsum(steps, axis=-1, out=sums[..., 1:])
    return sums


def _mean_rise(curve: Array) -> float:
    return float(curve[-1] - curve[0]) / (len(curve) - 1) if len(curve) > 1 else 0.0
