"""Were the acceptances that steps were chosen by the right ones? What was predicted, beside what came of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Reached(NamedTuple):
    """Drafts that the verifier reached.

    Attributes:
        drafts: how many.
        predicted: their mean chance of acceptance, told before the step.
        observed: their mean label.
    """

    drafts: int
    predicted: float
    observed: float

    @property
    def gap(self) -> float:
        """How far the prediction was off; above 0: too hopeful."""
        return self.predicted - self.observed


class Calibration:
    """Sums over reached drafts, by position and by predicted chance. Mutated by `record` only.

    Args:
        depth: positions told apart; those behind count as the last of them.
        bins: equally wide classes of predicted chances.

    Attributes:
        count, predicted, observed: [depth, bins] float64: drafts, the sum of their chances, the sum of their labels.
    """

    def __init__(self, depth: int = 16, bins: int = 10) -> None:
        self.count = np.zeros((depth, bins))
        self.predicted = np.zeros((depth, bins))
        self.observed = np.zeros((depth, bins))

    def record(self, position: NDArray[np.int64], predicted: NDArray[np.float64], label: NDArray[np.float64]) -> None:
        """Book n drafts.

        Args:
            position: [n] from 0.
            predicted: [n] conditional chance of acceptance, in [0, 1].
            label: [n] what came of it: 0 or 1, or a chance in between.
        """
        depth, bins = self.count.shape
        bin_of = np.minimum((predicted * bins).astype(np.int64), bins - 1)
        place = np.minimum(position, depth - 1) * bins + bin_of
        for total, weight in ((self.count, None), (self.predicted, predicted), (self.observed, label)):
            total += np.bincount(place, weight, depth * bins).reshape(depth, bins)

    def by_position(self) -> list[Reached]:
        """The first positions, as far as one was reached: a position is reached through those before it."""
        return self._means(axis=1)

    def by_bin(self) -> list[Reached]:
        """By predicted chance, from low to high, without empty classes."""
        return self._means(axis=0)

    def largest_gap(self, min_count: float) -> float:
        """The largest |predicted - observed| of a position that was reached `min_count` times; 0 if none was."""
        return max((abs(reached.gap) for reached in self.by_position() if reached.drafts >= min_count), default=0.0)

    def _means(self, axis: int) -> list[Reached]:
        sums = zip(self.count.sum(axis), self.predicted.sum(axis), self.observed.sum(axis), strict=True)
        return [Reached(int(n), float(chances / n), float(labels / n)) for n, chances, labels in sums if n]
