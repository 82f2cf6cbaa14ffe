"""Finds the first of several strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class StopMatcher:
    """An automaton after Aho and Corasick (1975): one transition per character, however many strings there are.

    A state is the longest end of the text read so far that begins one of the strings, so each string that is completed
    is found at its last character. Of several that end there, the longest matches. Immutable; the reader keeps the
    state, `START` at first.
    """

    START: ClassVar[int] = 0

    def __init__(self, strings: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # the state to fall back to: the longest proper end of this one that is a state too
        self._length = [0]
        self._match: list[str | None] = [None]
        for string in strings:
            self._add(string)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state behind one more character."""
        while state and char not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(char, 0)

    def length(self, state: int) -> int:
        """Characters at the end of the text that may become a match: exactly what must be held back."""
        return self._length[state]

    def match(self, state: int) -> str | None:
        """The string that ends here, if one does."""
        return self._match[state]

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self._length.append(self._length[state] + 1)
                self._match.append(None)
            state = self._next[state][char]
        self._match[state] = string

    def _link(self) -> None:
        """Breadth first, so that what a state falls back to, being shorter, is linked before it."""
        queue = list(self._next[0].values())
        for state in queue:
            for char, longer in self._next[state].items():
                self._shorter[longer] = self.step(self._shorter[state], char)
                queue.append(longer)
            if not self._next[state]:
                self._length[state] = self._length[self._shorter[state]]  # complete, so it becomes nothing longer
            if self._match[state] is None:
                self._match[state] = self._match[self._shorter[state]]
