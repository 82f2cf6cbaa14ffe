"""How deep each request drafts in the next step: as deep as the drafts pay for the time they take.

A draft slot is worth the probability that it is kept; it costs the seconds by which it lengthens the step, at the rate
at which seconds earn tokens. What may be known here is history alone, never a drawn draft: that would bias sampled
output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from paceline.core.cost_model import DECODE, MIXED, CostModel
from paceline.core.depth import (
    NOTHING,
    Chosen,
    Decision,
    DepthCandidate,
    Outcome,
    StepLoad,
    offer_by,
    slots_of,
    within_bounds,
)
from paceline.core.method import DRAFT_MODEL, NGRAM
from paceline.core.ngram_slots import NgramProblem
from paceline.core.priced_step import SHORTEST, PricedStep, plain_seconds
from paceline.core.prices import Prices
from paceline.core.probes import Probes
from paceline.core.review import review
from paceline.core.slots import BestSlots, SlotProblem
from paceline.core.standing import Look, Standing

MAX_DEPTH: Final = 8  # of any request, unless the operator fixes a higher depth for all
# Steps between two decisions. Streams that begin together come to new blocks of KV together, and then a step takes
# long; with no common factor, decisions meet such steps as often as others do.
DWELL: Final = 7
# About what a decision takes, in seconds, and what each request adds to it. Where that is more than a share of the
# time of seven steps, it stands for as many times seven, but not as if steps took no time at all.
DECISION_SHARE: Final = 0.003
DECISION_SECONDS: Final = 50e-6
SECONDS_PER_REQUEST: Final = 6e-6
MOST_DWELLS: Final = 64  # fewer steps than those after which something is tried in any case
PRICE_CHANGE: Final = 0.1  # tokens; of what a slot costs, since a decision, which calls for another
HYSTERESIS: Final = 0.03  # of a step's worth, which a change of depth must bring
EARNINGS_DECAY: Final = 0.5 ** (1 / 16)  # per step
LEAST_SHARE: Final = 0.9  # the least price of time, over what time earns without free drafts; chance takes up the rest
# Of the rate without drafts, what one draft each must earn for prompts to be read along, were reading free: some may
# draft where all of them would lose a little, and to catch up while others decode is dearer by what they wait.
LIKELY: Final = 0.9
OUTLIER: Final = 3.0  # times the predicted duration: no step counts for more


class AdaptiveDepth:
    """Each request as deep as its drafts pay, under one price of time and one number of draft passes for all.

    With the price of time equal to the rate that the optimum earns, the most of tokens - price * duration is the most
    of tokens / duration (Dinkelbach 1967). So the price is what decodes lately earned, in the time that was theirs, or
    nearly what they would with no draft but those that bounds ask for, if that is more: the time of prompts is so much
    for each token to come, whatever the depth, and makes no other second cheaper.

    A `DepthPolicy`. What the draft model does is decided as if there were no n-grams, and stands for `DWELL` steps, or
    a multiple where steps are short, unless the load changes; who drafted is reviewed after every step. N-grams are
    looked at whenever they promise something new: what they have to propose, and how good that is, nobody knows before.
    The number of passes changes once what was missed by keeping it adds up to `HYSTERESIS`. Requests whose draft model
    is idle and that do not copy when a decision is due, and one position more than anyone drafts, are probed now and
    then, for at most `PROBE_SHARE` of the time. That also pays for what requests lose that go on, not quite worth a
    draft, before their draft model falls behind.
    The price of a step without drafts is probed too, the oftener the less would be lost by it: where drafts hardly pay,
    a small error about it is a loss in every step.
    """

    def __init__(self, costs: CostModel, *, max_depth: int = MAX_DEPTH) -> None:
        self.costs = costs
        self.max_depth = max_depth
        self.decision = Decision()
        # Per step, lately: tokens per sequence, and duration over that of the same decodes without drafts; no prompts.
        self._earned = 1.0
        self._spent = 1.0
        self._decodes = 0  # in the last step with any
        self._plain = SHORTEST  # seconds that they take without drafts
        self._least_factor = LEAST_SHARE  # of earned over spent, as of the last decision
        self._num_steps = 0
        self._decided_at: int | None = None
        self._dwell = DWELL  # of that decision
        self._decided_for = (StepLoad(0, 0, 0, 0), 0.0)  # with the price of a slot
        self._num_passes = 0
        self._depth = 0  # the deepest by the draft model, as of the last decision
        self._missed = math.inf  # by keeping them, relative to what a step is worth; there is nothing to keep yet
        self._next_price = 0.0  # tokens, of one slot more than the last decision took, verified
        self._pass_price = 0.0  # of a draft pass for one of many
        self._pass_prices: list[float] = []  # for each of its passes and one more: what one sequence adds
        self._standing = Standing()  # since the last decision
        self._reviewed: set[int] = set()  # requests that have drafted since, for which nothing stands
        self._bound: set[int] = set()  # requests whose bounds leave no choice
        self._probes = Probes(max_depth)

    def standing(self, load: StepLoad, *, slot_price: float = 0.0) -> Standing | None:
        self._num_steps += 1
        return None if self._is_due(load, slot_price) else self._standing

    def join(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        """By the draft model what stands, what still pays or what the last decision's prices allow."""
        prices = self._prices(load, slot_price)
        by_model = [self._by_model(candidate, prices) for candidate in candidates]
        self._review(candidates, by_model, prices)
        return self._look(candidates, by_model, prices)

    def _by_model(self, candidate: DepthCandidate, prices: Prices) -> Chosen:
        """What stands. For a new one, the best at the prices of the last decision and within its number of passes, if
        that pays for what its draft model has to read.
        """
        request_id = candidate.request_id
        choice = self._standing.by_model.get(request_id)
        if choice is not None and not choice.depth:
            return choice
        offer = offer_by(DRAFT_MODEL, candidate)
        if offer is None:  # which it may have had when that was decided
            return NOTHING
        if choice is not None or request_id in self._reviewed:
            return choice or NOTHING
        price, most = self._next_price + self._pass_price, min(self._num_passes, candidate.reach(self.max_depth))
        depth = sum([survival > price for survival in offer.survivals[:most]])
        if sum(offer.survivals[:depth]) - depth * price <= prices.of_reading(candidate, offer):
            depth = 0
        choice = self._standing.by_model[request_id] = within_bounds(candidate, offer, depth)
        return choice

    def _review(self, candidates: Sequence[DepthCandidate], by_model: list[Chosen], prices: Prices) -> None:
        """Choose anew for those that have drafted since."""
        if not self._reviewed:
            return
        indices, reviewed, offers = [], [], []
        for index, candidate in enumerate(candidates):
            offer = offer_by(DRAFT_MODEL, candidate)
            if candidate.request_id in self._reviewed and offer is not None:
                self._reviewed.discard(candidate.request_id)
                indices.append(index)
                reviewed.append(candidate)
                offers.append(offer)
        if not indices:
            return
        standing = slots_of(by_model)
        behind = sum([offer.catch_up for offer in offers])
        rows, budget = prices.load.rows + standing, prices.load.budget - standing - behind
        chosen = review(reviewed, offers, prices, rows, budget, self.max_depth)
        for index, candidate, choice in zip(indices, reviewed, chosen):
            by_model[index] = self._standing.by_model[candidate.request_id] = choice

    def _look(self, candidates: Sequence[DepthCandidate], by_model: list[Chosen], prices: Prices) -> list[Chosen]:
        """At n-grams: who drafts by them, and what of that holds for more than this step."""
        chosen = NgramProblem(candidates, by_model, prices, self.max_depth).solve()
        looks, left = self._standing.looks, prices.load.budget - slots_of(chosen)
        for candidate, standing, choice in zip(candidates, by_model, chosen):
            if not candidate.match:
                continue
            reach = candidate.reach(self.max_depth)
            if choice.method is NGRAM and choice.depth >= reach:
                looks[candidate.request_id] = Look(candidate.match, choice)
            elif choice is standing and left >= reach:
                looks[candidate.request_id] = Look(candidate.match)
            elif candidate.request_id in looks:  # with a longer match, more rows or other company, it may do otherwise
                del looks[candidate.request_id]
        return chosen

    def _prices(self, load: StepLoad, slot_price: float) -> Prices:
        return Prices(self.costs, load, self._price_of_time(load), slot_price, self._pass_prices)

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        if not candidates:
            return []
        before, candidates = self._decided_at, list(candidates)  # mypyc makes plain loops over lists
        self._least_factor = self._least_price_factor(candidates, load)
        by_model = self._decide(candidates, load, slot_price)
        chosen = self._look(candidates, by_model, self._prices(load, slot_price))
        step = PricedStep(candidates, chosen, load, self.costs)
        deepest, second = max(choice.depth for choice in step.chosen), self._price_of_time(load)
        self.decision = Decision(deepest, step.slots, second)
        if before is None:
            self._probes.begin(step)
        passed, slot_seconds = 1 if before is None else self._num_steps - before, slot_price / second
        takes = DECISION_SECONDS + SECONDS_PER_REQUEST * len(candidates)
        self._dwell = DWELL * min(MOST_DWELLS, math.ceil(takes / (DECISION_SHARE * DWELL * step.seconds)))
        self._probes.save(step, passed)
        # First, so that what only goes on counts as drafts whose price is to be checked.
        for index in self._probes.go_on(step, by_model, slot_seconds, second, self._dwell):
            self._standing.by_model[candidates[index].request_id] = step.chosen[index]
        if step.slots > 0 and self._probes.takes_plain_step(step, passed, self._num_steps):
            return [NOTHING] * len(candidates)
        self._probes.add_drafts(step, self._depth, slot_seconds, self._num_steps)
        return step.chosen

    def reads_along(self, unread: int, tokens: float, survival: float, sequences: int, context: int) -> bool:
        """By what costs tell: the time that one draft each saves these tokens, or hardly loses, is more than reading
        takes.
        """
        alone = self.costs.target(sequences, context, sequences)
        drafting = self.costs.target(2 * sequences, context, sequences) + self.costs.passes([sequences])
        saved = alone / LIKELY - drafting / (1.0 + survival)  # of a token of each
        return tokens * saved / sequences >= self.costs.draft_rows(unread)

    def observe(self, outcome: Outcome) -> None:
        """Move the price of time. A step without decodes says nothing of it."""
        decodes = outcome.decodes
        if not decodes:
            return
        shape = outcome.shape
        predicted = max(self.costs.step(shape), SHORTEST)
        seconds = min(outcome.seconds, OUTLIER * predicted)
        if shape.kind is MIXED:
            rows = decodes + sum(drafted for _, drafted, _ in outcome.drafts)
            alone = replace(shape, rows=rows, sequences=decodes, draft_rows=0)
            seconds *= self.costs.step(alone) / predicted
        plain = max(self.costs.target(decodes, shape.context, decodes), SHORTEST)
        self._decodes, self._plain = decodes, plain
        if shape.kind is DECODE:
            self._probes.saw_plain_step(self._num_steps)
        # What drafts will bring changes with what they brought, faster than what they cost.
        by_model, looks = self._standing.by_model, self._standing.looks
        for request_id, drafted, kept in outcome.drafts:
            chosen = by_model.get(request_id)
            if chosen is not None and chosen.depth and request_id not in self._bound:
                del by_model[request_id]
                self._reviewed.add(request_id)
            look = looks.get(request_id)
            if look is not None and look.choice.depth and kept < drafted:
                del looks[request_id]
        self._earned += (1 - EARNINGS_DECAY) * (outcome.emitted / decodes - self._earned)
        self._spent += (1 - EARNINGS_DECAY) * (seconds / plain - self._spent)

    def forget(self, request_id: int) -> None:
        self._standing.forget(request_id)
        self._reviewed.discard(request_id)
        self._bound.discard(request_id)
        self._probes.forget(request_id)

    def _price_of_time(self, load: StepLoad) -> float:
        """Tokens per second: what these sequences earn without drafts, times what drafts lately made of it.

        That factor depends little on the number of sequences, so the price follows a change of load at once. The best
        there is earns no less than drafting only what bounds ask for, whatever drafts that did not pay have earned;
        what is a little less is left as it is, or chance would make time dearer than it is.
        """
        factor = max(self._least_factor, self._earned / self._spent)
        # As many decode as in the last step: what they read has hardly grown.
        plain = self._plain if load.sampling == self._decodes else plain_seconds(self.costs, load)
        return factor * load.sampling / plain

    def _least_price_factor(self, candidates: list[DepthCandidate], load: StepLoad) -> float:
        """What drafting as little as bounds allow makes of the price of time, or hardly less."""
        if not any([candidate.lowest for candidate in candidates]):
            return LEAST_SHARE
        # Bounds ask for drafts of the first offer, which is the only one where they do.
        asked = [within_bounds(candidate, candidate.offers[0], 0) for candidate in candidates]
        decodes = replace(load, rows=load.sampling)
        least, plain = (
            PricedStep(candidates, chosen, decodes, self.costs) for chosen in (asked, [NOTHING] * len(asked))
        )
        return LEAST_SHARE * least.tokens / least.seconds * plain.seconds / plain.tokens

    # -- between decisions ---------------------------------------------------------------------------------------------

    def _is_due(self, load: StepLoad, slot_price: float) -> bool:
        """The last decision is old, or was made for another load, or for want of rows that are there now."""
        before, price_before = self._decided_for
        enough = self.decision.slots + before.sampling  # rows: one more for each
        return (
            self._decided_at is None
            or self._num_steps - self._decided_at >= self._dwell
            or (load.sampling != before.sampling and 8 * abs(load.sampling - before.sampling) > before.sampling)
            or abs(slot_price - price_before) > PRICE_CHANGE
            or (load.rows != before.rows and abs(self._row_price(load) - self._row_price(before)) > PRICE_CHANGE)
            or before.budget < enough <= load.budget
        )

    def _row_price(self, load: StepLoad) -> float:
        """What a row costs, in tokens, of as many as were last drafted, or one for each sequence: other rows of a step
        matter as far as that changes with them.
        """
        count = max(load.sampling, self.decision.slots)
        plain, more = (self.costs.target(load.rows + added, load.context) for added in (0, count))
        return self._price_of_time(load) * (more - plain) / count

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _decide(self, candidates: list[DepthCandidate], load: StepLoad, slot_price: float) -> list[Chosen]:
        problem = SlotProblem(
            candidates, load, self.costs, self._price_of_time(load), slot_price, self.max_depth, self._num_passes
        )
        best = self._change_passes(problem.solve(), problem.second)
        chosen = problem.chosen(best, len(candidates))
        self._depth = max([choice.depth for choice in chosen])
        self._next_price = problem.next_price(best)
        self._pass_price, self._pass_prices = problem.pass_price, problem.pass_prices(best)
        self._decided_at, self._decided_for = self._num_steps, (load, slot_price)
        self._standing, self._reviewed, self._bound = Standing(), set(), set()
        for candidate, choice in zip(candidates, chosen):
            self._standing.by_model[candidate.request_id] = choice
            if candidate.lowest >= candidate.highest:
                self._bound.add(candidate.request_id)
            if choice.depth:
                self._probes.forget(candidate.request_id)
        return chosen

    def _change_passes(self, solutions: Sequence[BestSlots], second: float) -> BestSlots:
        """Decide on the number of passes, given the best for each.

        The better one is not taken at once if it is hardly better: the estimates behind it are noisy.
        """
        best = max(solutions, key=lambda solution: (solution.asked, solution.value))
        current = solutions[min(self._num_passes, len(solutions) - 1)]
        if best is not current and current.asked == best.asked:
            self._missed += (best.value - current.value) / (second * max(best.seconds, SHORTEST))
            if self._missed <= HYSTERESIS:
                self._num_passes = current.passes
                return current
        self._num_passes = best.passes
        self._missed = 0.0
        return best
