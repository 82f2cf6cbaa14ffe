"""A curve, against numpy's interpolation."""

from __future__ import annotations

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


def test_without_buckets_it_is_zero() -> None:
    assert Curve([], []).span(0, 3) == [0.0] * 4
    assert Curve([], [], at_zero=0.0).at(7) == 0.0
