"""Words that a completion may not contain, as token sequences."""

from __future__ import annotations

from collections.abc import Sequence


class BadWords:
    """Immutable. Finds what would complete a word, in time that does not depend on the number of words.

    Attributes:
        longest: tokens before the last of the longest word.
    """

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._last: dict[tuple[int, ...], list[int]] = {}
        for *before, last in words:
            self._last.setdefault(tuple(before), []).append(last)
        self._lengths = sorted({len(before) for before in self._last})
        self.longest = max(self._lengths, default=0)

    def completing(self, behind: Sequence[int]) -> list[int]:
        """The tokens that would complete a word behind these."""
        lengths = (length for length in self._lengths if length <= len(behind))
        return [last for length in lengths for last in self._last.get(tuple(behind[len(behind) - length :]), ())]
