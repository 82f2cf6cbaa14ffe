"""A non-decreasing function of a count, known at a few of them."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Curve:
    """Linear between its buckets, and beyond the last as between the last two; before the first it is as there.

    It is corrected at every step and asked at a few counts in each, so that a correction touches only what it changes.
    Mutated by `stretch` and `change_rises`, which whoever owns it calls.

    Args:
        buckets: ascending and positive; without any, the function is 0.
        heights: at each of them, ascending.
        at_zero: what it is at 0, if that is no bucket to go on from.
    """

    __slots__ = ("_at_zero", "_buckets", "_heights", "_last", "_rises", "_scale")

    def __init__(self, buckets: Sequence[int], heights: Sequence[float], at_zero: float | None = None) -> None:
        self._buckets: list[int] = list(buckets)
        self._heights: list[float] = [float(height) for height in heights]  # times the scale
        self._rises: list[float] = []  # by how much each bucket exceeds the one before; times the scale
        for index in range(1, len(self._heights)):
            self._rises.append(self._heights[index] - self._heights[index - 1])
        self._last = len(self._heights) - 1
        self._scale = 1.0
        self._at_zero = at_zero

    def at(self, count: int) -> float:
        if count == 0 and self._at_zero is not None:
            return self._at_zero
        height, slope, start, most = self._line(self._bucket(count))
        return min(height + slope * (count - start), most)

    def span(self, first: int, count: int) -> list[float]:
        """At `first`, ... `first + count`, [count + 1]."""
        bucket, last, buckets = self._bucket(first), self._last, self._buckets
        values = []
        height, slope, start, most = self._line(bucket)
        for number in range(first, first + count + 1):
            if bucket < last and buckets[bucket + 1] <= number:
                bucket += 1
                height, slope, start, most = self._line(bucket)
            values.append(min(height + slope * (number - start), most))
        if first == 0 and self._at_zero is not None:
            values[0] = self._at_zero
        return values

    def rises(self, first: int, count: int, factor: float, each: float, taken: int, more: float) -> list[float]:
        """By how much `first`, ... `first + count` exceed the first, times a factor, plus as many times `each`,
        [count + 1]; or fewer: the first that exceeds the one at `taken` by `more` is the last.
        """
        bucket, last, buckets = self._bucket(first), self._last, self._buckets
        rise, total, most = factor * self._slope(bucket) + each, 0.0, 0.0
        values = [total]
        for number in range(first, first + count):
            if number == first + taken:
                most = total + more
            if number >= first + taken and total > most:
                break
            if bucket < last and buckets[bucket + 1] <= number:
                bucket += 1
                rise = factor * self._slope(bucket) + each
            total += rise
            values.append(total)
        return values

    def heights(self) -> list[float]:
        """At each bucket."""
        return [self._scale * height for height in self._heights]

    def rise(self, index: int) -> float:
        """By how much bucket `index + 1` exceeds the one before."""
        return self._scale * self._rises[index]

    def stretch(self, factor: float) -> None:
        """Multiply all of it, but for what it is at 0."""
        self._scale *= factor

    def change_rises(self, first: int, rises: list[float]) -> None:
        """Let the rises from that index on be these, none of them negative; buckets behind move along."""
        for index, rise in enumerate(rises, first):
            self._rises[index] = rise / self._scale
        height = self._heights[first]
        for index in range(first, self._last):
            height += self._rises[index]
            self._heights[index + 1] = height

    def _bucket(self, count: int) -> int:
        """The last bucket that is not above a count; -1 if all are. Once this is compiled, a call of the library's
        bisection takes longer than to bisect.
        """
        first, end = 0, len(self._buckets)
        while first < end:
            middle = (first + end) // 2
            if self._buckets[middle] <= count:
                first = middle + 1
            else:
                end = middle
        return first - 1

    def _slope(self, bucket: int) -> float:
        """Behind the bucket of that index, or before the first one."""
        if bucket < 0 or self._last < 1:
            return 0.0
        if bucket >= self._last:
            bucket = self._last - 1
        return self._scale * self._rises[bucket] / (self._buckets[bucket + 1] - self._buckets[bucket])

    def _line(self, bucket: int) -> tuple[float, float, int, float]:
        """Behind the bucket of that index, or before the first one: height, slope, the count to go on from, and the
        next bucket's height, which a rounded line may exceed.
        """
        if bucket < 0 or self._last < 1:
            return (self._scale * self._heights[0] if self._heights else 0.0), 0.0, 0, math.inf
        inside = bucket < self._last
        rise = bucket if inside else self._last - 1
        slope = self._rises[rise] / (self._buckets[rise + 1] - self._buckets[rise])
        most = self._scale * self._heights[bucket + 1] if inside else math.inf
        return self._scale * self._heights[bucket], self._scale * slope, self._buckets[bucket], most
