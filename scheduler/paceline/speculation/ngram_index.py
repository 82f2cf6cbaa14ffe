"""Where the n-grams of a text last stood, and so what it may go on with (prompt lookup; Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.plan import LONGEST_MATCH, LONGEST_NGRAM
from paceline.speculation.packed_ngrams import PackedNgrams

RECENT = 1024  # tokens at least whose n-grams are not packed
PACKED_SHARE = 16  # as many are not packed as this part of those that are


class NgramIndex:
    """Where each n-gram of a growing text last ended; grows with the text.

    Those of the newest tokens are in a dictionary, which grows in O(1) but takes hundreds of bytes per token. When
    these are many, all are packed.
    """

    def __init__(self) -> None:
        self._packed: PackedNgrams | None = None
        self._num_packed = 0
        self._ends: dict[tuple[int, ...], int] = {}  # of n-grams that end behind what is packed
        self._num_read = 0

    def read(self, token_ids: list[int]) -> None:
        """Take in every n-gram that something follows: those ending before the newest token."""
        if len(token_ids) - self._num_packed > RECENT + self._num_packed // PACKED_SHARE:
            self._num_read = self._num_packed = len(token_ids) - 1
            self._packed, self._ends = PackedNgrams(token_ids[: self._num_packed]), {}
        for end in range(self._num_read + 1, len(token_ids)):
            for n in range(1, min(LONGEST_NGRAM, end) + 1):
                self._ends[tuple(token_ids[end - n : end])] = end
        self._num_read = max(self._num_read, len(token_ids) - 1)

    def continuation(self, token_ids: list[int], count: int) -> list[int]:
        """`count` tokens that followed the longest, latest match of the text's end; none without a match.

        A match that near to the end is a loop, so where the text ends, what followed the match follows again.
        """
        end, _ = self._longest(token_ids)
        period = len(token_ids) - end
        return [token_ids[end + i % period] for i in range(count)] if period else []

    def score(self, token_ids: list[int], emitted: Sequence[int]) -> tuple[float, ...]:
        """A 1 for each token of the continuation that was emitted, and a 0 for the first that was not."""
        labels = []
        for mine, token in zip(self.continuation(token_ids, len(emitted)), emitted, strict=False):
            labels.append(float(mine == token))
            if mine != token:
                break
        return tuple(labels)

    def match(self, token_ids: list[int]) -> int:
        """Tokens before the continuation that agree with the text's end, up to `LONGEST_MATCH`; 0 without a match."""
        end, count = self._longest(token_ids)
        if count == LONGEST_NGRAM:
            most, size = min(LONGEST_MATCH, end), len(token_ids)
            while count < most and token_ids[end - count - 1] == token_ids[size - count - 1]:
                count += 1
        return count

    def _longest(self, token_ids: list[int]) -> tuple[int, int]:
        """Where the longest, latest match ends, and tokens that were looked up; the text's end and 0 without one."""
        packed = [] if self._packed is None else self._packed.ends(token_ids)
        for n in range(min(LONGEST_NGRAM, len(token_ids)), 0, -1):
            end = self._ends.get(tuple(token_ids[-n:]))
            if end is not None:
                return end, n
            if n <= len(packed):
                return packed[n - 1], n
        return len(token_ids), 0
