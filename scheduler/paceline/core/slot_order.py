"""Slots of several offers in one order, and how many of them are taken at prices that rise in stairs."""

from __future__ import annotations

from collections.abc import Sequence
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

    def __init__(self, index: int, asked: int, gains: list[float]) -> None:
        self.index = index
        self.asked = asked
        self.gains = gains


class Slot:
    """One draft.

    Attributes:
        rank: those of low rank are taken first.
        is_asked: taken whatever it brings.
        index: whose it is.
        gain: tokens that it brings beyond what it costs by itself.
    """

    __slots__ = ("gain", "index", "is_asked", "rank")

    def __init__(self, rank: float, is_asked: bool, index: int, gain: float) -> None:
        self.rank = rank
        self.is_asked = is_asked
        self.index = index
        self.gain = gain


def rank_of(slot: Slot) -> float:
    return slot.rank


def best_depths(runs: Sequence[Run], budget: int, prices: list[float]) -> dict[int, int]:
    """How many slots of each run are taken, from its front, by index: those that are asked for, and as many of the best
    behind them as gain the most, of `budget` at most.

    Every count is looked at, since the first drop says nothing where prices rise in stairs.

    Args:
        prices: of 0, 1, ... slots beside whatever there is: rising from the first, for all slots of the runs.
    """
    slots: list[Slot] = []
    for run in runs:
        worst, asked = 1.0, run.asked
        for position, gain in enumerate(run.gains):
            is_asked = position < asked
            if gain <= 0.0 and position and not is_asked:
                break  # nor does anything behind it gain
            worst = min(worst, gain)  # nothing stands before what it builds on
            slots.append(Slot(position - ASKED if is_asked else -worst, is_asked, run.index, gain))
    slots.sort(key=rank_of)
    slots = slots[: max(0, budget)]
    count, _ = best_count([slot.gain for slot in slots], prices, sum([slot.is_asked for slot in slots]))
    depths = {run.index: 0 for run in runs}
    for slot in slots[:count]:
        depths[slot.index] += 1
    return depths


def best_count(gains: list[float], prices: list[float], asked: int = 0) -> tuple[int, float]:
    """How many of these slots bring the most beyond their prices, of no fewer than are asked for; and what they bring.

    Args:
        prices: of 0, 1, ... of them, or of more.
    """
    best, most, tokens = 0, -prices[0], 0.0
    for index, gain in enumerate(gains):
        tokens += gain
        worth = tokens - prices[index + 1]
        if index < asked or worth > most:
            best, most = index + 1, worth
    return best, most
