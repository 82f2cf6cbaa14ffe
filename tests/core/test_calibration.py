"""What was predicted beside what came of it: against sums by hand, and against chances that are known."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.calibration import Calibration, Reached


def _record(calibration: Calibration, *drafts: tuple[int, float, float]) -> None:
    position, predicted, label = zip(*drafts, strict=True)
    calibration.record(np.array(position), np.array(predicted), np.array(label))


def test_sums_by_hand() -> None:
    calibration = Calibration(depth=3, bins=4)
    _record(calibration, (0, 0.8, 1.0), (0, 0.8, 0.5), (1, 0.2, 0.0))
    _record(calibration, (0, 0.5, 0.0), (0, 0.2, 1.0))
    assert calibration.count.tolist() == [[1, 0, 1, 2], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert calibration.predicted == pytest.approx(np.array([[0.2, 0, 0.5, 1.6], [0.2, 0, 0, 0], [0, 0, 0, 0]]))
    assert calibration.observed.tolist() == [[1, 0, 0, 1.5], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert calibration.by_position() == [
        (4, pytest.approx(2.3 / 4), pytest.approx(2.5 / 4)),
        (1, pytest.approx(0.2), 0.0),
    ]
    assert calibration.by_bin() == [
        (2, pytest.approx(0.2), 0.5),
        (1, 0.5, 0.0),
        (2, pytest.approx(0.8), 0.75),
    ]


def test_the_ends_of_the_range_have_a_place() -> None:
    """A chance of 1 is in the last class, and a position behind the last counts as the last."""
    calibration = Calibration(depth=2, bins=2)
    _record(calibration, (0, 1.0, 1.0), (0, 0.0, 0.0), (1, 0.5, 1.0), (7, 0.5, 0.0))
    assert calibration.count.tolist() == [[1, 1], [0, 2]]


def test_the_largest_gap_is_that_of_a_position_with_enough_drafts() -> None:
    calibration = Calibration()
    assert calibration.largest_gap(1) == 0.0
    _record(calibration, (0, 0.5, 0.0), (0, 0.5, 1.0), (1, 0.5, 1.0), (1, 0.7, 1.0), (2, 1.0, 0.0))
    assert calibration.largest_gap(1) == 1.0
    assert calibration.largest_gap(2) == pytest.approx(0.4), "too low counts like too high"
    assert calibration.largest_gap(3) == 0.0
    assert Reached(1, 0.5, 0.75).gap == -0.25


def test_true_chances_are_found_calibrated() -> None:
    """Labels drawn with the chances that were told leave no gap, and with others the gap that they have."""
    generator = np.random.default_rng(5)
    position = generator.integers(0, 4, 40_000)
    chance = generator.random(40_000)
    label = (generator.random(40_000) < chance).astype(np.float64)
    right, hopeful = Calibration(), Calibration()
    right.record(position, chance, label)
    hopeful.record(position, 0.9 * chance + 0.1, label)
    assert right.largest_gap(1000) < 0.02
    assert hopeful.largest_gap(1000) == pytest.approx(0.05, abs=0.02)
    for reached in right.by_bin():
        assert reached.observed == pytest.approx(reached.predicted, abs=0.03)
