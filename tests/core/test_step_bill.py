"""What a step is charged to whom."""

from __future__ import annotations

import pytest

from core.test_speculation import PASS, costs
from paceline.core.cost_model import CostModel, StepShape
from paceline.core.method import Method
from paceline.core.plan import SequenceResult, SequenceWork
from paceline.core.step_bill import rows_read, write_bill

MODEL = Method.DRAFT_MODEL


def decode(
    request_id: int, depth: int = 0, accepted: int = 0, method: Method = MODEL
) -> tuple[SequenceWork, SequenceResult]:
    work = SequenceWork(request_id, 1, True, num_drafts=depth, method=method)
    return work, SequenceResult(request_id, (0,) * (accepted + 1), depth, accepted)


def bill(
    pairs: list[tuple[SequenceWork, SequenceResult]], passes: tuple[int, ...], seconds: float, priced: bool = True
):  # type: ignore[no-untyped-def]
    works, results = zip(*pairs, strict=True)
    rows = sum(work.num_tokens for work in works) + sum(result.num_drafted for result in results)
    shape = StepShape(rows, 0, passes, sequences=len(works))
    return write_bill(costs() if priced else None, shape, works, results, [0] * len(works), seconds)


def test_charges_sum_to_the_duration() -> None:
    pairs = [decode(0, 3, 1), decode(1), decode(2, 1, 1)]
    assert sum(bill(pairs, (2, 1, 1), 20.0).charges) == pytest.approx(20.0)
    assert sum(bill(pairs, (2, 1, 1), 7.0).charges) == pytest.approx(7.0)


def test_who_drafts_pays_for_drafts_and_everybody_for_the_rest() -> None:
    """10 s, half a second for each row and each pass: two rows that are no drafts, three slots, three passes."""
    told = bill([decode(0, 3, 1), decode(1)], (1, 1, 1), 10 + 0.5 * 5 + 3 * PASS)
    assert told.charges == pytest.approx([5.5 + 3 * 0.5 + 3 * PASS, 5.5])
    assert told.drafts[0] == pytest.approx((11 / 2, 3 * 0.5 + 3 * PASS, 2 * 0.5 + 2 * PASS))
    assert told.drafts[1] == (0.0, 0.0, 0.0)


def test_a_pass_is_shared_by_those_in_it() -> None:
    told = bill([decode(0, 2, 2), decode(1, 1, 0)], (2, 1), 10 + 0.5 * 5 + 2 * PASS)
    assert [price.spent for price in told.drafts] == pytest.approx([2 * 0.5 + PASS / 2 + PASS, 0.5 + PASS / 2])


def test_ngrams_pay_for_no_pass() -> None:
    told = bill([decode(0, 2, 0, Method.NGRAM), decode(1, 2, 0)], (1, 1), 20.0)
    assert [price.spent for price in told.drafts] == pytest.approx([1.0, 1.0 + 2 * PASS])


def test_who_was_forced_pays_for_no_pass() -> None:
    """What a grammar forces is proposed without the draft model, in which the other is alone."""
    work, result = decode(0, 2, 2)
    result.is_forced = True
    told = bill([(work, result), decode(1, 2, 0)], (1, 1), 20.0)
    assert [price.spent for price in told.drafts] == pytest.approx([1.0, 1.0 + 2 * PASS])
    assert [price.rejected for price in told.drafts] == pytest.approx([0.0, 1.0 + 2 * PASS])


def test_who_has_to_read_pays_for_that() -> None:
    """And not who reads, in its first pass, what that reads anyway."""
    prices = CostModel([1, 64], [1.0, 1.0], 0.0, [1, 64], [0.5, 0.5], first_rows=2, reading_seconds=1.0)
    pairs = [decode(number, 1) for number in range(4)]
    for (work, _), gap in zip(pairs, (1, 2, 2, 10), strict=True):
        work.draft_catch_up = gap
    works, results = zip(*pairs, strict=True)
    assert [rows_read(*pair, 2) for pair in pairs] == [0, 0, 0, 8]
    shape = StepShape(8, 0, (4,), 8, sequences=4)
    told = write_bill(prices, shape, works, results, [0] * 4, prices.step(shape))
    assert told.charges == pytest.approx([0.25 + 0.125] * 3 + [0.25 + 0.125 + 1.0])


def test_a_prompt_pays_by_its_rows() -> None:
    chunk = SequenceWork(0, 99, False), SequenceResult(0)
    told = bill([chunk, decode(1)], (), 60.0)
    assert told.charges == pytest.approx([59.4, 0.6])


def test_without_prices_rows_share_alike() -> None:
    told = bill([decode(0, 3, 3), decode(1)], (1, 1, 1), 10.0, priced=False)
    assert told.charges == pytest.approx([8.0, 2.0])
    assert told.drafts == [(0.0, 0.0, 0.0)] * 2


def test_free_slots_cost_nothing() -> None:
    """In a step that waits for memory, rows up to a number are free."""
    from paceline.sim.control import roofline

    pairs = [decode(0, 4, 0, Method.NGRAM), decode(1)]
    works, results = zip(*pairs, strict=True)
    told = write_bill(roofline(0.02, 8, 0.1), StepShape(6, 0, (), sequences=2), works, results, [0, 0], 0.02)
    assert told.charges == pytest.approx([0.01, 0.01])
    assert all(price.rejected == 0.0 for price in told.drafts)
