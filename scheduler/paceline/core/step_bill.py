"""Who pays for a step: its charges sum to its duration, and rejected drafts are paid by their owner.

Rows that are no drafts share what the step would have cost without drafts; draft pass j is shared by the requests that
are in it; each draft slot pays by how much it makes the target's forward longer. So slots that ride free in a step that
waits for memory cost about nothing. What the cost model says is stretched to what the step really took.
"""

from __future__ import annotations

import itertools
from typing import Final, NamedTuple

from paceline.core.cost_model import CostModel, StepShape
from paceline.core.method import DRAFT_MODEL
from paceline.core.plan import SequenceResult, SequenceWork


class DraftPrice(NamedTuple):
    """Seconds, by the cost model.

    Attributes:
        gained: what the tokens that drafts brought would have taken without.
        spent: what the drafts took.
        rejected: of that, what those took that were not kept.
    """

    gained: float = 0.0
    spent: float = 0.0
    rejected: float = 0.0


FREE: Final = DraftPrice()


class StepBill:
    """In seconds, one entry for each work of the plan.

    Attributes:
        charges: what each pays; they sum to the step's duration.
        drafts: what those of each did, by the cost model.
    """

    __slots__ = ("charges", "drafts")

    def __init__(self, charges: list[float], drafts: list[DraftPrice]) -> None:
        self.charges = charges
        self.drafts = drafts


def write_bill(
    costs: CostModel | None,
    shape: StepShape,
    works: tuple[SequenceWork, ...],
    results: tuple[SequenceResult, ...],
    contexts: list[int],
    seconds: float,
) -> StepBill:
    """Divide a step that was executed.

    Args:
        costs: None divides by rows, and tells nothing of what drafts cost.
        contexts: tokens whose KV each work reads.
        seconds: that the step took.
    """
    if costs is None:
        rows = shape.rows
        charges = [seconds * (work.num_tokens + result.num_drafted) / rows for work, result in zip(works, results)]
        return StepBill(charges, [FREE] * len(works))
    slots = samples = 0
    for work, result in zip(works, results):
        slots += result.num_drafted
        samples += work.samples
    plain = costs.target(shape.rows - slots, 0, shape.sequences)
    without = costs.target(shape.rows - slots, shape.context, shape.sequences)
    slot = (costs.target(shape.rows, 0) - costs.target(shape.rows - slots, 0)) / slots if slots else 0.0
    passes, drafting = _shares_of_passes(costs, shape), costs.drafting(shape.draft_passes, shape.draft_rows)
    reading = drafting - costs.passes(shape.draft_passes)
    predicted = without + slots * slot + drafting
    stretch = seconds / predicted if predicted > 0.0 else 0.0
    per_row = stretch * plain / max(1, shape.rows - slots)
    per_context = stretch * (without - plain) / max(1, shape.context)
    per_read = stretch * reading / max(1, shape.draft_rows)
    per_token = without / max(1, samples)
    charges, drafts = [], []
    # One loop over plain numbers: there is an entry for every request at every step.
    for work, result, context in zip(works, results, contexts):
        charge = per_row * work.num_tokens + per_context * context
        if work.draft_catch_up:
            charge += per_read * rows_read(work, result, costs.first_rows)
        price, planned = FREE, work.num_drafts
        if planned:
            drafted, kept, emitted = result.num_drafted, result.num_accepted, len(result.token_ids)
            if kept > emitted:
                kept = emitted
            spent, rejected = slot * drafted, slot * (drafted - kept)
            if work.method is DRAFT_MODEL and not result.is_forced:
                spent += passes[planned]
                rejected += passes[planned] - passes[kept if kept < planned else planned]
            price = DraftPrice(per_token * (emitted - 1), spent, rejected)
            charge += stretch * spent
        charges.append(charge)
        drafts.append(price)
    return StepBill(charges, drafts)


def rows_read(work: SequenceWork, result: SequenceResult, first_rows: int) -> int:
    """Rows that the draft model read for one work besides its passes. Of drafts that a grammar forced it made none."""
    return work.draft_catch_up if result.is_forced else work.rows_read(first_rows)


def _shares_of_passes(costs: CostModel, shape: StepShape) -> list[float]:
    """Seconds that a request pays for 0, 1, ... passes of the draft model."""
    shares = [costs.draft_pass(number, count) / count for number, count in enumerate(shape.draft_passes)]
    return list(itertools.accumulate(shares, initial=0.0))
