"""What was chosen in an earlier step and holds for this one, too."""

from __future__ import annotations

from typing import Final

from paceline.core.depth import NOTHING, Chosen


class Look:
    """What came of looking at a request's n-grams.

    Attributes:
        match: tokens that agreed before the first proposal, at that step.
        choice: to copy as deep as the request may, or NOTHING: what stands by its draft model is worth more.
    """

    __slots__ = ("choice", "match")

    def __init__(self, match: int, choice: Chosen = NOTHING) -> None:
        self.match = match
        self.choice = choice


class Standing:
    """Choices by request. Mutated by the policy that made them.

    Attributes:
        by_model: what each does by its draft model.
        looks: at n-grams, since the last decision, as far as they tell something of the next steps.
    """

    __slots__ = ("by_model", "looks")

    def __init__(self) -> None:
        self.by_model: dict[int, Chosen] = {}
        self.looks: Final[dict[int, Look]] = {}

    def of(self, request_id: int, match: int) -> Chosen | None:
        """None if it must be chosen: of that request nothing stands, or its n-grams promise something new. A longer
        match promises more: where a shorter one was copied to the end, it is; where a longer one did not pay, it does
        not.

        Args:
            match: tokens that agree before the first proposal; 0 if n-grams have none, or may not draft.
        """
        by_model = self.by_model.get(request_id)
        if by_model is None or not match:
            return by_model
        look = self.looks.get(request_id)
        if look is None:
            return None
        if look.choice.depth:
            return look.choice if match >= look.match else None
        return by_model if match <= look.match else None

    def forget(self, request_id: int) -> None:
        self.by_model.pop(request_id, None)
        self.looks.pop(request_id, None)
