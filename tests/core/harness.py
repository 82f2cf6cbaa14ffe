"""A scheduler and the scripted runner, driven by hand, with all that must hold checked after every operation.

The runner checks every KV read against the sequence's own tokens. The harness checks the rest: the scheduler's
invariants, the budget, the runner's mirror, what is shared between completions of one prompt, that there is always
something to plan, and that each request ends once, with exactly what its prompt and limits determine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.config import PrefixScope, SchedulerConfig
from paceline.core.depth import Chosen, DepthCandidate, StepLoad, within_bounds
from paceline.core.depth_policy import DepthPolicy, FixedDepth
from paceline.core.method import Method
from paceline.core.params import LogprobsParams, SamplingParams, SchedulingParams, SpeculationParams, StopParams
from paceline.core.plan import Admission, FinishReason, SequenceResult, SequenceWork, StepPlan
from paceline.core.request import Request, RequestOutput, RequestStatus
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.errors import PacelineError
from paceline.sim import ScriptedRunner, reference_output
from paceline.sim.scripted_runner import VOCAB_SIZE
from paceline.sim.simulation import cut_result

GREEDY = SamplingParams(temperature=0.0)


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt * 101 + position * 7 + 3) % VOCAB_SIZE for position in range(length))


def always(request_id: int, position: int) -> bool:
    return True


def never(request_id: int, position: int) -> bool:
    return False


def percent_right(percent: int, salt: int = 0) -> Callable[[int, int], bool]:
    """Drafts that are right about `percent` times in a hundred, by a hash of request, position and salt."""

    def right(request_id: int, position: int) -> bool:
        mixed = (request_id << 40) ^ (position << 20) ^ salt
        for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):  # MurmurHash3's finalizer
            mixed = (mixed ^ (mixed >> 33)) * multiplier % (1 << 64)
        return (mixed ^ (mixed >> 33)) % 100 < percent

    return right


@dataclass(slots=True)
class CyclingDepth(DepthPolicy):
    """Depths from a list, over and over, the same for every candidate of a step; and offers in turn."""

    depths: tuple[int, ...]
    calls: int = 0

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        depth = self.depths[self.calls % len(self.depths)]
        self.calls += 1
        return [within_bounds(c, c.offers[self.calls % len(c.offers)], depth) for c in candidates]


def expected_end(request: Request, config: SchedulerConfig) -> tuple[list[int], FinishReason]:
    """What a request must emit and why it ends, worked out one token at a time."""
    tokens = reference_output(request.prompt_token_ids, request.max_output_tokens)
    for index, token in enumerate(tokens):
        if index < request.stop.min_tokens:
            continue
        if token in request.stop.token_ids:
            return tokens[: index + 1], FinishReason.STOP_TOKEN
        if token in config.eos_token_ids and not request.stop.ignore_eos:
            return tokens[: index + 1], FinishReason.EOS
    own = len(tokens) == request.stop.max_tokens
    return tokens, FinishReason.MAX_TOKENS if own else FinishReason.CONTEXT_LENGTH


class Harness:
    """Attributes:
    requests: every request ever added.
    plans, results: what was planned, and what each request's work brought, in order.
    outputs, finished, aborted, refused: by request id.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: DepthPolicy | None = None,
        lag: int = 0,
        right: Callable[[int, int], bool] = always,
        max_ngram: int = 1 << 30,
    ) -> None:
        self.config = config
        self.lag = lag
        self.scheduler = Scheduler(config, SpeculationControl(policy or FixedDepth(3)))
        self.runner = ScriptedRunner(config.num_blocks, config.block_size, right, max_ngram)
        self.outstanding: deque[StepPlan] = deque()
        self.requests: dict[int, Request] = {}
        self.plans: list[StepPlan] = []
        self.results: list[SequenceResult] = []
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, RequestOutput] = {}
        self.aborted: set[int] = set()
        self.refused: dict[int, PacelineError] = {}
        self.now = 0.0

    # -- operations --------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: int | tuple[int, ...],
        max_tokens: int | None = 8,
        method: Method | None = None,
        min_depth: int = 0,
        max_depth: int | None = None,
        stop_ids: tuple[int, ...] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
        sibling: Request | None = None,
        tenant: str = "",
        scheduling: SchedulingParams | None = None,
        logprobs: LogprobsParams = LogprobsParams(),
        arrival: float | None = None,
    ) -> Request:
        """Queue a request; with `sibling`, another completion of its prompt, which has to be given again."""
        request_id = len(self.requests)
        request = self.scheduler.add(
            request_id,
            prompt_of(prompt, request_id) if isinstance(prompt, int) else prompt,
            GREEDY,
            StopParams(max_tokens=max_tokens, token_ids=stop_ids, ignore_eos=ignore_eos, min_tokens=min_tokens),
            SpeculationParams(method, min_depth, max_depth),
            self.now,
            sibling_id=None if sibling is None else sibling.request_id,
            scheduling=scheduling or SchedulingParams(tenant),
            logprobs=logprobs,
            arrival=arrival,
        )
        self.requests[request_id] = request
        self.check()
        return request

    def add_group(self, n: int, prompt: int | tuple[int, ...], max_tokens: int | None = 8) -> list[Request]:
        """Queue n completions of one prompt."""
        token_ids = prompt_of(prompt, len(self.requests)) if isinstance(prompt, int) else prompt
        leader = self.add(token_ids, max_tokens)
        return [leader, *(self.add(token_ids, max_tokens, sibling=leader) for _ in range(n - 1))]

    def abort(self, request: Request) -> None:
        assert self.scheduler.abort(request.request_id)
        self.aborted.add(request.request_id)
        assert not self.scheduler.kv.table(request.request_id)
        self.check()

    def plan(self) -> StepPlan:
        """Plan a step, which `land` will run."""
        self.now += 1.0
        computed = {request.request_id: request.num_computed_tokens for request in self.scheduler.running.values()}
        plan = self.scheduler.schedule(self.now)
        self._take_refused()
        waits = self.scheduler.wake_at(self.now) < math.inf
        assert plan.work or self.outstanding or waits or not self.live, "requests are left, but nothing can be planned"
        self._check_plan(plan)
        self._check_shares(plan, computed)
        if plan.work:
            self.plans.append(plan)
            self.outstanding.append(plan)
        self.check()
        return plan

    def land(self) -> None:
        """Run the oldest outstanding plan and book its result."""
        plan = self.outstanding.popleft()
        result = cut_result(self.scheduler, self.runner.execute(plan))
        self.results.extend(result.sequences)
        for output in self.scheduler.update(plan, result, self.now):
            self._book(output)
        self._take_refused()
        self.check()

    def step(self) -> StepPlan:
        """Plan a step and land the oldest, so that `lag` plans stay outstanding while there is work to plan."""
        while len(self.outstanding) > self.lag:
            self.land()
        plan = self.plan()
        if self.outstanding and (len(self.outstanding) > self.lag or not plan.work):
            self.land()
        return plan

    def step_until(self, condition: Callable[[], object], max_steps: int = 200) -> None:
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"did not come up in {max_steps} steps")

    def drain(self, max_steps: int = 10_000) -> None:
        """Step until every request has ended; nothing may be left behind."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests and not self.outstanding:
                break
            self.step()
        else:
            raise AssertionError(f"not finished after {max_steps} steps")
        assert self.finished.keys() | self.aborted | self.refused.keys() == self.requests.keys()
        assert not self.finished.keys() & self.refused.keys()
        assert self.scheduler.kv.num_free_blocks == self.config.num_blocks
        assert all(request.status is RequestStatus.FINISHED for request in self.requests.values())

    # -- views -------------------------------------------------------------------------------------------------------

    @property
    def live(self) -> list[Request]:
        return list(self.scheduler.requests.values())

    @property
    def num_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests.values())

    @property
    def num_in_use(self) -> int:
        """Blocks that are not free."""
        return self.config.num_blocks - self.scheduler.kv.num_free_blocks

    def admissions(self, request: Request) -> list[Admission]:
        """Every time a request entered the batch, in order."""
        return [a for plan in self.plans for a in plan.admitted if a.request_id == request.request_id]

    def works(self, request: Request) -> list[SequenceWork]:
        """All that was ever planned for a request, in order."""
        return [work for plan in self.plans for work in plan.work if work.request_id == request.request_id]

    # -- checks ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.scheduler.check_invariants()
        if self.outstanding:
            return
        for request in self.scheduler.running.values():
            mirror = self.runner.sequences[request.request_id]
            assert tuple(mirror.token_ids) == request.all_token_ids
            assert tuple(mirror.block_ids) == self.scheduler.kv.table(request.request_id)
            assert mirror.num_computed == request.num_computed_tokens
            assert mirror.num_draft_computed == request.num_draft_computed

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.work or not plan.admitted, "admitted without work"
        assert plan.work or not plan.released, "a plan without work is not executed: its releases would be lost"
        assert len({work.request_id for work in plan.work}) == len(plan.work) <= self.config.max_num_seqs
        assert rows_of(plan) <= self.config.max_num_batched_tokens
        for work in plan.work:
            request = self.requests[work.request_id]
            assert work.num_tokens >= 1
            assert work.num_drafts <= self.config.max_depth
            assert request.speculation.max_depth is None or work.num_drafts <= request.speculation.max_depth
            assert work.num_drafts == 0 or (work.samples and work.num_tokens == 1), "drafts behind a chunk"

    def _check_shares(self, plan: StepPlan, computed: dict[int, int]) -> None:
        """Who is admitted shares all that it can, and no prompt is computed by two who could share it.

        Args:
            computed: tokens with KV of each request that ran before the plan was made; the admitted are added.
        """
        for admission in plan.admitted:
            request = self.requests[admission.request_id]
            wanted = (len(request.prompt_token_ids) - 1) // self.config.block_size * self.config.block_size
            live = [self.requests[i] for i in computed if i in self.scheduler.requests]
            others = [other for other in live if other.siblings is request.siblings]
            can_share = any(computed[other.request_id] >= wanted for other in others)
            assert can_share or all(other.max_output_tokens == 1 for other in others), "a prompt is computed twice"
            shared = wanted if can_share else 0
            if self.config.prefix_cache is PrefixScope.OFF:
                assert admission.num_computed == shared
            else:
                assert shared <= admission.num_computed < request.num_tokens
            assert len(admission.block_ids) * self.config.block_size == admission.num_computed
            assert admission.block_ids == self.scheduler.kv.table(request.request_id)[: len(admission.block_ids)]
            assert admission.num_draft_computed <= admission.num_computed
            computed[request.request_id] = admission.num_computed

    def _take_refused(self) -> None:
        for request_id, error in self.scheduler.take_refused():
            assert request_id not in self.refused, "refused twice"
            assert request_id not in self.aborted | self.finished.keys(), "refused after the end"
            self.refused[request_id] = error

    def _book(self, output: RequestOutput) -> None:
        request = self.requests[output.request_id]
        assert request.request_id not in self.aborted, "output after an abort"
        assert request.request_id not in self.finished, "output after the end"
        tokens = self.outputs.setdefault(request.request_id, [])
        assert output.token_offset == len(tokens)
        assert output.token_ids
        tokens.extend(output.token_ids)
        wanted, reason = expected_end(request, self.config)
        assert tokens == wanted[: len(tokens)]
        assert (output.finish is None) == (output.stats is None) == (len(tokens) < len(wanted))
        if output.finish is not None:
            assert output.finish.reason is reason
            self.finished[request.request_id] = output


def rows_of(plan: StepPlan) -> int:
    """Rows that the budget must cover: the target's, and what a draft model reads beyond them."""
    return plan.num_rows + sum(work.rows_read(1) for work in plan.work if work.draft_catch_up > work.num_tokens)
