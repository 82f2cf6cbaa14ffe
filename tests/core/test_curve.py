"""A curve, against numpy's interpolation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.curve import Curve

HEIGHTS = st.lists(st.floats(0, 100), min_size=1, max_size=6).map(sorted)


@given(HEIGHTS, st.data())
def test_it_is_linear_between_buckets_and_beyond(heights: list[float], data: st.DataObject) -> None:
    size = len(heights)
    buckets = sorted(data.draw(st.sets(st.integers(1, 60), min_size=size, max_size=size)))
    curve = Curve(buckets, heights)
    within = np.arange(buckets[-1] + 1)
    np.testing.assert_allclose(curve.span(0, buckets[-1]), np.interp(within, buckets, heights), atol=1e-9)
    slope = (heights[-1] - heights[-2]) / (buckets[-1] - buckets[-2]) if size > 1 else 0.0
    assert curve.at(buckets[-1] + 10) == pytest.approx(heights[-1] + 10 * slope)


@given(HEIGHTS, st.integers(0, 70), st.integers(0, 70), st.sampled_from([None, 0.0]))
def test_a_span_is_the_curve_at_each_count(heights: list[float], first: int, count: int, at_zero: float | None) -> None:
    curve = Curve([3 * index + 1 for index in range(len(heights))], heights, at_zero)
    assert curve.span(first, count) == [curve.at(number) for number in range(first, first + count + 1)]
    if at_zero is not None:
        assert curve.at(0) == at_zero


@given(HEIGHTS, st.integers(1, 70), st.integers(1, 70))
def test_rises_are_those_of_a_span(heights: list[float], first: int, count: int) -> None:
    curve = Curve([3 * index + 1 for index in range(len(heights))], heights)
    rises = np.array(curve.span(first, count)) - curve.at(first)
    np.testing.assert_allclose(curve.rises(first, count, 1.0, 0.0, 0, math.inf), rises, atol=1e-9)
    dearer = 2.0 * rises + 3.0 * np.arange(count + 1)
    np.testing.assert_allclose(curve.rises(first, count, 2.0, 3.0, 0, math.inf), dearer, atol=1e-9)


def test_rises_end_once_they_are_too_high() -> None:
    curve = Curve([1, 10], [0.0, 9.0])
    assert curve.rises(1, 6, 1.0, 0.0, 0, 2.5) == [0.0, 1.0, 2.0, 3.0]
    assert curve.rises(1, 6, 1.0, 0.0, 2, 1.5) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert curve.rises(1, 2, 1.0, 0.0, 2, 0.0) == [0.0, 1.0, 2.0]


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=6),
    st.floats(0.01, 100.0),
    st.lists(st.floats(0.3, 3.0), max_size=3),
)
def test_it_never_falls(bits: list[int], lowest: float, factors: list[float]) -> None:
    """Nor by a bit between buckets that differ by bits."""
    heights = [lowest]
    for count in bits:
        heights.append(heights[-1] + count * math.ulp(lowest))
    curve = Curve([7 * index + 1 for index in range(len(heights))], heights)
    for factor in factors:
        curve.stretch(factor)
    values = curve.span(0, 7 * len(heights) + 30)
    assert (np.diff(values) >= 0).all()


def test_without_buckets_it_is_zero() -> None:
    assert Curve([], []).rises(0, 3, 1.0, 0.0, 0, math.inf) == [0.0] * 4
    assert Curve([], []).span(0, 3) == [0.0] * 4
    assert Curve([], [], at_zero=0.0).at(7) == 0.0


@given(HEIGHTS, st.data())
def test_what_is_corrected_is_as_if_it_had_been_made_so(heights: list[float], data: st.DataObject) -> None:
    """Stretched, and some of its rises changed, in any order."""
    buckets = [3 * index + 1 for index in range(len(heights))]
    curve, rises, lowest = Curve(buckets, heights), list(np.diff(heights)), heights[0]
    for _ in range(data.draw(st.integers(0, 4))):
        if data.draw(st.booleans()) or not rises:
            factor = data.draw(st.floats(0.5, 2.0))
            curve.stretch(factor)
            rises, lowest = [factor * rise for rise in rises], factor * lowest
        else:
            first = data.draw(st.integers(0, len(rises) - 1))
            changed = data.draw(st.lists(st.floats(0, 100), min_size=1, max_size=len(rises) - first))
            curve.change_rises(first, changed)
            rises[first : first + len(changed)] = changed
    again = Curve(buckets, lowest + np.cumsum([0.0, *rises]))
    np.testing.assert_allclose(curve.heights(), again.heights(), atol=1e-9)
    np.testing.assert_allclose(curve.span(0, 30), again.span(0, 30), atol=1e-9)
    np.testing.assert_allclose([curve.rise(index) for index in range(len(rises))], rises, atol=1e-9)
