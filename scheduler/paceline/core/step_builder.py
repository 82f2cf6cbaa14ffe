"""A plan in the making: who has how many rows of it, and how many are left."""

from __future__ import annotations

from paceline.core.plan import Admission, SequenceWork
from paceline.core.request import Request
from paceline.core.slowdown import Slowdown


class Share:
    """One request's part of the step, until it is settled; see `SequenceWork`.

    Attributes:
        rows: known tokens to compute.
        end: token positions that must have slots for them.
    """

    __slots__ = ("blocks", "catch_up", "depth", "end", "method", "request", "rows", "samples", "scores_ngram")

    def __init__(self, request: Request, rows: int, samples: bool, end: int, blocks: tuple[int, ...]) -> None:
        self.request = request
        self.rows = rows
        self.samples = samples
        self.end = end
        self.blocks = blocks
        self.depth = 0
        self.catch_up = 0
        self.method = request.method
        self.scores_ngram = False

    def work(self) -> SequenceWork:
        return SequenceWork(
            self.request.request_id,
            self.rows,
            self.samples,
            self.depth,
            self.method,
            self.catch_up,
            self.blocks,
            self.scores_ngram,
        )


class StepBuilder:
    """Attributes:
    budget: rows that are left.
    prompt_budget: of them, those that prompts may have.
    crowd: tenants whose requests may make the step only so much longer,
    light: for those of these tenants,
    most_slowdown: so many times as long;
    ahead: of the crowd, those who make room for others of it.
    slowdown: what is left of it for those; None before that is known, or where there is no bound.
    shares: one for each request at most, in the order in which they got their rows.
    """

    def __init__(self, budget: int, prompt_budget: int) -> None:
        self.budget = budget
        self.prompt_budget = prompt_budget
        self.crowd: frozenset[str] = frozenset()
        self.light: frozenset[str] = frozenset()
        self.ahead: frozenset[str] = frozenset()
        self.most_slowdown = 1.0
        self.slowdown: Slowdown | None = None
        self.shares: list[Share] = []
        self.admitted: list[Admission] = []

    def add(self, share: Share) -> None:
        self.shares.append(share)
        self.budget -= share.rows
        if share.rows > 1:
            self.prompt_budget -= share.rows

    def drop(self, request: Request) -> None:
        """It was preempted: if it has rows, others may have them."""
        for index, share in enumerate(self.shares):
            if share.request is request:
                del self.shares[index]
                self.budget += share.rows
                if share.rows > 1:
                    self.prompt_budget += share.rows
                return
