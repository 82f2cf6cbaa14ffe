"""A plan in the making: who has how many rows of it, and how many are left."""

from __future__ import annotations

from paceline.core.crowd import Crowd
from paceline.core.plan import Admission
from paceline.core.request import Request
from paceline.core.share import Share


class StepBuilder:
    """Attributes:
    budget: rows that are left.
    prompt_budget: of them, those that prompts may have.
    crowd: whose requests may make the step only so much longer.
    shares: one for each request at most, in the order in which they got their rows.
    """

    def __init__(self, budget: int, prompt_budget: int, crowd: Crowd) -> None:
        self.budget = budget
        self.prompt_budget = prompt_budget
        self.crowd = crowd
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
