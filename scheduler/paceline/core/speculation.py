"""Between the scheduler and the policy: who may draft how, what is known of each, and what came of it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from paceline.core.acceptance import MODEL_TRAITS, NGRAM_TRAITS, AcceptanceModel
from paceline.core.calibration import Calibration
from paceline.core.cost_model import DECODE, MIXED, VERIFY, CostModel, StepShape
from paceline.core.depth import Chosen, DepthCandidate, Offer, Outcome, StepLoad, passes_of
from paceline.core.depth_choices import choose_depths
from paceline.core.depth_policy import DepthPolicy
from paceline.core.method import DRAFT_MODEL, NGRAM, Method
from paceline.core.params import Verification
from paceline.core.plan import SequenceResult, SequenceWork, StepPlan, StepResult
from paceline.core.request import FINISHED, Request
from paceline.core.speculation_counts import SpeculationCounts
from paceline.core.speculation_report import DrafterReport, RequestReport, SpeculationReport, TenantReport
from paceline.core.step_bill import rows_read, write_bill

MAX_TENANTS: Final = 1024  # whose counts are kept; the one that was idle for the longest time goes first


@dataclass(slots=True)
class TrackRecord:
    """Of one way to draft under one verification rule: what is expected of it, and what it did for ended requests."""

    acceptance: AcceptanceModel
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)


class SpeculationControl:
    """Offers drafters to the policy and learns from results. One caller: the scheduler.

    Depths follow from the history of requests, tenants and drafters alone, never from a drawn draft, which would bias
    sampled output.

    Args:
        policy: chooses depths; it is told every outcome.
        costs: by which seconds saved and seconds spent on rejected drafts are told; None tells none.

    Attributes:
        drafters: track records.
        tenants, totals: what speculation brought to requests that have ended.
    """

    def __init__(self, policy: DepthPolicy, costs: CostModel | None = None) -> None:
        self.policy = policy
        self.costs = costs
        self.forget()

    def forget(self) -> None:
        """Start acceptance and counts anew, as after a warm-up; the policy and its costs stay."""
        self.drafters = {
            (method, rule): TrackRecord(AcceptanceModel(NGRAM_TRAITS if method is NGRAM else MODEL_TRAITS))
            for method in Method
            for rule in Verification
        }
        self._models = {
            rule: {method: self.drafters[method, rule].acceptance for method in Method} for rule in Verification
        }
        self.tenants: OrderedDict[str, SpeculationCounts] = OrderedDict()
        self.totals = SpeculationCounts()
        # In the last step in which requests asked for it, and in which nobody copied instead. A full step counts, too:
        # where prompts leave no rows to draft in, reading them along would be a price without a return.
        self.model_drafts = True

    @property
    def first_rows(self) -> int:
        """Of each sequence in the first pass of the draft model: tokens that it need not read before."""
        return 1 if self.costs is None else self.costs.first_rows

    # -- before a step -------------------------------------------------------------------------------------------------

    def choose(
        self,
        requests: list[Request],
        highest: list[dict[Method, int]],
        load: StepLoad,
        slot_price: float = 0.0,
    ) -> list[Chosen]:
        """Method and depth of each decoding request.

        Args:
            highest: the depth of each by each method that it may use, none of them 0.
            slot_price: tokens that a draft slot must earn besides its time.
        """
        allowed = [
            # n-grams may have nothing to propose: only a model can promise a lowest depth.
            {DRAFT_MODEL: limits[DRAFT_MODEL]} if request.speculation.min_depth and DRAFT_MODEL in limits else limits
            for request, limits in zip(requests, highest)
        ]
        matches = [request.match if NGRAM in limits else 0 for request, limits in zip(requests, allowed)]
        chosen = choose_depths(
            self.policy,
            load,
            [request.request_id for request in requests],
            allowed,
            matches,
            lambda indices: [self._candidate(requests[i], allowed[i], matches[i], load.budget) for i in indices],
            slot_price=slot_price,
        )
        if any([DRAFT_MODEL in limits for limits in highest]):
            methods = [choice.method for choice in chosen]
            self.model_drafts = DRAFT_MODEL in methods or (NGRAM in methods and self.model_drafts)
        return chosen

    def reads_along(self, request: Request, sequences: int) -> bool:
        """Shall the draft model read this prompt while the target does? What it does not read it catches up on once it
        is asked for a draft, for as many seconds of its own: where few drafts are to be expected, it waits for that. A
        request that must draft is asked at once.

        Args:
            sequences: that will decode.
        """
        if request.speculation.min_depth:
            return True
        if not self.model_drafts:
            return False
        [survival] = self._survivals(request, DRAFT_MODEL, 1)
        unread = request.num_tokens - request.num_draft_computed
        context = sequences * request.num_tokens
        return self.policy.reads_along(unread, request.tokens_to_serve, survival, sequences, context)

    def _candidate(self, request: Request, limits: dict[Method, int], match: int, budget: int) -> DepthCandidate:
        """What the policy chooses among: a request with the depths that it may have."""
        # The newest tokens are read by the first pass anyway. What does not fit a step is read in parts, of which the
        # first is offered here; the scheduler grants no drafts before the last.
        catch_up = min(max(0, request.draft_gap - self.first_rows), budget // 2)
        most = max(limits.values())
        offers = tuple(
            [
                Offer(method, self._survivals(request, method, depth), catch_up if method is DRAFT_MODEL else 0)
                for method, depth in limits.items()
            ]
        )
        lowest = min(request.speculation.min_depth, most)
        drafts = any([work.num_drafts and work.method is DRAFT_MODEL for work in request.pending])
        idle = 0 if drafts else request.steps_without_model
        if catch_up and not drafts and DRAFT_MODEL not in request.counts_by_method:
            idle = max(1, idle)  # it has missed the prompt
        return DepthCandidate(request.request_id, offers, lowest, most, idle, match, request.tokens_to_serve)

    def _survivals(self, request: Request, method: Method, depth: int) -> list[float]:
        model, residual = self._models[request.params.verification][method], request.residuals[method]
        agreed, awaited = _agreed(request, method), 0
        if method is NGRAM and request.match:
            awaited = sum([1 + work.num_drafts * (work.method is NGRAM) for work in request.pending if work.samples])
        if not awaited:
            return model.survivals(request.tenant, residual, depth, agreed=agreed)
        return model.survivals_behind(request.tenant, residual, depth, agreed, awaited)

    # -- after a step --------------------------------------------------------------------------------------------------

    def observe(self, plan: StepPlan, result: StepResult, requests: list[Request]) -> list[float]:
        """Learn from a step's result, before it is committed to `requests`.

        Args:
            requests: of each work of the plan; nothing is learnt of those that have ended.

        Returns:
            What each work of the plan is charged, in seconds; they sum to the step's duration.
        """
        contexts = [
            0 if request.status is FINISHED else request.num_computed_tokens + work.num_tokens
            for work, request in zip(plan.work, requests)
        ]
        shape = _shape(plan.work, result.sequences, sum(contexts), self.first_rows)
        bill = write_bill(self.costs, shape, plan.work, result.sequences, contexts, result.times.total)
        drafts, decodes, emitted = [], 0, 0
        for work, sequence, request, price in zip(plan.work, result.sequences, requests, bill.drafts):
            if request.status is FINISHED or not work.samples:
                continue
            # A run that computes a whole prompt besides is no verify step: it could not have drafted.
            if work.num_tokens > 1:
                request.match = sequence.match
                continue
            if request.methods:
                self._learn(request, work, sequence)
                request.match = sequence.match
            tokens, drafted, accepted = len(sequence.token_ids), sequence.num_drafted, sequence.num_accepted
            request.depth = drafted
            counts = request.counts_by_method[work.method] if work.num_drafts else request.counts_without_drafts
            counts.record(tokens, drafted, accepted if accepted < tokens else tokens, price)
            if drafted:
                drafts.append((work.request_id, drafted, accepted))
            decodes += 1
            emitted += tokens
        times = result.times
        if self.costs is not None:
            self.costs.observe(shape, times.draft, times.total)
        self.policy.observe(Outcome(shape, times.draft, times.total, decodes, emitted, tuple(drafts)))
        return bill.charges

    def preempted(self, request: Request) -> None:
        """The request has lost its KV: what was chosen for it was chosen for a draft model that had read its text."""
        self.policy.forget(request.request_id)

    def end(self, request: Request) -> None:
        """The request is gone: what it brought is booked for its tenant, its drafters and the whole server."""
        self.policy.forget(request.request_id)
        for method, counts in request.counts_by_method.items():
            self.drafters[method, request.params.verification].counts.add(counts)
        counts = request.counts
        self.totals.add(counts)
        tenant = self.tenants.setdefault(request.tenant, SpeculationCounts())
        tenant.add(counts)
        self.tenants.move_to_end(request.tenant)
        if len(self.tenants) > MAX_TENANTS:
            self.tenants.popitem(last=False)

    # -- what there is to tell -----------------------------------------------------------------------------------------

    def calibration(self, method: Method, rule: Verification) -> Calibration:
        """How well the acceptance of that drafter was predicted."""
        return self.drafters[method, rule].acceptance.calibration

    def report(self, requests: Iterable[Request]) -> SpeculationReport:
        """How speculation does at this moment, the live requests included.

        Args:
            requests: the live ones.
        """
        drafters = {key: record.counts.copy() for key, record in self.drafters.items()}
        tenants = defaultdict(SpeculationCounts, {name: counts.copy() for name, counts in self.tenants.items()})
        totals = self.totals.copy()
        live = {}
        for request in requests:
            counts = request.counts
            for method, own in request.counts_by_method.items():
                drafters[method, request.params.verification].add(own)
            tenants[request.tenant].add(counts)
            totals.add(counts)
            live[request.request_id] = self._request_report(request, counts)
        errors = {} if self.costs is None else self.costs.errors()
        plain = errors.get(DECODE)
        return SpeculationReport(
            decision=self.policy.decision,
            drafters={
                key: DrafterReport(tuple(self.drafters[key].acceptance.rates()), counts)
                for key, counts in drafters.items()
                if counts.drafted
            },
            tenants={name: self._tenant_report(name, counts) for name, counts in tenants.items()},
            requests=live,
            totals=totals,
            errors=errors,
            checked_saved_seconds=totals.gained_seconds * plain.ratio - totals.spent_seconds if plain else None,
        )

    def _tenant_report(self, tenant: str, counts: SpeculationCounts) -> TenantReport:
        acceptance = {
            key: record.acceptance.rates(tenant)[0]
            for key, record in self.drafters.items()
            if record.acceptance.is_observed
        }
        return TenantReport(acceptance, counts)

    def _request_report(self, request: Request, counts: SpeculationCounts) -> RequestReport:
        acceptance = {method: self._survivals(request, method, 1)[0] for method in request.residuals}
        return RequestReport(request.tenant, request.depth, acceptance, counts)

    # -- learning ------------------------------------------------------------------------------------------------------

    def _learn(self, request: Request, work: SequenceWork, sequence: SequenceResult) -> None:
        drafter = work.method if work.num_drafts else None
        models = self._models[request.params.verification]
        for method, residual in request.residuals.items():
            labels: tuple[float, ...] = ()
            # Without a match this is a prompt's last row, whose match nobody knew, or was planned ahead of a text that
            # now has none: that says nothing of matches.
            if method is not NGRAM or request.match:
                labels = sequence.acceptance if method is drafter else sequence.scored if method is NGRAM else ()
            if labels:
                agreed = _agreed(request, method)
                models[method].observe(request.tenant, residual, labels, request.is_example, agreed)
            else:
                residual.age()
        request.steps_without_model = 0 if drafter is DRAFT_MODEL else request.steps_without_model + 1


def _agreed(request: Request, method: Method) -> int:
    """Positions that count as kept before the first draft. For n-grams, a match is taken for a match of its first
    token, and each token behind that for a draft that was kept.
    """
    return request.match - 1 if method is NGRAM and request.match else 0


def _shape(
    works: tuple[SequenceWork, ...], results: tuple[SequenceResult, ...], context: int, first_rows: int
) -> StepShape:
    """The step as it was executed: an n-gram may have proposed less than was planned, and a grammar all there was."""
    depths: list[int] = []  # by the draft model
    read = tokens = samples = slots = 0
    for work, result in zip(works, results):
        if work.num_drafts and work.method is DRAFT_MODEL and not result.is_forced:
            depths.append(work.num_drafts)
        if work.draft_catch_up:
            read += rows_read(work, result, first_rows)
        tokens += work.num_tokens
        samples += work.samples
        slots += result.num_drafted
    is_mixed = tokens > len(works) or samples < len(works)
    kind = MIXED if is_mixed else VERIFY if slots else DECODE
    return StepShape(tokens + slots, context, tuple(passes_of(depths)), read, kind, len(works))
