"""How fast requests are served at this moment, for estimates: when one could be done, and when to come again."""

from __future__ import annotations

from typing import Final

from paceline.core.plan import SequenceResult, SequenceWork

DECAY: Final = 0.95  # of what was known, per step
ENDINGS_DECAY: Final = 0.9  # per request that ends
# Requests in a row that end, none of them of some kind, before what is known of the kind is forgotten: it may be why
# none is let in.
ENDINGS_KEPT: Final = 100
UNLIMITED: Final = 0  # the kind of those who did not choose how long they may become
NOTHING: Final = (0.0, 0)
# Of a step to what was known: one that took longer was disturbed, and teaches no more than that.
LARGEST_RATIO: Final = 3.0
LONGEST_WAIT: Final = 60.0  # seconds that anybody is asked to wait
SHORTEST_WAIT: Final = 0.1


class ServiceRate:
    """Means of the last steps and of the last requests, weighted to the newest; only time in which steps ran counts.

    Args:
        budget: prompt tokens that a step can read.

    Attributes:
        prompt_seconds: of a step that reads prompts; 0 before the first.
        token_seconds: between two tokens of one completion; 0 before the first.
        completion_tokens: of a request that ended by itself; 0 before the first.
        prompt_charge, token_charge: engine seconds that a prompt token and a completion token are charged.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.forget()

    def forget(self) -> None:
        """Nothing is known any more."""
        self.prompt_seconds = 0.0
        self.token_seconds = 0.0
        self.completion_tokens = 0.0
        # By kind of request: the share of its limit that such a one used, or its tokens, if it had none; and how many
        # had ended by then, of any kind.
        self._used: dict[int, tuple[float, int]] = {}
        self._num_ended = 0
        self.prompt_charge = 0.0
        self.token_charge = 0.0
        self._between_ends = 0.0  # seconds
        self._since_end = 0.0

    def step(
        self,
        works: tuple[SequenceWork, ...],
        results: tuple[SequenceResult, ...],
        charges: list[float],
        seconds: float,
    ) -> None:
        """Learn from a step that took so long, and from what each work was charged."""
        self._since_end += seconds
        prompts = decodes = emitted = 0
        of_prompts = 0.0
        for work, result, charge in zip(works, results, charges):
            if work.num_tokens > 1 or not work.samples:
                prompts += work.num_tokens
                of_prompts += charge
            else:
                decodes += 1
                emitted += len(result.token_ids)
        if prompts:
            self.prompt_seconds = _mean(self.prompt_seconds, seconds)
            self.prompt_charge = _mean(self.prompt_charge, of_prompts / prompts)
        if emitted:
            self.token_seconds = _mean(self.token_seconds, seconds * decodes / emitted)
            self.token_charge = _mean(self.token_charge, max(0.0, seconds - of_prompts) / emitted)

    def ended(self, completion_tokens: int, max_tokens: int | None) -> None:
        """A request is done, with so many of the tokens that it might have had; None if it did not choose a limit."""
        kind, unit = _kind(max_tokens)
        used = _mean(self._used_by(kind), completion_tokens / unit, ENDINGS_DECAY)
        self._num_ended += 1
        self._used[kind] = used, self._num_ended
        self.completion_tokens = _mean(self.completion_tokens, completion_tokens, ENDINGS_DECAY)
        self._between_ends = _mean(self._between_ends, self._since_end, ENDINGS_DECAY)
        self._since_end = 0.0

    def seconds_to_first_token(self, prompt_tokens: int) -> float:
        """Of a request that starts now, if its prompt has the steps for itself."""
        return -(-prompt_tokens // self._budget) * self.prompt_seconds

    def seconds_to_end(self, known_tokens: int, room: int, max_tokens: int | None, emitted: int = 0) -> float:
        """Of a request that starts now, or again, and becomes as long as those of its kind.

        Args:
            known_tokens: to compute first: of the prompt, and of those `emitted` before.
            room: tokens that may still come.
            max_tokens: that it may have by its own choice.
        """
        to_come = min(room, max(self.usual_length(max_tokens) - emitted, 0.0))
        return self.seconds_to_first_token(known_tokens) + self.token_seconds * to_come

    def charge(self, prompt_tokens: int, room: int, max_tokens: int | None) -> float:
        """Engine seconds that a request would be charged; arguments as of `seconds_to_end`."""
        return prompt_tokens * self.prompt_charge + min(room, self.usual_length(max_tokens)) * self.token_charge

    def usual_length(self, max_tokens: int | None) -> float:
        """Tokens of a completion that may have so many by its own choice: as those of its kind were lately, or as all
        were, where nobody knows; 0 before any has ended.
        """
        kind, unit = _kind(max_tokens)
        return self._used_by(kind) * unit or self.completion_tokens

    def _used_by(self, kind: int) -> float:
        """As a share or in tokens; 0 if nobody knows."""
        used, num_ended = self._used.get(kind, NOTHING)
        return used if self._num_ended - num_ended < ENDINGS_KEPT else 0.0

    def seconds_until_ends(self, count: int) -> float:
        """Until so many requests have ended, within what anybody should be asked to wait."""
        return min(max(count * self._between_ends, SHORTEST_WAIT), LONGEST_WAIT)


def _kind(max_tokens: int | None) -> tuple[int, int]:
    """The kind of requests with that limit, and the unit, in tokens, that their lengths are told in. Limits with the
    same number of binary digits are one kind, whose lengths are shares of the limit. Requests without a limit are a
    kind, too, whose lengths are tokens.
    """
    return (UNLIMITED, 1) if max_tokens is None else (max_tokens.bit_length(), max_tokens)


def _mean(before: float, value: float, decay: float = DECAY) -> float:
    """The first value stands for itself."""
    if not before:
        return value
    return decay * before + (1.0 - decay) * min(value, LARGEST_RATIO * before)
