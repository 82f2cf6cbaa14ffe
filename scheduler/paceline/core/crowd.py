"""Heavy tenants, which ask for far more than their share, and what they get of steps in which light ones decode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from paceline.core.batch import Batch
from paceline.core.cost_model import CostModel
from paceline.core.request import Request
from paceline.core.share import Share
from paceline.core.slowdown import Slowdown
from paceline.core.tenants import Tenant, Tenants

NOBODY: Final[frozenset[str]] = frozenset()


class Crowd:
    """The heavy tenants of one step in its making, and the light ones for whom it is kept short.

    `gather` finds both before any request has rows; until then there are none. Once all others have theirs, `limit`
    says by how much the heavy may make the step longer, and they take turns at that.

    Args:
        before: of the last step, which tells whose turn it is and how much time was left.

    Attributes:
        heavy: names of tenants whose requests may make the step only so much longer.
        light: names of tenants for whose sake; none if there are no heavy ones.
        slowdown: what the heavy may still add; None before `limit`, and where it sets no bound.
    """

    __slots__ = ("_ahead", "_last_in_turn", "_most_slowdown", "_saved_seconds", "heavy", "light", "slowdown")

    def __init__(self, before: Crowd | None = None) -> None:
        self.heavy = self.light = NOBODY
        self.slowdown: Slowdown | None = None
        self._ahead = NOBODY  # heavy ones that make room for other heavy ones
        self._most_slowdown = 1.0  # times as long
        self._last_in_turn: int = -1 if before is None else before._last_in_turn
        self._saved_seconds: float = 0.0 if before is None or before.slowdown is None else before.slowdown.saved

    def gather(self, batch: Batch, may_start: Callable[[Tenant], bool]) -> None:
        """Find the heavy tenants, if a light one decodes. Together they may slow the light ones down as `max_slowdown`
        says, and by more if they have more weight.

        Args:
            may_start: a heavy tenant could start another request, if it were its turn.
        """
        config = batch.config
        heavy, light = batch.tenants.crowd(config.max_num_seqs)
        if not light:
            return
        decoding = {one.tenant for one in batch.running.values() if one.output_token_ids}
        light = [tenant for tenant in light if tenant.name in decoding]
        if not light:
            return
        self.heavy = frozenset([tenant.name for tenant in heavy])
        self.light = frozenset([tenant.name for tenant in light])
        # Where one that was charged less could start a request, those that are far ahead of it get no rows.
        least = min([one.service for one in heavy if may_start(one)], default=math.inf)
        self._ahead = frozenset([one.name for one in heavy if one.service > least + config.min_run_seconds])
        weights = sum([one.policy.weight for one in heavy]), sum([one.policy.weight for one in light])
        self._most_slowdown = 1.0 + (config.max_slowdown - 1.0) * max(1.0, weights[0] / weights[1])

    def bound(self, tenant: str) -> Slowdown | None:
        """What requests of a tenant may still add to the step; None if nothing but room bounds them."""
        return self.slowdown if tenant in self.heavy else None

    def in_turn(self, requests: Sequence[Request], tenants: Tenants) -> list[Request]:
        """Requests of heavy tenants, those of the tenant that was charged least first. Those of one tenant go around in
        the order of their ids, from the one behind whoever had the last turn.
        """
        service = {tenant.name: tenant.service for tenant in tenants}
        return sorted(
            requests, key=lambda one: (service[one.tenant], one.request_id <= self._last_in_turn, one.request_id)
        )

    def limit(self, shares: Sequence[Share], budget: int, costs: CostModel) -> None:
        """Set `slowdown`, if a light tenant has rows in the step.

        Args:
            shares: of all who are not heavy.
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

    def take_turn(self, request: Request, rows: int) -> int:
        """Rows for a running request, of those that it could have; all of them, unless its tenant is bound."""
        slowdown = self.bound(request.tenant)
        if slowdown is None:
            return rows
        taken = 0 if request.tenant in self._ahead else slowdown.take(rows, request.num_computed_tokens)
        if taken:
            self._last_in_turn = request.request_id
        return taken
