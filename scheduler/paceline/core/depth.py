"""How deep each request drafts in the next step: what a policy is told, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.cost_model import StepShape
from paceline.core.params import Method


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
        emitted: tokens, all sequences.
        drafts: request id, drafts verified and drafts kept of each decode; 0 and 0 where it drafted nothing.
    """

    shape: StepShape
    draft_seconds: float
    seconds: float
    emitted: int
    drafts: tuple[tuple[int, int, int], ...]


class DepthPolicy(Protocol):
    """Chooses from history alone."""

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        """A method and a depth for each candidate, within its bounds. Called once for each step.

        The scheduler may grant less where memory or budget is short.

        Args:
            slot_price: tokens that a draft slot must earn besides its time: what KV or a deadline is short of.
        """
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished step."""
        ...

    def forget(self, request_id: int) -> None:
        """The request has ended; an unknown one is ignored."""
        ...


NOTHING = Chosen(Method.NONE, 0)


def within_bounds(candidate: DepthCandidate, offer: Offer, depth: int) -> Chosen:
    """That depth by that offer, or the nearest one allowed."""
    depth = min(max(depth, candidate.lowest), candidate.highest, len(offer.survivals))
    return Chosen(offer.method, depth) if depth else NOTHING


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """The same depth for everyone by the first offer, wherever bounds allow it."""

    depth: int

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        return [within_bounds(c, c.offers[0], self.depth) for c in candidates]

    def observe(self, outcome: Outcome) -> None:
        pass

    def forget(self, request_id: int) -> None:
        pass
