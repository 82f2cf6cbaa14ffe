"""Which slots of the draft model earn the most, at a price of time: an exact search over draft passes and slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.cost_model import CostModel
from paceline.core.depth import NOTHING, Chosen, DepthCandidate, Offer, StepLoad, offer_by, passes_of
from paceline.core.method import DRAFT_MODEL
from paceline.core.slot_order import ASKED, Run, cut, in_all

CATCH_UP_HORIZON: Final = 64.0  # steps at most over which a request pays for what its draft model missed


class BestSlots:
    """The best slots for one number of draft passes.

    Attributes:
        passes: D.
        asked: slots among them that bounds ask for.
        value: expected tokens less what the time they take is worth.
        seconds: of the step.
        depths: slots of each run.
    """

    __slots__ = ("asked", "depths", "passes", "seconds", "value")

    def __init__(self, passes: int, asked: int, value: float, seconds: float, depths: list[int]) -> None:
        self.passes = passes
        self.asked = asked
        self.value = value
        self.seconds = seconds
        self.depths = depths


class SlotProblem:
    """Which slots, and how many draft passes D?

    A *run* is what the draft model could draft for one request. For a given D, which is paid for whole, slots at
    positions up to D stand in one order: first those that bounds ask for, then by what they bring. Survivals do not
    increase, so what is taken from its front is a prefix of each run. Every count is looked at: costs rise in stairs,
    so the first drop says nothing. If a pass costs a constant and a share for each of its sequences, the outcome is the
    best there is; where many rows must be read before drafts and the budget is short, a good one.

    Plain loops, since compiled they take less than arrays, of few slots an eighth.

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
        offered = _runs(candidates, load.budget, costs, max_depth)
        count, asked, tokens = in_all(offered)
        prices = costs.rises(load.rows, count, second, slot_price, asked, tokens)
        cut(offered, prices)
        self.most = len(prices) - 1  # slots: more cannot pay
        runs = self.runs = [run for run in offered if run.gains]
        self.more = max(1, len(runs))  # slots, behind all of these, whose cost is looked at
        self.targets = costs.targets(load.rows, self.most + self.more, load.context, load.sampling)
        sequences = 1 + len(runs)
        self.first_pass, self.later_pass = costs.first_passes(sequences), costs.draft_passes(sequences)
        self.pass_price = second * _mean_rise(self.later_pass[1:])  # of a slot, at the average
        self.max_passes = self._max_passes(passes)

    def solve(self) -> list[BestSlots]:
        """By number of passes, [D + 1]."""
        slots = self._slots()
        return [self._best(slots, passes) for passes in range(self.max_passes + 1)]

    def _slots(self) -> list[_Slot]:
        """In the order in which they are taken, whatever the number of passes."""
        slots = []
        for index, run in enumerate(self.runs):
            price = self.second * run.reading / len(run.gains)
            for position, gain in enumerate(run.gains):
                is_asked = position < run.asked
                rank = position - ASKED if is_asked else price - gain
                rows, reading = (1 + run.catch_up, run.reading) if position == 0 else (1, 0.0)
                slots.append(_Slot(rank, is_asked, index, position, gain - self.slot_price, rows, reading, run.forward))
        slots.sort(key=_rank_of)
        return slots

    def _best(self, slots: list[_Slot], passes: int) -> BestSlots:
        """Slots are taken in their order while there are rows for them, and the best count of them stands, but for
        those that are asked for.
        """
        second, sampling, targets = self.second, self.load.sampling, self.targets
        budget, tokens = self.load.budget, 0.0
        # The first sequence of each pass is paid for whatever it holds.
        drafting = self.first_pass[1] + (passes - 1) * self.later_pass[1] if passes else 0.0
        forward = 0.0  # the dearest part in it of those who read
        in_pass = [0] * passes  # sequences
        taken: list[int] = []  # the run of each
        seconds = targets[0] + drafting
        best, asked, best_seconds, best_value = 0, 0, seconds, sampling - second * seconds
        for slot in slots:
            position = slot.position
            if position >= passes:
                continue
            budget -= slot.rows
            if budget < 0 or len(taken) == self.most:
                break
            before = in_pass[position]
            in_pass[position] = before + 1
            if before:
                table = self.later_pass if position else self.first_pass
                drafting += table[before + 1] - table[before]
            drafting += slot.reading
            if slot.forward > forward:
                drafting += slot.forward - forward
                forward = slot.forward
            tokens += slot.gain
            taken.append(slot.index)
            seconds = targets[len(taken)] + drafting
            value = sampling + tokens - second * seconds
            asked += slot.is_asked
            if slot.is_asked or value > best_value:
                best, best_seconds, best_value = len(taken), seconds, value
        depths = [0] * len(self.runs)
        for run in taken[:best]:
            depths[run] += 1
        return BestSlots(passes, asked, best_value, best_seconds, depths)

    def chosen(self, best: BestSlots, count: int) -> list[Chosen]:
        """What each of `count` candidates drafts."""
        chosen = [NOTHING] * count
        for run, depth in zip(self.runs, best.depths):
            if depth:
                chosen[run.index] = Chosen(DRAFT_MODEL, depth)
        return chosen

    def pass_prices(self, best: BestSlots) -> list[float]:
        """What one sequence adds to the cost of each draft pass, in tokens, if others go on as they are: all that the
        pass costs if it is alone in it, as it would be in the last of these.
        """
        alone = [self.second * table[1] for table in (self.first_pass, self.later_pass)]
        shared = [self.second * _mean_rise(self.first_pass[1:]), self.pass_price]
        counts = passes_of(best.depths)
        counts += [0] * (best.passes + 1 - len(counts))
        return [(shared if count > 1 else alone)[min(number, 1)] for number, count in enumerate(counts)]

    def next_price(self, best: BestSlots) -> float:
        """What one more slot costs behind the best, verified, in tokens."""
        slots = sum(best.depths)
        return self.slot_price + self.second * _mean_rise(self.targets[slots : slots + 1 + self.more])

    def _max_passes(self, passes: int) -> int:
        """No more are looked at than bounds ask for, or than can pay: all drafts of one bring more than it costs."""
        if not self.runs:
            return 0
        least = self.second * min(self.first_pass[1], self.later_pass[1])
        longest = max([len(run.gains) for run in self.runs])
        most = max([min(passes, longest), *[run.asked for run in self.runs]])
        while most < longest:
            gain = 0.0
            for run in self.runs:
                if most < len(run.gains):
                    gain += run.gains[most]
            if gain <= least:
                break
            most += 1
        return most


