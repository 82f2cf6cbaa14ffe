"""The automaton against `str.find`."""

from __future__ import annotations

import random

import pytest

from paceline.engine.stop_matcher import StopMatcher


def scan(matcher: StopMatcher, text: str) -> tuple[int, str] | None:
    """Where the first match ends, and what matched."""
    state = matcher.START
    for end, char in enumerate(text, 1):
        state = matcher.step(state, char)
        match = matcher.match(state)
        if match is not None:
            return end, match
    return None


def naive(strings: list[str], text: str) -> tuple[int, str] | None:
    found = [(text.find(s) + len(s), -len(s), s) for s in strings if s in text]
    return (min(found)[0], min(found)[2]) if found else None


@pytest.mark.parametrize(
    ("strings", "text", "match"),
    [
        (["ab"], "aab", (3, "ab")),
        (["aab"], "aaab", (4, "aab")),
        (["abc", "b"], "abc", (2, "b")),  # the first to end
        (["c", "bc", "abc"], "abc", (3, "abc")),  # of those, the longest
        (["abcd", "bx", "c"], "abcx", (3, "c")),
        (["abab", "bb"], "ababb", (4, "abab")),
        (["€", "🚴"], "a€", (2, "€")),
        (["abc"], "abab", None),
        (["aa", "aa"], "baa", (3, "aa")),
    ],
)
def test_the_first_to_end_wins_then_the_longest(strings: list[str], text: str, match: tuple[int, str] | None) -> None:
    assert scan(StopMatcher(strings), text) == match == naive(strings, text)


@pytest.mark.parametrize("seed", range(5))
def test_random_strings_match_as_find_does(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        strings = ["".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 6))]
        text = "".join(rng.choices("abc", k=rng.randrange(30)))
        assert scan(StopMatcher(strings), text) == naive(strings, text)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_held_back_is_the_longest_end_that_may_become_a_match(seed: int) -> None:
    """Also where a match was passed over: what is complete and begins nothing longer is not held."""
    rng = random.Random(seed)
    for _ in range(200):
        strings = ["".join(rng.choices("ab", k=rng.randrange(1, 8))) for _ in range(3)]
        matcher = StopMatcher(strings)
        text, state = "", matcher.START
        for char in rng.choices("ab", k=20):
            text, state = text + char, matcher.step(state, char)
            starts = {string[:length] for string in strings for length in range(1, len(string))}
            assert matcher.length(state) == max((len(s) for s in starts if text.endswith(s)), default=0)
