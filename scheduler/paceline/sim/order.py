"""Other orders of service, to compare ours with."""

from __future__ import annotations

from paceline.core.deadlines import Deadlines
from paceline.core.request import Request


class FirstComeFirstServed(Deadlines):
    """Whoever came first, however late it is. A request ends when its deadline has passed: its client has left."""

    def rank(self, request: Request, priority: int, num_waiting: int) -> float:
        return request.arrival

    def check(self, request: Request, now: float, busy: bool, num_cached: int = 0) -> None:
        return


class EarliestDeadlineFirst(Deadlines):
    """The earliest deadline, whatever there is to do until then; what cannot be in time is refused, as with ours."""

    def rank(self, request: Request, priority: int, num_waiting: int) -> float:
        wanted = [moment for moment, _ in self._moments(request)]
        return min([request.arrival + self.patience, *wanted])
