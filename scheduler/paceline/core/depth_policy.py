"""Who chooses how deep each request drafts in the next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.core.depth import Chosen, Decision, DepthCandidate, Outcome, StepLoad, within_bounds
from paceline.core.standing import Standing


class DepthPolicy(Protocol):
    """Chooses from history alone. Who inherits this has to say nothing but `choose`."""

    @property
    def decision(self) -> Decision | None:
        """The last one; None of a policy that knows no prices."""
        return None

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        """A method and a depth for each candidate, within its bounds.

        The scheduler may grant less where memory or budget is short.

        Args:
            slot_price: tokens that a draft slot must earn besides its time: what KV or a deadline is short of.
        """
        ...

    def standing(self, load: StepLoad, *, slot_price: float = 0.0) -> Standing | None:
        """What was chosen before, if that holds for this step too. Then only those join of whom nothing stands.

        Asked once for each step, before `choose`; None calls for that.
        """
        return None

    def join(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        """`choose` for these alone, while what stands of the others goes on to hold. The drafts of those are in `load`,
        what their draft model reads is not.
        """
        raise AssertionError("asked only of policies whose choices stand")

    def reads_along(self, unread: int, tokens: float, survival: float, sequences: int, context: int) -> bool:
        """Shall the draft model read a prompt while the target does, in the company of requests that are all alike?

        Args:
            unread: tokens that it would read.
            tokens: of completions that these are likely to serve.
            survival: the chance that the first draft of each is kept.
            sequences: that will decode.
            context: tokens of all of them.
        """
        return True

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished step."""
        return

    def forget(self, request_id: int) -> None:
        """The request has ended or lost its KV; an unknown one is ignored."""
        return


class FixedDepth(DepthPolicy):
    """The same depth for everyone by the first offer, wherever bounds allow it."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def choose(self, candidates: Sequence[DepthCandidate], load: StepLoad, *, slot_price: float = 0.0) -> list[Chosen]:
        return [within_bounds(c, c.offers[0], self.depth) for c in candidates]
