"""A rule to be measured against, which takes more than a policy: draft in full depth, then verify what pays of that.

It is how drafters are used that propose all positions at once. A draft model pays for each pass that is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from paceline.bench.host import host_runner
from paceline.core.adaptive_depth import AdaptiveDepth
from paceline.core.cost_model import CostModel
from paceline.core.depth import Chosen, DepthCandidate, Outcome, StepLoad, within_bounds
from paceline.core.depth_policy import DepthPolicy
from paceline.core.plan import SequenceWork
from paceline.core.sequence import Sequence as Mirror
from paceline.engine import Engine
from paceline.runner import Draft, Drafter

NAME = "draft-full-then-trim"


class FullDepth(DepthPolicy):
    """Everyone drafts as deep as bounds allow; the exact search decides how much of it is worth verifying.

    Args:
        costs: of which the draft passes are left out, being paid in any case.

    Attributes:
        kept: drafts to verify of each request, at least one.
    """

    def __init__(self, costs: CostModel, max_depth: int) -> None:
        self.kept: dict[int, int] = {}
        self._max_depth = max_depth
        self._search = AdaptiveDepth(without_drafting(costs), max_depth=max_depth)

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        worthwhile = self._search.choose(candidates, load, slot_price=slot_price)
        for candidate, choice in zip(candidates, worthwhile, strict=True):
            self.kept[candidate.request_id] = max(1, choice.depth)
        return [within_bounds(candidate, candidate.offers[0], self._max_depth) for candidate in candidates]

    def observe(self, outcome: Outcome) -> None:
        self._search.observe(outcome)

    def forget(self, request_id: int) -> None:
        self.kept.pop(request_id, None)
        self._search.forget(request_id)


class TrimmedDrafter:
    """Another drafter's drafts, cut to `kept`: by what was known before they were drawn, so that output stays exact."""

    def __init__(self, drafter: Drafter, kept: Mapping[int, int]) -> None:
        self._drafter = drafter
        self._kept = kept

    def propose(self, batch: Sequence[tuple[Mirror, SequenceWork]]) -> list[Draft]:
        drafts = self._drafter.propose(batch)
        return [
            replace(draft, token_ids=draft.token_ids[: self._kept[work.request_id]]) if work.num_drafts else draft
            for (_, work), draft in zip(batch, drafts, strict=True)
        ]

    def release(self, request_id: int) -> None:
        self._drafter.release(request_id)


def without_drafting(costs: CostModel) -> CostModel:
    """The same prices of the target, and drafts for nothing."""
    prices = costs.as_dict()
    for name in ("pass_seconds", "first_seconds"):
        prices[name] = [0.0] * len(prices[name])
    return CostModel.from_dict({**prices, "per_draft_row": 0.0})


@contextmanager
def trimming(engine: Engine, policy: FullDepth) -> Iterator[None]:
    """Meanwhile every drafter's proposals are cut as the policy says."""
    runner = host_runner(engine, "drafts that are trimmed")
    own = runner.drafters
    runner.drafters = {method: TrimmedDrafter(drafter, policy.kept) for method, drafter in own.items()}
    try:
        yield
    finally:
        runner.drafters = own
