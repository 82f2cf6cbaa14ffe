"""How deep each request drafts in the next step: as deep as the drafts pay for the time they take.

A draft slot is worth the probability that it is kept; it costs the seconds by which it lengthens the step, at the rate
at which seconds earn tokens. What may be known here is history alone, never a drawn draft: that would bias sampled
output.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.cost_model import CostModel, StepShape
from paceline.core.params import Method

Array = NDArray[np.float64]

MAX_DEPTH = 8
DWELL = 4  # steps between two decisions
HYSTERESIS = 0.03  # of a step's worth, which a change of depth must bring
CATCH_UP_HORIZON = 64  # steps over which a request that drafts again pays for what its draft model missed
EARNINGS_DECAY = 0.5 ** (1 / 16)  # per step
SHORTEST = 1e-9  # seconds that any step takes
OUTLIER = 3.0  # times the predicted duration: no step counts for more
PROBE_SHARE = 0.01  # of all step time, the most that probes may take
PROBE_CREDIT = 8.0  # steps' worth to begin with: a mistake about an unknown drafter would last
PROBE_SAVINGS = 512  # steps for which an unused share is kept
PROBE_INTERVAL = 32  # steps without drafts before a request's first probe
MAX_PROBE_INTERVAL = 512
PROBE_SPREAD = 317  # times the request's id, modulo its interval: neighbours far apart
PROBE_STRETCH = 0.25  # of a step: no probe joins where probes make it longer by more
DEEPER_INTERVAL = 32  # steps between probes one deeper than the batch
FEW_SLOTS = 256  # up to which plain Python outruns arrays
ASKED = 1e6  # rank of a slot that bounds ask for: before all others


@dataclass(frozen=True, slots=True)
class Offer:
    """One way to draft for a request.

    Attributes:
        method: NGRAM or DRAFT_MODEL.
        survivals: probability that the first 1, 2, ... drafts are all kept; non-increasing, and as many as the method
            can draft, at least one.
        catch_up: tokens that the draft model must read before it can draft.
    """

    method: Method
    survivals: Sequence[float]
    catch_up: int = 0


@dataclass(frozen=True, slots=True)
class DepthCandidate:
    """A request that will decode in the step being planned.

    Attributes:
        offers: one, or two by different methods.
        lowest, highest: bounds that the choice keeps; an offer that cannot reach `lowest` goes as deep as it can.
        steps_without_drafts: decode steps since the request last drafted.
    """

    request_id: int
    offers: tuple[Offer, ...]
    lowest: int
    highest: int
    steps_without_drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The step so far, before any draft.

    Attributes:
        rows: of the target's forward: prompt chunks, and one for each decode.
        context: tokens whose KV is read, once per sequence.
        sampling: sequences that sample in this step, candidates included.
        budget: rows that drafts and catching up may take.
    """

    rows: int
    context: int
    sampling: int
    budget: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a request drafts; the method is NONE if the depth is 0."""

    method: Method
    depth: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished step brought.

    Attributes:
        draft_seconds: of `seconds`, those of the draft model.
        emitted: tokens, all sequences.
        drafts: request id, drafts verified and drafts kept of each decode; 0 and 0 where it drafted nothing.
    """

    shape: StepShape
    draft_seconds: float
    seconds: float
    emitted: int
    drafts: tuple[tuple[int, int, int], ...]


