"""What speculation brought and cost: of a request, a tenant, a drafter or the whole server."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationCounts:
    """Totals over verify steps, which are the decodes. Mutated by `record` only.

    Attributes:
        emitted: tokens that the verify steps brought.
        draft_steps: verify steps with a draft to verify.
        drafted, accepted: drafts verified, and those of them that were emitted.
        drafted_by_position, accepted_by_position: the same for each position of a draft.
        depths: verify steps by the number of drafts verified, from 0.
        saved_seconds: what the same tokens would have taken without drafts, by the cost model, less what they took.
        rejected_seconds: of what they took, the price of drafts that were rejected.
    """

    verify_steps: int = 0
    emitted: int = 0
    draft_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    saved_seconds: float = 0.0
    rejected_seconds: float = 0.0

    def record(self, emitted: int, drafted: int, accepted: int, saved: float = 0.0, rejected: float = 0.0) -> None:
        """Book one verify step; `saved` and `rejected` are in seconds."""
        self.verify_steps += 1
        self.emitted += emitted
        self.draft_steps += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        _count(self.drafted_by_position, drafted)
        _count(self.accepted_by_position, accepted)
        self.depths.extend([0] * (drafted + 1 - len(self.depths)))
        self.depths[drafted] += 1
        self.saved_seconds += saved
        self.rejected_seconds += rejected


def _count(by_position: list[int], reached: int) -> None:
    """One more at each of the first `reached` positions."""
    by_position.extend([0] * (reached - len(by_position)))
    for position in range(reached):
        by_position[position] += 1
