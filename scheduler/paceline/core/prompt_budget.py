"""How many rows of prompts a step may have, so that those who decode in it get their tokens in time."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Final

from paceline.core.batch import Batch
from paceline.core.cost_model import CostModel
from paceline.core.slowdown import LEAST_ROWS

# However short steps must be for a request's pace, they read prompts at least at this part of the speed of full ones.
PACED_SPEED: Final = 0.5


def prompt_budget(batch: Batch, costs: CostModel | None) -> int:
    """Rows that prompts may have beside decodes, so that the step stays as short as they need it. A request's pace
    leaves prompts part of their speed, whoever's they are; the server's own limit may leave them a few rows.
    """
    rows = batch.config.max_num_batched_tokens
    pace, limit = batch.pace, batch.config.max_step_seconds or math.inf
    if costs is None or min(pace, limit) == math.inf:
        return rows
    contexts = [request.num_tokens for request in batch.running.values() if request.output_token_ids]
    if not contexts:
        return rows
    decodes, context = len(contexts), sum(contexts)

    def seconds_with(rows: int) -> float:
        return costs.target(decodes + rows, context, decodes)

    rows = _rows_within(seconds_with, limit, rows)
    if pace < limit:
        rows = max(_rows_within(seconds_with, pace, rows), _rows_at(PACED_SPEED, seconds_with, rows))
    return max(LEAST_ROWS, rows)


def _rows_within(seconds_with: Callable[[int], float], seconds: float, most: int) -> int:
    """How many rows of prompts, up to `most`, fit a step of so many seconds.

    Args:
        seconds_with: how long a step with so many takes.
    """
    return max(0, bisect_right(range(most + 1), seconds, key=seconds_with) - 1)


def _rows_at(speed: float, seconds_with: Callable[[int], float], most: int) -> int:
    """The fewest rows of prompts at which steps read that part of the tokens per second that they read with `most`."""
    whole = seconds_with(most)
    return bisect_left(range(most), 0.0, key=lambda rows: rows * whole - speed * most * seconds_with(rows))
