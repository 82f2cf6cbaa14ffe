"""How likely the next drafts are to be accepted: one regression over all requests, which knows what it did not see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Final, NamedTuple

PRIOR_RATE: Final = 0.7  # of a drafter that nobody has observed yet
MAX_TENANTS: Final = 4096  # of which a model keeps what it learned

_PRIOR: Final = log(PRIOR_RATE / (1.0 - PRIOR_RATE))
_LOWEST, _HIGHEST = log(0.01 / 0.99), log(0.995 / 0.005)  # log-odds: there is always something left to learn
_AGE_DECAY: Final = 0.98  # per decode step without drafts: half is forgotten after 34


class _Level(NamedTuple):
    """How fast residuals of one kind forget, and how slowly they learn while they know little.

    Attributes:
        decay: of the information, per verify step that the residual took part in.
        prior: information that a shift of 0 counts for, which is 1 / variance of the shifts around it.
    """

    decay: float
    prior: float


# A memory of 25 steps, 500 steps, and 5000 times that the position was reached. Half or twice of any of these numbers
# moves the log loss by about 1 % at most, on simulated requests and on recorded ones.
_REQUEST: Final = _Level(decay=0.96, prior=1.5)
_TENANT: Final = _Level(decay=0.998, prior=2.0)
_POSITION: Final = _Level(decay=0.9998, prior=8.0)


@dataclass(slots=True)
class Residual:
    """One level's shift of the log-odds, and how much is known about it.

    Attributes:
        shift: what the level adds to the log-odds of acceptance.
        information: the Fisher information of what was observed, decayed: rate * (1 - rate) per observation.
    """

    shift: float = 0.0
    information: float = 0.0

    def learn(self, error: float, information: float, level: _Level) -> None:
        """One observation: a Newton step against `error`, the shorter the more is known."""
        self.information += information
        self.shift = _bounded(self.shift + error / (self.information + level.prior))

    def forget(self, level: _Level) -> None:
        self.information *= level.decay


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

    Positions have residuals of their own because the rate is no constant of the depth: it rises where requests differ,
    since the easy ones get deep, and it falls where a drafter drifts away from the target. A position that nobody
    reached yet is taken for the deepest one that somebody did.
    """

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._positions: list[Residual] = []  # of the reached ones, in order: without gaps, as drafts are verified
        self._tenants: dict[str, Residual] = {}  # the least recently observed first
        self._max_tenants = max_tenants

    def survivals(self, tenant: str, request: Residual, depth: int, optimism: float = 0.0) -> list[float]:
        """S_1 .. S_depth, S_j = probability that the first j drafts are all accepted: in [0, 1], non-increasing.

        Args:
            optimism: standard deviations of the request's residual that are added to its log-odds; 0 for the mean.
        """
        log_odds = self._log_odds(tenant, request)
        if optimism:
            log_odds += optimism / sqrt(request.information + _REQUEST.prior)
        survivals = []
        survival, rate = 1.0, _rate(log_odds)
        for position in self._positions[:depth]:
            rate = _rate(log_odds + position.shift)
            survival *= rate
            survivals.append(survival)
        while len(survivals) < depth:
            survival *= rate
            survivals.append(survival)
        return survivals

    def observe(self, tenant: str, request: Residual, reached: Sequence[float], shared: bool = True) -> None:
        """Learn from one verify step. Changes `request` and, if `shared`, what is known of the tenant and the drafter.

        Args:
            reached: for each reached position, in order, the probability that a draft there is accepted, or 0 or 1
                where only the outcome is known: the same on average, with more noise. Empty: no effect.
            shared: False where the request's own transforms of the target's logits make it no example for others.
        """
        if not reached:
            return
        # All errors are those of the rates before the step, which is what `survivals` predicts: deep positions are
        # reached in easy steps, and a request that learned within the step would take the credit for that. Lengths of
        # steps, though, may depend only on what was known before the label: else runs of ones, which bring more
        # information than a first zero, would count for less.
        log_odds = self._log_odds(tenant, request)
        unexplained = _REQUEST.prior / (request.information + _REQUEST.prior)
        request.forget(_REQUEST)
        if shared:
            tenant_residual = self._touch(tenant)
            tenant_residual.forget(_TENANT)
        for index, label in enumerate(reached):
            position = self._position(index)
            rate = _rate(log_odds + position.shift)
            error, information = label - rate, rate * (1.0 - rate)
            request.learn(error, information, _REQUEST)
            if shared:
                if index == len(self._positions):
                    self._positions.append(position)
                position.forget(_POSITION)
                position.learn(error, information, _POSITION)
                tenant_residual.learn(unexplained * error, unexplained**2 * information, _TENANT)

    def age(self, request: Residual) -> None:
        """A decode step in which the request drafted nothing: it returns to its tenant's rate, less and less certain.

        So a request that stopped drafting takes it up again by itself.
        """
        request.information *= _AGE_DECAY
        request.shift *= _AGE_DECAY

    def _log_odds(self, tenant: str, request: Residual) -> float:
        """Without the position's part."""
        residual = self._tenants.get(tenant)
        return _PRIOR + request.shift + (residual.shift if residual else 0.0)

    def _position(self, index: int) -> Residual:
        """A new one starts where its neighbour is; it is not kept."""
        if index < len(self._positions):
            return self._positions[index]
        return Residual(self._positions[-1].shift) if self._positions else Residual()

    def _touch(self, tenant: str) -> Residual:
        """The tenant's residual, which is now the most recent; a new one may displace the least recent."""
        residual = self._tenants.pop(tenant, None) or Residual()
        self._tenants[tenant] = residual
        if len(self._tenants) > self._max_tenants:
            del self._tenants[next(iter(self._tenants))]
        return residual


def _rate(log_odds: float) -> float:
    return 1.0 / (1.0 + exp(-_bounded(log_odds)))


def _bounded(log_odds: float) -> float:
    return min(max(log_odds, _LOWEST), _HIGHEST)
