"""Probes: drafts, and steps without drafts, that do not pay but teach something, within time set aside for them."""

from __future__ import annotations

import math
from typing import Final

from paceline.core.depth import Chosen, DepthCandidate, Offer, offer_by
from paceline.core.method import DRAFT_MODEL
from paceline.core.priced_step import PricedStep, plain_seconds

# These two are not Final, since tests take probes away.
PROBE_SHARE = 0.005  # of the time of all steps with a choice, the most that probes may take
# Steps' worth to begin with, of one request: a mistake about an unknown drafter would last. Many requests learn as much
# in fewer steps.
PROBE_CREDIT = 5.0
LEAST_CREDIT: Final = 0.5  # steps' worth, however many there are: enough for most draft passes
PROBE_SAVINGS: Final = 1024  # steps for which an unused share is kept
PROBE_INTERVAL: Final = 32  # steps without drafts before a request's first probe
MAX_PROBE_INTERVAL: Final = 512
PROBE_SPREAD: Final = 317  # times the request's id, modulo its interval: neighbours far apart
PROBE_STRETCH: Final = 0.25  # of a step: no probe joins where probes make it longer by more
DEEPER_INTERVAL: Final = 32  # steps between probes one deeper than the batch
# Steps without drafts, by which what drafts save is told, and whether they save anything.
PLAIN_SHARE: Final = 0.001  # of the time, the most that they may lose but for those that are due anyway
PLAIN_CREDIT: Final = 1.0  # steps' worth to begin with, and the most that is kept
LEAST_PLAIN_INTERVAL: Final = 16  # steps from one to the next: often, where drafts bring little more than they cost
PLAIN_INTERVAL: Final = 512  # after which one is due


