"""The oracle of most tests is itself tested: each fault that it is there to find, it finds."""

from __future__ import annotations

import pytest

from paceline.core.method import Method
from paceline.core.plan import Admission, SequenceWork, StepPlan, StepResult
from paceline.sim import ScriptedRunner, next_token, reference_output

PROMPT = (5, 6, 7)


class Driver:
    """Hand-written plans for one request, id 1, whose blocks are 0, 1, 2 and so on."""

    def __init__(
        self, right: bool = True, prompt: tuple[int, ...] = PROMPT, method: Method = Method.DRAFT_MODEL
    ) -> None:
        self.runner = ScriptedRunner(16, 2, lambda request_id, position: right)
        self.method = method
        self.num_steps = 0
        self.blocks = 0
        self.admitted: tuple[Admission, ...] = (Admission(1, prompt, len(prompt)),)

    def step(
        self, num_tokens: int, drafts: int = 0, catch_up: int = 0, new_blocks: int = 0, samples: bool = True
    ) -> StepResult:
        ids = tuple(range(self.blocks, self.blocks + new_blocks))
        self.blocks += new_blocks
        work = SequenceWork(1, num_tokens, samples, drafts, self.method, catch_up, ids)
        plan = StepPlan(self.num_steps, (), self.admitted, (work,))
        self.admitted = ()
        self.num_steps += 1
        return self.runner.execute(plan)


def test_all_right_emits_all_and_one_more() -> None:
    driver = Driver()
    assert driver.step(3, catch_up=3, new_blocks=2).sequences[0].token_ids == (next_token(PROMPT),)
    (result,) = driver.step(1, drafts=3, catch_up=1, new_blocks=2).sequences
    assert list(result.token_ids) == reference_output(PROMPT, 5)[1:]
    assert (result.num_drafted, result.num_accepted, result.acceptance) == (3, 3, (1.0, 1.0, 1.0))
    assert result.num_draft_computed == 4 + 3 - 1, "the last draft was never read by the draft model"


def test_all_wrong_emits_one() -> None:
    driver = Driver(right=False)
    driver.step(3, catch_up=3, new_blocks=2)
    (result,) = driver.step(1, drafts=3, catch_up=1, new_blocks=2).sequences
    assert list(result.token_ids) == reference_output(PROMPT, 2)[1:]
    assert (result.num_drafted, result.num_accepted, result.acceptance) == (3, 0, (0.0,))
    assert result.num_draft_computed == 4


def test_ngram_proposes_what_it_has() -> None:
    driver = Driver(method=Method.NGRAM)
    driver.runner.max_ngram = 1
    driver.step(3, new_blocks=2)
    (result,) = driver.step(1, drafts=3, new_blocks=2).sequences
    assert (result.num_drafted, result.num_accepted, len(result.token_ids)) == (1, 1, 2)


def test_a_chunk_emits_nothing() -> None:
    (result,) = Driver().step(2, new_blocks=1, samples=False).sequences
    assert result.token_ids == ()


def test_finds_a_missing_slot() -> None:
    driver = Driver()
    with pytest.raises(AssertionError, match="request 1: position 2 has no slot"):
        driver.step(3, new_blocks=1)


def test_finds_a_missing_slot_for_a_draft() -> None:
    driver = Driver(method=Method.NGRAM)
    driver.step(3, new_blocks=2)
    with pytest.raises(AssertionError, match="position 4 has no slot"):
        driver.step(1, drafts=1)


def test_finds_draft_kv_that_fell_behind() -> None:
    driver = Driver()
    driver.step(3, catch_up=3, new_blocks=3)
    driver.step(1)
    with pytest.raises(AssertionError, match="draft KV is behind"):
        driver.step(1, drafts=1, catch_up=1)


