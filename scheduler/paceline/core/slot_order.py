"""Slots of several offers in one order, and how many of them are taken at prices that rise in stairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

ASKED: Final = 1e6  # rank of a slot that bounds ask for: before all others


class Run:
    """What one request could draft.

    Attributes:
        index: of the request, for whoever asks.
        asked: its first slots, which are taken whatever they bring.
        gains: tokens that its slots bring beyond what they cost by themselves, at most 1 each.
    """

    __slots__ = ("asked", "gains", "index")

    def __init__(self, index: int, asked: int, gains: Sequence[float]) -> None:
        self.index = index
        self.asked = asked
        self.gains = gains


def best_depths(runs: Sequence[Run], budget: int, prices: Callable[[int], list[float]]) -> Counter[int]:
    """How many slots of each run are taken, from its front, by index: those that are asked for, and as many of the best
    behind them as gain the most, of `budget` at most.

    Every count is looked at, since the first drop says nothing where prices rise in stairs.

    Args:
        prices: of 0, 1, ... slots, up to the number that it is given.
    """
    slots = []
    for run in runs:
        worst = 1.0
        for position, gain in enumerate(run.gains):
            if gain <= 0.0 and position >= max(run.asked, 1):
                break  # nor does anything behind it gain
            worst = min(worst, gain)  # nothing stands before what it builds on
            slots.append((position - ASKED if position < run.asked else -worst, run.index, gain))
    slots.sort()
    slots = slots[: max(0, budget)]
    worth = net([gain for _, _, gain in slots], prices(len(slots)))
    asked = len([rank for rank, _, _ in slots if rank < -1.0])
    count = worth.index(max(worth[asked:]), asked)
    return Counter([index for _, index, _ in slots[:count]])


def net(gains: Sequence[float], prices: Sequence[float]) -> list[float]:
    """What the first 0, 1, ... of these slots bring beyond their prices, in tokens."""
    sums, tokens = [0.0], 0.0
    for index, gain in enumerate(gains):
        tokens += gain
        sums.append(tokens - prices[index + 1])
    return sums
