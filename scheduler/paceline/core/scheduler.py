"""Which tokens are computed in the next step: one rule and one budget for prompts, decodes and drafts.

There is no prefill phase and no decode phase. Every request has known tokens, some of which have KV; a step moves that
count forward, by a chunk of a prompt or by the one token of a decode, and samples where it reaches the end. Drafts are
optional work behind a decode: they get the rows and blocks that are left when everyone else is served, and are the
first to shrink when memory is short.

`schedule` may be called with one plan outstanding, before `update` has seen its result: then a request's length is
known only within bounds (`Request.most_tokens`), and blocks are allocated for the upper one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.config import PrefixScope, SchedulerConfig
from paceline.core.depth import StepLoad
from paceline.core.kv_cache_manager import KVCacheManager
from paceline.core.params import (
    Constraints,
    LogprobsParams,
    Method,
    SamplingParams,
    SequenceParams,
    SpeculationBounds,
    SpeculationParams,
    StopParams,
)
from paceline.core.plan import Admission, SequenceResult, SequenceWork, StepPlan, StepResult
from paceline.core.prefix_cache import first_key, next_key
from paceline.core.queue import RequestQueue
from paceline.core.request import Request, RequestOutput, RequestStats, RequestStatus
from paceline.core.speculation import SpeculationControl
from paceline.core.speculation_report import SpeculationReport
from paceline.errors import AlreadyExists, InvalidArgument, ResourceExhausted, Unavailable

MAX_OUTSTANDING = 2  # the plan that runs and the one made meanwhile
UNBOUNDED = SpeculationBounds()


class Scheduler:
    """Owns every live request and all KV bookkeeping. Not thread-safe: one caller, who also provides the time.

    Attributes:
        tenant_speculation: bounds by tenant, within the server's; who is not named has the server's. The operator may
            put another mapping in its place, which holds for the requests that are added from then on.
    """

    def __init__(self, config: SchedulerConfig, speculation: SpeculationControl) -> None:
        self.config = config
        self.speculation = speculation
        self.tenant_speculation: Mapping[str, SpeculationBounds] = {}
        self.kv = KVCacheManager(config.num_blocks, config.block_size)
        self.waiting = RequestQueue()
        self.running: dict[int, Request] = {}  # in arrival order
        self.requests: dict[int, Request] = {}
        self._released: list[int] = []  # the runner still mirrors these
        self._num_steps = 0
        self._num_outstanding = 0

    # -- requests in and out -------------------------------------------------------------------------------------------

    def check(self, num_prompt_tokens: int, stop: StopParams) -> int:
        """Can such a request ever be served? Prompt and completion tokens that it may reach. Changes nothing.

        Raises:
            InvalidArgument: the prompt is empty or leaves no room for a token.
            ResourceExhausted: it could never fit the KV pool.
        """
        config = self.config
        if num_prompt_tokens == 0:
            raise InvalidArgument("prompt", [], "at least one token")
        if num_prompt_tokens >= config.max_model_len:
            allowed = f"at most {config.max_model_len - 1} tokens (the model's length less one)"
            raise InvalidArgument("prompt", f"{num_prompt_tokens} tokens", allowed)
        max_tokens = config.max_model_len if stop.max_tokens is None else stop.max_tokens
        max_total = min(num_prompt_tokens + max_tokens, config.max_model_len)
        if config.blocks_for(max_total) > config.num_blocks:
            raise ResourceExhausted(
                f"prompt and completion of up to {max_total} tokens can never fit the KV cache of "
                f"{config.num_blocks * config.block_size} tokens"
            )
        return max_total

    def allowed_methods(self, tenant: str) -> frozenset[Method]:
        """The methods that the tenant's requests may name, whether they are loaded or not."""
        return self.tenant_speculation.get(tenant, UNBOUNDED).allowed

    def bounded(self, speculation: SpeculationParams, tenant: str) -> SpeculationParams:
        """A request's depths within those of its tenant and of the server. Changes nothing.

        Raises:
            InvalidArgument: a lowest depth above a highest one of theirs.
        """
        return speculation.within(
            {
                "the server": SpeculationBounds(min_depth=self.config.min_depth, max_depth=self.config.max_depth),
                f"tenant {tenant!r}": self.tenant_speculation.get(tenant, UNBOUNDED),
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
        tenant: str = "",
    ) -> Request:
        """Queue a request. Ids are never used twice, so that a late result cannot meet a newer request.

        Args:
            choice: which completion of its prompt it is.
            sibling_id: another completion of the same prompt, whose KV it shares; it may have ended already.
            tenant: whose request it is; a method that it may not use drafts nothing.

        Raises:
            AlreadyExists: the id is live.
            InvalidArgument: a lowest depth above the tenant's or the server's highest, a verification rule that does
                not fit.
            Unavailable: the queue is full.
            PacelineError: whatever `check` refuses.
        """
        if request_id in self.requests:
            raise AlreadyExists(f"request {request_id} is live")
        bounded = self.bounded(speculation, tenant)
        params = SequenceParams(sampling, constraints, logprobs, speculation.rule_for(sampling), choice)
        max_total = self.check(len(prompt_token_ids), stop)
        if len(self.waiting) >= self.config.max_queued:
            raise Unavailable(f"{len(self.waiting)} requests are waiting, as many as max_queued allows")
        sibling = None if sibling_id is None else self.requests.get(sibling_id)
        assert sibling is None or sibling.prompt_token_ids == prompt_token_ids, "siblings have one prompt"
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            stop,
            bounded,
            now,
            methods=self._methods(speculation, tenant),
            tenant=tenant,
            max_total_tokens=max_total,
            siblings=None if sibling is None else sibling.siblings,
        )
        self.requests[request_id] = request
        self.waiting.push(request)
        return request

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
        wanted = (self.config.method, Method.NGRAM) if own is None else (own,)
        if wanted[0] is Method.NONE:
            return ()
        allowed = self.allowed_methods(tenant)
        methods = tuple(method for method in dict.fromkeys(wanted) if method in allowed)
        return methods if self.config.hybrid else methods[:1]

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step. The plan may hold no work, if none can be planned before an outstanding result is in."""
        assert self._num_outstanding < MAX_OUTSTANDING, "more than one plan is outstanding"
        step = _Step(self.config.max_num_batched_tokens)
        preempted = self._continue_running(step)
        if not preempted:
            self._admit_waiting(step, now)
        self._add_drafts(step)
        if not step.work:
            return StepPlan(self._num_steps, (), (), ())
        for request_id, work in step.work.items():
            self.requests[request_id].pending.append(work)
        plan = StepPlan(self._num_steps, tuple(self._released), tuple(step.admitted), tuple(step.work.values()))
        self._released.clear()
        self._num_steps += 1
        self._num_outstanding += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> tuple[RequestOutput, ...]:
        """Commit a step's result; plans are updated in the order in which they were made.

        Results of requests that ended meanwhile are dropped. A request that was preempted meanwhile keeps the tokens,
        which are as good as any, but not the KV.
        """
        assert plan.step_id == result.step_id, (plan.step_id, result.step_id)
        self._num_outstanding -= 1
        self.speculation.observe(plan, result, self.requests)
        outputs = []
        for work, sequence in zip(plan.work, result.sequences, strict=True):
            assert work.request_id == sequence.request_id, (work, sequence)
            request = self.requests.get(work.request_id)
            if request is None:
                continue
            planned = request.pending.popleft()
            assert planned is work, (planned, work)
            output = self._commit(request, work, sequence, now)
            if output is not None:
                outputs.append(output)
        return tuple(outputs)

    # -- planning ------------------------------------------------------------------------------------------------------

    def _continue_running(self, step: _Step) -> bool:
        """Give every running request its rows, in arrival order. True if somebody had to be preempted for it."""
        preempted = False
        order = list(self.running.values())
        for index, request in enumerate(order):
            if request.status is not RequestStatus.RUNNING or request.surely_ends:
                continue
            # One row stays reserved for each request behind this one, so that a long prompt never stops their decodes.
            rows = min(request.num_to_compute, step.budget - (len(order) - index - 1))
            if rows <= 0:
                continue
            while (blocks := self.kv.grow(request.request_id, self._end_position(request, rows))) is None:
                victim = next(reversed(self.running.values()))
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                step.add(self._work(request, rows, blocks))
        return preempted

    def _admit_waiting(self, step: _Step, now: float) -> None:
        """Admit from the head of the queue while rows, places and blocks for the whole of its known tokens are left."""
        while (request := self.waiting.first()) is not None:
            if step.budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                return
            # A preempted request waits for its outstanding results: they may bring tokens, or its end.
            if request.pending or self._awaits_sibling(request):
                return
            known, num_drafted = self._known_prefix(request)
            missing = self.config.blocks_for(request.num_tokens) - len(known)
            if missing + self.kv.num_free_among(known) > self._spare_blocks:
                return
            if known:
                self.kv.share(request.request_id, known)
                request.num_computed_tokens = len(known) * self.config.block_size
                request.num_draft_computed = num_drafted * self.config.block_size
                request.num_known_blocks, request.num_drafted_blocks = len(known), num_drafted
            blocks = self.kv.grow(request.request_id, request.num_tokens)
            assert blocks is not None
            self.waiting.remove(request)
            self.running[request.request_id] = request
            request.status = RequestStatus.RUNNING
            if request.first_scheduled is None:
                request.first_scheduled = now
                request.num_cached_tokens = request.num_computed_tokens
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
            step.add(self._work(request, min(request.num_to_compute, step.budget), blocks))

    def _awaits_sibling(self, request: Request) -> bool:
        """Another completion computes the prompt right now, of which this one will share whole blocks."""
        wanted = self._num_shareable(request) * self.config.block_size
        # One of a single token ends with the step that computes its prompt: nobody can share with it.
        running = [
            s for s in request.siblings.values() if s.status is RequestStatus.RUNNING and s.max_output_tokens > 1
        ]
        return bool(running) and all(s.num_computed_tokens < wanted for s in running)

    def _known_prefix(self, request: Request) -> tuple[Sequence[int], int]:
        """Full blocks that hold the first of its known tokens already, and how many of them hold their draft KV too.

        The newest token is computed anew, for its logits. Who asks for logprobs of the prompt needs those of all of it.
        """
        if request.params.logprobs.prompt is not None and not request.output_token_ids:
            return (), 0
        size = self.config.block_size
        known: Sequence[int] = ()
        if self.config.prefix_cache is not PrefixScope.OFF:
            known = self.kv.cache.find(self._keys(request, (request.num_tokens - 1) // size))
        num_blocks = self._num_shareable(request)
        if num_blocks > len(known):
            for sibling in request.siblings.values():
                computed = min(sibling.num_computed_tokens, num_blocks * size)
                if sibling.status is RequestStatus.RUNNING and computed == num_blocks * size:
                    drafted = min(sibling.num_draft_computed, computed) // size
                    return self.kv.table(sibling.request_id)[:num_blocks], drafted
        return known, self.kv.cache.num_drafted(known)

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """Of the request's first blocks, all of whose tokens are known."""
        keys, size = request.block_keys, self.config.block_size
        if not keys and count:
            salt = request.tenant if self.config.prefix_cache is PrefixScope.TENANT else ""
            keys.append(next_key(first_key(salt), request.tokens_between(0, size)))
        for index in range(len(keys), count):
            keys.append(next_key(keys[-1], request.tokens_between(index * size, (index + 1) * size)))
        return keys[:count]

    def _remember_prefix(self, request: Request) -> None:
        """Let others find what a result has completed."""
        if self.config.prefix_cache is PrefixScope.OFF:
            return
        size = self.config.block_size
        full = request.num_computed_tokens // size
        if full > request.num_known_blocks:
            keys = self._keys(request, full)
            for index in range(request.num_known_blocks, full):
                self.kv.cache.insert(keys[index], self.kv.block(request.request_id, index))
            request.num_known_blocks = full
        drafted = min(full, request.num_draft_computed // size)
        if drafted > request.num_drafted_blocks:
            keys = self._keys(request, drafted)
            for index in range(request.num_drafted_blocks, drafted):
                self.kv.cache.mark_drafted(keys[index], self.kv.block(request.request_id, index))
            request.num_drafted_blocks = drafted

    def _num_shareable(self, request: Request) -> int:
        """Blocks that the prompt fills; its last token is computed anew, for its logits."""
        return (len(request.prompt_token_ids) - 1) // self.config.block_size

    def _work(self, request: Request, rows: int, blocks: tuple[int, ...]) -> SequenceWork:
        """Target rows for one request. While draft models draft, the request's reads along with its prompt; else it
        catches up when it is asked for a draft.
        """
        samples = rows == request.num_to_compute
        if (
            self.speculation.model_drafts
            and not self._decodes(request)
            and self._highest_depth(request, Method.DRAFT_MODEL) > 0
        ):
            method, catch_up = Method.DRAFT_MODEL, rows
        else:
            method, catch_up = request.method, 0
        return SequenceWork(
            request.request_id, rows, samples, method=method, draft_catch_up=catch_up, new_block_ids=blocks
        )

    def _add_drafts(self, step: _Step) -> None:
        """Let the policy choose depths for the decodes of this step, then grant them while rows and blocks last."""
        offered = {}
        for work in step.work.values():
            request = self.requests[work.request_id]
            if work.samples and work.num_tokens == 1 and (highest := self._highest_depths(request)):
                offered[request] = highest
        if not offered:
            return
        for request, chosen in zip(offered, self.speculation.choose(offered, self._load(step)), strict=True):
            work, depth = step.work[request.request_id], chosen.depth
            # What a draft model has yet to read counts as rows too; where that alone is too much, it reads what fits.
            gap = request.draft_gap if depth and chosen.method is Method.DRAFT_MODEL else 0
            behind = max(0, gap - work.num_tokens)
            if behind > step.budget:
                depth, behind = 0, step.budget
                gap = behind + work.num_tokens
            depth, blocks = self._grow_for_drafts(request, min(depth, step.budget - behind))
            step.budget -= depth + behind
            step.work[request.request_id] = SequenceWork(
                request.request_id,
                num_tokens=work.num_tokens,
                samples=True,
                num_drafts=depth,
                method=chosen.method if depth or gap else request.method,
                draft_catch_up=gap,
                new_block_ids=work.new_block_ids + blocks,
                scores_ngram=Method.NGRAM in request.methods and not (depth and chosen.method is Method.NGRAM),
            )

    def _load(self, step: _Step) -> StepLoad:
        works = step.work.values()
        return StepLoad(
            rows=sum(work.num_rows for work in works),
            context=sum(self._end_position(self.requests[work.request_id], work.num_tokens) for work in works),
            sampling=sum(work.samples for work in works),
            budget=step.budget,
        )

    def _grow_for_drafts(self, request: Request, depth: int) -> tuple[int, tuple[int, ...]]:
        """Slots for drafts, allocated before drafting: the depth there is room for, and the new blocks."""
        known = request.most_tokens
        room = self.kv.capacity(request.request_id) + self._spare_blocks * self.config.block_size - known
        depth = max(0, min(depth, room))
        blocks = self.kv.grow(request.request_id, known + depth) if depth else ()
        assert blocks is not None
        return depth, blocks

    @property
    def _spare_blocks(self) -> int:
        """Free blocks for optional work, admissions and drafts: one is kept back for the next token of each running
        request.
        """
        return max(0, self.kv.num_free_blocks - len(self.running))

    def _highest_depths(self, request: Request) -> dict[Method, int]:
        """By each method that the request may use, if any depth is left for it."""
        depths = {method: self._highest_depth(request, method) for method in request.methods}
        return {method: depth for method, depth in depths.items() if depth}

    def _highest_depth(self, request: Request, method: Method) -> int:
        """No draft may be of use behind the request's last token, nor lie behind the draft model's length."""
        if method not in request.methods:
            return 0
        bound = request.speculation.max_depth
        assert bound is not None, "the server has a highest depth, so every request has one"
        highest = min(bound, request.max_total_tokens - request.most_tokens - 1)
        if method is Method.DRAFT_MODEL:
            highest = min(highest, self.config.max_draft_len - request.most_tokens)
        return max(0, highest)

    @staticmethod
    def _decodes(request: Request) -> bool:
        return bool(request.output_token_ids or request.awaits_sample) and request.num_to_compute == 1

    @staticmethod
    def _end_position(request: Request, rows: int) -> int:
        """Token positions that must have slots once `rows` more known tokens are computed."""
        return request.most_tokens - request.num_to_compute + rows

    # -- transitions ---------------------------------------------------------------------------------------------------

    def _commit(
        self, request: Request, work: SequenceWork, sequence: SequenceResult, now: float
    ) -> RequestOutput | None:
        running = request.status is RequestStatus.RUNNING
        if running:
            request.num_draft_computed = sequence.num_draft_computed
        if not work.samples:
            if running:
                request.num_computed_tokens += work.num_tokens
                self._remember_prefix(request)
            return None
        token_ids = sequence.token_ids
        offset = len(request.output_token_ids)
        request.output_token_ids.extend(token_ids)
        if running:
            request.num_computed_tokens = request.num_tokens - 1
            self._remember_prefix(request)
        assert request.num_tokens <= request.max_total_tokens, (request.num_tokens, request.max_total_tokens)
        if token_ids and request.first_token is None:
            request.first_token = now
        if sequence.finish is None:
            return RequestOutput(request.request_id, offset, token_ids)
        stats = RequestStats.of(request, now)
        self._end(request)
        return RequestOutput(request.request_id, offset, token_ids, sequence.finish, stats)

    def _preempt(self, request: Request) -> None:
        """Take all blocks back; the request will be computed anew, its emitted tokens included."""
        del self.running[request.request_id]
        self.kv.free(request.request_id)
        self._released.append(request.request_id)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_draft_computed = 0
        request.num_known_blocks = request.num_drafted_blocks = 0
        request.num_preemptions += 1
        self.waiting.push_front(request)

    def _end(self, request: Request) -> None:
        """The one way out, for finished and aborted requests alike."""
        if request.status is RequestStatus.RUNNING:
            del self.running[request.request_id]
            self._released.append(request.request_id)
        self.waiting.remove(request)
        self.kv.free(request.request_id)
        self.speculation.end(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]
        del request.siblings[request.request_id]

    def speculation_report(self) -> SpeculationReport:
        """How speculation does at this moment. Changes nothing."""
        return self.speculation.report(self.requests.values())

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance. Mutates nothing."""
        self.kv.check_invariants()
        config = self.config
        assert len(self.running) <= config.max_num_seqs
        waiting = {request.request_id for request in self.waiting}
        assert not waiting & self.running.keys(), "running and waiting"
        assert waiting | self.running.keys() == self.requests.keys(), "live = running + waiting"
        arrivals = [request.arrival for request in self.running.values()]
        assert arrivals == sorted(arrivals), "running is in arrival order"
        for request in self.requests.values():
            assert len(request.pending) <= MAX_OUTSTANDING
            assert 0 <= request.num_computed_tokens < request.num_tokens <= request.max_total_tokens
            assert request.num_draft_computed <= request.num_tokens
            if request.status is RequestStatus.RUNNING:
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


class _Step:
    """A plan in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # rows left
        self.work: dict[int, SequenceWork] = {}
        self.admitted: list[Admission] = []

    def add(self, work: SequenceWork) -> None:
        self.work[work.request_id] = work
        self.budget -= work.num_rows