def test_finds_a_block_that_was_given_away() -> None:
    driver = Driver()
    driver.step(3, new_blocks=3)
    thief = SequenceWork(2, 1, True, new_block_ids=(0,))
    driver.runner.execute(StepPlan(1, (), (Admission(2, (9,), 1),), (thief,)))
    with pytest.raises(AssertionError, match="request 1: target KV at 0 is 9, expected 5"):
        driver.step(1)


def test_finds_a_block_in_two_tables_of_one_step() -> None:
    runner = ScriptedRunner(4, 2)
    admitted = (Admission(1, (1, 2), 2), Admission(2, (3, 4), 2))
    works = (SequenceWork(1, 2, True, new_block_ids=(0,)), SequenceWork(2, 2, True, new_block_ids=(0,)))
    with pytest.raises(AssertionError, match="request 1: target KV at 0"):
        runner.execute(StepPlan(0, (), admitted, works))


@pytest.mark.parametrize(("prompt", "fault"), [(PROMPT, None), ((5, 9, 7), "request 2: target KV at 1 is 6")])
def test_shared_blocks_hold_the_prompt_or_are_found_out(prompt: tuple[int, ...], fault: str | None) -> None:
    driver = Driver()
    driver.step(3, catch_up=3, new_blocks=2)
    shares = Admission(2, prompt, len(prompt), block_ids=(0,), num_computed=2, num_draft_computed=2)
    plan = StepPlan(1, (), (shares,), (SequenceWork(2, 1, True, new_block_ids=(7,)),))
    if fault is None:
        assert driver.runner.execute(plan).sequences[0].token_ids == (next_token(prompt),)
    else:
        with pytest.raises(AssertionError, match=fault):
            driver.runner.execute(plan)


def test_finds_shared_blocks_without_draft_kv() -> None:
    driver = Driver()
    driver.step(3, new_blocks=2)
    shares = Admission(2, PROMPT, len(PROMPT), block_ids=(0,), num_computed=2, num_draft_computed=2)
    work = SequenceWork(2, 1, True, 1, Method.DRAFT_MODEL, 1, (7,))
    with pytest.raises(AssertionError, match="request 2: draft KV at 0 is -1, expected 5"):
        driver.runner.execute(StepPlan(1, (), (shares,), (work,)))


def test_finds_a_write_into_a_shared_block() -> None:
    """Of a request that believes less to be computed than is shared, and has another token there."""
    driver = Driver()
    driver.step(3, catch_up=3, new_blocks=2)
    shares = Admission(2, (5, 9, 7), 3, block_ids=(0,), num_computed=1)
    works = (SequenceWork(2, 2, True, new_block_ids=(7,)), SequenceWork(1, 1, True))
    with pytest.raises(AssertionError, match="request 1: target KV at 1 is 9, expected 6"):
        driver.runner.execute(StepPlan(1, (), (shares,), works))


def test_finds_a_miscounted_step() -> None:
    driver = Driver()
    driver.step(2, new_blocks=3, samples=False)
    with pytest.raises(AssertionError):
        driver.step(1, samples=False)


def test_finds_a_double_admission() -> None:
    driver = Driver()
    driver.step(3, new_blocks=2)
    driver.admitted = (Admission(1, PROMPT, len(PROMPT)),)
    with pytest.raises(AssertionError, match="admitted twice"):
        driver.step(3, new_blocks=2)


def test_finds_drafts_without_a_method() -> None:
    driver = Driver(method=Method.NONE)
    driver.step(3, new_blocks=3)
    with pytest.raises(AssertionError):
        driver.step(1, drafts=1)


def test_a_released_request_may_be_admitted_again() -> None:
    driver = Driver()
    driver.step(3, new_blocks=2)
    work = SequenceWork(1, 3, True, new_block_ids=(4, 5))
    again = StepPlan(1, (1,), (Admission(1, PROMPT, len(PROMPT)),), (work,))
    assert driver.runner.execute(again).sequences[0].token_ids == (next_token(PROMPT),)
