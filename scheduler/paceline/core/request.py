"""A request inside the scheduler, from arrival to its one end."""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.acceptance import Residual
from paceline.core.method import DRAFT_MODEL, NO_METHOD, Method
from paceline.core.params import (
    ANYBODY,
    SchedulingParams,
    SequenceParams,
    SpeculationParams,
    StopParams,
)
from paceline.core.plan import Finish, SequenceWork
from paceline.core.speculation_counts import SpeculationCounts


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()  # waiting again, with nothing computed; its emitted tokens are kept
    FINISHED = enum.auto()


# As in `method.py`.
RUNNING: Final = RequestStatus.RUNNING
FINISHED: Final = RequestStatus.FINISHED


class Siblings:
    """The completions of one prompt, which share its KV: one of them reads it, and the others wait for that.

    Mutated by the scheduler and by `RequestQueue`.

    Attributes:
        running: those in the batch, in the order in which they were admitted.
        held: those that wait for the prompt: they are in the queue, but their turn does not come.
        have_begun: one has run: somebody may be reading the stream that they share.
    """

    __slots__ = ("have_begun", "held", "running")

    def __init__(self) -> None:
        self.running: dict[int, Request] = {}
        self.held: list[Request] = []
        self.have_begun = False


class Request:
    """One completion that is asked for: what was asked, how far it is, and what is known of its drafts.

    Mutated by the scheduler, and for it by `Prefixes`, which knows what is computed, and by `SpeculationControl`, which
    knows what drafts brought. Only `companion` is for whoever uses the scheduler.

    Attributes:
        params: what the runner has to know about it.
        methods: how drafts may be made, by the request's own choice or the server's; none if not at all.
        method: the first of them.
        scheduling: whose request it is, and when it is wanted.
        rank: its place among the requests of its tenant: the lowest is let in first and gives way last.
        admitted_at: when it last entered the batch.
        awaits_token: it had none since.
        charged_seconds: engine time that its tenant was charged for it.
        limits: its highest depth by each of these methods, while its end is far.
        is_example: what it accepts says something of others.
        residuals: by method, what is known of the request beside what is known of its tenant and the drafter.
        match: how many of its last tokens stood before in this order, as of the last result; n-grams have nothing to
            propose if none.
        max_total_tokens: prompt and completion tokens at most: the request's own limit or the model's.
        chosen_max_tokens: its own limit; None if it gave none, or the model's length is reached before.
        num_tokens: known ones: prompt and emitted.
        num_computed_tokens: leading tokens with target KV, as of the last result.
        num_draft_computed: leading tokens with draft KV, as of the last result.
        num_cached_tokens: prompt tokens whose KV was there when the request was first admitted.
        usual_length: tokens that completions of its kind have, as of its first admission; infinite if none has ended.
        num_uses: requests that a token of a prompt of its tenant serves, as of then: others find it in the cache.
        num_unread: prompt tokens that its tenant paid for in advance and that no step has computed, as of when it last
            entered or left the batch.
        block_keys: of its leading full blocks, as far as somebody asked.
        num_known_blocks, num_drafted_blocks: leading blocks that the prefix cache was told of, and whose draft KV.
        depth: drafts verified in the last decode.
        num_in_vain: preemptions since its last token.
        seconds_to_token: from its last admission after which it got a token to that token.
        counts_by_method: what speculation brought, by who drafted; NONE for verify steps without drafts.
        counts_without_drafts: those of NONE.
        pending: work that was planned and whose result is not in yet, oldest first (at most two, with one plan
            outstanding).
        siblings: the completions of the same prompt, itself included.
        companion: what somebody keeps beside it, and finds again by it. The core never looks at it.
    """

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: tuple[int, ...],
        params: SequenceParams,
        stop: StopParams,
        speculation: SpeculationParams,
        arrival: float,
        *,
        methods: tuple[Method, ...],
        scheduling: SchedulingParams = ANYBODY,
        max_total_tokens: int,
        siblings: Siblings | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.stop = stop
        # What is asked for every token stands here, too, and not only behind another object.
        self.stop_token_ids = stop.token_ids
        self.ignore_eos = stop.ignore_eos
        self.min_tokens = stop.min_tokens
        self.speculation = speculation
        self.arrival = arrival
        self.methods = methods
        self.method = methods[0] if methods else NO_METHOD
        self.is_example = not params.edits_logits
        self.limits = dict.fromkeys(methods, speculation.max_depth) if speculation.max_depth else {}
        self.scheduling = scheduling
        self.tenant = scheduling.tenant
        self.max_total_tokens = max_total_tokens
        room = max_total_tokens - len(prompt_token_ids)
        self.chosen_max_tokens = stop.max_tokens if stop.max_tokens == room else None

        self.status = RequestStatus.WAITING
        self.output_token_ids: list[int] = []
        self.num_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_draft_computed = 0
        self.num_cached_tokens = 0
        self.usual_length = math.inf
        self.num_uses = 1.0
        self.num_unread = 0
        self.block_keys: list[bytes] = []
        self.num_known_blocks = 0
        self.num_drafted_blocks = 0
        self.pending: tuple[SequenceWork, ...] = ()
        self.siblings = Siblings() if siblings is None else siblings

        self.residuals = {method: Residual() for method in methods}
        self.match = 0
        self.counts_by_method = defaultdict[Method, SpeculationCounts](SpeculationCounts)
        self.counts_without_drafts = self.counts_by_method[NO_METHOD]
        self.depth = 0
        self.steps_without_model = 0
        self.num_preemptions = 0
        self.num_in_vain = 0
        self.seconds_to_token = 0.0
        self.rank = 0.0
        self.admitted_at = -math.inf
        self.awaits_token = False
        self.charged_seconds = 0.0
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.companion: object = None

    @property
    def counts(self) -> SpeculationCounts:
        """What speculation brought so far."""
        total = SpeculationCounts()
        for counts in self.counts_by_method.values():
            total.add(counts)
        return total

    @property
    def max_output_tokens(self) -> int:
        return self.max_total_tokens - len(self.prompt_token_ids)

    @property
    def tokens_to_serve(self) -> float:
        """Tokens of completions that are to be expected behind what is read now: its own, and those of others who find
        that in the cache. A completion is expected to become as long as usual, and at least twice as long as it is.
        """
        emitted = len(self.output_token_ids)
        to_come = max(self.usual_length - emitted, float(emitted))
        return min(to_come, float(self.max_output_tokens - emitted)) * self.num_uses

    @property
    def all_token_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids + tuple(self.output_token_ids)

    def emit(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the completion."""
        self.output_token_ids.extend(token_ids)
        self.num_tokens += len(token_ids)

    def tokens_between(self, start: int, end: int) -> Sequence[int]:
        """Known tokens at positions from `start` up to `end`."""
        prompt, size = self.prompt_token_ids, len(self.prompt_token_ids)
        if end <= size:
            return prompt[start:end]
        if start >= size:
            return self.output_token_ids[start - size : end - size]
        return prompt[start:] + tuple(self.output_token_ids[: end - size])

    # With a plan outstanding the next token count is not known, but its bounds are. A step that samples emits between 1
    # and depth + 1 tokens and leaves every known token but the newest computed.

    @property
    def awaits_sample(self) -> bool:
        return any(work.samples for work in self.pending)

    @property
    def most_tokens(self) -> int:
        """Known tokens once every pending result is in, at most."""
        if not self.pending:
            return self.num_tokens
        return self.num_tokens + sum(1 + work.num_drafts for work in self.pending if work.samples)

    @property
    def num_to_compute(self) -> int:
        """Known tokens that will have no KV once every pending result is in."""
        if not self.pending:
            return self.num_tokens - self.num_computed_tokens
        if self.awaits_sample:
            return 1
        return self.num_tokens - self.num_computed_tokens - sum(work.num_tokens for work in self.pending)

    @property
    def draft_gap(self) -> int:
        """Known tokens without draft KV once every pending result is in, at most."""
        gap = self.num_tokens - self.num_draft_computed
        for work in self.pending:
            if work.num_drafts and work.method is DRAFT_MODEL and gap > work.draft_catch_up:
                # Drafts for which there was no memory have left it behind by more than that step was planned to read.
                gap += 1 + work.num_drafts
            elif work.num_drafts and work.method is DRAFT_MODEL:
                # A draft model that drafted is one token behind, or two after a full acceptance. It has seen none of
                # the drafts that a grammar forced.
                gap = 2 if self.params.constraints.grammar is None else work.num_drafts + 1
            else:
                gap = max(0, gap - work.draft_catch_up) + (1 + work.num_drafts if work.samples else 0)
        return gap

    @property
    def surely_ends(self) -> bool:
        """The pending results reach the token limit, whatever they are."""
        # What is known never reaches the limit: then the request would have ended.
        return bool(self.pending) and (
            self.num_tokens + sum(work.samples for work in self.pending) >= self.max_total_tokens
        )


@dataclass(frozen=True, slots=True)
class RequestStats:
    """A finished request's account. Times are in seconds."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    method: Method
    verify_steps: int
    draft_steps: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...]
    depths: tuple[int, ...]  # verify steps by the number of drafts verified
    saved_seconds: float  # against no drafts, by the cost model
    rejected_seconds: float  # spent on drafts that were rejected
    engine_seconds: float  # that the tenant was charged
    acceptance_length: float  # emitted tokens per verify step; 0 without one
    preemptions: int
    queue_seconds: float
    time_to_first_token: float
    total_seconds: float

    @classmethod
    def of(cls, request: Request, now: float) -> RequestStats:
        counts = request.counts
        first_scheduled = now if request.first_scheduled is None else request.first_scheduled
        first_token = now if request.first_token is None else request.first_token
        return cls(
            prompt_tokens=len(request.prompt_token_ids),
            cached_prompt_tokens=request.num_cached_tokens,
            completion_tokens=len(request.output_token_ids),
            method=request.method,
            verify_steps=counts.verify_steps,
            draft_steps=counts.draft_steps,
            drafted_tokens=counts.drafted,
            accepted_tokens=counts.accepted,
            accepted_by_position=tuple(counts.accepted_by_position),
            depths=tuple(counts.depths),
            saved_seconds=counts.saved_seconds,
            rejected_seconds=counts.rejected_seconds,
            engine_seconds=request.charged_seconds,
            acceptance_length=counts.emitted / counts.verify_steps if counts.verify_steps else 0.0,
            preemptions=request.num_preemptions,
            queue_seconds=first_scheduled - request.arrival,
            time_to_first_token=first_token - request.arrival,
            total_seconds=now - request.arrival,
        )


class RequestOutput:
    """New tokens of one request; `finish` and `stats` come once, with the last of them."""

    __slots__ = ("finish", "request_id", "stats", "token_ids", "token_offset")

    def __init__(
        self,
        request_id: int,
        token_offset: int,
        token_ids: tuple[int, ...],
        finish: Finish | None = None,
        stats: RequestStats | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_offset = token_offset
        self.token_ids = token_ids
        self.finish = finish
        self.stats = stats
