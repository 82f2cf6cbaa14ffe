"""Who chooses how deep each request drafts in the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from paceline.core.depth import NOTHING, Chosen, Decision, DepthCandidate, Outcome, StepLoad, within_bounds
from paceline.core.params import Method


class DepthPolicy(Protocol):
    """Chooses from history alone. Who inherits this has to say nothing but `choose`."""

    @property
    def decision(self) -> Decision | None:
        """The last one; None of a policy that knows no prices."""
        return None

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        """A method and a depth for each candidate, within its bounds.

        The scheduler may grant less where memory or budget is short.

        Args:
            slot_price: tokens that a draft slot must earn besides its time: what KV or a deadline is short of.
        """
        ...

    def standing(self, load: StepLoad, *, slot_price: float = 0.0) -> Mapping[int, Chosen] | None:
        """What was chosen before, by request, if that holds for this step too: then nobody has to be offered anew.

        Asked once for each step, before `choose`; None calls for that.
        """
        return None

    def join(self, candidate: DepthCandidate) -> Chosen:
        """The same for a request that was not there before, while what stands goes on to hold."""
        raise AssertionError("asked only of policies whose choices stand")

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished step."""
        return

    def forget(self, request_id: int) -> None:
        """The request has ended; an unknown one is ignored."""
        return


class FixedDepth(DepthPolicy):
    """The same depth for everyone by the first offer, wherever bounds allow it."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        return [within_bounds(c, c.offers[0], self.depth) for c in candidates]


def choose_depths(
    policy: DepthPolicy,
    load: StepLoad,
    request_ids: Sequence[int],
    highest: Sequence[Mapping[Method, int]],
    candidates: Callable[[Sequence[int]], list[DepthCandidate]],
    *,
    slot_price: float = 0.0,
) -> list[Chosen]:
    """Ask a policy for one step: what it holds on to, or its choice among candidates, which are made where needed.

    Args:
        highest: how deep each request may draft by each method that it may use.
        candidates: makes those of the requests at these indices.
    """
    standing = policy.standing(load, slot_price=slot_price)
    if standing is not None:
        joining = [index for index, request_id in enumerate(request_ids) if request_id not in standing]
        joined = {one.request_id: policy.join(one) for one in candidates(joining)} if joining else {}
        chosen = [standing[i] if i not in joined else joined[i] for i in request_ids]
        if sum([choice.depth for choice in chosen]) > load.budget:
            standing = None
    if standing is None:
        chosen = policy.choose(candidates(range(len(request_ids))), load, slot_price=slot_price)
    # What stands may be too deep by now, and the bounds of a candidate are those of its farthest offer.
    return [
        choice if not choice.depth or choice.depth <= limits.get(choice.method, 0) else _at_most(choice, limits)
        for choice, limits in zip(chosen, highest, strict=True)
    ]


def _at_most(choice: Chosen, highest: Mapping[Method, int]) -> Chosen:
    limit = highest.get(choice.method, 0)
    return Chosen(choice.method, limit) if limit else NOTHING
