"""Slots of several offers in one order, and how many of them are taken at prices that rise in stairs."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

ASKED: Final = 1e6  # rank of a slot that bounds ask for: before all others


class Run:
    """What one request could draft.

    Attributes:
        index: of the request, for whoever asks.
        asked: its first slots, which are taken whatever they bring.
        gains: tokens that its slots bring beyond what they cost by themselves, at most 1 each; behind the second none
            brings more than the one before it.
    """

    __slots__ = ("asked", "gains", "index")

    def __init__(self, index: int, asked: int, gains: list[float]) -> None:
        self.index = index
        self.asked = asked
        self.gains = gains


def best_depths(runs: list[Run], budget: int, prices: list[float]) -> list[int]:
    """How many slots of each run are taken, from its front: those that are asked for, and as many of the best behind
    them as gain the most, of `budget` at most.

    Every count is looked at, since the first drop says nothing where prices rise in stairs.

    Args:
        prices: of 0, 1, ... slots beside whatever there is, rising from the first: for all that can pay.
    """
    if len(runs) == 1:
        [run] = runs
        count, _ = best_count(run.gains[: max(0, budget)], prices, run.asked)
        return [count]
    # In order, of each slot its rank, its run and its gain; equal ranks as they come. Each has its place looked up: to
    # sort them all would take calls of Python's, which take longer while there are few.
    ranks: list[float] = []
    owners: list[int] = []
    gains: list[float] = []
    asked = 0
    for number, run in enumerate(runs):
        worst, place = 1.0, 0
        for position, gain in enumerate(run.gains):
            worst = min(worst, gain)  # nothing stands before what it builds on
            if position < run.asked:
                asked += 1
                rank = position - ASKED
            else:
                rank = -worst
            end = len(ranks)
            while place < end:
                middle = (place + end) // 2
                if ranks[middle] <= rank:
                    place = middle + 1
                else:
                    end = middle
            ranks.insert(place, rank)
            owners.insert(place, number)
            gains.insert(place, gain)
    count, _ = best_count(gains[: max(0, min(budget, len(prices) - 1))], prices, asked)
    depths = [0] * len(runs)
    for owner in owners[:count]:
        depths[owner] += 1
    return depths


def in_all(runs: Sequence[Run]) -> tuple[int, int, float]:
    """Slots of these runs, those of them that are asked for, and tokens that they bring."""
    count, asked, tokens = 0, 0, 0.0
    for run in runs:
        count += len(run.gains)
        asked += run.asked
        brought = 0.0
        for gain in run.gains:
            brought += gain
        tokens += brought
    return count, asked, tokens


def cut(runs: Sequence[Run], prices: list[float]) -> None:
    """Take from the end of each run what brings no more than any slot costs, but for what is asked for. Mutates runs.

    Args:
        prices: of 0, 1, ... slots.
    """
    least = inf
    for index in range(1, len(prices)):
        least = min(least, prices[index] - prices[index - 1])
    for run in runs:
        end = len(run.gains)
        while end > run.asked and run.gains[end - 1] <= least:
            end -= 1
        if end < len(run.gains):
            run.gains = run.gains[:end]


def best_count(gains: list[float], prices: list[float], asked: int = 0) -> tuple[int, float]:
    """How many of these slots bring the most beyond their prices, of no fewer than are asked for; and what they bring.

    Args:
        prices: of 0, 1, ... of them, as far as they can pay, or of more.
    """
    best, most, tokens = 0, -prices[0], 0.0
    for index, gain in enumerate(gains[: len(prices) - 1]):
        tokens += gain
        worth = tokens - prices[index + 1]
        if index < asked or worth > most:
            best, most = index + 1, worth
    return best, most
