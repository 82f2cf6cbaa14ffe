"""Ratios within rounds: what a machine does to one round, it does to both sides."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Median over rounds of a value over the other one of the same round."""
    return float(median(value / other for value, other in zip(values, others, strict=True)))
