"""How fast requests are served at this moment, for estimates: when one could be done, and when to come again."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.plan import SequenceResult, SequenceWork

DECAY = 0.95  # of what was known, per step
ENDINGS_DECAY = 0.9  # per request that ends
LONGEST_WAIT = 60.0  # seconds that anybody is asked to wait
SHORTEST_WAIT = 0.1


class ServiceRate:
    """Means of the last steps and of the last requests, weighted to the newest. Mutated by `step` and `ended`.

    Attributes:
        prompt_seconds: that a step takes per token of the prompts in it; 0 before the first.
        token_seconds: between two tokens of one completion; 0 before the first.
        completion_tokens: of a request that ended by itself; 0 before the first.
    """

    def __init__(self) -> None:
        self.prompt_seconds = 0.0
        self.token_seconds = 0.0
        self.completion_tokens = 0.0
        self._between_ends = 0.0  # seconds
        self._last_end: float | None = None

    def step(self, works: Sequence[SequenceWork], results: Sequence[SequenceResult], seconds: float) -> None:
        """Learn from a step that took so long."""
        prompts = decodes = emitted = 0
        for work, result in zip(works, results, strict=True):
            if work.num_tokens > 1 or not work.samples:
                prompts += work.num_tokens
            else:
                decodes += 1
                emitted += len(result.token_ids)
        if prompts:
            self.prompt_seconds = _mean(self.prompt_seconds, seconds / prompts, DECAY)
        if emitted:
            self.token_seconds = _mean(self.token_seconds, seconds * decodes / emitted, DECAY)

    def ended(self, completion_tokens: int, now: float) -> None:
        """A request is done."""
        self.completion_tokens = _mean(self.completion_tokens, completion_tokens, ENDINGS_DECAY)
        if self._last_end is not None:
            self._between_ends = _mean(self._between_ends, now - self._last_end, ENDINGS_DECAY)
        self._last_end = now

    def seconds_to_first_token(self, prompt_tokens: int) -> float:
        """Of a request that starts now."""
        return prompt_tokens * self.prompt_seconds

    def seconds_to_end(self, prompt_tokens: int, max_tokens: int) -> float:
        """Of a request that starts now and is as long as most, or as long as it may be if that is less."""
        return self.seconds_to_first_token(prompt_tokens) + self.token_seconds * min(max_tokens, self.completion_tokens)

    def seconds_until_ends(self, count: int) -> float:
        """Until so many requests have ended, within what anybody should be asked to wait."""
        return min(max(count * self._between_ends, SHORTEST_WAIT), LONGEST_WAIT)


def _mean(before: float, value: float, decay: float) -> float:
    """The first value stands for itself."""
    return decay * before + (1.0 - decay) * value if before else value
