"""Where a run of tokens ends a completion."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.harness import Harness
from paceline.core.config import SchedulerConfig
from paceline.core.plan import Finish, FinishReason
from paceline.core.request import Request
from paceline.core.stopping import cut_run

EOS = 90


def request(
    max_tokens: int | None = 5, stop_ids: tuple[int, ...] = (), ignore_eos: bool = False, min_tokens: int = 0
) -> Request:
    """A request with a prompt of 4 tokens and a model of 12."""
    harness = Harness(SchedulerConfig(num_blocks=4, max_model_len=12))
    return harness.add(4, max_tokens, stop_ids=stop_ids, ignore_eos=ignore_eos, min_tokens=min_tokens)


def test_a_run_without_an_end_stays_whole() -> None:
    assert cut_run(request(), (1, 2, 3), (EOS,)) == ((1, 2, 3), None)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_stop_token_is_the_last_of_the_ids(index: int) -> None:
    run = [1, 2, 3]
    run[index] = EOS
    assert cut_run(request(), tuple(run), (EOS,)) == (tuple(run[: index + 1]), Finish(FinishReason.EOS, None, EOS))


def test_the_first_stop_wins() -> None:
    assert cut_run(request(stop_ids=(7,)), (1, 7, EOS), (EOS,)) == ((1, 7), Finish(FinishReason.STOP_TOKEN, None, 7))
    assert cut_run(request(stop_ids=(7,)), (1, EOS, 7), (EOS,)) == ((1, EOS), Finish(FinishReason.EOS, None, EOS))


def test_any_of_several_eos_ids_ends() -> None:
    assert cut_run(request(), (1, 92, 3), (EOS, 91, 92)) == ((1, 92), Finish(FinishReason.EOS, None, 92))


def test_eos_can_be_ignored_but_not_an_own_stop_id() -> None:
    assert cut_run(request(ignore_eos=True), (1, EOS, 3), (EOS,)) == ((1, EOS, 3), None)
    both = request(ignore_eos=True, stop_ids=(EOS,))
    assert cut_run(both, (1, EOS, 3), (EOS,)) == ((1, EOS), Finish(FinishReason.STOP_TOKEN, None, EOS))


def test_an_own_stop_id_is_named_before_eos() -> None:
    assert cut_run(request(stop_ids=(EOS,)), (EOS,), (EOS,))[1] == Finish(FinishReason.STOP_TOKEN, None, EOS)


@pytest.mark.parametrize(
    ("max_tokens", "length", "reason"),
    [
        (5, 5, FinishReason.MAX_TOKENS),
        (8, 8, FinishReason.MAX_TOKENS),  # of 12 positions, 4 are the prompt's: its own limit is reached as well
        (9, 8, FinishReason.CONTEXT_LENGTH),
        (None, 8, FinishReason.CONTEXT_LENGTH),
    ],
)
def test_the_limit_that_was_reached_is_named(max_tokens: int | None, length: int, reason: FinishReason) -> None:
    run = tuple(range(20))
    assert cut_run(request(max_tokens), run, (EOS,)) == (run[:length], Finish(reason))


def test_tokens_of_earlier_steps_count() -> None:
    subject = request(max_tokens=5)
    subject.emit([1, 2, 3])
    assert cut_run(subject, (4,), ()) == ((4,), None)
    assert cut_run(subject, (4, 5, 6), ()) == ((4, 5), Finish(FinishReason.MAX_TOKENS))


@pytest.mark.parametrize("emitted", range(4))
def test_the_first_min_tokens_tokens_do_not_stop(emitted: int) -> None:
    """Case 12: they are counted as tokens, over steps and inside a run."""
    subject = request(max_tokens=None, stop_ids=(7,), min_tokens=3)
    subject.output_token_ids += [7, EOS, 7][:emitted]
    run = (EOS, 7, EOS, 7, EOS)
    finish = cut_run(subject, run[emitted:], (EOS,))
    assert finish == ((EOS, 7, EOS, 7)[emitted:], Finish(FinishReason.STOP_TOKEN, None, 7))


def test_min_tokens_does_not_move_a_length() -> None:
    assert cut_run(request(3, min_tokens=3), (1, EOS, EOS, EOS), (EOS,)) == (
        (1, EOS, EOS),
        Finish(FinishReason.MAX_TOKENS),
    )
    assert cut_run(request(min_tokens=4), (EOS,) * 3, (EOS,)) == ((EOS,) * 3, None)


@settings(deadline=None, derandomize=True, database=None)
@given(
    run=st.lists(st.integers(0, 5), min_size=1, max_size=9).map(tuple),
    stops=st.sets(st.integers(0, 5), max_size=2).map(tuple),
    eos=st.sets(st.integers(0, 5), max_size=2).map(tuple),
    max_tokens=st.integers(1, 8),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 8),
)
def test_a_run_ends_where_its_tokens_one_by_one_would(
    run: tuple[int, ...],
    stops: tuple[int, ...],
    eos: tuple[int, ...],
    max_tokens: int,
    ignore_eos: bool,
    min_tokens: int,
) -> None:
    subject = request(max_tokens, stops, ignore_eos, min(min_tokens, max_tokens))
    whole = cut_run(subject, run, eos)
    emitted: tuple[int, ...] = ()
    finish = None
    for token in run:
        token_ids, finish = cut_run(subject, (token,), eos)
        emitted += token_ids
        subject.emit(token_ids)
        if finish is not None:
            break
    assert whole == (emitted, finish)
