"""Masks off the critical path: computed beside the target's forward."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from paceline.core.grammar import Mask, Matcher

Job = tuple[Matcher, Sequence[int]]


class MaskWorker:
    """One thread that computes masks, in the order in which they were asked for.

    It is a plain thread and no part of the forward's OpenMP pool. Parsers release the interpreter while they work, so
    on a machine with a core to spare masks cost nothing but the wait for a forward that is done before them.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-masks")

    def start(self, jobs: Sequence[Job]) -> Future[list[Mask]]:
        """Begin to compute `matcher.masks(drafts)` for each job.

        Until the result is there the matchers belong to the worker: nobody else may touch them.
        """
        return self._thread.submit(_masks, tuple(jobs))

    def close(self) -> None:
        """Wait for what was started, and end the thread."""
        self._thread.shutdown()


def _masks(jobs: tuple[Job, ...]) -> list[Mask]:
    return [matcher.masks(drafts) for matcher, drafts in jobs]
