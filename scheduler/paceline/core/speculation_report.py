"""What speculation does at one moment, for whoever watches: decisions, estimates, counts and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.cost_model import Error
from paceline.core.depth import Decision
from paceline.core.method import Method
from paceline.core.params import Verification
from paceline.core.speculation_counts import SpeculationCounts

DrafterKey = tuple[Method, Verification]


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """One way to draft under one verification rule.

    Attributes:
        acceptance: expected for a new request of a new tenant, by position: the chance that a draft there is kept if
            those before it were. As far as anyone got. Positions of n-grams begin with the tokens that agreed before.
    """

    acceptance: tuple[float, ...]
    counts: SpeculationCounts


@dataclass(frozen=True, slots=True)
class TenantReport:
    """Attributes:
    acceptance: expected of the first draft of a new request, by drafter; of n-grams, after a match of one token.
    """

    acceptance: Mapping[DrafterKey, float]
    counts: SpeculationCounts


@dataclass(frozen=True, slots=True)
class RequestReport:
    """A live request.

    Attributes:
        depth: drafts verified in its last step.
        acceptance: expected of its next first draft, by method.
    """

    tenant: str
    depth: int
    acceptance: Mapping[Method, float]
    counts: SpeculationCounts


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """All of it; counts are those of ended and of live requests.

    Attributes:
        decision: the policy's last one, with the price of time; None of a policy that knows no prices.
        drafters: those that verified anything.
        requests: the live ones, by id.
        errors: of the cost model's predictions, by kind of step.
        checked_saved_seconds: `totals.saved_seconds`, corrected by what steps without drafts really took lately; None
            if there was none to check by.
    """

    decision: Decision | None
    drafters: Mapping[DrafterKey, DrafterReport]
    tenants: Mapping[str, TenantReport]
    requests: Mapping[int, RequestReport]
    totals: SpeculationCounts
    errors: Mapping[str, Error]
    checked_saved_seconds: float | None