class Probes:
    """Adds to a decision what is not expected to pay, within savings that grow with every step. One caller: the policy.

    Attributes:
        seconds: saved for drafts, not yet spent.
    """

    def __init__(self, max_depth: int) -> None:
        """
        Args:
            max_depth: of any request, unless bounds ask for more.
        """
        self.seconds = 0.0
        self._max_depth = max_depth
        self._too_dear = 0.0  # the dearest probe that was refused since the last one
        self._plain_seconds = 0.0  # saved for steps without drafts, not yet spent
        self._plain_at = 0  # the last of those
        self._deeper_at = 0
        self._num_probes = 0
        self._intervals: dict[int, int] = {}  # of requests whose probes changed nothing so far

    def begin(self, step: PricedStep) -> None:
        """Of the first decision: what is there before anything was saved."""
        plain = plain_seconds(step.costs, step.load)
        self.seconds = max(LEAST_CREDIT, PROBE_CREDIT / step.load.sampling) * plain
        self._plain_seconds = PLAIN_CREDIT * plain

    def save(self, step: PricedStep, passed: int) -> None:
        """Set time aside for drafts, before this step is added to.

        Args:
            passed: steps since the last decision.
        """
        share = PROBE_SHARE * step.seconds
        if any([candidate.lowest < candidate.highest for candidate in step.candidates]):
            self.seconds += share * passed
        # Where the draft model is far behind everybody, one probe may cost more than is kept otherwise.
        self.seconds = min(self.seconds, max(PROBE_SAVINGS * share, self._too_dear))

    # -- steps without drafts ------------------------------------------------------------------------------------------

    def saw_plain_step(self, now: int) -> None:
        """A step without drafts was taken, for whatever reason; `now` is its number."""
        self._plain_at = now

    def takes_plain_step(self, step: PricedStep, passed: int, now: int) -> bool:
        """It is time for a step without drafts, and this one can be it. Pays for it.

        Args:
            passed: steps since the last decision.
            now: the step's number.
        """
        load = step.load
        saved = self._plain_seconds + PLAIN_SHARE * step.seconds * passed
        self._plain_seconds = min(saved, PLAIN_CREDIT * step.seconds)
        if load.rows != load.sampling or any([candidate.lowest for candidate in step.candidates]):
            return False
        interval = now - self._plain_at
        as_chosen = load.sampling * step.seconds / step.tokens  # for as many tokens
        lost = max(plain_seconds(step.costs, load) - as_chosen, 0.0)
        if interval < (LEAST_PLAIN_INTERVAL if lost <= self._plain_seconds else PLAIN_INTERVAL):
            return False
        self._plain_seconds = max(self._plain_seconds - lost, 0.0)
        return True

    # -- drafts --------------------------------------------------------------------------------------------------------

    def go_on(
        self, step: PricedStep, standing: list[Chosen], slot_seconds: float, second: float, dwell: int
    ) -> list[int]:
        """Let requests whose draft model is up to date go on by one draft even if that does not quite pay, the
        likeliest first, until the next decision.

        More about them will never be learned as cheaply: without drafts the draft model falls behind, and the way back
        costs more with every step. An estimate that is a little too low must not decide that. What they are expected to
        lose together is paid from the savings for probes, if it is no more than what they are expected to earn.

        Args:
            standing: what each does by its draft model.
            slot_seconds: what a slot costs besides its time, in time.
            second: what it is worth, in tokens.
            dwell: steps for which the decision stands.

        Returns:
            Who goes on, as indices.
        """
        ready = []
        for index, (candidate, choice) in enumerate(zip(step.candidates, step.chosen)):
            offer = offer_by(DRAFT_MODEL, candidate)
            if offer is None or candidate.steps_without_model or not candidate.highest:
                continue
            if not choice.depth and not standing[index].depth:
                ready.append((index, offer))
        if not ready:
            return []
        costs = step.costs
        ready.sort(key=lambda pair: costs.draft_rows(pair[1].catch_up) - pair[1].survivals[0] / second)
        count, earned, lost = 0, 0.0, 0.0
        first_drafts = step.seconds_of_first_drafts([offer for _, offer in ready])
        for number, ((_, offer), seconds) in enumerate(zip(ready, first_drafts), 1):
            earned += offer.survivals[0] / second
            loses = seconds - earned + slot_seconds * number
            if loses <= earned and dwell * loses <= self.seconds:
                count, lost = number, loses
        self.seconds -= dwell * max(lost, 0.0)
        for index, offer in ready[:count]:
            step.draft_one_more(index, offer)
        return [index for index, _ in ready[:count]]

    def add_drafts(self, step: PricedStep, deepest: int, slot_seconds: float, now: int) -> None:
        """Add drafts that the decision leaves out, to learn from them, while the time set aside for that lasts.

        Args:
            deepest: draft of any request by the draft model, as decided.
            slot_seconds: what a slot costs besides its time, in time.
            now: the step's number.
        """
        before = self.seconds
        too_dear = math.inf  # from so many tokens to catch up on, as long as nothing is added
        for wait, index, offer in self._waiting(step):
            # Where a draft pass is paid for, those that have waited for half their time come along, a few at once.
            spent = before - self.seconds
            if (wait < 1.0 and not spent) or spent > PROBE_STRETCH * step.seconds:
                break
            candidate = step.candidates[index]
            if offer.catch_up >= too_dear:
                continue
            if self._pay(step, slot_seconds, index, offer):
                too_dear = math.inf
                interval = self._interval(candidate)
                self._intervals[candidate.request_id] = min(2 * interval, MAX_PROBE_INTERVAL)
                self._num_probes += 1
            else:
                too_dear = float(offer.catch_up)
        if now - self._deeper_at >= DEEPER_INTERVAL:
            self._deeper_at = now
            self._add_deeper(step, deepest, slot_seconds, now)

    def _waiting(self, step: PricedStep) -> list[tuple[float, int, Offer]]:
        """Requests whose draft model was idle for half of their interval or more, the longest first: how much of it has
        passed, the index, and what the model offers.

        Intervals differ by request, so that those which began together do not probe together.
        """
        waiting = []
        for index, (candidate, choice) in enumerate(zip(step.candidates, step.chosen)):
            offer = offer_by(DRAFT_MODEL, candidate)
            if choice.depth or offer is None:
                continue
            interval = self._interval(candidate)
            passed = candidate.steps_without_model / (interval + candidate.request_id * PROBE_SPREAD % interval)
            if passed >= 0.5:
                waiting.append((passed, index, offer))
        return sorted(waiting, reverse=True)

    def _interval(self, candidate: DepthCandidate) -> int:
        """Short while little is known of any request: a draft model that is left behind is dear to try again."""
        first = min(PROBE_INTERVAL, 1 + self._num_probes)
        return self._intervals.get(candidate.request_id, first)

    def _add_deeper(self, step: PricedStep, depth: int, slot_seconds: float, now: int) -> None:
        """Let one of the deepest requests draft one more, each time another."""
        deepest = []
        for index, (candidate, choice) in enumerate(zip(step.candidates, step.chosen)):
            offer = offer_by(DRAFT_MODEL, candidate)
            if offer is None or choice.method is not DRAFT_MODEL or choice.depth != depth:
                continue
            if choice.depth < min(candidate.highest, len(offer.survivals), self._max_depth):
                deepest.append((index, offer))
        if deepest:
            self._pay(step, slot_seconds, *deepest[now // DEEPER_INTERVAL % len(deepest)])

    def _pay(self, step: PricedStep, slot_seconds: float, index: int, offer: Offer) -> bool:
        """Draft one more by this offer if there are rows and savings for it."""
        seconds = step.seconds_of_one_more(index, offer) + slot_seconds
        if seconds > self.seconds:
            if seconds < math.inf:
                self._too_dear = max(self._too_dear, seconds)
            return False
        self._too_dear = 0.0
        self.seconds -= seconds
        step.draft_one_more(index, offer)
        return True

    def forget(self, request_id: int) -> None:
        """It drafts, or is gone: what its probes brought says nothing of the next."""
        self._intervals.pop(request_id, None)
