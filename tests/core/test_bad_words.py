"""What would complete a bad word, against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.bad_words import BadWords

TOKENS = st.integers(0, 3)


@given(st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=8), st.lists(TOKENS, max_size=6))
def test_completing(words: list[tuple[int, ...]], behind: list[int]) -> None:
    expected = sorted(
        w[-1] for w in words if tuple(behind[len(behind) - len(w) + 1 :]) == w[:-1] and len(behind) >= len(w) - 1
    )
    bad = BadWords(words)
    assert sorted(bad.completing(behind)) == expected
    assert bad.longest == max((len(word) - 1 for word in words), default=0)
    # No token before the longest word's can matter.
    assert bad.completing(behind[max(0, len(behind) - bad.longest) :]) == bad.completing(behind)