class DepthPolicy(Protocol):
    """Chooses from history alone."""

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        """A method and a depth for each candidate, within its bounds. Called once for each step.

        The scheduler may grant less where memory or budget is short.

        Args:
            slot_price: tokens that a draft slot must earn besides its time: what KV or a deadline is short of.
        """
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished step."""
        ...

    def forget(self, request_id: int) -> None:
        """The request has ended; an unknown one is ignored."""
        ...


NOTHING = Chosen(Method.NONE, 0)


def within_bounds(candidate: DepthCandidate, offer: Offer, depth: int) -> Chosen:
    """That depth by that offer, or the nearest one allowed."""
    depth = min(max(depth, candidate.lowest), candidate.highest, len(offer.survivals))
    return Chosen(offer.method, depth) if depth else NOTHING


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """The same depth for everyone by the first offer, wherever bounds allow it."""

    depth: int

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        return [within_bounds(c, c.offers[0], self.depth) for c in candidates]

    def observe(self, outcome: Outcome) -> None:
        pass

    def forget(self, request_id: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Decision:
    """The last choice in numbers, for statistics.

    Attributes:
        depth: the deepest of all.
        slots: draft slots, all requests.
        price_of_time: tokens that a second is worth.
        rate: expected tokens per second of the step.
        predicted_seconds: the step's duration.
    """

    depth: int = 0
    slots: int = 0
    price_of_time: float = 0.0
    rate: float = 0.0
    predicted_seconds: float = 0.0


class AdaptiveDepth:
    """Each request as deep as its drafts pay, under one price of time and one number of draft passes for all.

    With the price of time equal to the rate that the optimum earns, the most of tokens - price * duration is the most
    of tokens / duration (Dinkelbach 1967). So the price is what was lately earned, beside prompt chunks too, where the
    ratio of a single step would buy slots too cheaply.

    A decision stands for `DWELL` steps unless the load changes. The number of passes changes once what was missed by
    keeping it adds up to `HYSTERESIS`. Requests that do not draft, and one position more than anyone drafts, are probed
    now and then, for at most `PROBE_SHARE` of the time.
    """

    def __init__(self, costs: CostModel, *, max_depth: int = MAX_DEPTH) -> None:
        self.costs = costs
        self.max_depth = max_depth
        self.last = Decision()
        # Per step, lately: tokens per sequence, and duration over that of the same decodes without drafts and prompts.
        self._earned = 1.0
        self._spent = 1.0
        self._num_steps = 0
        self._decided_at = -DWELL
        self._decided_for = (StepLoad(0, 0, 0, 0), 0.0)  # with the price of a slot
        self._num_passes = 0
        self._missed = math.inf  # by keeping them, relative to what a step is worth; there is nothing to keep yet
        self._slot_prices: dict[Method, float] = {}  # tokens, as of the last decision
        self._chosen: dict[int, Chosen] = {}  # by request, since the last decision
        self._probe_seconds = 0.0  # saved, not yet spent
        self._num_probes = 0
        self._probe_intervals: dict[int, int] = {}  # of requests whose probes changed nothing so far

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        if not candidates:
            return []
        self._num_steps += 1
        step = None
        if not self._is_due(load, slot_price):
            step = _Step(candidates, [self._kept(candidate) for candidate in candidates], load, self.costs)
        if step is None or step.slots + step.catch_up > load.budget:
            step = _Step(candidates, self._decide(candidates, load, slot_price), load, self.costs)
        deepest, second = max(choice.depth for choice in step.chosen), self._price_of_time(load)
        self.last = Decision(deepest, step.slots, second, step.tokens / step.seconds, step.seconds)
        self._probe(step, slot_price / second)
        return step.chosen

    def observe(self, outcome: Outcome) -> None:
        """Move the price of time. A step without decodes says nothing of it."""
        decodes = len(outcome.drafts)
        if not decodes:
            return
        seconds = min(outcome.seconds, OUTLIER * self.costs.step(outcome.shape))
        plain = self.costs.target(decodes, outcome.shape.context, decodes)
        self._earned += (1 - EARNINGS_DECAY) * (outcome.emitted / decodes - self._earned)
        self._spent += (1 - EARNINGS_DECAY) * (seconds / max(plain, SHORTEST) - self._spent)

    def forget(self, request_id: int) -> None:
        self._chosen.pop(request_id, None)
        self._probe_intervals.pop(request_id, None)

    def _price_of_time(self, load: StepLoad) -> float:
        """Tokens per second: what these sequences earn without drafts, times what drafts and prompts lately made of it.

        That factor depends little on the number of sequences, so the price follows a change of load at once.
        """
        plain = self.costs.target(load.sampling, load.context, load.sampling)
        return self._earned / self._spent * load.sampling / max(plain, SHORTEST)

    # -- between decisions ---------------------------------------------------------------------------------------------

    def _is_due(self, load: StepLoad, slot_price: float) -> bool:
        """The last decision is old, or was made for another load."""
        before, price_before = self._decided_for
        return (
            self._num_steps - self._decided_at >= DWELL
            or 8 * abs(load.rows - before.rows) > before.rows
            or 8 * abs(load.sampling - before.sampling) > before.sampling
            or abs(slot_price - price_before) > 0.1
        )

    def _kept(self, candidate: DepthCandidate) -> Chosen:
        """The last decision for a request, as far as today's bounds and offers allow it."""
        before = self._chosen.get(candidate.request_id)
        if before is None:
            before = self._chosen[candidate.request_id] = self._alone(candidate)
        for offer in candidate.offers:
            if offer.method is before.method:
                return within_bounds(candidate, offer, before.depth)
        return within_bounds(candidate, candidate.offers[0], 0)

    def _alone(self, candidate: DepthCandidate) -> Chosen:
        """The best for one new request at the prices of the last decision, within its number of passes."""
        best, best_gain = NOTHING, -math.inf
        for offer in candidate.offers:
            price = self._slot_prices[offer.method]
            limit = self._num_passes if offer.method is Method.DRAFT_MODEL else self.max_depth
            depth = sum(survival > price for survival in offer.survivals[:limit])
            choice = within_bounds(candidate, offer, depth)
            gain = sum(offer.survivals[: choice.depth]) - price * choice.depth
            if gain > best_gain:
                best, best_gain = choice, gain
        return best

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _decide(self, candidates: Sequence[DepthCandidate], load: StepLoad, slot_price: float) -> list[Chosen]:
        problem = _Problem(candidates, load, self.costs, self._price_of_time(load), slot_price, self.max_depth)
        best = self._change_passes(problem.solve(), problem.second)
        chosen = problem.chosen(best, len(candidates))
        self._slot_prices = problem.slot_prices(best)
        self._decided_at, self._decided_for = self._num_steps, (load, slot_price)
        self._chosen = {}
        for candidate, choice in zip(candidates, chosen, strict=True):
            self._chosen[candidate.request_id] = choice
            if choice.depth:
                self._probe_intervals.pop(candidate.request_id, None)
        return chosen

    def _change_passes(self, solutions: Sequence[_Best], second: float) -> _Best:
        """Decide on the number of passes, given the best for each.

        The better one is not taken at once if it is hardly better: the estimates behind it are noisy.
        """
        best = max(solutions, key=lambda solution: (solution.asked, solution.value))
        current = solutions[min(self._num_passes, len(solutions) - 1)]
        if best is not current:
            if current.asked == best.asked:
                self._missed += (best.value - current.value) / (second * best.seconds)
                if self._missed <= HYSTERESIS:
                    return current
            self._num_passes = best.passes
        self._missed = 0.0
        return best

    # -- probes --------------------------------------------------------------------------------------------------------

    def _probe(self, step: _Step, slot_seconds: float) -> None:
        """Add drafts that the decision leaves out, to learn from them, while the time set aside for that lasts.

        Args:
            slot_seconds: what a slot costs besides its time, in time.
        """
        if self._num_steps == 1:
            self._probe_seconds = PROBE_CREDIT * step.seconds
        share = PROBE_SHARE * step.seconds
        self._probe_seconds = min(self._probe_seconds + share, PROBE_SAVINGS * share)
        before = self._probe_seconds
        for wait, index in self._waiting(step):
            # Where a draft pass is paid for, those that have waited for half their time come along, a few at once.
            spent = before - self._probe_seconds
            if (wait < 1.0 and not spent) or spent > PROBE_STRETCH * step.seconds:
                break
            candidate = step.candidates[index]
            if self._pay(step, slot_seconds, index, max(candidate.offers, key=lambda offer: offer.survivals[0])):
                interval = self._probe_interval(candidate)
                self._probe_intervals[candidate.request_id] = min(2 * interval, MAX_PROBE_INTERVAL)
                self._num_probes += 1
        if self._num_steps % DEEPER_INTERVAL == 0:
            self._probe_deeper(step, slot_seconds)

    def _waiting(self, step: _Step) -> list[tuple[float, int]]:
        """Requests that have not drafted for half of their interval or more, the longest first: how much of it has
        passed, and the index.

        Intervals differ by request, so that those which began together do not probe together.
        """
        waiting = []
        for index, (candidate, choice) in enumerate(zip(step.candidates, step.chosen, strict=True)):
            if choice.depth or not candidate.highest:
                continue
            interval = self._probe_interval(candidate)
            passed = candidate.steps_without_drafts / (interval + candidate.request_id * PROBE_SPREAD % interval)
            if passed >= 0.5:
                waiting.append((passed, index))
        return sorted(waiting, reverse=True)

    def _probe_interval(self, candidate: DepthCandidate) -> int:
        """Short while little is known of any request: a draft model that is left behind is dear to try again."""
        first = min(PROBE_INTERVAL, 1 + self._num_probes)
        return self._probe_intervals.get(candidate.request_id, first)

    def _probe_deeper(self, step: _Step, slot_seconds: float) -> None:
        """Let one of the deepest requests draft one more, each time another."""
        deepest = [
            (index, offer)
            for index, (candidate, choice) in enumerate(zip(step.candidates, step.chosen, strict=True))
            for offer in candidate.offers
            if offer.method is choice.method
            and choice.depth == self.last.depth < min(candidate.highest, len(offer.survivals), self.max_depth)
        ]
        if deepest:
            self._pay(step, slot_seconds, *deepest[self._num_steps // DEEPER_INTERVAL % len(deepest)])

    def _pay(self, step: _Step, slot_seconds: float, index: int, offer: Offer) -> bool:
        """Draft one more by this offer if there are rows and savings for it."""
        seconds = step.seconds_of_one_more(index, offer) + slot_seconds
        if seconds > self._probe_seconds:
            return False
        self._probe_seconds -= seconds
        step.draft_one_more(index, offer)
        return True


class _Step:
    """A choice, what it costs and what it brings.

    Attributes:
        slots, catch_up: rows for drafts, and rows that the draft model reads before.
        tokens: expected, all sequences.
        seconds: predicted.
    """

    def __init__(
        self, candidates: Sequence[DepthCandidate], chosen: list[Chosen], load: StepLoad, costs: CostModel
    ) -> None:
        self.candidates = candidates
        self.chosen = chosen
        self.load = load
        self.costs = costs
        self.slots = 0
        self.catch_up = 0
        self.tokens = float(load.sampling)
        self._passes: list[int] = []  # sequences in each
        for candidate, choice in zip(candidates, chosen, strict=True):
            for offer in candidate.offers:
                if offer.method is choice.method:
                    self.tokens += sum(offer.survivals[: choice.depth])
                    self._book(offer, 0, choice.depth)
        self.seconds = self._predict()

    def seconds_of_one_more(self, index: int, offer: Offer) -> float:
        """By how much one more draft of a request makes the step longer; infinite if there is no row for it."""
        depth = self.chosen[index].depth
        catch_up = offer.catch_up if depth == 0 else 0
        if self.slots + self.catch_up + 1 + catch_up > self.load.budget:
            return math.inf
        before, after = self.costs.targets(self.load.rows + self.slots, 1, self.load.context).tolist()
        seconds: float = after - before
        if offer.method is Method.DRAFT_MODEL:
            count = self._passes[depth] if depth < len(self._passes) else 0
            by_count = self.costs.draft_passes(count + 1) if depth else self.costs.first_passes(count + 1)
            seconds += by_count.item(count + 1) - by_count.item(count) + self.costs.draft_rows(catch_up)
        return seconds

    def draft_one_more(self, index: int, offer: Offer) -> None:
        depth = self.chosen[index].depth
        self.chosen[index] = Chosen(offer.method, depth + 1)
        self._book(offer, depth, depth + 1)

    def _book(self, offer: Offer, before: int, after: int) -> None:
        """Let a request draft by `after` instead of `before`."""
        self.slots += after - before
        if offer.method is not Method.DRAFT_MODEL:
            return
        if before == 0:
            self.catch_up += offer.catch_up
        for position in range(before, after):
            if position == len(self._passes):
                self._passes.append(0)
            self._passes[position] += 1

    def _predict(self) -> float:
        costs = self.costs
        seconds = costs.target(self.load.rows + self.slots, self.load.context, self.load.sampling)
        if self._passes:
            first, *later = self._passes
            by_count = costs.draft_passes(first)
            seconds += costs.first_passes(first).item(first) + costs.draft_rows(self.catch_up)
            seconds += sum(by_count.item(count) for count in later)
        return max(seconds, SHORTEST)


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
class _Best:
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


class _Problem:
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

    def solve(self) -> list[_Best]:
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

    def chosen(self, best: _Best, count: int) -> list[Chosen]:
        """Method and depth of each of `count` candidates."""
        chosen = [NOTHING] * count
        for row, depth in Counter(best.taken).items():
            run = self.runs[row]
            chosen[run.owner] = Chosen(run.method, depth)
        return chosen

    def slot_prices(self, best: _Best) -> dict[Method, float]:
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


def _scan_few(problem: _Problem) -> list[_Best]:
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
        solutions.append(_Best(passes, asked, best_value, best_seconds, taken[:best_count]))
    return solutions


def _scan_many(problem: _Problem) -> list[_Best]:
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
            _Best(passes, asked, float(values[count]), float(seconds[count]), rows[index[:count]].tolist())
        )
    return solutions


def _mean_rise(curve: Array) -> float:
    return float(curve[-1] - curve[0]) / (len(curve) - 1) if len(curve) > 1 else 0.0
