"""Between the scheduler and the policy: who may draft how, what is known of each, and what came of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.acceptance import AcceptanceModel
from paceline.core.cost_model import CostModel, StepKind, StepShape
from paceline.core.depth import Chosen, DepthCandidate, DepthPolicy, Offer, Outcome, StepLoad
from paceline.core.params import Method, Verification
from paceline.core.plan import SequenceResult, SequenceWork, StepPlan, StepResult
from paceline.core.request import Request
from paceline.core.speculation_counts import SpeculationCounts

MAX_TENANTS = 1024  # whose counts are kept; the one that was idle for the longest time goes first


@dataclass(slots=True)
class Drafter:
    """One way to draft under one verification rule: what is expected of it, and what it has done."""

    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)


class SpeculationControl:
    """Offers drafters to the policy and learns from results. One caller: the scheduler.

    Depths follow from the history of requests, tenants and drafters alone, never from a drawn draft, which would bias
    sampled output.

    Args:
        policy: chooses depths; it is told every outcome.
        costs: by which seconds saved and seconds spent on rejected drafts are told; None tells none.
    """

    def __init__(self, policy: DepthPolicy, costs: CostModel | None = None) -> None:
        self.policy = policy
        self.costs = costs
        self.drafters: dict[tuple[Method, Verification], Drafter] = {}
        self.tenants: OrderedDict[str, SpeculationCounts] = OrderedDict()
        self.totals = SpeculationCounts()
        self.model_drafts = True  # in the last step that offered it a place
        self.forget()

    def forget(self) -> None:
        """Start every estimate and count anew, as after a warm-up."""
        self.drafters = {(method, rule): Drafter() for method in Method for rule in Verification}
        self.tenants.clear()
        self.totals = SpeculationCounts()
        self.model_drafts = True

    # -- before a step -------------------------------------------------------------------------------------------------

    def choose(self, requests: Sequence[tuple[Request, Mapping[Method, int]]], load: StepLoad) -> list[Chosen]:
        """Method and depth of each decoding request.

        Args:
            requests: with the highest depth by each method that the request may use, none of them 0.
        """
        candidates = [self._candidate(request, highest, load.budget) for request, highest in requests]
        chosen = self.policy.choose(candidates, load)
        if any(Method.DRAFT_MODEL in highest for _, highest in requests):
            self.model_drafts = any(choice.method is Method.DRAFT_MODEL for choice in chosen)
        # The bounds of a candidate are those of its farthest offer.
        return [
            Chosen(choice.method, min(choice.depth, highest.get(choice.method, 0)))
            for choice, (_, highest) in zip(chosen, requests, strict=True)
        ]

    def _candidate(self, request: Request, highest: Mapping[Method, int], budget: int) -> DepthCandidate:
        # The newest token is read by the first pass anyway. What does not fit a step is read in parts, of which the
        # first is offered here; the scheduler grants no drafts before the last.
        catch_up = min(max(0, request.draft_gap - 1), budget // 2)
        offers = tuple(
            Offer(
                method,
                self._acceptance(request, method).survivals(request.tenant, request.residuals[method], depth),
                catch_up if method is Method.DRAFT_MODEL else 0,
            )
            for method, depth in highest.items()
        )
        most = max(highest.values())
        lowest = min(request.speculation.min_depth, most)
        return DepthCandidate(request.request_id, offers, lowest, most, request.steps_without_drafts)

    def _acceptance(self, request: Request, method: Method) -> AcceptanceModel:
        return self.drafters[method, request.params.verification].acceptance

    # -- after a step --------------------------------------------------------------------------------------------------

    def observe(self, plan: StepPlan, result: StepResult, requests: Mapping[int, Request]) -> None:
        """Learn from a step's result, before it is committed to `requests`, the live ones."""
        pairs = list(zip(plan.work, result.sequences, strict=True))
        shape = _shape(pairs, requests)
        bill = None if self.costs is None else _Bill(self.costs, shape, pairs)
        drafts = []
        for work, sequence in pairs:
            request = requests.get(work.request_id)
            # A run that computes a whole prompt besides is no verify step: it could not have drafted.
            if request is None or not work.samples or work.num_tokens > 1:
                continue
            self._learn(request, work, sequence)
            self._record(request, work, sequence, bill)
            drafts.append((work.request_id, sequence.num_drafted, sequence.num_accepted))
        emitted = sum(len(sequence.token_ids) for sequence in result.sequences)
        times = result.times
        if self.costs is not None:
            self.costs.observe(shape, times.draft, times.total)
        self.policy.observe(Outcome(shape, times.draft, times.total, emitted, tuple(drafts)))

    def end(self, request_id: int) -> None:
        """The request is gone."""
        self.policy.forget(request_id)

    def _learn(self, request: Request, work: SequenceWork, sequence: SequenceResult) -> None:
        shared = not request.params.edits_logits
        seen = {work.method: sequence.acceptance} if work.num_drafts else {}
        if work.num_drafts and not sequence.num_drafted:
            seen[work.method] = (0.0,)  # it had nothing to propose, which the next choice should know
        if work.scores_ngram:
            seen[Method.NGRAM] = sequence.scored
        for method, residual in request.residuals.items():
            model = self._acceptance(request, method)
            if seen.get(method):
                model.observe(request.tenant, residual, seen[method], shared)
            else:
                model.age(residual)
        request.steps_without_drafts = 0 if work.num_drafts else request.steps_without_drafts + 1

    def _record(self, request: Request, work: SequenceWork, sequence: SequenceResult, bill: _Bill | None) -> None:
        emitted, drafted = len(sequence.token_ids), sequence.num_drafted
        accepted = min(sequence.num_accepted, emitted)
        saved, rejected = (0.0, 0.0) if bill is None else bill.of(work, emitted, drafted, accepted)
        everyone = [request.counts, self._tenant(request.tenant), self.totals]
        if work.num_drafts:
            everyone.append(self.drafters[work.method, request.params.verification].counts)
        for counts in everyone:
            counts.record(emitted, drafted, accepted, saved, rejected)

    def _tenant(self, name: str) -> SpeculationCounts:
        counts = self.tenants.setdefault(name, SpeculationCounts())
        self.tenants.move_to_end(name)
        if len(self.tenants) > MAX_TENANTS:
            self.tenants.popitem(last=False)
        return counts


