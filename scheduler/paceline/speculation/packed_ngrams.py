"""Where the n-grams of a text last stood, in few bytes per token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from paceline.core.plan import LONGEST_NGRAM

TOKEN_BITS = 32


class PackedNgrams:
    """Where each n-gram of a text last ended; immutable, 48 bytes per token at most, and less where n-grams come again.

    Those of n tokens have a sorted table of keys: of the token that they begin with, behind the row that the other
    tokens have in the table of n - 1.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Of all n-grams of a text that has a token at least, in O(n log n)."""
        text = np.asarray(token_ids, np.int64)
        self._keys: list[memoryview] = []  # by n - 1, int64 each
        self._ends: list[memoryview] = []  # likewise, int32 each: tokens before the end
        rows = np.zeros(len(text) + 1, np.int64)  # by end, of the n-gram that ends there
        for n in range(1, min(LONGEST_NGRAM, len(text)) + 1):
            keys, rows = np.unique(rows[1:] << TOKEN_BITS | text[: len(text) - n + 1], return_inverse=True)
            ends = np.empty(len(keys), np.int32)
            ends[rows] = np.arange(n, len(text) + 1)  # where a row comes again, the last one stays
            self._keys.append(keys.data)
            self._ends.append(ends.data)

    def ends(self, token_ids: Sequence[int]) -> list[int]:
        """Where the last token, the last two, and so on last ended, as far as they ever did."""
        found: list[int] = []
        row = 0
        for keys, ends, token in zip(self._keys, self._ends, reversed(token_ids[-LONGEST_NGRAM:]), strict=False):
            key = row << TOKEN_BITS | token
            row = bisect_left(keys, key)
            if row == len(keys) or keys[row] != key:
                break
            found.append(ends[row])
        return found
