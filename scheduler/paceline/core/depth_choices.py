"""The depths of one step: what the policy holds on to, or chooses anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.core.depth import NOTHING, Chosen, DepthCandidate, StepLoad
from paceline.core.depth_policy import DepthPolicy
from paceline.core.method import Method


def choose_depths(
    policy: DepthPolicy,
    load: StepLoad,
    request_ids: list[int],
    highest: list[dict[Method, int]],
    matches: list[int],
    candidates: Callable[[Sequence[int]], list[DepthCandidate]],
    *,
    slot_price: float = 0.0,
) -> list[Chosen]:
    """Ask a policy for one step: what it holds on to, or its choice among candidates, which are made where needed.

    Args:
        highest: how deep each request may draft by each method that it may use.
        matches: tokens that agree before the first proposal of its n-grams; 0 if they have none, or may not draft.
        candidates: makes those of the requests at these indices.
    """
    standing = policy.standing(load, slot_price=slot_price)
    if standing is not None:
        joining, chosen, drafts = [], [], 0
        for index, request_id in enumerate(request_ids):
            choice = standing.of(request_id, matches[index])
            if choice is None:
                joining.append(index)
                choice = NOTHING
            chosen.append(choice)
            drafts += choice.depth
        if joining:
            rest = StepLoad(load.rows + drafts, load.context, load.sampling, max(0, load.budget - drafts))
            for index, choice in zip(joining, policy.join(candidates(joining), rest, slot_price=slot_price)):
                chosen[index] = choice
                drafts += choice.depth
        if drafts > load.budget:
            standing = None
    if standing is None:
        chosen = policy.choose(candidates(range(len(request_ids))), load, slot_price=slot_price)
    assert len(chosen) == len(highest), (len(chosen), len(highest))
    # What stands may be too deep by now, and the bounds of a candidate are those of its farthest offer.
    return [
        choice if not choice.depth or choice.depth <= limits.get(choice.method, 0) else _at_most(choice, limits)
        for choice, limits in zip(chosen, highest)
    ]


def _at_most(choice: Chosen, highest: dict[Method, int]) -> Chosen:
    limit = highest.get(choice.method, 0)
    return Chosen(choice.method, limit) if limit else NOTHING
