"""How much longer steps may become for tenants that ask for far more than their share, while light ones decode."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from paceline.core.cost_model import CostModel

# Of a prompt in a step that is kept short for others: less is not worth reading its context again.
LEAST_ROWS: Final = 16
SPAN: Final = 1024  # tokens of context by which the price of one is told


class Slowdown:
    """What is left of a step, in its making, for requests of such tenants, in seconds.

    What is too dear for one step waits for the time that several leave, and everybody behind it waits, too. So steps
    become that much longer in the mean, and nobody waits for ever.

    Args:
        rows, context, sequences: of the step without them, with the drafts that are to be expected.
        most_rows: that are left of its budget.
        limit: how many times as long it may become.
        saved: seconds that steps before it have left.

    Attributes:
        is_full: nobody else gets a row.
    """

    def __init__(
        self, costs: CostModel, rows: int, context: int, sequences: int, most_rows: int, limit: float, saved: float
    ) -> None:
        self._costs = costs
        self._shape = rows, context, sequences
        self._most_rows = most_rows
        alone = self._with(0)
        self._per_context = (costs.target(rows, context + SPAN, sequences) - alone) / SPAN
        self._per_sequence = costs.target(rows, context, sequences + 1) - alone
        self._seconds = saved + (limit - 1.0) * alone
        self._rows = 0
        self._waits_for = 0.0  # seconds that whoever has to wait would need
        self.is_full = False

    @property
    def saved(self) -> float:
        """Seconds for the next step: none if nobody had to wait, and no more than one of them waits for."""
        return min(self._seconds, self._waits_for) if self.is_full else 0.0

    def fits_or_closes(self, rows: int, context: int) -> bool:
        """Do as many of these rows of a request fit as are worth it? If not, the step is full from here on.

        Args:
            context: tokens whose KV it reads.
        """
        least = min(self._rows + min(rows, LEAST_ROWS), self._most_rows)
        price = self._price(least - self._rows, context)
        if price > self._seconds or least == self._rows:
            self.is_full, self._waits_for = True, price
        return not self.is_full

    def take(self, rows: int, context: int) -> int:
        """Rows for one more request, of those that it wants; 0 if it has to wait."""
        if self.is_full or not self.fits_or_closes(rows, context):
            return 0
        seconds = self._with(self._rows) + self._seconds - self._price(0, context)
        fitting = bisect_right(range(self._most_rows + 1), seconds, key=self._with) - 1 - self._rows
        taken = max(1, min(rows, fitting))
        self._seconds -= self._price(taken, context)
        self._rows += taken
        return taken

    def _with(self, added: int) -> float:
        """Seconds of the step with so many more rows."""
        rows, context, sequences = self._shape
        return self._costs.target(rows + added, context, sequences)

    def _price(self, rows: int, context: int) -> float:
        of_rows = self._with(self._rows + rows) - self._with(self._rows)
        return of_rows + self._per_context * context + self._per_sequence
