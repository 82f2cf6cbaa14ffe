"""Counts of tokens against a plain counter, whatever is added in what order."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.token_counts import TokenCounts

TOKENS = st.lists(st.integers(0, 400), max_size=150)


def as_counter(counts: TokenCounts, drafts: list[int]) -> dict[int, float]:
    token_ids, times = counts.behind(drafts)
    assert len(set(token_ids.tolist())) == len(token_ids) == len(times)
    return dict(zip(token_ids.tolist(), times.tolist(), strict=True))


@given(TOKENS, TOKENS, st.lists(TOKENS, max_size=4), TOKENS)
def test_counts_are_a_counters(prompt: list[int], output: list[int], later: list[list[int]], drafts: list[int]) -> None:
    counts = TokenCounts(prompt, output)
    said = Counter(output)
    for tokens in later:
        assert as_counter(counts, drafts) == {t: (said + Counter(drafts))[t] for t in {*prompt, *said, *drafts}}
        counts.add(tokens)
        said.update(tokens)
    assert as_counter(counts, []) == {t: said[t] for t in {*prompt, *said}}
    assert as_counter(counts, drafts) == {t: (said + Counter(drafts))[t] for t in {*prompt, *said, *drafts}}


def test_any_number_of_distinct_tokens() -> None:
    for size in (63, 64, 65, 128, 129, 1000):
        assert as_counter(TokenCounts([], list(range(size))), []) == dict.fromkeys(range(size), 1.0)
        assert as_counter(TokenCounts(list(range(size)), [size]), []) == dict.fromkeys(range(size), 0.0) | {size: 1.0}


def test_drafts_leave_no_trace_and_the_arrays_are_the_callers_own() -> None:
    counts = TokenCounts([1, 2], [2])
    token_ids, times = counts.behind([2, 9])
    token_ids[:] = -1
    times[:] = -1
    assert as_counter(counts, []) == {1: 0, 2: 1}
    assert as_counter(counts, [2, 9, 9]) == {1: 0, 2: 2, 9: 2}
