"""Places in the queues for a request that is on its way there."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import PacelineError


class Places:
    """Kept for the completions of a request that is being prepared; see `Scheduler.keep`.

    Args:
        count: completions.
        on_loss: told why they went to another tenant, if they did. Must not raise.
    """

    __slots__ = ("count", "on_loss", "tenant")

    def __init__(self, tenant: str, count: int, on_loss: Callable[[PacelineError], None]) -> None:
        self.tenant = tenant
        self.count = count
        self.on_loss = on_loss
