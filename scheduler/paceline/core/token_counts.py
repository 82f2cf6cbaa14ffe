"""How often each token stands in a text, as penalties need it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The distinct tokens of a prompt and its completion, and their counts in the completion. Grows by `add` only."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._index: dict[int, int] = {}  # token -> its place below
        self._token_ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float32)  # in the completion; 0 for tokens of the prompt alone
        for token in prompt:
            self._place(token)
        self.add(output)

    def add(self, output: Sequence[int]) -> None:
        """Count emitted tokens."""
        for token in output:
            place = self._place(token)  # first: it may replace the arrays
            self._counts[place] += 1

    def behind(self, drafts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Distinct token ids and their counts, once `drafts` are emitted too. The arrays are the caller's own."""
        size = len(self._index)
        counts = self._counts[:size].copy()
        more: dict[int, int] = {}
        for token in drafts:
            place = self._index.get(token)
            if place is None:
                more[token] = more.get(token, 0) + 1
            else:
                counts[place] += 1
        token_ids = np.concatenate([self._token_ids[:size], np.fromiter(more.keys(), np.int64, len(more))])
        return token_ids, np.concatenate([counts, np.fromiter(more.values(), np.float32, len(more))])

    def _place(self, token: int) -> int:
        place = self._index.setdefault(token, len(self._index))
        if place == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[place] = token
        return place