class _Bill:
    """What the drafts of one step cost and what its tokens are worth, in seconds, by the cost model."""

    def __init__(self, costs: CostModel, shape: StepShape, pairs: list[tuple[SequenceWork, SequenceResult]]) -> None:
        slots = sum(sequence.num_drafted for _, sequence in pairs)
        self._without = costs.target(shape.rows - slots, shape.context, shape.sequences)
        with_slots = costs.target(shape.rows, shape.context, shape.sequences)
        most = max(shape.draft_passes, default=0)
        first, later = costs.first_passes(most), costs.draft_passes(most)
        self._sampling = sum(work.samples for work, _ in pairs)
        self._slot = (with_slots - self._without) / slots if slots else 0.0
        # Shared by those in it.
        self._passes = [
            float((later if number else first)[count]) / count for number, count in enumerate(shape.draft_passes)
        ]

    def of(self, work: SequenceWork, emitted: int, drafted: int, accepted: int) -> tuple[float, float]:
        """Seconds saved by one request's drafts, and spent on those of them that were rejected."""
        passes = self._passes[: work.num_drafts] if work.method is Method.DRAFT_MODEL else []
        spent = drafted * self._slot + sum(passes)
        rejected = (drafted - accepted) * self._slot + sum(passes[accepted:])
        return (emitted - 1) * self._without / self._sampling - spent, rejected


def _shape(pairs: list[tuple[SequenceWork, SequenceResult]], requests: Mapping[int, Request]) -> StepShape:
    """The step as it was executed: an n-gram may have proposed less than was planned."""
    drafting = [work for work, _ in pairs if work.method is Method.DRAFT_MODEL and work.num_drafts]
    deepest = max((work.num_drafts for work in drafting), default=0)
    passes = tuple(sum(work.num_drafts > number for work in drafting) for number in range(deepest))
    read = sum(work.draft_catch_up for work, _ in pairs)
    if any(work.num_tokens > 1 or not work.samples for work, _ in pairs):
        kind = StepKind.MIXED
    else:
        kind = StepKind.VERIFY if any(sequence.num_drafted for _, sequence in pairs) else StepKind.DECODE
    return StepShape(
        rows=sum(work.num_tokens + sequence.num_drafted for work, sequence in pairs),
        context=sum(
            requests[work.request_id].num_computed_tokens + work.num_tokens
            for work, _ in pairs
            if work.request_id in requests
        ),
        draft_passes=passes,
        draft_rows=max(0, read - len(drafting)),
        kind=kind,
        sequences=len(pairs),
    )
