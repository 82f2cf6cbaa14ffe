"""The mailbox: merging, one end, and nobody waits for a slow reader."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing

import pytest

from paceline.core.method import Method
from paceline.core.plan import Finish, FinishReason, TokenLogprobs
from paceline.core.request import RequestStats
from paceline.engine import Delta, Stream
from paceline.engine.reading import read_next
from paceline.engine.turns import Sleeper
from paceline.errors import Cancelled, EngineDead

FINISH = Finish(FinishReason.MAX_TOKENS)
STATS = RequestStats(3, 0, 5, Method.NONE, 4, 0, 0, 0, (), (4,), 0.0, 0.0, 0.0, 1.0, 0, 0.0, 0.0, 0.0)


def make_stream(num_choices: int = 1, *, first_leads: bool = False) -> tuple[Stream, list[int]]:
    abandoned: list[int] = []
    return Stream(7, 3, abandoned.append, num_choices, first_leads=first_leads), abandoned


def last(text: str, token_ids: tuple[int, ...], offset: int, choice: int) -> Delta:
    return Delta(text, token_ids, offset, FINISH, STATS, choice=choice)


async def test_what_waits_is_merged_into_one_delta() -> None:
    stream, abandoned = make_stream()
    for index in range(4):
        stream.put(Delta(f"{index}", (index,), index))
    reader = aiter(stream)
    assert await anext(reader) == Delta("0123", (0, 1, 2, 3), 0)
    stream.put(Delta("4", (4, 5), 4))
    stream.put(Delta("5", (), 6, FINISH, STATS))
    assert await anext(reader) == Delta("45", (4, 5), 4, FINISH, STATS)
    assert [delta async for delta in reader] == []
    assert abandoned == []


async def test_a_slow_reader_costs_one_message_however_late_it_comes() -> None:
    stream, _ = make_stream()
    for index in range(1000):
        stream.put(Delta("x", (index,), index))
    stream.put(Delta("", (1000,), 1000, FINISH, STATS))
    deltas = [delta async for delta in stream]
    assert len(deltas) == 1
    assert deltas[0].token_ids == tuple(range(1001))
    assert deltas[0].text == "x" * 1000


async def test_a_waiting_reader_gets_each_delta() -> None:
    stream, _ = make_stream()
    deltas: list[Delta] = []

    async def read() -> None:
        async for delta in stream:
            deltas.append(delta)

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        for index in range(3):
            stream.put(Delta("x", (index,), index, *((FINISH, STATS) if index == 2 else ())))
            for _ in range(3):
                await asyncio.sleep(0)
    assert [delta.token_ids for delta in deltas] == [(0,), (1,), (2,)]


async def test_an_error_comes_once_behind_what_came_before_it() -> None:
    stream, abandoned = make_stream()
    stream.put(Delta("a", (1,), 0))
    stream.fail(EngineDead("dead"))
    stream.fail(Cancelled("too late to matter"))
    reader = aiter(stream)
    assert (await anext(reader)).text == "a"
    with pytest.raises(EngineDead):
        await anext(reader)
    assert [delta async for delta in stream] == []
    assert abandoned == []


async def test_a_finished_stream_does_not_fail() -> None:
    stream, _ = make_stream()
    stream.put(Delta("a", (1,), 0, FINISH, STATS))
    stream.fail(EngineDead("dead"))
    assert [delta.finish async for delta in stream] == [FINISH]


async def test_nothing_comes_after_the_end() -> None:
    stream, _ = make_stream()
    stream.put(Delta("a", (1,), 0, FINISH, STATS))
    with pytest.raises(AssertionError):
        stream.put(Delta("b", (2,), 1))


@pytest.mark.parametrize("reads", [False, True])
async def test_a_gap_is_noticed(reads: bool) -> None:
    stream, _ = make_stream()
    stream.put(Delta("a", (1,), 0))
    reader = aiter(stream)
    if reads:
        await anext(reader)
    with pytest.raises(AssertionError):
        stream.put(Delta("b", (3,), 2))


async def test_closing_aborts_once() -> None:
    stream, abandoned = make_stream()
    async with aclosing(stream):
        stream.put(Delta("a", (1,), 0))
        async for _ in stream:
            break
    assert abandoned[:1] == [7]
    assert [delta async for delta in stream] == []


async def test_leaving_the_loop_aborts_within_a_turn_of_the_event_loop() -> None:
    stream, abandoned = make_stream()
    stream.put(Delta("a", (1,), 0))
    async for _ in stream:
        break
    for _ in range(3):
        await asyncio.sleep(0)
    assert abandoned == [7]


async def test_cancelling_the_reader_aborts() -> None:
    stream, abandoned = make_stream()

    async def read() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert abandoned == [7]


async def test_closing_wakes_a_waiting_reader() -> None:
    stream, _ = make_stream()

    async def read() -> list[Delta]:
        return [delta async for delta in stream]

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    await stream.aclose()
    assert await task == []


class TestSeveralChoices:
    async def test_each_is_merged_on_its_own_and_the_longest_waiting_comes_first(self) -> None:
        stream, _ = make_stream(3)
        stream.put(Delta("b", (1,), 0, choice=1))
        stream.put(Delta("a", (2,), 0, choice=0))
        stream.put(Delta("b", (3, 4), 1, choice=1))
        reader = aiter(stream)
        assert await anext(reader) == Delta("bb", (1, 3, 4), 0, choice=1)
        stream.put(Delta("b", (5,), 3, choice=1))
        stream.put(Delta("a", (6,), 1, choice=0))
        assert await anext(reader) == Delta("aa", (2, 6), 0, choice=0)
        assert await anext(reader) == Delta("b", (5,), 3, choice=1)

    async def test_what_was_held_is_due_at_once_choice_by_choice(self) -> None:
        stream, _ = make_stream(3)
        stream.hold(0.02)
        for choice in (2, 0):
            stream.put(Delta("a", (1,), 0, choice=choice))
            assert stream.take() == Delta("a", (1,), 0, choice=choice), "first tokens wait for nothing"
        for choice in (2, 0):
            stream.put(Delta("b", (2,), 1, choice=choice))
            assert stream.take() is None
        await stream.wait()
        assert [stream.take() for _ in range(3)] == [*(Delta("b", (2,), 1, choice=choice) for choice in (0, 2)), None]

    async def test_a_slow_reader_costs_one_delta_of_each(self) -> None:
        stream, _ = make_stream(4)
        for index in range(100):
            for choice in range(4):
                stream.put(Delta("x", (index,), index, choice=choice))
        for choice in range(4):
            stream.put(last("", (), 100, choice))
        deltas = [delta async for delta in stream]
        assert [delta.choice for delta in deltas] == [0, 1, 2, 3]
        assert {delta.token_ids for delta in deltas} == {tuple(range(100))}

    async def test_it_ends_when_the_last_of_them_has(self) -> None:
        stream, abandoned = make_stream(2)
        stream.put(last("b", (1,), 0, choice=1))
        assert not stream.ended
        reader = aiter(stream)
        assert (await anext(reader)).finish is FINISH
        waits = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        assert not waits.done()
        stream.put(last("a", (2,), 0, choice=0))
        assert stream.ended
        assert (await waits).choice == 0
        assert [delta async for delta in reader] == []
        assert abandoned == []

    async def test_one_that_has_ended_does_not_go_on(self) -> None:
        stream, _ = make_stream(2)
        stream.put(last("b", (1,), 0, choice=1))
        with pytest.raises(AssertionError):
            stream.put(Delta("c", (2,), 1, choice=1))

    @pytest.mark.parametrize("reads", [False, True])
    async def test_a_gap_is_noticed_in_each(self, reads: bool) -> None:
        stream, _ = make_stream(2)
        stream.put(Delta("a", (1, 2), 0, choice=0))
        stream.put(Delta("b", (1,), 0, choice=1))
        if reads:
            await anext(aiter(stream))
        with pytest.raises(AssertionError):
            stream.put(Delta("b", (1,), 2, choice=1))

    async def test_an_error_comes_behind_what_every_choice_has(self) -> None:
        stream, abandoned = make_stream(3)
        stream.put(Delta("a", (1,), 0, choice=0))
        stream.put(last("b", (1,), 0, choice=1))
        stream.fail(EngineDead("dead"))
        reader = aiter(stream)
        assert [(await anext(reader)).text for _ in range(2)] == ["a", "b"]
        with pytest.raises(EngineDead):
            await anext(reader)
        assert [delta async for delta in stream] == []
        assert abandoned == []

    @pytest.mark.parametrize("ended", [0, 1, 2])
    async def test_leaving_aborts_as_long_as_one_is_open(self, ended: int) -> None:
        stream, abandoned = make_stream(2)
        for choice in range(ended):
            stream.put(last("a", (1,), 0, choice))
        await stream.aclose()
        assert abandoned == [7] * (ended < 2)

    async def test_logprobs_are_merged_with_their_tokens_and_the_prompts_come_once(self) -> None:
        stream, _ = make_stream(2)
        prompt = (None, TokenLogprobs(-0.5, 1), TokenLogprobs(-0.25, 1))
        first, second = TokenLogprobs(-1.0, 1), TokenLogprobs(-2.0, 3, (5,), (-0.5,))
        stream.put(Delta("a", (1,), 0, logprobs=(first,), prompt_logprobs=prompt))
        stream.put(Delta("a", (2,), 1, logprobs=(second,)))
        stream.put(Delta("b", (3,), 0, logprobs=(second,), choice=1))
        reader = aiter(stream)
        assert await anext(reader) == Delta("aa", (1, 2), 0, None, None, (first, second), 0, prompt)
        assert await anext(reader) == Delta("b", (3,), 0, None, None, (second,), 1, ())
        stream.put(Delta("a", (4,), 2, logprobs=(first,)))
        assert (await anext(reader)).prompt_logprobs == ()


class TestTheFirstLeads:
    """Of the others nothing may be taken before something of the first has come, with what is told of all."""

    PROMPT = (None, TokenLogprobs(-0.5, 1))

    def first(self, index: int = 0) -> Delta:
        return Delta("a", (index,), index, prompt_logprobs=() if index else self.PROMPT)

    @pytest.mark.parametrize("hold", [0.0, 60.0])
    async def test_others_wait_and_follow(self, hold: float) -> None:
        stream, _ = make_stream(3, first_leads=True)
        stream.hold(hold)
        stream.put(last("c", (1,), 0, choice=2))
        for index in range(2):
            stream.put(Delta("b", (index,), index, choice=1))
        assert stream.take() is None
        assert stream.backlog == 3
        reader = Sleeper(None)
        stream.listen(reader)
        told = reader.sleep()
        stream.put(self.first())
        assert told.done()
        assert stream.prompt_logprobs == self.PROMPT
        assert [stream.take() for _ in range(4)] == [
            *(self.first(), last("c", (1,), 0, choice=2), Delta("bb", (0, 1), 0, choice=1)),
            None,
        ]
        stream.put(last("b", (2,), 2, choice=1))
        assert stream.take() == last("b", (2,), 2, choice=1), "it has led"
        await stream.aclose()

    async def test_held_until_their_ends_they_wait_for_no_more_than_its_first_tokens(self) -> None:
        stream, _ = make_stream(2, first_leads=True)
        stream.hold(math.inf)
        stream.put(last("b", (1,), 0, choice=1))
        assert stream.take() is None
        stream.put(self.first())
        assert stream.prompt_logprobs == self.PROMPT
        assert [stream.take() for _ in range(2)] == [last("b", (1,), 0, choice=1), None]
        stream.put(last("a", (1,), 1, 0))
        delta = stream.take()
        assert delta is not None
        assert (delta.text, delta.prompt_logprobs) == ("aa", self.PROMPT)

    @pytest.mark.parametrize("hold", [0.0, 60.0, math.inf])
    async def test_an_error_waits_for_nobody(self, hold: float) -> None:
        stream, _ = make_stream(2, first_leads=True)
        stream.hold(hold)
        stream.put(last("b", (1,), 0, choice=1))
        stream.fail(EngineDead("dead"))
        assert stream.take() == last("b", (1,), 0, choice=1)
        with pytest.raises(EngineDead):
            stream.take()

    async def test_closing_aborts_all_the_same(self) -> None:
        stream, abandoned = make_stream(2, first_leads=True)
        stream.put(last("b", (1,), 0, choice=1))
        await stream.aclose()
        assert abandoned == [7]


class TestHolding:
    async def test_first_tokens_and_the_end_are_due_at_once(self) -> None:
        stream, _ = make_stream()
        stream.hold(60.0)
        stream.put(Delta("a", (1,), 0))
        assert stream.take() == Delta("a", (1,), 0)
        stream.put(Delta("b", (2,), 1))
        stream.put(Delta("c", (3,), 2))
        assert stream.take() is None
        stream.put(last("d", (4,), 3, 0))
        assert stream.take() == last("bcd", (2, 3, 4), 1, 0)
        assert stream.exhausted

    async def test_what_is_held_is_due_after_a_while(self) -> None:
        stream, _ = make_stream()
        stream.hold(0.01)
        stream.put(Delta("a", (1,), 0))
        assert stream.take() is not None
        for round_ in range(2):
            first = 1 + 2 * round_
            stream.put(Delta("b", (2,), first))
            stream.put(Delta("c", (3,), first + 1))
            assert stream.take() is None
            assert await read_next(stream) == Delta("bc", (2, 3), first)
        await stream.aclose()

    async def test_each_choice_for_itself(self) -> None:
        stream, _ = make_stream(2)
        stream.hold(60.0)
        stream.put(Delta("a", (1,), 0, choice=0))
        stream.put(Delta("b", (1,), 0, choice=1))
        assert [stream.take().choice for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
        stream.put(Delta("a", (2,), 1, choice=0))
        stream.put(last("b", (2,), 1, 1))
        assert stream.take() == last("b", (2,), 1, 1)
        assert stream.take() is None
        stream.put(last("a", (3,), 2, 0))
        assert stream.take() == last("aa", (2, 3), 1, 0)

    async def test_until_the_end_of_each(self) -> None:
        stream, _ = make_stream(2)
        stream.hold(math.inf)
        for index in range(3):
            stream.put(Delta("a", (index,), index, choice=0))
            stream.put(Delta("b", (index,), index, choice=1))
        assert stream.take() is None
        stream.put(last("b", (3,), 3, 1))
        assert stream.take() == last("bbbb", (0, 1, 2, 3), 0, 1)
        assert stream.take() is None
        stream.fail(EngineDead("dead"))  # and with it goes what the other had
        with pytest.raises(EngineDead):
            await read_next(stream)

    async def test_what_was_held_comes_before_the_error(self) -> None:
        stream, _ = make_stream()
        stream.hold(60.0)
        for index in range(3):
            stream.put(Delta("a", (index,), index))
        stream.fail(EngineDead("dead"))
        assert stream.take() == Delta("aaa", (0, 1, 2), 0)
        with pytest.raises(EngineDead):
            stream.take()

    async def test_no_timer_outlives_the_reader(self) -> None:
        stream, _ = make_stream()
        stream.hold(0.001)
        reader = Sleeper(None)
        stream.listen(reader)
        told = reader.sleep()
        stream.put(Delta("a", (1,), 0))
        assert told.done()
        stream.take()
        told = reader.sleep()
        stream.put(Delta("b", (2,), 1))
        await stream.aclose()
        await asyncio.sleep(0.01)
        assert not told.done()
        assert stream._timer is None


class TestListening:
    async def test_told_of_all_that_may_be_taken(self) -> None:
        stream, _ = make_stream()
        reader = Sleeper(None)
        told = reader.sleep()
        stream.put(Delta("a", (1,), 0))
        stream.listen(reader)
        assert told.done()
        told = reader.sleep()
        stream.put(Delta("b", (2,), 1))
        assert told.done()
        assert stream.take() == Delta("ab", (1, 2), 0)
        assert stream.take() is None
        told = reader.sleep()
        stream.fail(EngineDead("dead"))
        assert told.done()
        with pytest.raises(EngineDead):
            stream.take()

    async def test_a_backlog_is_told_as_long_as_it_lasts(self) -> None:
        stream, _ = make_stream(2)
        behind: list[int] = []
        stream.limit_backlog(2, lambda: behind.append(stream.backlog))
        for index in range(2):
            for choice in range(2):
                stream.put(Delta("a", (1,), index, choice=choice))
        assert behind == [3, 4]
        stream.take()
        stream.put(Delta("a", (1,), 2))
        assert behind == [3, 4, 3]
        assert stream.num_tokens == 5

    async def test_nothing_is_told_to_who_has_left(self) -> None:
        stream, _ = make_stream()
        reader = Sleeper(None)
        stream.listen(reader)
        told = reader.sleep()
        await stream.aclose()
        stream.fail(Cancelled("gone"))
        assert not told.done()
        assert stream.take() is None
        assert await read_next(stream) is None
