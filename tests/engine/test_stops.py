"""Where completions stop: precedence, runs of accepted tokens, and text that is held back."""

from __future__ import annotations

import codecs
import random
from itertools import pairwise

import pytest

from engine.toy import SPECIAL, ToyTokenizer
from paceline.core.params import Method, SamplingParams, SpeculationParams, StopParams
from paceline.core.plan import Finish, FinishReason
from paceline.core.request import Request
from paceline.engine.stops import Cut, StopChecker

EOS = 900
PROMPT = (1, 2, 3)


def make_request(stop: StopParams, model_len: int = 200) -> Request:
    max_tokens = model_len if stop.max_tokens is None else stop.max_tokens
    total = min(len(PROMPT) + max_tokens, model_len)
    return Request(
        0, PROMPT, SamplingParams(), stop, SpeculationParams(), 0.0, method=Method.NONE, max_total_tokens=total
    )


def feed(stop: StopParams, runs: list[tuple[int, ...]], model_len: int = 200) -> list[Cut]:
    """Cut one run after the other, as steps bring them, until the completion ends."""
    request = make_request(stop, model_len)
    checker = StopChecker(stop, ToyTokenizer(), (EOS,))
    cuts = []
    for run in runs:
        cuts.append(checker.cut(request, run))
        request.output_token_ids.extend(cuts[-1].token_ids)
        if cuts[-1].finish is not None:
            break
    return cuts


def whole(cuts: list[Cut]) -> tuple[tuple[int, ...], str, Finish | None]:
    return tuple(t for cut in cuts for t in cut.token_ids), "".join(cut.text for cut in cuts), cuts[-1].finish


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def splits(token_ids: tuple[int, ...], *cuts: int) -> list[tuple[int, ...]]:
    return [token_ids[a:b] for a, b in pairwise([0, *cuts, len(token_ids)]) if a < b]


@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_any_boundary(at: int, include: bool) -> None:
    """Cases 9 and 11: two steps meet before, inside or behind the match; ids, text and finish are the same."""
    stop = StopParams(50, ("STOP",), include_stop_string=include)
    token_ids, text, finish = whole(feed(stop, splits(ids("word STOP and more"), at)))
    assert token_ids == ids("word STOP")
    assert text == ("word STOP" if include else "word ")
    assert finish == Finish(FinishReason.STOP_STRING, stop_string="STOP")


def test_the_token_with_the_match_is_kept_and_its_text_is_cut() -> None:
    word = next(t for t in range(256, SPECIAL) if ToyTokenizer().token_bytes(t) == b" the")
    for include, text in ((False, "x "), (True, "x th")):
        cuts = feed(StopParams(50, ("th",), include_stop_string=include), [(*ids("x"), word, *ids("y"))])
        assert whole(cuts) == ((*ids("x"), word), text, Finish(FinishReason.STOP_STRING, stop_string="th"))


def test_of_several_stop_strings_the_first_to_end_wins() -> None:
    for order in (("bcd", "c"), ("c", "bcd")):
        _, text, finish = whole(feed(StopParams(50, order), [ids("abcde")]))
        assert (text, finish) == ("ab", Finish(FinishReason.STOP_STRING, stop_string="c"))


class TestPrecedence:
    """Case 10: the earliest end in a run wins, and nothing behind it is emitted."""

    def test_stop_string_before_eos_in_one_run(self) -> None:
        token_ids, text, finish = whole(feed(StopParams(50, ("!",)), [(*ids("a!b"), EOS)]))
        assert (token_ids, text) == (ids("a!"), "a")
        assert finish == Finish(FinishReason.STOP_STRING, stop_string="!")

    def test_eos_before_stop_string_in_one_run(self) -> None:
        token_ids, text, finish = whole(feed(StopParams(50, ("!",)), [(*ids("a"), EOS, *ids("!"))]))
        assert (token_ids, text) == ((*ids("a"), EOS), "a")
        assert finish == Finish(FinishReason.EOS, stop_token_id=EOS)

    def test_stop_string_before_the_length_in_one_run(self) -> None:
        token_ids, _, finish = whole(feed(StopParams(3, ("!",)), [ids("a!bcd")]))
        assert token_ids == ids("a!")
        assert finish is not None
        assert finish.reason is FinishReason.STOP_STRING

    def test_length_before_stop_string_in_one_run(self) -> None:
        token_ids, text, finish = whole(feed(StopParams(2, ("!",)), [ids("ab!")]))
        assert (token_ids, text, finish) == (ids("ab"), "ab", Finish(FinishReason.MAX_TOKENS))

    def test_stop_string_and_length_at_one_token(self) -> None:
        token_ids, text, finish = whole(feed(StopParams(2, ("!",)), [ids("a!b")]))
        assert (token_ids, text) == (ids("a!"), "a")
        assert finish == Finish(FinishReason.STOP_STRING, stop_string="!")

    def test_eos_and_length_at_one_token(self) -> None:
        assert whole(feed(StopParams(2), [(*ids("a"), EOS)]))[2] == Finish(FinishReason.EOS, stop_token_id=EOS)

    def test_a_stop_id_completes_no_stop_string(self) -> None:
        stop = StopParams(50, ("ab",), token_ids=ids("b"))
        assert whole(feed(stop, [ids("ab")])) == (ids("ab"), "a", Finish(FinishReason.STOP_TOKEN, stop_token_id=98))

    def test_eos_is_text_like_any_other_when_ignored(self) -> None:
        assert whole(feed(StopParams(4, ignore_eos=True), [(EOS, *ids("abcd"))]))[0] == (EOS, *ids("abc"))

    def test_the_models_length(self) -> None:
        assert whole(feed(StopParams(None), [ids("abcdef")], model_len=6))[2] == Finish(FinishReason.CONTEXT_LENGTH)


