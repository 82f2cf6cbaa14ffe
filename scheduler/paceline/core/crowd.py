"""Tenants that ask for far more than their share while light ones decode, and what they get of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from paceline.core.config import SchedulerConfig
from paceline.core.cost_model import CostModel
from paceline.core.request import Request
from paceline.core.share import Share
from paceline.core.slowdown import Slowdown
from paceline.core.tenants import Tenant, Tenants

NOBODY: Final[frozenset[str]] = frozenset()


class Crowd:
    """Of one step, in its making; nobody, unless `gather` finds some.

    Args:
        before: of the last step, by which it is known whose turn it is, and what that step has left.

    Attributes:
        greedy: tenants whose requests may make the step only so much longer,
        light: for those of these tenants.
        slowdown: what is left of it for the greedy; None before that is known, or where there is no bound.
    """

    __slots__ = ("_ahead", "_last_in_turn", "_most_slowdown", "_saved_seconds", "greedy", "light", "slowdown")

    def __init__(self, before: Crowd | None = None) -> None:
        self.greedy = self.light = NOBODY
        self.slowdown: Slowdown | None = None
        self._ahead = NOBODY  # of the greedy, those who make room for others of them
        self._most_slowdown = 1.0  # times as long
        self._last_in_turn: int = -1 if before is None else before._last_in_turn
        self._saved_seconds: float = 0.0 if before is None or before.slowdown is None else before.slowdown.saved

    def gather(
        self,
        tenants: Tenants,
        running: Iterable[Request],
        config: SchedulerConfig,
        may_start: Callable[[Tenant], bool],
    ) -> None:
        """Find tenants that ask for far more than their share, if others decode a few requests. Everyone else of their
        weight may slow those by as much as `max_slowdown` says.

        Args:
            may_start: its own limits let a tenant that waits begin another request.
        """
        greedy, light = tenants.crowd(config.max_num_seqs)
        if not light:
            return
        decoding = {one.tenant for one in running if one.output_token_ids}
        light = [tenant for tenant in light if tenant.name in decoding]
        if not light:
            return
        self.greedy = frozenset([tenant.name for tenant in greedy])
        self.light = frozenset([tenant.name for tenant in light])
        # Whoever is owed, and could start more, gets what there is before those who are ahead go on.
        owed = min([one.service for one in greedy if may_start(one)], default=math.inf)
        self._ahead = frozenset([one.name for one in greedy if one.service > owed + config.min_run_seconds])
        weights = sum([one.policy.weight for one in greedy]), sum([one.policy.weight for one in light])
        self._most_slowdown = 1.0 + (config.max_slowdown - 1.0) * max(1.0, weights[0] / weights[1])

    def in_turn(self, requests: Sequence[Request], tenants: Tenants) -> list[Request]:
        """Those of the tenant that is owed most first; of each, behind the one that had the last turn, and around."""
        service = {tenant.name: tenant.service for tenant in tenants}
        return sorted(
            requests, key=lambda one: (service[one.tenant], one.request_id <= self._last_in_turn, one.request_id)
        )

    def limit(self, shares: Sequence[Share], budget: int, costs: CostModel) -> None:
        """From here on the greedy fill the step, if a light tenant decodes in it.

        Args:
            shares: of all others.
            budget: rows that are left.
        """
        if not any([share.request.tenant in self.light for share in shares]):
            return
        # Rows that are free are free for drafts first: as many as there were in the last step.
        drafts = sum([share.request.depth for share in shares])
        self.slowdown = Slowdown(
            costs,
            sum([share.rows for share in shares]) + drafts,
            sum([share.end for share in shares]),
            len(shares),
            max(0, budget),
            self._most_slowdown,
            self._saved_seconds,
        )

    def take_turn(self, request: Request, rows: int, slowdown: Slowdown) -> int:
        """Rows for a greedy tenant's request that runs, of those that it could have."""
        taken = 0 if request.tenant in self._ahead else slowdown.take(rows, request.num_computed_tokens)
        if taken:
            self._last_in_turn = request.request_id
        return taken
