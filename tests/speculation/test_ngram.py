"""Prompt lookup."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import pytest

from paceline.core.method import Method
from paceline.core.plan import LONGEST_MATCH, LONGEST_NGRAM, Admission, SequenceWork
from paceline.core.sequence import Sequence
from paceline.speculation import Ngram, ngram_index
from paceline.speculation.ngram_index import NgramIndex


def propose(drafter: Ngram, sequence: Sequence, depth: int) -> list[int]:
    work = SequenceWork(sequence.request_id, 1, samples=True, num_drafts=depth, method=Method.NGRAM)
    (draft,) = drafter.propose([(sequence, work)])
    assert draft.probs is None
    return draft.token_ids


def sequence_of(token_ids: list[int], request_id: int = 1) -> Sequence:
    return Sequence(Admission(request_id, tuple(token_ids), len(token_ids)))


def naive(token_ids: list[int], depth: int) -> tuple[list[int], int]:
    """What is proposed, and how many tokens before it agree."""
    for n in range(min(LONGEST_NGRAM, len(token_ids)), 0, -1):
        for end in range(len(token_ids) - 1, n - 1, -1):
            if token_ids[end - n : end] == token_ids[-n:]:
                while (
                    n < min(LONGEST_MATCH, end) and n >= LONGEST_NGRAM and token_ids[end - n - 1] == token_ids[-n - 1]
                ):
                    n += 1
                return list(itertools.islice(itertools.cycle(token_ids[end:]), depth)), n
    return [], 0


@pytest.mark.parametrize(
    ("text", "depth", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 9, [3, 4, 1, 2, 3, 4, 1, 2, 3]),
        ([1, 2, 9, 1, 2, 8, 1, 2], 1, [8]),  # the latest match
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 1, [7]),  # but a longer one first
        ([1, 2, 3, 2], 2, [3, 2]),  # one token will do
        ([1, 2, 3], 4, []),
        ([1], 4, []),
        ([7, 7, 7], 3, [7, 7, 7]),  # a loop goes on
        ([1, 2, 3, 1, 2], 0, []),
    ],
)
def test_examples(text: list[int], depth: int, expected: list[int]) -> None:
    assert propose(Ngram(), sequence_of(text), depth) == expected


@pytest.mark.parametrize("recent", [0, 5, 150, 1 << 20])
def test_growing_text_agrees_with_a_search_from_scratch(recent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its n-grams are packed now and then, or never."""
    monkeypatch.setattr(ngram_index, "RECENT", recent)
    rng = random.Random(4)
    drafter = Ngram()
    sequence = sequence_of([0, 1])
    matches = set()
    for step in range(300):
        if step % 10:
            sequence.token_ids.extend(rng.choice((0, 1, 151_935, 2**31 - 1)) for _ in range(rng.randint(1, 5)))
        else:
            start = rng.randrange(max(1, len(sequence.token_ids) - 24))
            sequence.token_ids.extend(sequence.token_ids[start : start + 24])
        expected, match = naive(sequence.token_ids, 5)
        assert drafter.match(sequence) == match
        assert propose(drafter, sequence, 5) == expected
        matches.add(match)
    assert {2, 3, 4, 5, LONGEST_MATCH} <= matches


def test_long_texts_take_few_bytes_per_token() -> None:
    rng = random.Random(1)
    text = [rng.randrange(150_000) for _ in range(50_000)]
    index = NgramIndex()
    tracemalloc.start()
    try:
        for size in (40_000, *range(40_001, len(text) + 1, 7)):
            index.read(text[:size])
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 80 * len(text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ([1, 2, 3], 0),
        ([1, 2, 3, 1], 1),
        ([1, 2, 3, 4, 1, 2], 2),
        ([9, 5, 6, 7, 8, 1, 5, 6, 7, 8], 4),
        ([9, 4, 5, 6, 7, 8, 1, 4, 5, 6, 7, 8], 5),
        ([4, 5, 6, 7, 8, 4, 5, 6, 7, 8], 5),  # up to the text's begin
        ([7] * 5, 4),
        (list(range(40)) * 2, LONGEST_MATCH),
    ],
)
def test_a_match_is_as_long_as_tokens_agree(text: list[int], match: int) -> None:
    assert Ngram().match(sequence_of(text)) == match


def test_sequences_do_not_see_each_other_and_are_forgotten() -> None:
    drafter = Ngram()
    propose(drafter, sequence_of([1, 2, 3, 1, 2], request_id=1), 3)
    assert propose(drafter, sequence_of([1, 2], request_id=2), 3) == []
    drafter.release(1)
    assert propose(drafter, sequence_of([4, 1, 2], request_id=1), 3) == []


@pytest.mark.parametrize(
    ("text", "emitted", "labels"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1], (1.0, 1.0, 1.0)),
        ([1, 2, 3, 4, 1, 2], [3, 9, 1], (1.0, 0.0)),
        ([1, 2, 3, 4, 1, 2], [9], (0.0,)),
        ([1, 2, 3], [4, 5], ()),
    ],
)
def test_what_is_scored(text: list[int], emitted: list[int], labels: tuple[float, ...]) -> None:
    """As far as the first mistake, and nothing where nothing is proposed."""
    assert Ngram().score(sequence_of(text), emitted) == labels