class TestHoldBack:
    def test_text_that_may_become_a_match_waits(self) -> None:
        cuts = feed(StopParams(50, ("abcd",)), [(byte,) for byte in b"xabcabcx"])
        assert [cut.text for cut in cuts] == ["x", "", "", "", "abc", "", "", "abcx"]

    def test_tokens_do_not_wait_for_their_text(self) -> None:
        cuts = feed(StopParams(50, ("abcd",)), [ids("ab"), ids("c")])
        assert [(cut.token_ids, cut.text) for cut in cuts] == [(ids("ab"), ""), (ids("c"), "")]

    @pytest.mark.parametrize("end", [(EOS,), ()])
    def test_it_is_flushed_at_the_end(self, end: tuple[int, ...]) -> None:
        assert whole(feed(StopParams(4, ("abcd",)), [(*ids("xabc"), *end)]))[1] == "xabc"
        assert whole(feed(StopParams(3, ("abcd",)), [(*ids("ab"), EOS)]))[1] == "ab"

    def test_an_incomplete_character_follows_held_text_at_the_end(self) -> None:
        assert whole(feed(StopParams(3, ("abc",)), [(*ids("ab"), 0xF0)]))[1] == "ab\ufffd"

    def test_no_more_is_held_than_the_longest_string_less_one(self) -> None:
        stop = StopParams(150, ("aaab", "aaaaaaac"))
        shown = 0
        for step, cut in enumerate(feed(stop, [ids("a")] * 100), 1):
            shown += len(cut.text)
            assert step - shown <= len("aaaaaaac") - 1

    def test_without_stop_strings_nothing_waits(self) -> None:
        assert [cut.text for cut in feed(StopParams(50), [ids("a"), ids("b")])] == ["a", "b"]


def naive(stop: StopParams, tokens: list[int]) -> tuple[tuple[int, ...], str, Finish | None]:
    """The definition, token by token over the whole text so far."""
    tokenizer, raw = ToyTokenizer(), b""
    for count, token in enumerate(tokens, 1):
        seen = tuple(tokens[:count])
        if token == EOS:
            return seen, raw.decode(errors="replace"), Finish(FinishReason.EOS, stop_token_id=EOS)
        raw += tokenizer.token_bytes(token)
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(raw)
        found = [(text.find(s) + len(s), -len(s), s) for s in stop.strings if s in text]
        if found:
            end, length, string = min(found)
            text = text[: end if stop.include_stop_string else end + length]
            return seen, text, Finish(FinishReason.STOP_STRING, stop_string=string)
        if count == stop.max_tokens:
            return seen, raw.decode(errors="replace"), Finish(FinishReason.MAX_TOKENS)
    raise AssertionError("max_tokens ends it")


@pytest.mark.parametrize("seed", range(10))
def test_random_runs_end_as_the_definition_says(seed: int) -> None:
    """However tokens are grouped into steps, and characters cut into tokens."""
    rng = random.Random(seed)
    vocabulary = [*b"abc", *range(256, 256 + 18), 0xE2, 0x82, 0xAC, SPECIAL]
    for _ in range(200):
        strings = tuple("".join(rng.choices("abc €é\n", k=rng.randrange(1, 5))) for _ in range(rng.randrange(4)))
        stop = StopParams(rng.randrange(1, 25), strings, include_stop_string=rng.random() < 0.5)
        tokens = [EOS if rng.random() < 0.03 else rng.choice(vocabulary) for _ in range(25)]
        cuts = sorted(rng.choices(range(25), k=rng.randrange(10)))
        assert whole(feed(stop, splits(tuple(tokens), *cuts))) == naive(stop, tokens)
