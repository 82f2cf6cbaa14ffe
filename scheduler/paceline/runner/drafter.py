"""The seam behind which drafts are made."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.core.plan import SequenceWork
from paceline.core.sequence import Sequence


# Not frozen: docs/decisions/012.
@dataclass(slots=True)
class Draft:
    """Tokens proposed for one sequence.

    Attributes:
        token_ids: at most the planned depth.
        probs: the distributions that the tokens of this step's drafts were drawn from, after every processor,
            [drawn tokens of the step, vocab] float32: one tensor that they share. None: the tokens were chosen, not
            drawn (one-hot).
        first_row: where this draft's rows of `probs` begin.
        is_forced: a grammar allows no other tokens; no drafter was asked.
    """

    token_ids: list[int]
    probs: Tensor | None = None
    first_row: int = 0
    is_forced: bool = False


class Drafter(Protocol):
    """Proposes tokens at depths that it is given; it never chooses one."""

    def propose(self, batch: Seq[tuple[Sequence, SequenceWork]]) -> list[Draft]:
        """A draft for each sequence, in order; of depth 0 an empty one, after any catch-up that was planned.

        Reads the sequences and may move `num_draft_computed`, nothing else of them.
        """
        ...

    def release(self, request_id: int) -> None:
        """Forget a sequence. Unknown ids have no effect."""
        ...


class Scorer(Protocol):
    """A drafter that costs so little that it is asked even when nobody wants its drafts."""

    def score(self, sequence: Sequence, emitted: Seq[int]) -> tuple[float, ...]:
        """How what it would have proposed compares with what was emitted, which the sequence does not hold yet: a 1 for
        each token that is equal, and a 0 for the first that is not; nothing without a proposal.
        """
        ...

    def match(self, sequence: Sequence) -> int:
        """How many of the sequence's last tokens agree with those that its next proposal would go on from; 0 if there
        is nothing to propose.
        """
        ...
