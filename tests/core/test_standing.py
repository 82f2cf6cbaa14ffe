"""What holds for later steps, and what calls for a choice."""

from __future__ import annotations

from paceline.core.depth import Chosen
from paceline.core.method import Method
from paceline.core.standing import Look, Standing

DRAFTS = Chosen(Method.DRAFT_MODEL, 2)
COPIES = Chosen(Method.NGRAM, 8)


def test_a_stranger_is_chosen_for() -> None:
    assert Standing().of(7, 0) is None
    assert Standing().of(7, 3) is None


def test_without_a_match_the_draft_model_goes_on() -> None:
    standing = Standing()
    standing.by_model[7] = DRAFTS
    standing.looks[7] = Look(5, COPIES)
    assert standing.of(7, 0) == DRAFTS


def test_matches_that_nobody_looked_at_are_looked_at() -> None:
    standing = Standing()
    standing.by_model[7] = DRAFTS
    assert standing.of(7, 1) is None


def test_what_did_not_pay_does_not_with_a_shorter_match() -> None:
    standing = Standing()
    standing.by_model[7] = DRAFTS
    standing.looks[7] = Look(3)
    assert [standing.of(7, match) for match in (1, 3, 4)] == [DRAFTS, DRAFTS, None]


def test_what_was_copied_to_the_end_is_with_a_longer_match() -> None:
    standing = Standing()
    standing.by_model[7] = DRAFTS
    standing.looks[7] = Look(3, COPIES)
    assert [standing.of(7, match) for match in (2, 3, 9)] == [None, COPIES, COPIES]


def test_a_request_whose_draft_model_is_chosen_for_is_looked_at_whole() -> None:
    standing = Standing()
    standing.looks[7] = Look(3, COPIES)
    assert standing.of(7, 9) is None


def test_forgotten() -> None:
    standing = Standing()
    standing.by_model[7], standing.looks[7] = DRAFTS, Look(3)
    standing.forget(7)
    standing.forget(8)
    assert not standing.by_model
    assert not standing.looks
