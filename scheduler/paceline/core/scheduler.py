"""Which tokens are computed in the next step: one rule and one budget for prompts, decodes and drafts.

There is no prefill phase and no decode phase. Every request has known tokens, some of which have KV; a step moves that
count forward, by a chunk of a prompt or by the one token of a decode, and samples where it reaches the end. Drafts are
optional work behind a decode: they get the rows and blocks that are left when everyone else is served, and are the
first to shrink when memory is short.

`schedule` may be called with one plan outstanding, before `update` has seen its result: then a request's length is
known only within bounds (`Request.most_tokens`), and blocks are allocated for the upper one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final

from paceline.core.batch import Batch
from paceline.core.config import SchedulerConfig
from paceline.core.crowd import NOBODY, Crowd
from paceline.core.deadlines import Deadlines
from paceline.core.drafts import add_drafts, draft_limits
from paceline.core.kv_cache_manager import KVCacheManager
from paceline.core.method import DRAFT_MODEL, NGRAM, NO_METHOD, Method
from paceline.core.params import (
    ANYBODY,
    Constraints,
    LogprobsParams,
    SamplingParams,
    SchedulingParams,
    SequenceParams,
    SpeculationBounds,
    SpeculationParams,
    StopParams,
)
from paceline.core.places import Places
from paceline.core.plan import Admission, SequenceResult, SequenceWork, StepPlan, StepResult
from paceline.core.prefixes import Prefixes
from paceline.core.prompt_budget import prompt_budget
from paceline.core.request import FINISHED, RUNNING, Request, RequestOutput, RequestStats, RequestStatus
from paceline.core.service_rate import ServiceRate
from paceline.core.share import Share
from paceline.core.speculation import SpeculationControl
from paceline.core.speculation_report import SpeculationReport
from paceline.core.step_builder import StepBuilder
from paceline.core.tenant_policy import ONE_SHARE, TenantPolicy
from paceline.core.tenants import Tenant, Tenants
from paceline.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    NotFinite,
    PacelineError,
    QuotaExceeded,
    Reason,
    ResourceExhausted,
    Unavailable,
)

MAX_OUTSTANDING: Final = 2  # the plan that runs and the one made meanwhile


class Outstanding:
    """A plan whose result is still to come.

    Attributes:
        requests: of each of its works.
        light: tenants for whom the step is kept short, if it is.
    """

    __slots__ = ("light", "requests", "step_id")

    def __init__(self, step_id: int, requests: list[Request], light: frozenset[str]) -> None:
        self.step_id = step_id
        self.requests = requests
        self.light = light


class Scheduler:
    """Owns every live request and all KV bookkeeping. Not thread-safe: one caller, who also provides the time.

    Attributes:
        batch: who runs.
        refused: those that came too late, gave way in a full queue, or failed alone in a step, and that nobody has
            taken note of yet.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        speculation: SpeculationControl,
        tenants: Mapping[str, TenantPolicy] | None = None,
        default_tenant: TenantPolicy | None = ONE_SHARE,
    ) -> None:
        self.config = config
        self.speculation = speculation
        self.kv = KVCacheManager(config.num_blocks, config.block_size)
        self.prefixes = Prefixes(config, self.kv)
        longest = config.long_prefill_threshold or config.max_num_batched_tokens
        self.rate = ServiceRate(min(config.max_num_batched_tokens, longest))
        self.deadlines = Deadlines(self.rate, config.patience)
        self.batch = Batch(config, self.kv, Tenants({} if tenants is None else tenants, default_tenant))
        self.requests: dict[int, Request] = {}
        self._crowd = Crowd()  # of the last step
        self.refused: list[tuple[int, PacelineError]] = []
        self._released: list[int] = []  # the runner still mirrors these
        self._num_steps = 0
        self._outstanding: deque[Outstanding] = deque()  # oldest first

    @property
    def tenants(self) -> Tenants:
        """Queues and accounts. Its policies may be replaced, which holds for the requests that come from then on."""
        return self.batch.tenants

    @property
    def running(self) -> dict[int, Request]:
        """The requests in the batch by their ids, in the order in which they were admitted."""
        return self.batch.running

    # -- requests in and out -------------------------------------------------------------------------------------------

    def check(self, num_prompt_tokens: int, stop: StopParams, tenant: str = "", field: str = "prompt") -> int:
        """Can such a request ever be served? Prompt and completion tokens that it may reach. Changes nothing.

        Args:
            field: what the client calls its prompt.

        Raises:
            InvalidArgument: the prompt is empty or leaves no room for a token.
            ResourceExhausted: it could never fit the KV pool, or, as QuotaExceeded, what its tenant may hold of it.
        """
        config = self.config
        if num_prompt_tokens == 0:
            raise InvalidArgument(field, [], "at least one token")
        if num_prompt_tokens >= config.max_model_len:
            allowed = f"at most {config.max_model_len - 1} tokens (the model's length less one)"
            raise InvalidArgument(field, f"{num_prompt_tokens} tokens", allowed, reason=Reason.PROMPT_TOO_LONG)
        max_tokens = config.max_model_len if stop.max_tokens is None else stop.max_tokens
        max_total = min(num_prompt_tokens + max_tokens, config.max_model_len)
        wanted, most = config.blocks_for(max_total), self.tenants.policy(tenant).max_blocks
        reason = f"prompt and completion of up to {max_total} tokens can never fit the KV cache"
        if wanted > config.num_blocks:
            reason += f": {config.num_blocks * config.block_size} tokens"
            raise ResourceExhausted(reason, reason=Reason.EXCEEDS_KV_CACHE)
        if most is not None and wanted > most:
            reason += f" share of tenant {tenant!r}: {most * config.block_size} tokens"
            raise QuotaExceeded(reason, tenant=tenant, limit="max_blocks", granted=most)
        return max_total

    def allowed_methods(self, tenant: str) -> frozenset[Method]:
        """The methods that the tenant's requests may name, whether they are loaded or not."""
        return self.tenants.policy(tenant).speculation.allowed

    def bounded(self, speculation: SpeculationParams, tenant: str) -> SpeculationParams:
        """A request's depths within those of its tenant and of the server. Changes nothing.

        Raises:
            InvalidArgument: a lowest depth above a highest one of theirs.
        """
        return speculation.within(
            {
                "the server": SpeculationBounds(min_depth=self.config.min_depth, max_depth=self.config.max_depth),
                f"tenant {tenant!r}": self.tenants.policy(tenant).speculation,
            }
        )

    def add(
        self,
        request_id: int,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        stop: StopParams,
        speculation: SpeculationParams,
        now: float,
        *,
        constraints: Constraints = Constraints(),
        logprobs: LogprobsParams = LogprobsParams(),
        choice: int = 0,
        sibling_id: int | None = None,
        num_siblings: int = 0,
        scheduling: SchedulingParams = ANYBODY,
        arrival: float | None = None,
    ) -> Request:
        """Queue a request. Ids are never used twice, so that a late result cannot meet a newer request.

        Args:
            choice: which completion of its prompt it is.
            sibling_id: another completion of the same prompt, whose KV it shares; it may have ended already.
            num_siblings: completions that are added right after this one, with all else equal: there is room in the
                queue for them, too, or for none, and nobody gives way for some of them.
            scheduling: whose request it is and when it is wanted; a method that the tenant may not use drafts nothing.
            arrival: when it came, which its times count from; None: now.

        Raises:
            AlreadyExists: the id is live.
            InvalidArgument: an unknown tenant, a lowest depth above the tenant's or the server's highest, a
                verification rule that does not fit.
            DeadlineExceeded: the time is over, or it could not be in time even if it started at once, as far as that
                can be told.
            QueueTimeout: it has waited for too long before it came here.
            PacelineError: whatever `check` and `check_queue` refuse.
        """
        if request_id in self.requests:
            raise AlreadyExists(f"request {request_id} is live")
        if scheduling.deadline is not None and scheduling.deadline <= now:
            raise DeadlineExceeded("too late: the time is over")
        tenant = scheduling.tenant
        bounded = self.bounded(speculation, tenant)
        params = SequenceParams(sampling, constraints, logprobs, speculation.rule_for(sampling), choice)
        max_total = self.check(len(prompt_token_ids), stop, tenant)
        self.check_queue(tenant, 1 + num_siblings, now)
        sibling = None if sibling_id is None else self.requests.get(sibling_id)
        if sibling is not None:
            assert sibling.prompt_token_ids == prompt_token_ids, "siblings have one prompt"
            assert sibling.tenant == tenant, "siblings have one tenant"
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            stop,
            bounded,
            now if arrival is None else arrival,
            methods=self._methods(speculation, tenant),
            scheduling=scheduling,
            max_total_tokens=max_total,
            siblings=None if sibling is None else sibling.siblings,
        )
        self._check_times(request, now)
        priority = min(scheduling.priority, self.tenants.policy(tenant).max_priority)
        request.rank = self.deadlines.rank(request, priority, len(self.tenants[tenant].queue))
        self._make_room(tenant, 1 + num_siblings)
        self.requests[request_id] = request
        self.tenants.push(request)
        self.deadlines.watch(request)
        return request

    def _check_times(self, request: Request, now: float) -> None:
        """`Deadlines.check` of one that waits. What is cached of its prompt, which takes milliseconds to find of a long
        one, is looked for only where that may decide.
        """
        busy = bool(self.running)
        try:
            self.deadlines.check(request, now, busy)
        except DeadlineExceeded:
            if not busy:
                raise
            known, _ = self.prefixes.find(request)
            if not known:
                raise
            self.deadlines.check(request, now, busy, len(known) * self.config.block_size)

    def check_queue(self, tenant: str, count: int, now: float) -> None:
        """May so many more requests of the tenant wait, beside those that places are kept for? Changes nothing but the
        books of idle tenants.

        Raises:
            InvalidArgument: an unknown tenant.
            QuotaExceeded: its own bound; tells when to come again.
            Unavailable: the server's bound; likewise.
        """
        account = self.tenants.get(tenant, now)
        own, most = account.num_queued, account.policy.max_queued
        if most is not None and own + count > most:
            reason = f"{own} requests of tenant {tenant!r} are waiting, and its max_queued is {most}"
            wait = self.rate.seconds_until_ends(own + count - most)
            raise QuotaExceeded(reason, wait, tenant=tenant, limit="max_queued", granted=most)
        missing = self._missing_places(count)
        if missing and not self.tenants.give_way(tenant, count, missing):
            reason = f"{self.tenants.num_queued} requests are waiting, and max_queued is {self.config.max_queued}"
            raise Unavailable(reason, self.rate.seconds_until_ends(missing), reason=Reason.QUEUE_FULL)

    def keep(self, places: Places, now: float) -> None:
        """Let places in the queue count as taken, for a request that is to be prepared before it can be added, until it
        gives them back: right before that, or when it will not come. They may go to another tenant before.

        Raises:
            PacelineError: whatever `check_queue` refuses.
        """
        self.check_queue(places.tenant, places.count, now)
        self._make_room(places.tenant, places.count)
        self.tenants.keep(places)

    def give_back(self, places: Places) -> None:
        """Keep them no more. Lost already: no effect."""
        self.tenants.give_back(places)

    def _missing_places(self, count: int) -> int:
        """In the queue, before so many more requests can wait."""
        return max(0, self.tenants.num_queued + count - self.config.max_queued)

    def _make_room(self, tenant: str, count: int) -> None:
        """For so many more requests of the tenant."""
        missing = self._missing_places(count)
        for leaving in self.tenants.give_way(tenant, count, missing) if missing else ():
            reason = "the queue is full, and its tenant has more requests in it for its share than others"
            error = Unavailable(reason, self.rate.seconds_until_ends(missing), reason=Reason.QUEUE_FULL)
            if isinstance(leaving, Places):
                self.give_back(leaving)
                leaving.on_loss(error)
            else:
                self._refuse(leaving, error)

    def take_refused(self) -> list[tuple[int, PacelineError]]:
        """Requests that were ended because they came too late, gave way or failed alone, each once, and why."""
        refused, self.refused = self.refused, []
        return refused

    def wake_at(self, now: float) -> float:
        """When to plan again, if nothing can be planned and no result is outstanding; infinite if only a new request
        can change that. Requests may wait for their tenant's bucket.
        """
        limited = [tenant for tenant in self.tenants.waiting if tenant.policy.tokens_per_second is not None]
        buckets = [now + tenant.seconds_until_tokens(now) for tenant in limited]
        return min([*buckets, self.deadlines.next_timer], default=math.inf)

    def abort(self, request_id: int) -> bool:
        """End a request now, at whatever stage; its blocks are free on return. False if it is not live.

        A result still to come for it is dropped. Blocks may be reused at once although a step may still write to them:
        steps run in order, so the new owner writes later, and reads only what it wrote.
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._end(request)
        return True

    def _methods(self, speculation: SpeculationParams, tenant: str) -> tuple[Method, ...]:
        """The request's own choice, or else the server's, with n-grams beside it or where the tenant may not use it."""
        own = speculation.method
        wanted = (self.config.method, NGRAM) if own is None else (own,)
        if wanted[0] is NO_METHOD:
            return ()
        allowed = self.allowed_methods(tenant)
        methods = tuple(method for method in dict.fromkeys(wanted) if method in allowed)
        return methods if self.config.hybrid else methods[:1]

    def forget(self) -> None:
        """Start the books of drafters, of the rate and of tenants anew, as after a warm-up. The policy, its costs and
        what is cached stay. No request is live.
        """
        assert not self.requests, "requests are live"
        self.speculation.forget()
        self.rate.forget()
        self.batch = Batch(self.config, self.kv, Tenants(self.tenants.policies, self.tenants.default))

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait, tenant by tenant, in their order."""
        return self.tenants.requests()

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step. The plan may hold no work, if none can be planned before an outstanding result is in."""
        assert len(self._outstanding) < MAX_OUTSTANDING, "more than one plan is outstanding"
        for request, late in self.deadlines.expired(self.requests, now):
            self._refuse(request, late)
        step = StepBuilder(
            self.config.max_num_batched_tokens,
            prompt_budget(self.batch, self.speculation.costs),
            self._next_crowd(now),
        )
        preempted = self._continue_running(step)
        if not preempted:
            self._admit_waiting(step, now)
        add_drafts(step, self.batch, self.speculation)
        crowd = self._crowd = step.crowd
        if not step.shares and crowd.slowdown is not None:
            # Those it was kept short for have given way to others: there is nothing to keep short.
            return self.schedule(now)
        if not step.shares:
            return StepPlan(self._num_steps, (), (), ())
        works, requests = [], []
        for share in step.shares:
            work, request = share.work(), share.request
            request.pending += (work,)
            works.append(work)
            requests.append(request)
        plan = StepPlan(self._num_steps, tuple(self._released), tuple(step.admitted), tuple(works))
        self._released.clear()
        light = NOBODY if crowd.slowdown is None else crowd.light
        self._outstanding.append(Outstanding(self._num_steps, requests, light))
        self._num_steps += 1
        return plan

    def requests_of(self, plan: StepPlan) -> list[Request]:
        """Of each work of the plan that is next to be updated; they may have ended since it was made."""
        oldest = self._outstanding[0]
        assert plan.step_id == oldest.step_id, (plan.step_id, oldest.step_id)
        return oldest.requests

    def update(self, plan: StepPlan, result: StepResult, now: float) -> tuple[RequestOutput, ...]:
        """Commit a step's result; plans are updated in the order in which they were made.

        Results of requests that ended meanwhile are dropped. A request that was preempted meanwhile keeps the tokens,
        which are as good as any, but not the KV.
        """
        assert plan.step_id == result.step_id, (plan.step_id, result.step_id)
        assert len(plan.work) == len(result.sequences), (len(plan.work), len(result.sequences))
        requests = self.requests_of(plan)
        light = self._outstanding.popleft().light
        charges = self.speculation.observe(plan, result, requests)
        self.rate.step(plan.work, result.sequences, charges, result.times.total)
        outputs = []
        for work, sequence, request, seconds in zip(plan.work, result.sequences, requests, charges):
            assert work.request_id == sequence.request_id, (work, sequence)
            assert request.pending[0] is work, (request.pending, work)
            request.pending = request.pending[1:]
            # Heavy tenants, which take less of such a step than they might, shall not find themselves owed for that.
            counts = request.tenant not in light
            if request.status is FINISHED:
                # What was computed for one that has ended meanwhile is paid for all the same, if it has an account.
                if request.tenant in self.tenants:
                    self.tenants[request.tenant].charge(seconds, counts=counts)
                continue
            request.charged_seconds += seconds
            account = self.tenants[request.tenant]
            account.charge(seconds, counts=counts)
            account.spend(len(sequence.token_ids), now)
            if sequence.error is not None:
                if isinstance(sequence.error, NotFinite):
                    self.prefixes.forget(request)
                self._refuse(request, sequence.error)
                continue
            output = self._commit(request, work, sequence, now)
            if request.siblings.held and self.prefixes.has_prompt(request):
                account.queue.release(request.siblings)
            if output is not None:
                outputs.append(output)
        return tuple(outputs)

    # -- planning ------------------------------------------------------------------------------------------------------

    def _prompt_rows(self, wanted: int, step: StepBuilder, budget: int) -> int:
        """Known tokens of one prompt that the step may compute."""
        return max(0, min(wanted, budget, step.prompt_budget, self.config.long_prefill_threshold or wanted))

    def _next_crowd(self, now: float) -> Crowd:
        """Heavy and light tenants of the step to come. Whether it is kept short is known only once those who are not
        heavy have their rows.
        """
        crowd = Crowd(self._crowd)
        if self.config.max_slowdown < math.inf and self.speculation.costs is not None and self.tenants.num_waiting:
            crowd.gather(self.batch, lambda one: self._may_start(one, now) and self._could_fit(one))
        return crowd

    def _could_fit(self, tenant: Tenant) -> bool:
        """Its next request, which may start, finds room, or would if all gave way to it who are ahead of it."""
        request = tenant.queue.first()
        assert request is not None, "of a tenant that may start"
        known, _ = self.prefixes.find(request)
        missing = self.config.blocks_for(request.num_tokens) - len(known)
        batch = self.batch
        return batch.fits(missing, known) or batch.would_suffice(batch.far_ahead(tenant), missing, known)

    def _continue_running(self, step: StepBuilder) -> bool:
        """Give running requests their rows, in the order of admission; those of heavy tenants come last, and take
        turns. True if somebody had to be preempted.
        """
        order, crowd, costs = list(self.running.values()), step.crowd, self.speculation.costs
        last: list[Request] = []
        behind, preempted = len(order), False
        if crowd.heavy:
            last = crowd.in_turn([request for request in order if request.tenant in crowd.heavy], self.tenants)
            order = [request for request in order if request.tenant not in crowd.heavy]
        for request in order:
            behind -= 1
            if self._continue(request, behind, step):
                preempted = True
        if crowd.heavy and costs is not None:
            crowd.limit(step.shares, step.budget, costs)
        for request in last:
            behind -= 1
            if self._continue(request, behind, step):
                preempted = True
        return preempted

    def _continue(self, request: Request, behind: int, step: StepBuilder) -> bool:
        """Give a running request its rows, if there are any for it. True if somebody had to be preempted.

        Args:
            behind: requests that come after it. One row stays reserved for each: a long prompt never stops their
                decodes.
        """
        if request.status is not RUNNING or request.surely_ends:
            return False
        rows = wanted = request.num_to_compute
        if wanted > 1:
            rows = self._prompt_rows(wanted, step, step.budget - behind)
        if rows:
            rows = step.crowd.take_turn(request, rows)
        if not rows:
            return False
        end = request.most_tokens - wanted + rows
        preempted = False
        while (blocks := self.kv.grow(request.request_id, end)) is None:
            victim = self.batch.victim()
            self._preempt(victim)
            step.drop(victim)
            preempted = True
            if victim is request:
                return True
        step.add(self._share(request, rows, rows == wanted, end, blocks))
        return preempted

    def _admit_waiting(self, step: StepBuilder, now: float) -> None:
        """Admit requests while rows, places and blocks for the whole of their known tokens are left: the most urgent of
        the tenant that is owed most. If that one finds no room nobody else takes it.
        """
        held_up: set[Tenant] = set()  # who can start nothing in this step
        while step.budget > 0 and step.prompt_budget > 0 and self.tenants.num_waiting:
            tenant = self.tenants.next(lambda one: one not in held_up and self._may_start(one, now))
            if tenant is None:
                break
            request = tenant.queue.first()
            assert request is not None, "of a tenant that may start"
            # A preempted request waits for its outstanding results: they may bring tokens, or its end.
            if request.pending:
                held_up.add(tenant)
                continue
            try:
                self._check_times(request, now)
            except DeadlineExceeded as error:  # whose time was over has been refused already
                self._refuse(request, error)
                continue
            slowdown = step.crowd.bound(tenant.name)
            if slowdown is not None and slowdown.is_full:
                held_up.add(tenant)
                continue
            known, num_drafted = self.prefixes.find(request)
            cached = len(known) * self.config.block_size
            if slowdown is not None and not slowdown.fits_or_closes(request.num_tokens - cached, cached):
                held_up.add(tenant)
                continue
            missing = self.config.blocks_for(request.num_tokens) - len(known)
            if not self.batch.fits(missing, known):
                victims = self.batch.over_served(tenant, now)
                if not self.batch.would_suffice(victims, missing, known):
                    break
                for victim in victims:
                    self._preempt(victim)
                    step.drop(victim)
                    held_up.add(self.tenants[victim.tenant])
                    if self.batch.fits(missing, known):
                        break
            self._admit(request, known, num_drafted, step, now)

    def _first_of(self, tenant: Tenant) -> Request | None:
        """Its next request. While one reads their prompt, its siblings are held: others may start meanwhile."""
        queue = tenant.queue
        while (request := queue.first()) is not None and self.prefixes.awaits_sibling(request):
            queue.hold_first()
        return request

    def _may_start(self, tenant: Tenant, now: float) -> bool:
        """It has a next request, and its own limits leave room for it: of blocks, as long as all may become. A request
        may run alone in any case: the policy may have been another one when it came.
        """
        request, policy = self._first_of(tenant), tenant.policy
        if request is None:
            return False
        if policy.max_running is not None and tenant.num_running >= policy.max_running:
            return False
        if policy.max_blocks is not None and tenant.num_running:
            own = self.config.blocks_for(request.max_total_tokens)
            if tenant.num_blocks + own > policy.max_blocks:
                return False
        return tenant.seconds_until_tokens(now) == 0.0

    def _admit(self, request: Request, known: Sequence[int], num_drafted: int, step: StepBuilder, now: float) -> None:
        """Let a request run that has a place."""
        if known:
            self.prefixes.share(request, known, num_drafted)
        blocks = self.kv.grow(request.request_id, request.num_tokens)
        assert blocks is not None
        self.batch.add(request, now)
        if request.first_scheduled is None:
            request.first_scheduled = now
            request.num_cached_tokens = request.num_computed_tokens
            request.usual_length = self.rate.usual_length(request.chosen_max_tokens) or math.inf
            tenant = self.tenants[request.tenant]
            tenant.prompt_began(len(request.prompt_token_ids), request.num_cached_tokens)
            request.num_uses = tenant.uses
            # Before it is read, lest many prompts be let in at once; see `_end`.
            request.num_unread = request.num_to_compute
            tenant.spend(request.num_unread, now)
        step.admitted.append(
            Admission(
                request.request_id,
                request.all_token_ids,
                len(request.prompt_token_ids),
                request.params,
                tuple(known),
                request.num_computed_tokens,
                request.num_draft_computed,
            )
        )
        wanted = request.num_to_compute
        rows = self._prompt_rows(wanted, step, step.budget)
        slowdown = step.crowd.bound(request.tenant)
        if slowdown is not None:
            rows = max(1, slowdown.take(rows, request.num_computed_tokens))
        step.add(self._share(request, rows, rows == wanted, request.num_computed_tokens + rows, blocks))

    def _share(self, request: Request, rows: int, samples: bool, end: int, blocks: tuple[int, ...]) -> Share:
        """What one request gets of the step. Its draft model reads a prompt along with the target, if drafts are to be
        expected when all decode that run and all that blocks and places let in of those that wait; else it catches up
        when it is first asked for a draft.
        """
        share = Share(request, rows, samples, end, blocks)
        share.scores_ngram = samples and NGRAM in request.limits
        reads_prompt = rows > 1 or not (request.output_token_ids or request.pending)
        if reads_prompt and draft_limits(request, self.config).get(DRAFT_MODEL):
            fitting = self.batch.spare_blocks // self.config.blocks_for(request.num_tokens)
            coming = min(self.tenants.num_waiting, fitting, self.batch.num_places)
            sequences = len(self.running) + coming
            if self.speculation.reads_along(request, sequences):
                share.method, share.catch_up = DRAFT_MODEL, rows
        return share

    # -- transitions ---------------------------------------------------------------------------------------------------

    def _commit(
        self, request: Request, work: SequenceWork, sequence: SequenceResult, now: float
    ) -> RequestOutput | None:
        running = request.status is RUNNING
        if running:
            request.num_draft_computed = sequence.num_draft_computed
        if not work.samples:
            if running:
                request.num_computed_tokens += work.num_tokens
                self.prefixes.remember(request)
            return None
        token_ids = sequence.token_ids
        offset = len(request.output_token_ids)
        request.emit(token_ids)
        if token_ids:
            request.num_in_vain = 0
            if request.first_token is None:
                request.first_token = now
            if running and request.awaits_token:
                request.seconds_to_token, request.awaits_token = now - request.admitted_at, False
        if running:
            request.num_computed_tokens = request.num_tokens - 1
            # Asked inline, since a block is full at few steps only.
            size = self.kv.block_size
            if request.num_computed_tokens >= size * (
                request.num_known_blocks + 1
            ) or request.num_draft_computed >= size * (request.num_drafted_blocks + 1):
                self.prefixes.remember(request)
        assert request.num_tokens <= request.max_total_tokens, (request.num_tokens, request.max_total_tokens)
        if sequence.finish is None:
            return RequestOutput(request.request_id, offset, token_ids)
        self.rate.ended(len(request.output_token_ids), request.chosen_max_tokens)
        stats = RequestStats.of(request, now)
        self._end(request)
        return RequestOutput(request.request_id, offset, token_ids, sequence.finish, stats)

    def _preempt(self, request: Request) -> None:
        """Take all blocks back; the request will be computed anew, its emitted tokens included."""
        self._stop(request)
        self.kv.free(request.request_id)
        self.speculation.preempted(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_draft_computed = 0
        request.num_known_blocks = request.num_drafted_blocks = 0
        request.num_preemptions += 1
        request.num_in_vain += 1
        self.tenants.push(request)

    def _end(self, request: Request) -> None:
        """The one way out, for finished and aborted requests alike."""
        if request.status is RUNNING:
            self._stop(request)
        self.tenants[request.tenant].give_back(request.num_unread)
        self.tenants.remove(request)
        self.kv.free(request.request_id)
        self.speculation.end(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]

    def _stop(self, request: Request) -> None:
        """Take a request out of the batch."""
        self.batch.remove(request)
        self._released.append(request.request_id)
        read = request.num_computed_tokens + sum(work.num_tokens for work in request.pending)
        request.num_unread = max(0, min(request.num_unread, len(request.prompt_token_ids) - read))

    def _refuse(self, request: Request, error: PacelineError) -> None:
        self.refused.append((request.request_id, error))
        self._end(request)

    # -- what there is to tell -----------------------------------------------------------------------------------------

    def speculation_report(self) -> SpeculationReport:
        """How speculation does at this moment. Changes nothing."""
        return self.speculation.report(self.requests.values())

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance. Mutates nothing."""
        self.kv.check_invariants()
        self.batch.check_invariants()
        waiting = {request.request_id for request in self.waiting}
        assert len(waiting) == self.tenants.num_waiting
        assert not waiting & self.running.keys(), "running and waiting"
        assert waiting | self.running.keys() == self.requests.keys(), "live = running + waiting"
        planned = Counter(request.request_id for step in self._outstanding for request in step.requests)
        for request in self.requests.values():
            assert len(request.pending) == planned[request.request_id] <= MAX_OUTSTANDING
            assert 0 <= request.num_computed_tokens < request.num_tokens <= request.max_total_tokens
            assert request.num_draft_computed <= request.num_tokens
            assert request.siblings.running or not request.siblings.held, "held, and nobody reads"
            if request.status is RUNNING:
                # A running request's first chunk is planned when it is admitted, with blocks for all its known tokens.
                assert self.kv.capacity(request.request_id) >= request.num_tokens - 1
            else:
                assert request.num_computed_tokens == 0
                assert not self.kv.table(request.request_id), "a waiting request owns blocks"
        self._check_sharing()

    def _check_sharing(self) -> None:
        """A block in several tables stands at one place of one prefix, and is computed for all who hold it."""
        holders: dict[int, list[tuple[Request, int]]] = {}
        for request in self.running.values():
            for index, block in enumerate(self.kv.table(request.request_id)):
                holders.setdefault(block, []).append((request, index))
        for block, held in holders.items():
            if len(held) > 1:
                first, place = held[0]
                end = (place + 1) * self.config.block_size
                for request, index in held:
                    assert index == place, f"block {block} is shared at different places"
                    prefixes = request.all_token_ids[:end], first.all_token_ids[:end]
                    assert prefixes[0] == prefixes[1], f"block {block}: prefixes differ"
                    assert end <= request.num_computed_tokens, f"block {block} is open"
