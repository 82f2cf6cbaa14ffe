"""What speculation brought and cost: of a request, a tenant, a drafter or the whole server."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.core.step_bill import FREE, DraftPrice


@dataclass(slots=True)
class SpeculationCounts:
    """Totals over verify steps, which are the decodes. Mutated by `record` and `add` only.

    Attributes:
        emitted: tokens that the verify steps brought.
        plain_steps: those without drafts to verify.
        steps: the others by (drafts verified, those of them that were emitted).
        gained_seconds: what the tokens that drafts brought would have taken without, by the cost model.
        spent_seconds: what the drafts took.
        rejected_seconds: of that, the price of drafts that were rejected.
    """

    emitted: int = 0
    plain_steps: int = 0
    steps: dict[tuple[int, int], int] = field(default_factory=dict)
    gained_seconds: float = 0.0
    spent_seconds: float = 0.0
    rejected_seconds: float = 0.0

    def record(self, emitted: int, drafted: int, accepted: int, price: DraftPrice = FREE) -> None:
        """Book one verify step."""
        self.emitted += emitted
        if drafted:
            key = drafted, accepted
            self.steps[key] = self.steps.get(key, 0) + 1
        else:
            self.plain_steps += 1
        if price is not FREE:
            self.gained_seconds += price.gained
            self.spent_seconds += price.spent
            self.rejected_seconds += price.rejected

    def copy(self) -> SpeculationCounts:
        return replace(self, steps=dict(self.steps))

    def add(self, other: SpeculationCounts) -> None:
        """Book all that `other` has."""
        self.emitted += other.emitted
        self.plain_steps += other.plain_steps
        for key, steps in other.steps.items():
            self.steps[key] = self.steps.get(key, 0) + steps
        self.gained_seconds += other.gained_seconds
        self.spent_seconds += other.spent_seconds
        self.rejected_seconds += other.rejected_seconds

    @property
    def saved_seconds(self) -> float:
        """What the same tokens would have taken without drafts, by the cost model, less what they took."""
        return self.gained_seconds - self.spent_seconds

    @property
    def verify_steps(self) -> int:
        return self.plain_steps + self.draft_steps

    @property
    def draft_steps(self) -> int:
        """Verify steps with a draft to verify."""
        return sum(self.steps.values())

    @property
    def drafted(self) -> int:
        """Drafts verified."""
        return sum(drafted * steps for (drafted, _), steps in self.steps.items())

    @property
    def accepted(self) -> int:
        """Drafts emitted."""
        return sum(accepted * steps for (_, accepted), steps in self.steps.items())

    @property
    def depths(self) -> list[int]:
        """Verify steps by the number of drafts verified, from 0."""
        counts = [0] * (1 + max((drafted for drafted, _ in self.steps), default=0 if self.plain_steps else -1))
        for (drafted, _), steps in self.steps.items():
            counts[drafted] += steps
        if counts:
            counts[0] = self.plain_steps
        return counts

    @property
    def accepted_by_position(self) -> list[int]:
        """Steps that kept drafts as far as each position or farther."""
        counts = [0] * max((accepted for _, accepted in self.steps), default=0)
        for (_, accepted), steps in self.steps.items():
            for position in range(accepted):
                counts[position] += steps
        return counts
