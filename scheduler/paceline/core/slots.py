"""Which draft slots of a step earn the most, at a price of time: an exact search over draft passes and slots."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from paceline.core.cost_model import CostModel
from paceline.core.depth import NOTHING, Chosen, DepthCandidate, StepLoad
from paceline.core.params import Method

Array = NDArray[np.float64]

CATCH_UP_HORIZON = 64  # steps over which a request that drafts again pays for what its draft model missed
FEW_SLOTS = 256  # up to which plain Python outruns arrays
ASKED = 1e6  # rank of a slot that bounds ask for: before all others


@dataclass(slots=True)
class _Run:
    """What one offer could draft in this step.

    Attributes:
        owner: index of the candidate.
        survivals: as far as bounds and the offer go.
        asked: as many drafts as bounds ask for.
        reading: seconds for catching up; what was missed while nothing was drafted serves many steps and is spread.
        price: what puts all slots of the run behind those of others with the same survival, in tokens.
    """

    owner: int
    method: Method
    survivals: Sequence[float]
    asked: int
    catch_up: int
    reading: float
    is_model: bool
    price: float = 0.0


@dataclass(slots=True)
class BestSlots:
    """The best slots for one number of draft passes.

    Attributes:
        passes: D.
        asked: slots among them that bounds ask for.
        value: expected tokens less what the time they take is worth.
        seconds: of the step.
        taken: the run of each slot.
    """

    passes: int
    asked: int
    value: float
    seconds: float
    taken: Sequence[int]


class SlotProblem:
    """Which slots, and how many draft passes D?

    For a given D, which is paid for whole, slots at positions up to D (by n-gram: all) stand in one order: first those
    that bounds ask for, then by what they bring. Survivals do not increase, so what is taken from its front is a prefix
    of each run. Every count is looked at: costs rise in stairs, so the first drop says nothing. If a pass costs a
    constant and a share for each of its sequences, the outcome is the best there is.

    Args:
        second: what a second is worth, in tokens.
        slot_price: what a slot must earn besides its time.
    """

    def __init__(
        self,
        candidates: Sequence[DepthCandidate],
        load: StepLoad,
        costs: CostModel,
        second: float,
        slot_price: float,
        max_depth: int,
    ) -> None:
        self.load = load
        self.second = second
        self.slot_price = slot_price
        self.runs = _runs(candidates, load.budget, costs, max_depth)
        models = [run for run in self.runs if run.is_model]
        self.max_passes = max((len(run.survivals) for run in models), default=0)
        self.targets = costs.targets(
            load.rows, sum(len(run.survivals) for run in self.runs), load.context, load.sampling
        )
        # Of the first pass, and of any later one.
        self.pass_seconds = (costs.first_passes(len(models)), costs.draft_passes(len(models)))
        self.row_price = slot_price + second * _mean_rise(self.targets)
        self.pass_price = second * _mean_rise(self.pass_seconds[1][1:])
        for run in models:
            run.price = self.pass_price + second * run.reading / len(run.survivals)

    def solve(self) -> list[BestSlots]:
        """By number of passes, [D + 1]."""
        scan = _scan_few if len(self.targets) <= FEW_SLOTS + 1 else _scan_many
        return scan(self)

    def seconds_of_passes(self, passes: int) -> float:
        """Of so many passes with one sequence each."""
        first, later = self.pass_seconds
        return float(first[1] + (passes - 1) * later[1]) if passes else 0.0

    def more_in_pass(self) -> tuple[Array, Array]:
        """What the first, second, ... sequence adds to that, in the first pass and in any later one."""
        first, later = (np.diff(seconds[1:], prepend=seconds[1:2]) for seconds in self.pass_seconds)
        return first, later

    def usable(self) -> list[list[bool]]:
        """The runs that may be drawn on, one for each candidate, by number of passes: [D + 1][runs]."""
        usable = [[True] * len(self.runs) for _ in range(self.max_passes + 1)]
        for second, (one, other) in enumerate(itertools.pairwise(self.runs), start=1):
            if one.owner == other.owner:
                gains = zip(self._gains(one), self._gains(other), strict=True)
                for passes, (gain, other_gain) in enumerate(gains):
                    usable[passes][second - 1] = gain >= other_gain
                    usable[passes][second] = gain < other_gain
        return usable

    def _gains(self, run: _Run) -> list[float]:
        """What a run brings by number of passes, at the average price of a slot."""
        price = self.row_price + (self.pass_price if run.is_model else 0.0)
        gains = [-self.second * run.reading]
        for column, survival in enumerate(run.survivals):
            worth = survival - price
            gains.append(gains[-1] + (worth if column < run.asked else max(worth, 0.0)))
        gains += gains[-1:] * (self.max_passes - len(run.survivals))
        if not run.is_model:
            return gains[-1:] * (self.max_passes + 1)
        # A model that cannot draft at all, or not as deep as bounds ask, comes last.
        short = max(run.asked, 1)
        return [-math.inf] * short + gains[short : self.max_passes + 1]

    def chosen(self, best: BestSlots, count: int) -> list[Chosen]:
        """Method and depth of each of `count` candidates."""
        chosen = [NOTHING] * count
        for row, depth in Counter(best.taken).items():
            run = self.runs[row]
            chosen[run.owner] = Chosen(run.method, depth)
        return chosen

    def slot_prices(self, best: BestSlots) -> dict[Method, float]:
        """What one more slot of each method costs behind the best, in tokens."""
        slots = len(best.taken)
        following = self.targets[slots : slots + 1 + len(self.runs)]
        row = self.slot_price + self.second * _mean_rise(following if len(following) > 1 else self.targets)
        return {Method.NGRAM: row, Method.DRAFT_MODEL: row + self.pass_price}


def _runs(candidates: Sequence[DepthCandidate], budget: int, costs: CostModel, max_depth: int) -> list[_Run]:
    """Every offer within its bounds, less those whose catching up does not fit the budget, short ones first."""
    runs = []
    for owner, candidate in enumerate(candidates):
        highest = max(candidate.lowest, min(candidate.highest, max_depth))
        for offer in candidate.offers:
            survivals = offer.survivals[:highest]
            if not survivals:
                continue
            asked = min(candidate.lowest, len(survivals))
            is_model = offer.method is Method.DRAFT_MODEL
            reading = costs.draft_rows(offer.catch_up) if offer.catch_up else 0.0
            if candidate.steps_without_drafts:
                reading /= CATCH_UP_HORIZON
            runs.append(_Run(owner, offer.method, survivals, asked, offer.catch_up, reading, is_model))
    behind = [row for row, run in enumerate(runs) if run.catch_up]
    if not behind:
        return runs
    too_long = set()
    for row in sorted(behind, key=lambda row: runs[row].catch_up):
        if runs[row].catch_up < budget:
            budget -= runs[row].catch_up + 1
        else:
            too_long.add(row)
    return [run for row, run in enumerate(runs) if row not in too_long]


def _scan_few(problem: SlotProblem) -> list[BestSlots]:
    """Slot by slot: faster where there are few."""
    runs, second, budget = problem.runs, problem.second, problem.load.budget
    targets = problem.targets.tolist()
    first, later = (seconds.tolist() for seconds in problem.more_in_pass())
    slots = []
    for row, run in enumerate(runs):
        for column, survival in enumerate(run.survivals):
            rank = column - ASKED if column < run.asked else run.price - survival
            slots.append((rank, row, column, survival - problem.slot_price, run))
    slots.sort(key=itemgetter(0))
    solutions = []
    for passes, usable in enumerate(problem.usable()):
        in_pass = [0] * passes
        tokens, drafting, rows, asked = float(problem.load.sampling), problem.seconds_of_passes(passes), 0, 0
        best_count, best_seconds = 0, targets[0] + drafting
        best_value = tokens - second * best_seconds
        taken = []
        for _, row, column, worth, run in slots:
            if not usable[row] or (run.is_model and column >= passes):
                continue
            rows += 1
            if run.is_model:
                drafting += (later if column else first)[in_pass[column]]
                in_pass[column] += 1
                if not column:
                    rows += run.catch_up
                    drafting += run.reading
            if rows > budget:
                break
            taken.append(row)
            tokens += worth
            seconds = targets[len(taken)] + drafting
            value = tokens - second * seconds
            is_asked = column < run.asked
            if is_asked or value > best_value:
                asked += is_asked
                best_count, best_value, best_seconds = len(taken), value, seconds
        solutions.append(BestSlots(passes, asked, best_value, best_seconds, taken[:best_count]))
    return solutions


def _scan_many(problem: SlotProblem) -> list[BestSlots]:
    """The same by arrays."""
    runs, second = problem.runs, problem.second
    lengths = np.array([len(run.survivals) for run in runs])
    rows = np.repeat(np.arange(len(runs)), lengths)
    columns = np.arange(len(rows)) - np.repeat(lengths.cumsum() - lengths, lengths)
    survivals = np.concatenate([run.survivals for run in runs])
    is_asked = columns < np.array([run.asked for run in runs])[rows]
    price = np.array([run.price for run in runs])[rows]
    order = np.argsort(np.where(is_asked, columns - ASKED, price - survivals), kind="stable")
    rows, columns, is_asked = rows[order], columns[order], is_asked[order]
    worth = survivals[order] - problem.slot_price
    is_model = np.array([run.is_model for run in runs])[rows]
    # What the first slot of a run takes besides: rows and seconds for catching up.
    behind = np.where(columns == 0, np.array([run.catch_up for run in runs])[rows], 0)
    reading = np.where(columns == 0, np.array([run.reading for run in runs])[rows], 0.0)
    first, later = problem.more_in_pass()
    solutions = []
    for passes, usable in enumerate(problem.usable()):
        index = np.flatnonzero(np.array(usable)[rows] & (~is_model | (columns < passes)))
        index = index[: np.searchsorted((1 + behind[index]).cumsum(), problem.load.budget, side="right")]
        added = reading[index]
        of_model = is_model[index]
        for column in range(passes):
            members = np.flatnonzero(of_model & (columns[index] == column))
            added[members] += (later if column else first)[: len(members)]
        seconds = problem.targets[: len(index) + 1].copy()
        seconds[1:] += added.cumsum()
        seconds += problem.seconds_of_passes(passes)
        values = problem.load.sampling - second * seconds
        values[1:] += worth[index].cumsum()
        asked = int(is_asked[index].sum())
        count = asked + int(values[asked:].argmax())
        solutions.append(
            BestSlots(passes, asked, float(values[count]), float(seconds[count]), rows[index[:count]].tolist())
        )
    return solutions


def _mean_rise(curve: Array) -> float:
    return float(curve[-1] - curve[0]) / (len(curve) - 1) if len(curve) > 1 else 0.0
