"""How much longer a step may become for tenants that ask for more than they get, while others decode."""

from __future__ import annotations

from paceline.core.cost_model import CostModel

LEAST_ROWS = 16  # of prompts in a step that is kept short for others: whoever is first gets them in any case


class Slowdown:
    """What is left of a step, in its making, for requests of such tenants.

    Args:
        rows, context, sequences: of the step without them, drafts included that the others may want.
        most_rows: that are left of its budget.
        their_context: tokens whose KV all of their requests would read.
        limit: how many times as long it may become.
    """

    def __init__(
        self,
        costs: CostModel,
        rows: int,
        context: int,
        sequences: int,
        most_rows: int,
        their_context: int,
        limit: float,
    ) -> None:
        self._by_rows = costs.targets(rows, most_rows, context, sequences)
        self._least = self._by_rows.item(0)
        self._limit = limit * self._least
        more = costs.target(rows, context + their_context, sequences) - self._least
        self._per_context = more / max(1, their_context)
        self._rows = 0
        self._context = 0

    @property
    def is_full(self) -> bool:
        """Nobody else gets a row."""
        return self._rows > 0 and self._left(0) <= 0

    def take(self, rows: int, context: int) -> int:
        """Rows for one more request, of those that it wants; 0 if it has to wait for another step.

        Args:
            context: tokens whose KV it reads.
        """
        left = self._left(context)
        taken = min(rows, left if self._rows else max(left, LEAST_ROWS))
        if taken <= 0:
            return 0
        self._rows += taken
        self._context += context
        return taken

    def _left(self, context: int) -> int:
        """Rows that fit beside so many tokens of context more."""
        seconds = self._limit - self._per_context * (self._context + context)
        return int(self._by_rows.searchsorted(seconds, side="right")) - 1 - self._rows
