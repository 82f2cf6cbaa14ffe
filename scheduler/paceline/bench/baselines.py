"""Depth policies of other systems, to be measured against: none of them knows what a step costs.

Each takes the first offer, and learns from outcomes alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.adaptive_depth import MAX_DEPTH
from paceline.core.depth import Chosen, DepthCandidate, Outcome, StepLoad, within_bounds
from paceline.core.depth_policy import DepthPolicy, FixedDepth

START = 4


class _PerRequest(DepthPolicy):
    """A depth for each request, moved by that request's steps."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._depths: dict[int, int] = {}

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        return [within_bounds(c, c.offers[0], self._depths.get(c.request_id, self._start)) for c in candidates]

    def observe(self, outcome: Outcome) -> None:
        for request_id, drafted, accepted in outcome.drafts:
            depth = self._depths.get(request_id, self._start)
            self._depths[request_id] = self._moved(request_id, depth, drafted, accepted)

    def forget(self, request_id: int) -> None:
        self._depths.pop(request_id, None)

    @abstractmethod
    def _moved(self, request_id: int, depth: int, drafted: int, accepted: int) -> int:
        """The depth after a step that verified `drafted` drafts and kept `accepted` of them."""


class RateThresholds(_PerRequest):
    """One deeper where accepted / drafted is above `upper`, one less where it is below `lower`.

    That rate is biased low, the more so the deeper the drafts: a rejection hides what stands behind it.

    Args:
        weight: of the newest step in the moving average of that rate; 1 looks at that step alone.
    """

    def __init__(self, lower: float, upper: float, least: int, weight: float) -> None:
        super().__init__(START)
        self._lower = lower
        self._upper = upper
        self._least = least
        self._weight = weight
        self._rates: dict[int, float] = {}

    def forget(self, request_id: int) -> None:
        super().forget(request_id)
        self._rates.pop(request_id, None)

    def _moved(self, request_id: int, depth: int, drafted: int, accepted: int) -> int:
        rate = accepted / drafted
        before = self._rates.get(request_id, rate)
        rate = self._rates[request_id] = before + self._weight * (rate - before)
        if rate > self._upper:
            return min(depth + 1, MAX_DEPTH)
        if rate < self._lower:
            return max(depth - 1, self._least)
        return depth


class AllOrNothing(_PerRequest):
    """Two deeper after a step that kept all drafts, one less after any other: transformers' heuristic."""

    def __init__(self) -> None:
        super().__init__(5)

    def _moved(self, request_id: int, depth: int, drafted: int, accepted: int) -> int:
        return drafted + 2 if accepted == drafted else max(drafted - 1, 1)


@dataclass(slots=True)
class _Tier:
    """A range of batch sizes: its ladder of depths, the rung it is on, and what its batches brought."""

    ladder: tuple[int, ...]
    rung: int
    accepted: float | None = None  # per request and batch, moving average
    batches: int = 0

    @property
    def depth(self) -> int:
        return self.ladder[self.rung]


class BatchMeanLadder(DepthPolicy):
    """One depth for the batch, on a ladder by its size, moved by the mean number of accepted drafts (SGLang's adaptive
    speculation). From depth 0, where nothing can be learned, it always tries the next one.
    """

    WEIGHT = 0.2
    INTERVAL = 5  # batches between two moves
    WARM_UP = 10  # batches before the first

    def __init__(self) -> None:
        # By the smallest batch size.
        self._tiers = {1: _Tier((1, 3, 5, 7), 1), 8: _Tier((0, 1, 3), 1), 32: _Tier((0, 1), 1), 64: _Tier((0,), 0)}

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        depth = self._tier(load.sampling).depth
        return [within_bounds(c, c.offers[0], depth) for c in candidates]

    def observe(self, outcome: Outcome) -> None:
        if not outcome.decodes:
            return
        tier = self._tier(outcome.decodes)
        accepted = [kept for _, _, kept in outcome.drafts]
        if accepted:
            mean = sum(accepted) / len(accepted)
            before = mean if tier.accepted is None else tier.accepted
            tier.accepted = before + self.WEIGHT * (mean - before)
        tier.batches += 1
        if tier.batches >= self.WARM_UP and tier.batches % self.INTERVAL == 0:
            self._move(tier)

    def _tier(self, size: int) -> _Tier:
        return self._tiers[max(smallest for smallest in self._tiers if smallest <= max(size, 1))]

    def _move(self, tier: _Tier) -> None:
        deeper = tier.rung + 1 < len(tier.ladder)
        if tier.depth == 0 or tier.accepted is None:
            tier.rung += deeper and tier.depth == 0
        elif tier.accepted > tier.depth - 0.5:
            tier.rung += deeper
        elif tier.rung and tier.accepted <= tier.ladder[tier.rung - 1] - 0.75:
            tier.rung -= 1


class BatchTable(DepthPolicy):
    """A fixed table of depth by batch size, as operators write it for vLLM's dynamic speculation: up to 16 sequences 3,
    up to 63 2, up to 127 1, none from 128 on.
    """

    TABLE = ((16, 3), (63, 2), (127, 1))

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        depth = next((depth for size, depth in self.TABLE if load.sampling <= size), 0)
        return [within_bounds(c, c.offers[0], depth) for c in candidates]


BASELINES: dict[str, Callable[[], DepthPolicy]] = {
    "off": lambda: FixedDepth(0),
    "realizar": lambda: RateThresholds(lower=0.5, upper=0.8, least=1, weight=0.1),
    "ruvllm": lambda: RateThresholds(lower=0.5, upper=0.9, least=2, weight=1.0),
    "sglang-ema": BatchMeanLadder,
    "hf": AllOrNothing,
    "vllm-table": BatchTable,
}
