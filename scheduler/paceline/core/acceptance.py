"""How likely the next draft is to be accepted: a decayed estimate that knows what it did not see."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.97  # per verify step: a memory of about 33 steps
PRIOR_WEIGHT = 8.0  # observations that the prior counts for
PRIOR_RATE = 0.7  # of a drafter that nobody has observed yet


@dataclass(slots=True)
class Acceptance:
    """An EMA of acceptance over *reached* draft positions.

    The number of accepted drafts is geometric and right-censored at the depth: positions behind a rejection say
    nothing. So the estimate is EMA(accepted) / EMA(accepted + rejected), which is the censored maximum likelihood
    estimate, and not accepted / depth, which is biased low and throttles itself (0.59 for a true 0.8 at depth 4).

    Observations are probabilities where the verifier knows them (the overlap of p and q), which has less variance than
    drawing 0 or 1 with that probability and has the same mean.
    """

    accepted: float = 0.0
    rejected: float = 0.0

    def observe(self, reached: tuple[float, ...]) -> None:
        """Book one verify step: the acceptance probability at each reached position, in order. Empty: no effect."""
        if not reached:
            return
        accepted = sum(reached)
        self.accepted = DECAY * self.accepted + accepted
        self.rejected = DECAY * self.rejected + len(reached) - accepted

    def rate(self, prior: float = PRIOR_RATE) -> float:
        """The estimate, shrunk to `prior` while observations are few. In [0, 1]."""
        seen = self.accepted + self.rejected
        return (self.accepted + PRIOR_WEIGHT * prior) / (seen + PRIOR_WEIGHT)
