"""The scheduler's settings: plain values, validated once."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

from paceline.core.method import Method
from paceline.errors import InvalidArgument

MOST_ROWS: Final = 1 << 20  # of a step: as many as a cost model may be measured for


class PrefixScope(enum.StrEnum):
    """Whose prompts a request may find computed already."""

    OFF = "off"
    TENANT = "tenant"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits that every step keeps.

    Attributes:
        num_blocks: blocks in the KV pool.
        block_size: token positions per block.
        max_num_seqs: sequences running at once.
        max_num_batched_tokens: rows per step: prompt chunks, decodes, draft slots and draft catch-up together.
        max_model_len: prompt and completion tokens of one request at most.
        max_queued: requests waiting at most, those that are being prepared included.
        min_depth: lowest speculation depth of a request that does not ask for less.
        max_depth: highest speculation depth of any request.
        max_draft_len: positions that the draft model can see.
        method: how drafts are made where a request leaves the choice to the server.
        hybrid: such requests may use n-grams instead, from step to step.
        eos_token_ids: ids that end a completion unless it ignores them.
        prefix_cache: whose KV is kept and found again: of nobody, of the same tenant, or of everybody, which lets a
            tenant learn from a fast answer what others have asked.
        watermark: share of the blocks that admissions leave free while others run, for those to grow into.
        long_prefill_threshold: tokens of one prompt that a step reads at most; None sets no limit.
        max_step_seconds: that a step with prompts may take while others decode, as predicted; None sets no limit. So
            many tokens of prompts as fit are read, and a few in any case.
        patience: seconds after which a request without a deadline is as urgent as one whose deadline has come.
        min_run_seconds: that a request runs before it gives way to a tenant that is owed more, besides a multiple of
            what it took to its first token; and how far apart the two tenants must be, in seconds of service over
            weight.
        max_slowdown: how many times as long heavy tenants may make steps in which light ones decode, in the mean and as
            predicted; if they have more weight than the light ones, they may add so many times more. Heavy is who asks
            for more than twice its share of places, light who asks for a quarter of its share at most. Within the
            limit requests of heavy tenants take turns, and draft nothing. Infinity sets no limit.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    max_queued: int = 4096
    min_depth: int = 0
    max_depth: int = 8
    max_draft_len: int = 1 << 30
    method: Method = Method.NONE
    hybrid: bool = False
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: PrefixScope = PrefixScope.TENANT
    watermark: float = 0.01
    long_prefill_threshold: int | None = None
    max_step_seconds: float | None = None
    patience: float = 10.0
    min_run_seconds: float = 1.0
    max_slowdown: float = 1.1

    def __post_init__(self) -> None:
        positive = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_queued")
        for name in positive:
            if getattr(self, name) < 1:
                raise InvalidArgument(name, getattr(self, name), "an integer >= 1")
        if self.max_depth < 0:
            raise InvalidArgument("max_depth", self.max_depth, "an integer >= 0")
        if not 0 <= self.min_depth <= self.max_depth:
            raise InvalidArgument("min_depth", self.min_depth, f"between 0 and max_depth ({self.max_depth})")
        if not 0.0 <= self.watermark < 1.0:
            raise InvalidArgument("watermark", self.watermark, "a share in [0, 1)")
        if self.long_prefill_threshold is not None and self.long_prefill_threshold < 1:
            raise InvalidArgument("long_prefill_threshold", self.long_prefill_threshold, "an integer >= 1")
        if self.max_step_seconds is not None and not self.max_step_seconds > 0.0:
            raise InvalidArgument("max_step_seconds", self.max_step_seconds, "a number > 0")
        if not self.max_slowdown > 1.0:
            raise InvalidArgument("max_slowdown", self.max_slowdown, "a number > 1")
        for name in ("patience", "min_run_seconds"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise InvalidArgument(name, getattr(self, name), "a number >= 0")
        if self.max_num_batched_tokens > MOST_ROWS:
            raise InvalidArgument("max_num_batched_tokens", self.max_num_batched_tokens, f"at most {MOST_ROWS}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidArgument(
                "max_num_batched_tokens", self.max_num_batched_tokens, f"at least max_num_seqs ({self.max_num_seqs})"
            )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)