class _Slot:
    """A draft of a run.

    Attributes:
        rank: those of low rank are taken first.
        is_asked: taken whatever it brings.
        index: of the run.
        position: where it stands in it.
        gain: tokens that it brings beyond what a slot costs besides its time.
        rows: for it, and for what must be read before.
        reading: seconds of the latter.
        forward: and of its part in the forward that all share who read.
    """

    __slots__ = ("forward", "gain", "index", "is_asked", "position", "rank", "reading", "rows")

    def __init__(
        self,
        rank: float,
        is_asked: bool,
        index: int,
        position: int,
        gain: float,
        rows: int,
        reading: float,
        forward: float,
    ) -> None:
        self.rank = rank
        self.is_asked = is_asked
        self.index = index
        self.position = position
        self.gain = gain
        self.rows = rows
        self.reading = reading
        self.forward = forward


def _rank_of(slot: _Slot) -> float:
    return slot.rank


class _Run(Run):
    """What the draft model offers a request within bounds; its gains are before what any draft pass costs.

    Attributes:
        catch_up, reading, forward: rows, their seconds, and those of the forward that they share, for catching up.
    """

    __slots__ = ("catch_up", "forward", "reading")

    def __init__(
        self, index: int, asked: int, gains: list[float], catch_up: int, reading: float, forward: float
    ) -> None:
        super().__init__(index, asked, gains)
        self.catch_up = catch_up
        self.reading = reading
        self.forward = forward


def _runs(candidates: list[DepthCandidate], budget: int, costs: CostModel, max_depth: int) -> list[_Run]:
    """Less what does not fit the budget for all that must be read before, short ones first."""
    offers = [offer_by(DRAFT_MODEL, candidate) for candidate in candidates]
    fitting = _fitting(offers, budget)
    runs = []
    for index, offer in enumerate(offers):
        if offer is None or (offer.catch_up and index not in fitting):
            continue
        candidate = candidates[index]
        survivals = offer.survivals[: candidate.reach(max_depth)]
        if survivals:
            asked = min(candidate.lowest, len(survivals))
            reading, forward = reading_seconds(costs, candidate, offer)
            runs.append(_Run(index, asked, survivals, offer.catch_up, reading, forward))
    return runs


def reading_seconds(costs: CostModel, candidate: DepthCandidate, offer: Offer) -> tuple[float, float]:
    """What catching up costs a step: by its rows, and by the forward that all share who have to. What was missed while
    the draft model was idle serves all steps to come, and is spread over them.
    """
    if not offer.catch_up:
        return 0.0, 0.0
    steps = 1.0
    if candidate.steps_without_model:
        to_come = candidate.tokens_to_serve / (1.0 + sum(offer.survivals))  # if it goes as deep as it may
        steps = max(steps, min(CATCH_UP_HORIZON, to_come))
    forward = costs.reading_seconds
    return (costs.draft_rows(offer.catch_up) - forward) / steps, forward / steps


def _fitting(offers: list[Offer | None], budget: int) -> set[int]:
    """Of the requests whose draft model has to catch up, those for whom there are rows if the shortest go first."""
    behind = [(offer.catch_up, index) for index, offer in enumerate(offers) if offer is not None and offer.catch_up]
    fitting = set()
    for catch_up, index in sorted(behind):
        if catch_up < budget:
            budget -= catch_up + 1
            fitting.add(index)
    return fitting


def _mean_rise(curve: Sequence[float]) -> float:
    return (curve[-1] - curve[0]) / (len(curve) - 1) if len(curve) > 1 else 0.0
