"""The requests that run, the room that they leave, and who of them gives way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from paceline.core.config import SchedulerConfig
from paceline.core.kv_cache_manager import KVCacheManager
from paceline.core.request import RUNNING, Request
from paceline.core.tenants import Tenant, Tenants

MOST_DOUBLINGS: Final = 40  # of the time for which a request runs before it gives way
SHORTEST_RUN: Final = 1e-3  # seconds for which it runs in any case: there is something to double
STAY: Final = 2.0  # times what it took to its first token: so long a request runs at least


class Batch:
    """Who runs, of these tenants. Mutated by the scheduler alone, which sees to their blocks.

    Attributes:
        tenants: queues and accounts.
        running: by id, in the order in which they were admitted.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, tenants: Tenants) -> None:
        self.config = config
        self.kv = kv
        self.tenants = tenants
        self.running: dict[int, Request] = {}
        self._paced: dict[int, float] = {}  # seconds per token that they want at most

    # -- in and out ----------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """A request leaves its queue and runs."""
        self.tenants.started(request, self.config.blocks_for(request.max_total_tokens))
        self.running[request.request_id] = request
        request.siblings.running[request.request_id] = request
        request.siblings.have_begun = True
        request.status = RUNNING
        request.admitted_at, request.awaits_token = now, True
        if request.scheduling.time_per_output_token is not None:
            self._paced[request.request_id] = request.scheduling.time_per_output_token

    def remove(self, request: Request) -> None:
        """It runs no more. If it read the prompt of others, one of them has to."""
        del self.running[request.request_id]
        del request.siblings.running[request.request_id]
        self.tenants[request.tenant].queue.release(request.siblings)
        self._paced.pop(request.request_id, None)
        self.tenants.stopped(request, self.config.blocks_for(request.max_total_tokens))

    @property
    def pace(self) -> float:
        """Seconds per token that somebody wants at most; infinite if nobody does."""
        return min(self._paced.values(), default=math.inf)

    # -- room ----------------------------------------------------------------------------------------------------------

    @property
    def num_places(self) -> int:
        """That are left."""
        return self.config.max_num_seqs - len(self.running)

    @property
    def spare_blocks(self) -> int:
        """Free blocks for optional work, admissions and drafts: one is kept back for the next token of each running
        request.
        """
        return max(0, self.kv.num_free_blocks - len(self.running))

    @property
    def slot_price(self) -> float:
        """Tokens that a draft must earn besides its time: none while there is a block to spare for each running
        request, and more than it can where there is no block left.
        """
        return max(0.0, 1.0 - self.spare_blocks / len(self.running))

    def fits(self, missing: int, known: Sequence[int]) -> bool:
        """A place, and blocks for a request that misses so many besides those known, beside those that are kept back
        while others run.
        """
        blocks = missing + self.kv.num_free_among(known)
        return self.num_places > 0 and blocks <= self.spare_blocks - self._watermark(len(self.running))

    def would_suffice(self, victims: list[Request], missing: int, known: Sequence[int]) -> bool:
        """All of them together leave a place, and blocks for a request that misses so many besides those known, which
        has no room as it is: nobody is preempted in vain.
        """
        left = len(self.running) - len(victims)
        if not victims or left >= self.config.max_num_seqs:
            return False
        going = {request.request_id for request in victims}
        held = {block for one in going for block in self.kv.table(one)}
        held.difference_update(*[self.kv.table(one) for one in self.running if one not in going])
        needed = missing + self.kv.num_free_among(known) + len(held.intersection(known))
        return needed <= self.kv.num_free_blocks + len(held) - left - self._watermark(left)

    def _watermark(self, num_running: int) -> int:
        """Blocks that are kept back while so many run."""
        return int(self.config.watermark * self.config.num_blocks) if num_running else 0

    # -- who gives way -------------------------------------------------------------------------------------------------

    def victim(self) -> Request:
        """Who gives way when memory is short: of the most over-served tenant the least urgent request, of equals the
        newest.
        """
        return max(reversed(self.running.values()), key=self._gives_way)

    def over_served(self, tenant: Tenant, now: float) -> list[Request]:
        """Who may have to give way to a tenant that is below its share, in this order: requests of tenants that are far
        ahead of it, of the farthest first, if they have run for a while.
        """
        ran = [one for one in self.far_ahead(tenant) if now - one.admitted_at >= self._least_run(one)]
        return sorted(ran, key=self._gives_way, reverse=True)

    def far_ahead(self, tenant: Tenant) -> list[Request]:
        """Running requests of tenants that are ahead of it by more than `min_run_seconds`, the newest first."""
        least = tenant.service + self.config.min_run_seconds
        return [one for one in reversed(self.running.values()) if self.tenants[one.tenant].service > least]

    def _gives_way(self, request: Request) -> tuple[float, float]:
        """Whom this is highest for gives way first: the tenant comes before the request. As a tenant's requests are let
        in by the same order, the most urgent of them always goes on, and that order changes for none of them.
        """
        return self.tenants[request.tenant].service, request.rank

    def _least_run(self, request: Request) -> float:
        """Seconds that it runs before it gives way to another tenant. As most of them shall bring tokens, it is a
        multiple of what it took to the first one, or did the last time; and twice as long each time that it had to
        without a token, lest two tenants take turns at prompts that neither gets to the end of.
        """
        least = max(self.config.min_run_seconds, SHORTEST_RUN) + STAY * request.seconds_to_token
        return least * 2.0 ** min(request.num_in_vain, MOST_DOUBLINGS)

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance. Mutates nothing."""
        self.tenants.check_invariants()
        assert len(self.running) <= self.config.max_num_seqs
        admissions = [request.admitted_at for request in self.running.values()]
        assert admissions == sorted(admissions), "running is in the order of admission"
        own: dict[str, list[Request]] = {}
        for request in self.running.values():
            own.setdefault(request.tenant, []).append(request)
        for tenant in self.tenants:
            requests = own.get(tenant.name, [])
            assert tenant.num_running == len(requests), f"tenant {tenant.name!r}"
            blocks = sum(self.config.blocks_for(request.max_total_tokens) for request in requests)
            assert tenant.num_blocks == blocks, f"tenant {tenant.name!r}"
