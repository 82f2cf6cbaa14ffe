"""Tenants: what each is granted, what it has had, and whose turn it is.

Fair queueing by virtual counters (VTC, Sheng et al. 2024): a tenant's counter is the service that it was charged,
in seconds of the engine's time, over its weight; the waiting tenant with the lowest counter is served next.
Who was idle comes back at the level of those who are being served (start-time fair queueing, Goyal et al. 1996): time
in which nothing was asked for is no credit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from paceline.core.places import Places
from paceline.core.queue import RequestQueue
from paceline.core.request import Request
from paceline.core.tenant_policy import ONE_SHARE, TenantPolicy
from paceline.errors import InvalidArgument

EMPTY: Final = 1e-6  # tokens that a bucket may lack by rounding
# Times its share of places: a tenant that asks for more is heavy, one that asks for no more is light.
HEAVY, LIGHT = 2.0, 0.25
PROMPTS_DECAY: Final = 0.9  # of what was known of prompts, for each that begins
MOST_IDLE: Final = 1024  # tenants that are remembered although they have no requests
MOST_CREDIT: Final = (
    10.0  # seconds of service over weight that a tenant is owed that comes where others have run for long
)


class Tenant:
    """Mutated by `Tenants` and by the scheduler.

    Attributes:
        service: seconds charged over weight, lifted where it would be credit.
        charged_seconds: seconds charged.
        num_running: its requests in the batch.
        num_blocks: that they may all come to hold.
        queue: its waiting requests.
        coming: places in the queue that are kept, the newest last.
        num_queued: completions that wait, and those that places are kept for.
    """

    __slots__ = (
        "_bucket",
        "_filled_at",
        "_found",
        "_prompted",
        "_weight",
        "charged_seconds",
        "coming",
        "name",
        "num_blocks",
        "num_coming",
        "num_running",
        "policy",
        "queue",
        "service",
    )

    def __init__(self, name: str, policy: TenantPolicy, now: float) -> None:
        self.name = name
        self.policy = policy
        self._weight = policy.weight  # `charge` is called for every request at every step
        self.service = 0.0
        self.charged_seconds = 0.0
        self.num_running = 0
        self.num_blocks = 0
        self.queue = RequestQueue()
        self.coming: dict[Places, None] = {}
        self.num_coming = 0
        self._bucket = policy.burst
        self._filled_at = now
        self._prompted = self._found = 0.0  # tokens of a prompt, and those of them that were found, lately

    @property
    def is_live(self) -> bool:
        return self.num_running > 0 or len(self.queue) > 0

    @property
    def num_queued(self) -> int:
        return self.num_coming + len(self.queue)

    @property
    def asks_for(self) -> int:
        """Places that its requests would take."""
        return self.num_running + len(self.queue)

    def prompt_began(self, tokens: int, found: int) -> None:
        """Learn from a prompt of so many tokens, of which so many were found in the cache."""
        self._prompted += (1.0 - PROMPTS_DECAY) * (tokens - self._prompted)
        self._found += (1.0 - PROMPTS_DECAY) * (found - self._found)

    @property
    def uses(self) -> float:
        """Prompts that a token lately served that was computed: where half are found, two."""
        return self._prompted / (self._prompted - self._found) if self._prompted else 1.0

    def grant(self, policy: TenantPolicy, now: float) -> None:
        """Put another policy in place: the bucket fills at the old rate up to now, and nothing is owed for the time
        without one.
        """
        self._fill(now)
        self._bucket = math.inf if policy.tokens_per_second is None else min(policy.burst, self._bucket)
        self.policy = policy
        self._weight = policy.weight

    def own(self, share: float) -> float:
        """Places that are its own, where so many are for a weight of 1: no fewer than make one request a few."""
        return max(share * self.policy.weight, 1.0 / LIGHT)

    def charge(self, seconds: float, *, counts: bool = True) -> None:
        """Book engine time.

        Args:
            counts: towards its turn, too.
        """
        self.charged_seconds += seconds
        if counts:
            self.service += seconds / self._weight

    def spend(self, tokens: int, now: float) -> None:
        """Take tokens out of the bucket, which may end below 0."""
        self._fill(now)  # or what had been full until now would fill up again for that time
        self._bucket -= tokens

    def give_back(self, tokens: int) -> None:
        """Put tokens back that were spent in advance and not used. Whether what time brings comes before or after is
        all the same.
        """
        self._bucket = min(self.policy.burst, self._bucket + tokens)

    def seconds_until_tokens(self, now: float) -> float:
        """Until the bucket has a token; 0 if it has."""
        rate = self.policy.tokens_per_second
        if rate is None:
            return 0.0
        self._fill(now)
        return -self._bucket / rate if self._bucket < -EMPTY else 0.0

    def owes(self, level: float, now: float) -> float:
        """Seconds: of service over weight above a level, and until the bucket is full."""
        self._fill(now)
        rate = self.policy.tokens_per_second
        missing = 0.0 if rate is None else (self.policy.burst - self._bucket) / rate
        return max(0.0, self.service - level) + missing

    def _fill(self, now: float) -> None:
        """The bucket, with what has come since it was last filled; without a rate it stays infinite."""
        if now > self._filled_at:
            rate = self.policy.tokens_per_second or 0.0
            self._bucket = min(self.policy.burst, self._bucket + rate * (now - self._filled_at))
            self._filled_at = now


class Tenants:
    """Every tenant that has requests, and those that are remembered.

    Args:
        policies: by name.
        default: of tenants without a policy of their own; None refuses them.

    Attributes:
        num_waiting: requests in all queues.
        num_queued: these, and those that places are kept for.
    """

    def __init__(self, policies: Mapping[str, TenantPolicy], default: TenantPolicy | None = ONE_SHARE) -> None:
        self.policies = policies
        self.default = default
        self.num_waiting = 0
        self._num_coming = 0
        self._tenants: dict[str, Tenant] = {}
        self._waiting: dict[str, Tenant] = {}  # that have requests in their queues
        self._coming: dict[str, Tenant] = {}  # that places are kept for
        self._level = 0.0  # counter of the last that was served

    def policy(self, name: str) -> TenantPolicy:
        """Raises InvalidArgument: no such tenant, and unknown ones are not served."""
        policy = self.policies.get(name, self.default)
        if policy is None:
            unnamed = ", and named: the caller's credential has none of its own"
            raise InvalidArgument("scheduling.tenant", name, f"a tenant of this server{'' if name else unnamed}")
        return policy

    def get(self, name: str, now: float) -> Tenant:
        """The tenant, with a new account if it has none. Raises InvalidArgument as `policy`."""
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= MOST_IDLE:
                self._forget_idle(now)
            tenant = self._tenants[name] = Tenant(name, self.policy(name), now)
        return tenant

    def __getitem__(self, name: str) -> Tenant:
        """One that has an account."""
        return self._tenants[name]

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, name: str) -> bool:
        return name in self._tenants

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    @property
    def num_queued(self) -> int:
        return self.num_waiting + self._num_coming

    @property
    def waiting(self) -> Iterable[Tenant]:
        """Those with requests in their queues."""
        return self._waiting.values()

    def push(self, request: Request) -> None:
        """Queue a request, new or preempted."""
        tenant = self._tenants[request.tenant]
        if not tenant.queue:
            if not tenant.num_running:
                tenant.service = max(tenant.service, self._least_service(tenant) - MOST_CREDIT)
            tenant.service = max(tenant.service, self._level)
            self._waiting[tenant.name] = tenant
        tenant.queue.push(request)
        self.num_waiting += 1

    def _least_service(self, tenant: Tenant) -> float:
        """The lowest counter of all others that have requests; 0 without any."""
        return min([one.service for one in self._tenants.values() if one.is_live and one is not tenant], default=0.0)

    def remove(self, request: Request) -> None:
        """Take a request out of its queue. Not in there: no effect."""
        tenant = self._tenants[request.tenant]
        if tenant.queue.remove(request):
            self.num_waiting -= 1
            if not tenant.queue:
                del self._waiting[tenant.name]

    def keep(self, places: Places) -> None:
        """Let them count as if their request waited. Its tenant has an account."""
        tenant = self._coming[places.tenant] = self._tenants[places.tenant]
        tenant.coming[places] = None
        tenant.num_coming += places.count
        self._num_coming += places.count

    def give_back(self, places: Places) -> None:
        """Keep them no more. Not kept: no effect."""
        tenant = self._coming.get(places.tenant)
        if tenant is None or places not in tenant.coming:
            return
        del tenant.coming[places]
        tenant.num_coming -= places.count
        self._num_coming -= places.count
        if not tenant.coming:
            del self._coming[places.tenant]

    def started(self, request: Request, blocks: int) -> None:
        """A request leaves its queue and runs, and may come to hold so many blocks."""
        self.remove(request)
        tenant = self._tenants[request.tenant]
        tenant.num_running += 1
        tenant.num_blocks += blocks
        self._level = max(self._level, tenant.service)

    def stopped(self, request: Request, blocks: int) -> None:
        """A request runs no more, of which `started` was told the same."""
        tenant = self._tenants[request.tenant]
        tenant.num_running -= 1
        tenant.num_blocks -= blocks

    def next(self, may_start: Callable[[Tenant], bool]) -> Tenant | None:
        """The waiting tenant with the lowest counter of those that may start a request; of equals the first."""
        best = None
        for tenant in self._waiting.values():
            if (best is None or tenant.service < best.service) and may_start(tenant):
                best = tenant
        return best

    def crowd(self, places: int) -> tuple[list[Tenant], list[Tenant]]:
        """Heavy tenants: they have requests waiting and ask for far more than their share of so many places. And, if
        there are any, light ones: they have requests running and ask for few.
        """
        weight = sum([tenant.policy.weight for tenant in self._tenants.values() if tenant.is_live])
        share = places / weight  # for a weight of 1
        heavy = [one for one in self._waiting.values() if one.asks_for > HEAVY * one.own(share)]
        if not heavy:
            return [], []
        live = self._tenants.values()
        return heavy, [one for one in live if one.num_running and one.asks_for <= LIGHT * one.own(share)]

    def give_way(self, name: str, count: int, missing: int) -> list[Request | Places]:
        """Who leaves so many places in a full queue to `count` more of this tenant: of the tenant that has most of them
        for its weight, those who are still being prepared and then the newest requests, if it then still has no fewer
        than this one. Nobody, if there are not so many.

        So a flood of one tenant keeps no other out.
        """
        tenant = self._tenants[name]
        others = [*self._waiting.values(), *self._coming.values()]
        longest = max(others, key=lambda one: one.num_queued / one.policy.weight, default=tenant)
        left = (longest.num_queued - missing) / longest.policy.weight
        if longest is tenant or left < (tenant.num_queued + count) / tenant.policy.weight:
            return []
        leaving: list[Request | Places] = []
        for places in reversed(longest.coming):
            if missing > 0:
                leaving.append(places)
                missing -= places.count
        newest = longest.queue.newest(missing)
        return [*leaving, *newest] if len(newest) == max(0, missing) else []

    def requests(self) -> list[Request]:
        """All that wait, queue by queue."""
        return [request for tenant in self._waiting.values() for request in tenant.queue]

    def set_policies(self, policies: Mapping[str, TenantPolicy], default: TenantPolicy | None, now: float) -> None:
        """Put other policies in place, for what comes from now on. Accounts stay, but a tenant whose policy changes has
        no claim to what the old one kept from it.
        """
        self.policies, self.default = policies, default
        for tenant in self._tenants.values():
            policy = policies.get(tenant.name) or default or tenant.policy
            if policy != tenant.policy:
                tenant.service = max(tenant.service, self._least_service(tenant))
            tenant.grant(policy, now)

    def _forget_idle(self, now: float) -> None:
        """Drop accounts without requests: those that owe nothing or, if all do, the half that owes least, lest more be
        forgiven than must be.
        """
        owed = {
            tenant.name: tenant.owes(self._level, now)
            for tenant in self._tenants.values()
            if not (tenant.is_live or tenant.coming)
        }
        paid = [name for name, seconds in owed.items() if not seconds]
        for name in paid or sorted(owed, key=owed.__getitem__)[: (len(owed) + 1) // 2]:
            del self._tenants[name]

    def check_invariants(self) -> None:
        assert self.num_waiting == sum(len(tenant.queue) for tenant in self._tenants.values())
        waiting = {name for name, tenant in self._tenants.items() if tenant.queue}
        assert waiting == self._waiting.keys(), "waiting tenants"
        coming = {name for name, tenant in self._tenants.items() if tenant.coming}
        assert coming == self._coming.keys(), "tenants that places are kept for"
        assert self._num_coming == sum(tenant.num_coming for tenant in self._tenants.values())
        for tenant in self._tenants.values():
            assert tenant.num_coming == sum(places.count for places in tenant.coming)
            tenant.queue.check_invariants()
