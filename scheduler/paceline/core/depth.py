"""How deep each request drafts in the next step: what a policy is told, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.cost_model import StepShape
from paceline.core.params import NO_METHOD, Method


@dataclass(frozen=True, slots=True)
class Offer:
    """One way to draft for a request.

    Attributes:
        method: NGRAM or DRAFT_MODEL.
        survivals: probability that the first 1, 2, ... drafts are all kept; non-increasing, and as many as the method
            can draft, at least one.
        catch_up: tokens that the draft model must read before it can draft.
    """

    method: Method
    survivals: Sequence[float]
    catch_up: int = 0


@dataclass(frozen=True, slots=True)
class DepthCandidate:
    """A request that will decode in the step being planned.

    Attributes:
        offers: one, or two by different methods.
        lowest, highest: bounds that the choice keeps; an offer that cannot reach `lowest` goes as deep as it can.
        steps_without_drafts: decode steps since the request last drafted.
    """

    request_id: int
    offers: tuple[Offer, ...]
    lowest: int
    highest: int
    steps_without_drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The step so far, before any draft.

    Attributes:
        rows: of the target's forward: prompt chunks, and one for each decode.
        context: tokens whose KV is read, once per sequence.
        sampling: sequences that sample in this step, candidates included.
        budget: rows that drafts and catching up may take.
    """

    rows: int
    context: int
    sampling: int
    budget: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a request drafts; the method is NONE if the depth is 0."""

    method: Method
    depth: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished step brought.

    Attributes:
        draft_seconds: of `seconds`, those of the draft model.
        emitted: tokens that decodes brought.
        drafts: request id, drafts verified and drafts kept of each decode; 0 and 0 where it drafted nothing.
    """

    shape: StepShape
    draft_seconds: float
    seconds: float
    emitted: int
    drafts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The last choice in numbers, for statistics.

    Attributes:
        depth: the deepest of all.
        slots: draft slots, all requests.
        price_of_time: tokens that a second is worth.
        rate: expected tokens per second of the step.
        predicted_seconds: the step's duration.
    """

    depth: int = 0
    slots: int = 0
    price_of_time: float = 0.0
    rate: float = 0.0
    predicted_seconds: float = 0.0


class DepthPolicy(ABC):
    """Chooses from history alone.

    Attributes:
        decision: the last one; None of a policy that knows no prices.
    """

    decision: Decision | None = None

    @abstractmethod
    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        """A method and a depth for each candidate, within its bounds.

        The scheduler may grant less where memory or budget is short.

        Args:
            slot_price: tokens that a draft slot must earn besides its time: what KV or a deadline is short of.
        """

    def standing(self, load: StepLoad, *, slot_price: float = 0.0) -> Mapping[int, Chosen] | None:
        """What was chosen before, by request, if that holds for this step too: then nobody has to be offered anew.

        Asked once for each step, before `choose`; None calls for that.
        """
        return None

    def join(self, candidate: DepthCandidate) -> Chosen:
        """The same for a request that was not there before, while what stands goes on to hold."""
        raise NotImplementedError

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished step."""
        return

    def forget(self, request_id: int) -> None:
        """The request has ended; an unknown one is ignored."""
        return


NOTHING = Chosen(NO_METHOD, 0)


def choose_depths(
    policy: DepthPolicy,
    load: StepLoad,
    highest: Mapping[int, Mapping[Method, int]],
    candidate: Callable[[int], DepthCandidate],
    *,
    slot_price: float = 0.0,
) -> list[Chosen]:
    """Ask a policy for one step: what it holds on to, or its choice among candidates, which are made where needed.

    Args:
        highest: by request, in order: how deep it may draft by each method that it may use.
        candidate: makes that of a request.
    """
    standing = policy.standing(load, slot_price=slot_price)
    if standing is not None:
        chosen = [
            standing[request_id] if request_id in standing else policy.join(candidate(request_id))
            for request_id in highest
        ]
        if sum([choice.depth for choice in chosen]) > load.budget:
            standing = None
    if standing is None:
        chosen = policy.choose([candidate(request_id) for request_id in highest], load, slot_price=slot_price)
    # What stands may be too deep by now, and the bounds of a candidate are those of its farthest offer.
    return [_at_most(choice, limits) for choice, limits in zip(chosen, highest.values(), strict=True)]


def _at_most(choice: Chosen, highest: Mapping[Method, int]) -> Chosen:
    limit = highest.get(choice.method, 0)
    if choice.depth <= limit:
        return choice
    return Chosen(choice.method, limit) if limit else NOTHING


def within_bounds(candidate: DepthCandidate, offer: Offer, depth: int) -> Chosen:
    """That depth by that offer, or the nearest one allowed."""
    depth = min(max(depth, candidate.lowest), candidate.highest, len(offer.survivals))
    return Chosen(offer.method, depth) if depth else NOTHING


@dataclass(frozen=True, slots=True)
class FixedDepth(DepthPolicy):
    """The same depth for everyone by the first offer, wherever bounds allow it."""

    depth: int

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        return [within_bounds(c, c.offers[0], self.depth) for c in candidates]
