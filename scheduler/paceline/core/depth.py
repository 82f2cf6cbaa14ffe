"""How deep each request drafts in the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.params import Method

# A draft slot's price in units of one verify pass, until the measured cost model takes its place.
DRAFT_PRICE = {Method.DRAFT_MODEL: 0.15, Method.NGRAM: 0.05}
PROBE_INTERVAL = 32  # decode steps at depth 0 after which one draft is tried


@dataclass(frozen=True, slots=True)
class DepthCandidate:
    """A request that will decode in the step being planned.

    Attributes:
        method: who would draft.
        acceptance: estimated probability that a draft is accepted, given that the one before it was.
        lowest, highest: bounds that the choice keeps.
        steps_without_drafts: decode steps since the request last drafted.
    """

    method: Method
    acceptance: float
    lowest: int
    highest: int
    steps_without_drafts: int


class DepthPolicy(Protocol):
    """Chooses from history alone, never from a drawn draft: that would bias sampled output."""

    def choose(self, candidates: Sequence[DepthCandidate]) -> list[int]:
        """A depth for each candidate, within its bounds.

        The scheduler may grant less where memory or budget is short.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """The same depth for everyone, wherever bounds allow it."""

    depth: int

    def choose(self, candidates: Sequence[DepthCandidate]) -> list[int]:
        return [min(max(self.depth, c.lowest), c.highest) for c in candidates]


@dataclass(frozen=True, slots=True)
class AdaptiveDepth:
    """Each request on its own: the depth with the most expected tokens per unit of time.

    With acceptance a, depth k emits (1 - a^(k+1)) / (1 - a) tokens (Leviathan et al. 2023, eq. 1) in 1 + price * k
    verify passes. A request at depth 0 learns nothing about itself, so now and then it probes with one draft.
    """

    def choose(self, candidates: Sequence[DepthCandidate]) -> list[int]:
        return [self._choose(c) for c in candidates]

    def _choose(self, candidate: DepthCandidate) -> int:
        price = DRAFT_PRICE[candidate.method]
        best, best_rate = 0, 1.0
        survival, tokens = 1.0, 1.0
        for depth in range(1, candidate.highest + 1):
            survival *= candidate.acceptance
            tokens += survival
            rate = tokens / (1.0 + price * depth)
            if rate > best_rate:
                best, best_rate = depth, rate
        if best == 0 and candidate.steps_without_drafts >= PROBE_INTERVAL:
            best = 1
        return min(max(best, candidate.lowest), candidate.highest)
