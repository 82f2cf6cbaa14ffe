"""How likely the next drafts are to be accepted: one regression over all requests, which knows what it did not see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log
from typing import Final, NamedTuple

import numpy as np

from paceline.core.calibration import Calibration

PRIOR_RATE: Final = 0.7  # of a drafter that nobody has observed yet
MAX_TENANTS: Final = 4096  # of which a model keeps what it learned

# Log-odds: there is always something left to learn.
_LOWEST: Final = log(0.01 / 0.99)
_HIGHEST: Final = log(0.995 / 0.005)
_AGE_DECAY: Final = 0.98  # per decode step without drafts: half is forgotten after 34
_COMPARED_AT_ONCE: Final = 1024  # labels


class Level(NamedTuple):
    """How fast residuals of one kind forget, and how slowly they learn while they know little.

    Attributes:
        decay: of the information, per verify step that the residual took part in.
        prior: information that a shift of 0 counts for, which is 1 / variance of the shifts around it.
        tail: square of the shift for which it counts half as much. Most are alike and some altogether different: shifts
            have heavier tails than a normal distribution's (a t prior). Infinite if they have not.
    """

    decay: float
    prior: float
    tail: float = inf

    def prior_at(self, shift: float) -> float:
        return self.prior / (1.0 + shift * shift / self.tail)


# A memory of 500 steps, and of 5000 times that the position was reached. Half or twice of any of these numbers moves
# the log loss by about 1 % at most, on simulated requests and on recorded ones.
_TENANT: Final = Level(decay=0.998, prior=2.0)
_POSITION: Final = Level(decay=0.9998, prior=2.0)
_POSITION_DECAY: Final = _POSITION.decay
_POSITION_PRIOR: Final = _POSITION.prior


class Traits(NamedTuple):
    """What is known of a kind of drafter before it was observed.

    Attributes:
        rates: acceptance at the first positions, at least one; those behind are like the last.
        request: how long a request's past tells something of its future.
    """

    rates: tuple[float, ...]
    request: Level


# A memory of 25 steps and one of 4: once n-grams copy, they go on for a while. The prior of a draft model served best
# on recorded acceptance, of requests that are alike and of very different ones.
MODEL_TRAITS: Final = Traits((PRIOR_RATE,), Level(decay=0.96, prior=6.0, tail=0.25))
# By how many tokens agreed before, and were drafted since.
NGRAM_TRAITS: Final = Traits(
    (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.8, 0.8, 0.8, 0.8, 0.85, 0.85, 0.85, 0.85, 0.85, 0.85),
    Level(decay=0.75, prior=1.0),
)


@dataclass(slots=True)
class Residual:
    """One level's shift of the log-odds, and how much is known about it.

    Attributes:
        shift: what the level adds to the log-odds of acceptance.
        information: the Fisher information of what was observed, decayed: rate * (1 - rate) per observation.
    """

    shift: float = 0.0
    information: float = 0.0

    def age(self) -> None:
        """A decode step in which the request drafted nothing: it returns to its tenant's rate, less and less certain.

        So a request that stopped drafting takes it up again by itself.
        """
        self.information *= _AGE_DECAY
        self.shift *= _AGE_DECAY


class AcceptanceModel:
    """What is known of one drafter under one verification rule.

    The chance that draft j is accepted, if those before it were, has the log-odds

        prior + position j + tenant + request,

    where the last three are residuals. Each takes its own step against the error of every observation, and a level that
    knows much moves little: a young request departs from its tenant's rate at once, a drafter's positions move with
    what all requests have in common. A tenant learns from a request the less, the more the request knows of itself: its
    shift is where the next request will start, not where the longest one ended.

    Only *reached* positions are observed, the accepted ones and the first rejected one: the number of accepted drafts
    is right-censored by the depth, and positions behind a rejection say nothing. Accepted / depth would be biased low
    (0.59 for a true 0.8 at depth 4), and would throttle itself.

    Before the first draft of an n-gram some tokens have agreed already: its position counts them, too. So what is known
    of copies is how long they go on, by how long they have gone on. To the calibration it is a first position still.

    Positions have residuals of their own because the rate is no constant of the depth: it rises where requests differ,
    since the easy ones get deep, and it falls where a drafter drifts away from the target. A position that nobody
    reached yet is taken for the deepest one that somebody did.

    Args:
        traits: of the drafter.
    """

    def __init__(self, traits: Traits = MODEL_TRAITS, max_tenants: int = MAX_TENANTS) -> None:
        self._of_request = traits.request
        self._prior, *later = (log(rate / (1.0 - rate)) for rate in traits.rates)
        # Of those with a prior and of the reached ones, in order: without gaps, as drafts are verified.
        self._positions = [Residual(), *(Residual(log_odds - self._prior) for log_odds in later)]
        self._tenants: dict[str, Residual] = {}
        self._max_tenants = max_tenants
        self._calibration = Calibration()
        # Not yet in the calibration: of each reached draft its position, the rate that was told, and the label.
        self._told: tuple[list[int], list[float], list[float]] = [], [], []

    @property
    def calibration(self) -> Calibration:
        """How the rates that were told before each step compare with what was observed."""
        self._compare()
        return self._calibration

    def survivals(self, tenant: str, request: Residual, depth: int, agreed: int = 0) -> list[float]:
        """S_1 .. S_depth, S_j = probability that the first j drafts are all accepted: in [0, 1], non-increasing.

        Args:
            agreed: positions before the first of them.
        """
        log_odds = self._log_odds(tenant, request)
        survivals = []
        survival = 1.0
        for position in self._positions[agreed : agreed + depth]:
            survival *= _rate(log_odds + position.shift)
            survivals.append(survival)
        rate = _rate(log_odds + self._positions[-1].shift)
        while len(survivals) < depth:
            survival *= rate
            survivals.append(survival)
        return survivals

    def survivals_behind(self, tenant: str, request: Residual, depth: int, agreed: int, awaited: int) -> list[float]:
        """The same of drafts by n-grams behind tokens that are not known yet. If the match holds for all of these, the
        drafts continue it; if not, they begin a new one. Both are weighted by how likely the match is to hold.

        Args:
            agreed: positions before those tokens.
            awaited: how many of them there are, at least one.
        """
        holds = self.survivals(tenant, request, awaited, agreed)[-1]
        longer = self.survivals(tenant, request, depth, agreed + awaited)
        anew = self.survivals(tenant, request, depth)
        return [holds * one + (1.0 - holds) * other for one, other in zip(longer, anew)]

    @property
    def is_observed(self) -> bool:
        """Somebody's drafts were."""
        return any(position.information > 0.0 for position in self._positions)

    def rates(self, tenant: str = "") -> list[float]:
        """Of a new request, as far as anything is known: the chance at each position that a draft is kept if all before
        it were.
        """
        log_odds = self._log_odds(tenant, Residual())
        return [_rate(log_odds + position.shift) for position in self._positions]

    def observe(
        self, tenant: str, request: Residual, reached: Sequence[float], shared: bool = True, agreed: int = 0
    ) -> None:
        """Learn from one verify step. Changes `request` and, if `shared`, what is known of the tenant and the drafter.

        Args:
            reached: for each reached position, in order, the probability that a draft there is accepted, or 0 or 1
                where only the outcome is known: the same on average, with more noise. Empty: no effect.
            shared: False where the request's own transforms of the target's logits make it no example for others.
            agreed: positions before the first of them.
        """
        if not reached:
            return
        # All errors are those of the rates before the step, which is what `survivals` predicts: deep positions are
        # reached in easy steps, and a request that learned within the step would take the credit for that. Lengths of
        # steps, though, may depend only on what was known before the label: else runs of ones, which bring more
        # information than a first zero, would count for less. All in one loop, since every verified draft passes it.
        prior, of_tenant = self._of_request.prior_at(request.shift), self._tenants.get(tenant)
        if of_tenant is None:
            of_tenant = self._join(tenant) if shared else Residual()
        shift, information = request.shift, request.information
        log_odds = self._prior + shift + of_tenant.shift
        unexplained = prior / (information + prior)
        known = self._of_request.decay * information + prior
        tenant_shift, tenant_known = of_tenant.shift, _TENANT.decay * of_tenant.information + _TENANT.prior
        positions, (told_positions, rates, labels) = self._positions, self._told
        index = min(agreed, len(positions))
        for label in reached:
            if index < len(positions):
                position = positions[index]
            else:
                position = Residual(positions[-1].shift)  # as its neighbour
                if shared:
                    positions.append(position)
            odds = log_odds + position.shift
            rate = 1.0 / (1.0 + exp(-(_LOWEST if odds < _LOWEST else _HIGHEST if odds > _HIGHEST else odds)))
            rates.append(rate)
            error, news = label - rate, rate * (1.0 - rate)
            known += news
            shift += error / known
            if shared:
                position.information = of_position = _POSITION_DECAY * position.information + news
                odds = position.shift + error / (of_position + _POSITION_PRIOR)
                position.shift = _LOWEST if odds < _LOWEST else _HIGHEST if odds > _HIGHEST else odds
                tenant_known += unexplained * unexplained * news
                tenant_shift += unexplained * error / tenant_known
            index += 1
        request.shift = _LOWEST if shift < _LOWEST else _HIGHEST if shift > _HIGHEST else shift
        request.information = known - prior
        if shared:
            of_tenant.shift, of_tenant.information = _bounded(tenant_shift), tenant_known - _TENANT.prior
        told_positions.extend(range(len(reached)))
        labels.extend(reached)
        if len(rates) >= _COMPARED_AT_ONCE:
            self._compare()

    def _compare(self) -> None:
        """Enter what was told and observed into the calibration; many at once, as arrays are slow for few."""
        positions, rates, labels = self._told
        if rates:
            self._calibration.record(np.array(positions), np.array(rates), np.array(labels))
            self._told = [], [], []

    def _log_odds(self, tenant: str, request: Residual) -> float:
        """Without the position's part."""
        residual = self._tenants.get(tenant)
        return self._prior + request.shift + (residual.shift if residual else 0.0)

    def _join(self, tenant: str) -> Residual:
        """A new tenant's residual. Where there are too many, the half of which least is known is forgotten."""
        if len(self._tenants) >= self._max_tenants:
            by_knowledge = sorted(self._tenants, key=lambda name: self._tenants[name].information)
            for name in by_knowledge[: (len(by_knowledge) + 1) // 2]:
                del self._tenants[name]
        self._tenants[tenant] = Residual()
        return self._tenants[tenant]


def _rate(log_odds: float) -> float:
    if log_odds < _LOWEST:
        log_odds = _LOWEST
    elif log_odds > _HIGHEST:
        log_odds = _HIGHEST
    return 1.0 / (1.0 + exp(-log_odds))


def _bounded(log_odds: float) -> float:
    # Twice as fast as min and max.
    return _LOWEST if log_odds < _LOWEST else _HIGHEST if log_odds > _HIGHEST else log_odds
