"""How deep requests draft in a step: what there is to choose from, what was chosen, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.cost_model import StepShape
from paceline.core.method import NO_METHOD, Method


class Offer:
    """One way to draft for a request.

    Attributes:
        method: NGRAM or DRAFT_MODEL.
        survivals: probability that the first 1, 2, ... drafts are all kept; non-increasing, and as many as the method
            can draft, at least one.
        catch_up: tokens that the draft model must read before it can draft.
    """

    __slots__ = ("catch_up", "method", "survivals")

    def __init__(self, method: Method, survivals: list[float], catch_up: int = 0) -> None:
        self.method = method
        self.survivals = survivals
        self.catch_up = catch_up


class DepthCandidate:
    """A request that will decode in the step being planned.

    Attributes:
        offers: one, or two by different methods.
        lowest, highest: bounds that the choice keeps; an offer that cannot reach `lowest` goes as deep as it can.
        steps_without_model: decode steps since its draft model last drafted.
        tokens_to_serve: of completions, that are to be expected behind what its draft model has to read.
        match: tokens that agree before the first proposal of its n-grams; 0 if they offer nothing.
    """

    __slots__ = ("highest", "lowest", "match", "offers", "request_id", "steps_without_model", "tokens_to_serve")

    def __init__(
        self,
        request_id: int,
        offers: tuple[Offer, ...],
        lowest: int,
        highest: int,
        steps_without_model: int = 0,
        match: int = 0,
        tokens_to_serve: float = math.inf,
    ) -> None:
        self.request_id = request_id
        self.offers = offers
        self.lowest = lowest
        self.highest = highest
        self.steps_without_model = steps_without_model
        self.match = match
        self.tokens_to_serve = tokens_to_serve

    def reach(self, max_depth: int) -> int:
        """How deep it may draft where nobody goes deeper than that, unless bounds ask for it."""
        return max(self.lowest, min(self.highest, max_depth))


# Of this, and of what follows, there are some in every few steps; generated constructors take ten times as long.
@dataclass(init=False, slots=True)
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

    def __init__(self, rows: int, context: int, sampling: int, budget: int) -> None:
        self.rows = rows
        self.context = context
        self.sampling = sampling
        self.budget = budget


@dataclass(init=False, slots=True, unsafe_hash=True)
class Chosen:
    """What a request drafts; the method is NONE if the depth is 0. Nobody changes it: steps share it."""

    method: Method
    depth: int

    def __init__(self, method: Method, depth: int) -> None:
        self.method = method
        self.depth = depth


@dataclass(init=False, slots=True)
class Outcome:
    """What a finished step brought.

    Attributes:
        draft_seconds: of `seconds`, those of the draft model.
        decodes: requests that decoded.
        emitted: tokens that they brought.
        drafts: request id, drafts verified and drafts kept of those that drafted.
    """

    shape: StepShape
    draft_seconds: float
    seconds: float
    decodes: int
    emitted: int
    drafts: tuple[tuple[int, int, int], ...]

    def __init__(
        self,
        shape: StepShape,
        draft_seconds: float,
        seconds: float,
        decodes: int,
        emitted: int,
        drafts: tuple[tuple[int, int, int], ...],
    ) -> None:
        self.shape = shape
        self.draft_seconds = draft_seconds
        self.seconds = seconds
        self.decodes = decodes
        self.emitted = emitted
        self.drafts = drafts


@dataclass(init=False, slots=True)
class Decision:
    """The last choice in numbers, for statistics.

    Attributes:
        depth: the deepest of all.
        slots: draft slots, all requests.
        price_of_time: tokens that a second is worth.
    """

    depth: int
    slots: int
    price_of_time: float

    def __init__(self, depth: int = 0, slots: int = 0, price_of_time: float = 0.0) -> None:
        self.depth = depth
        self.slots = slots
        self.price_of_time = price_of_time


NOTHING: Final = Chosen(NO_METHOD, 0)


def slots_of(chosen: list[Chosen]) -> int:
    """How many drafts that is, all requests."""
    slots = 0
    for choice in chosen:
        slots += choice.depth
    return slots


def passes_of(depths: Sequence[int]) -> list[int]:
    """Sequences in each pass of the draft model, given how deep it drafts for each request."""
    passes: list[int] = []
    for depth in depths:
        passes.extend([0] * (depth - len(passes)))
        for number in range(depth):
            passes[number] += 1
    return passes


def offer_by(method: Method, candidate: DepthCandidate) -> Offer | None:
    for offer in candidate.offers:
        if offer.method is method:
            return offer
    return None


def within_bounds(candidate: DepthCandidate, offer: Offer, depth: int) -> Chosen:
    """That depth by that offer, or the nearest one allowed."""
    depth = min(max(depth, candidate.lowest), candidate.highest, len(offer.survivals))
    return Chosen(offer.method, depth) if depth else NOTHING
