"""Prompt lookup."""

from __future__ import annotations

import itertools
import random

import pytest

from paceline.core.method import Method
from paceline.core.plan import Admission, SequenceWork
from paceline.core.sequence import Sequence
from paceline.speculation import Ngram
from paceline.speculation.ngram import LONGEST, SHORTEST


def propose(drafter: Ngram, sequence: Sequence, depth: int) -> list[int]:
    work = SequenceWork(sequence.request_id, 1, samples=True, num_drafts=depth, method=Method.NGRAM)
    (draft,) = drafter.propose([(sequence, work)])
    assert draft.probs is None
    return draft.token_ids


def sequence_of(token_ids: list[int], request_id: int = 1) -> Sequence:
    return Sequence(Admission(request_id, tuple(token_ids), len(token_ids)))


def naive(token_ids: list[int], depth: int) -> list[int]:
    for n in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(token_ids) - 1, n - 1, -1):
            if len(token_ids) >= n and token_ids[end - n : end] == token_ids[-n:]:
                return list(itertools.islice(itertools.cycle(token_ids[end:]), depth))
    return []


@pytest.mark.parametrize(
    ("text", "depth", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 9, [3, 4, 1, 2, 3, 4, 1, 2, 3]),
        ([1, 2, 9, 1, 2, 8, 1, 2], 1, [8]),  # the latest match
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 1, [7]),  # but a longer one first
        ([1, 2, 3], 4, []),
        ([1], 4, []),
        ([7, 7, 7], 3, [7, 7, 7]),  # a loop goes on
        ([1, 2, 3, 1, 2], 0, []),
    ],
)
def test_examples(text: list[int], depth: int, expected: list[int]) -> None:
    assert propose(Ngram(), sequence_of(text), depth) == expected


def test_growing_text_agrees_with_a_search_from_scratch() -> None:
    rng = random.Random(4)
    drafter = Ngram()
    sequence = sequence_of([0, 1])
    for _ in range(300):
        sequence.token_ids.extend(rng.randrange(4) for _ in range(rng.randint(1, 5)))
        assert propose(drafter, sequence, 5) == naive(sequence.token_ids, 5)


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
