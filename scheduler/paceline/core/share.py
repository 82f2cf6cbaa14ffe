"""One request's part of a step in the making."""

from __future__ import annotations

from paceline.core.plan import SequenceWork
from paceline.core.request import Request


class Share:
    """Until it is settled; see `SequenceWork`.

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
