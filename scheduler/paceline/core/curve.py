"""A non-decreasing function of a count, known at a few of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class Curve:
    """Linear between its buckets, and beyond the last as between the last two; before the first it is as there. A few
    numbers, so that whoever corrects them makes a new one at every step. Immutable.

    Args:
        buckets: ascending and positive; without any, the function is 0.
        heights: at each of them, ascending.
        at_zero: what it is at 0, if that is no bucket to go on from.
    """

    __slots__ = ("_at_zero", "_buckets", "_heights", "_last", "_slopes")

    def __init__(self, buckets: Sequence[int], heights: Sequence[float], at_zero: float | None = None) -> None:
        self._buckets: list[int] = list(buckets)
        self._heights: list[float] = list(heights)
        self._slopes: list[float] = []  # behind each bucket
        for index in range(1, len(self._heights)):
            rise, run = heights[index] - heights[index - 1], buckets[index] - buckets[index - 1]
            self._slopes.append(rise / run)
        self._slopes.append(self._slopes[-1] if self._slopes else 0.0)
        self._last = len(self._heights) - 1
        self._at_zero = at_zero

    def at(self, count: int) -> float:
        if count == 0 and self._at_zero is not None:
            return self._at_zero
        return self._between(bisect_right(self._buckets, count) - 1, count)

    def span(self, first: int, count: int) -> list[float]:
        """At `first`, ... `first + count`, [count + 1]."""
        bucket, last, buckets = bisect_right(self._buckets, first) - 1, self._last, self._buckets
        values = []
        for number in range(first, first + count + 1):
            while bucket < last and buckets[bucket + 1] <= number:
                bucket += 1
            values.append(self._between(bucket, number))
        if first == 0 and self._at_zero is not None:
            values[0] = self._at_zero
        return values

    def _between(self, bucket: int, count: int) -> float:
        """Behind the bucket of that index, or before the first one."""
        if bucket < 0:
            return self._heights[0] if self._heights else 0.0
        return self._heights[bucket] + self._slopes[bucket] * (count - self._buckets[bucket])
