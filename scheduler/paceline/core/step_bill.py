"""Who pays for a step: its charges sum to its duration, and rejected drafts are paid by their owner.

Rows that are no drafts share what the step would have cost without drafts; draft pass j is shared by the requests that
are in it; each draft slot pays by how much it makes the target's forward longer. So slots that ride free in a step that
waits for memory cost about nothing. What the cost model says is stretched to what the step really took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.cost_model import CostModel, StepShape
from paceline.core.params import Method
from paceline.core.plan import SequenceResult, SequenceWork

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepBill:
    """In seconds, one entry for each work of the plan.

    Attributes:
        charges: what each pays; they sum to the step's duration.
        gained: what the tokens that its drafts brought would have taken without, by the cost model.
        spent: what its drafts took, by the cost model.
        rejected: of that, what those took that were not kept.
    """

    charges: list[float]
    gained: list[float]
    spent: list[float]
    rejected: list[float]


def write_bill(
    costs: CostModel | None,
    shape: StepShape,
    works: Sequence[SequenceWork],
    results: Sequence[SequenceResult],
    contexts: Sequence[int],
    seconds: float,
) -> StepBill:
    """Divide a step that was executed.

    Args:
        costs: None divides by rows, and tells nothing of what drafts cost.
        contexts: tokens whose KV each work reads.
        seconds: that the step took.
    """
    rows = np.array([work.num_tokens for work in works], dtype=np.float64)
    drafted = np.array([result.num_drafted for result in results], dtype=np.int64)
    if costs is None:
        nothing = [0.0] * len(works)
        return StepBill(_stretched(rows + drafted, seconds), nothing, nothing, nothing)
    slots = int(drafted.sum())
    plain = costs.target(shape.rows - slots, 0, shape.sequences)
    read = costs.target(shape.rows - slots, shape.context, shape.sequences) - plain
    charges: Array = plain * rows / rows.sum() + read * np.array(contexts) / max(1, sum(contexts))
    gained = spent = rejected = np.zeros(len(works))
    if slots or shape.draft_passes or shape.draft_rows:
        slot = (costs.target(shape.rows, 0) - costs.target(shape.rows - slots, 0)) / slots if slots else 0.0
        planned = np.array([w.num_drafts if w.method is Method.DRAFT_MODEL else 0 for w in works], dtype=np.int64)
        kept = np.array([min(r.num_accepted, len(r.token_ids)) for r in results], dtype=np.int64)
        passes = _by_depth(costs, shape)
        spent = drafted * slot + passes[planned]
        rejected = (drafted - kept) * slot + passes[planned] - passes[np.minimum(kept, planned)]
        emitted = np.array([len(r.token_ids) - 1 if w.num_drafts else 0 for w, r in zip(works, results, strict=True)])
        gained = emitted * ((plain + read) / max(1, sum(work.samples for work in works)))
        charges = charges + spent + _reading(costs, shape, works)
    return StepBill(_stretched(charges, seconds), gained.tolist(), spent.tolist(), rejected.tolist())


def _by_depth(costs: CostModel, shape: StepShape) -> Array:
    """Seconds that a request pays for 0, 1, ... passes of the draft model: [passes + 1]."""
    most = max(shape.draft_passes, default=0)
    first, later = costs.first_passes(most), costs.draft_passes(most)
    shares = [float((later if number else first)[count]) / count for number, count in enumerate(shape.draft_passes)]
    by_depth: Array = np.cumsum([0.0, *shares])
    return by_depth


def _reading(costs: CostModel, shape: StepShape, works: Sequence[SequenceWork]) -> Array:
    """Seconds for what draft models read besides drafting, by tokens read."""
    read = np.array([work.draft_catch_up for work in works], dtype=np.float64)
    seconds = costs.draft_rows(shape.draft_rows)
    if not shape.draft_passes and shape.draft_rows:
        seconds += float(costs.first_passes(1)[1])
    shares: Array = seconds * read / max(1.0, read.sum())
    return shares


def _stretched(charges: Array, seconds: float) -> list[float]:
    """The same, summing to `seconds`."""
    total = float(charges.sum())
    stretched: list[float] = (charges * (seconds / total) if total > 0.0 else charges).tolist()
    return stretched
