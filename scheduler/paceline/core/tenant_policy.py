"""What an operator grants a tenant."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from paceline.core.params import SpeculationBounds
from paceline.errors import InvalidArgument

LEAST_WEIGHT: Final = 0.0001
MOST_WEIGHT: Final = 10_000.0
LEAST_RATE: Final = 1e-9  # tokens per second: the time until there are some must be a number


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What an operator grants a tenant; None: no limit but the server's.

    Attributes:
        weight: share of the service, in proportion to those of others. Bounded, so that what is charged over the lowest
            weight and over the highest can be added up, for months, without losing the smaller.
        max_running: completions that run at once.
        max_queued: completions that wait or are being prepared for that.
        max_blocks: KV blocks held at once.
        tokens_per_second: the bucket's rate. It counts prompt tokens that are computed, and not those that are found in
            the prefix cache, and completion tokens; drafts are paid by charges alone. A prompt is paid for when it is
            begun; what is not computed of it, if the request ends before, is given back. A request that is begun is
            finished: what it overdraws, the next ones wait for.
        burst_tokens: the bucket's size; None for one second's worth.
        max_priority: what higher priorities are lowered to.
        speculation: bounds within the server's.

    Raises:
        InvalidArgument: a value that no request could satisfy.
    """

    weight: float = 1.0
    max_running: int | None = None
    max_queued: int | None = None
    max_blocks: int | None = None
    tokens_per_second: float | None = None
    burst_tokens: float | None = None
    max_priority: int = 0
    speculation: SpeculationBounds = field(default_factory=SpeculationBounds)

    def __post_init__(self) -> None:
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            raise InvalidArgument("weight", self.weight, f"in {LEAST_WEIGHT:g}..{MOST_WEIGHT:g}")
        for name in ("max_running", "max_queued", "max_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(name, value, "an integer >= 1")
        if self.tokens_per_second is not None and not LEAST_RATE <= self.tokens_per_second < math.inf:
            raise InvalidArgument("tokens_per_second", self.tokens_per_second, f"a number >= {LEAST_RATE:g}")
        if self.burst_tokens is not None and not 0.0 < self.burst_tokens < math.inf:
            raise InvalidArgument("burst_tokens", self.burst_tokens, "a number > 0")
        if self.burst_tokens is not None and self.tokens_per_second is None:
            raise InvalidArgument("burst_tokens", self.burst_tokens, "set together with tokens_per_second")
        if self.max_priority < 0:
            raise InvalidArgument("max_priority", self.max_priority, "an integer >= 0")

    @property
    def burst(self) -> float:
        """Tokens that the bucket holds; infinite without one."""
        if self.tokens_per_second is None:
            return math.inf
        return self.tokens_per_second if self.burst_tokens is None else self.burst_tokens


ONE_SHARE = TenantPolicy()
