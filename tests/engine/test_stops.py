"""Where completions stop: precedence, runs of accepted tokens, and text that is held back."""

from __future__ import annotations

import codecs
import random
from itertools import pairwise
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer as Backend

from engine.toy import SPECIAL, ToyTokenizer
from paceline.core.params import SequenceParams, SpeculationParams, StopParams
from paceline.core.plan import Finish, FinishReason
from paceline.core.request import Request
from paceline.demo import TARGET
from paceline.engine.detokenizer import Detokenizer
from paceline.engine.stops import StopChecker
from paceline.engine.tokenizer import Tokenizer

EOS = 900
PROMPT = (1, 2, 3)


class Cut(NamedTuple):
    """What a checker leaves of a run."""

    token_ids: tuple[int, ...]
    text: str
    finish: Finish | None


def make_request(stop: StopParams, model_len: int = 200) -> Request:
    max_tokens = model_len if stop.max_tokens is None else stop.max_tokens
    total = min(len(PROMPT) + max_tokens, model_len)
    return Request(0, PROMPT, SequenceParams(), stop, SpeculationParams(), 0.0, methods=(), max_total_tokens=total)


def feed(
    stop: StopParams, runs: list[tuple[int, ...]], model_len: int = 200, tokenizer: Tokenizer | None = None
) -> list[Cut]:
    """Cut one run after the other, as steps bring them, until the completion ends."""
    request = make_request(stop, model_len)
    checker = StopChecker(stop, tokenizer or ToyTokenizer(), PROMPT, (EOS,))
    cuts = []
    for run in runs:
        cuts.append(Cut(*checker.cut(request, run)))
        request.emit(cuts[-1].token_ids)
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


class TestEndOfRun:
    """Nothing can follow a run: a grammar is complete, or at a dead end."""

    END = Finish(FinishReason.DEAD_END, detail="why")

    def cut(self, stop: StopParams, token_ids: tuple[int, ...]) -> Cut:
        return Cut(*StopChecker(stop, ToyTokenizer(), PROMPT, (EOS,)).cut(make_request(stop), token_ids, self.END))

    @pytest.mark.parametrize("run", [(), ids("ab"), (*ids("ab"), 0xF0)])
    def test_it_ends_the_completion_and_nothing_stays_held_back(self, run: tuple[int, ...]) -> None:
        for min_tokens in (0, 30):
            text = bytes(run).decode(errors="replace")
            assert whole([self.cut(StopParams(50, ("abc",), min_tokens=min_tokens), run)]) == (run, text, self.END)

    def test_what_ends_the_completion_before_wins(self) -> None:
        stop = StopParams(4, ("!",))
        found = Finish(FinishReason.STOP_STRING, stop_string="!")
        assert whole([self.cut(stop, ids("a!b"))]) == (ids("a!"), "a", found)
        assert self.cut(stop, (*ids("a"), EOS)).finish == Finish(FinishReason.EOS, stop_token_id=EOS)
        assert self.cut(stop, ids("abcd")).finish == Finish(FinishReason.MAX_TOKENS)


class TestMinTokens:
    """Case 12: tokens are counted, not steps, and a completion has as many at least."""

    @pytest.mark.parametrize("at", range(8))
    @pytest.mark.parametrize("min_tokens", range(8))
    def test_eos_and_stop_ids_count_behind_them_only(self, min_tokens: int, at: int) -> None:
        stop = StopParams(50, token_ids=ids("!"), min_tokens=min_tokens)
        for end, finish in (
            (EOS, Finish(FinishReason.EOS, stop_token_id=EOS)),
            (ord("!"), Finish(FinishReason.STOP_TOKEN, stop_token_id=ord("!"))),
        ):
            assert whole(feed(stop, splits((end,) * 10, at))) == (
                (end,) * (min_tokens + 1),
                "".join(ToyTokenizer.token_bytes(end).decode() for _ in range(min_tokens)),
                finish,
            )

    @pytest.mark.parametrize("at", range(8))
    @pytest.mark.parametrize("min_tokens", range(9))
    def test_a_match_must_end_in_a_later_token(self, min_tokens: int, at: int) -> None:
        """The token with index 5 completes the first match, and the last one the second."""
        stop = StopParams(50, ("xyz",), min_tokens=min_tokens)
        token_ids, text, finish = whole(feed(stop, splits(ids("abcxyz.xyz"), at)))
        assert (token_ids, text) == ((ids("abcxyz"), "abc") if min_tokens <= 5 else (ids("abcxyz.xyz"), "abcxyz."))
        assert finish == Finish(FinishReason.STOP_STRING, stop_string="xyz")

    def test_a_match_that_was_passed_over_is_not_held_back(self) -> None:
        cuts = feed(StopParams(50, ("ab",), min_tokens=4), [(byte,) for byte in b"xabab"])
        assert [cut.text for cut in cuts] == ["x", "", "ab", "", ""]

    def test_unless_it_begins_a_longer_one(self) -> None:
        cuts = feed(StopParams(50, ("ab", "abba"), min_tokens=4), [(byte,) for byte in b"xabba"])
        assert [cut.text for cut in cuts] == ["x", "", "", "", ""]
        assert cuts[-1].finish == Finish(FinishReason.STOP_STRING, stop_string="abba")

    def test_a_match_in_the_middle_of_a_token_belongs_to_that_token(self) -> None:
        word = next(t for t in range(256, SPECIAL) if ToyTokenizer.token_bytes(t) == b" the")
        assert whole(feed(StopParams(50, ("th",), min_tokens=1), [(word, word)]))[:2] == ((word, word), " the ")
        assert whole(feed(StopParams(50, ("e ",), min_tokens=1), [(word, word)]))[:2] == ((word, word), " th")

    @pytest.mark.parametrize("strings", [(), ("a",)])
    def test_lengths_end_a_completion_all_the_same(self, strings: tuple[str, ...]) -> None:
        stop = StopParams(3, strings, min_tokens=3)
        assert whole(feed(stop, [ids("aaaa")])) == (ids("aaa"), "aaa", Finish(FinishReason.MAX_TOKENS))
        stop = StopParams(None, strings, min_tokens=8)
        assert whole(feed(stop, [ids("aaaa")], 6)) == (ids("aaa"), "aaa", Finish(FinishReason.CONTEXT_LENGTH))


def test_special_tokens_are_shown_and_searched_on_request() -> None:
    run = (*ids("a"), SPECIAL, *ids("b"))
    assert whole(feed(StopParams(3, ("l>b",)), [run]))[:2] == (run, "ab")
    assert whole(feed(StopParams(3, ("al>b",), include_special_tokens=True), [run]))[:2] == (run, "a<speci")
    shown = StopParams(3, token_ids=(SPECIAL,), include_special_tokens=True)
    assert whole(feed(shown, [run]))[:2] == (run[:2], "a"), "a stop id has no text"


class DemoTokenizer(ToyTokenizer):
    """The demo pair's own tokens."""

    backend = Backend.from_file(str(TARGET / "tokenizer.json"))

    def decoder(self, prompt_token_ids: object, *, special_tokens: bool) -> Detokenizer:  # type: ignore[override]
        return Detokenizer(self.backend, PROMPT, frozenset())


@pytest.mark.parametrize("string", ["🚴", "字", "x 漢", "return", "🚴 字"])
def test_stop_strings_of_characters_that_are_spread_over_tokens(string: str) -> None:
    text = "x 漢🚴 字 return x"
    token_ids = tuple(DemoTokenizer.backend.encode(text).ids)
    for at in range(len(token_ids)):
        kept, shown, finish = whole(feed(StopParams(100, (string,)), splits(token_ids, at), tokenizer=DemoTokenizer()))
        assert shown == text[: text.index(string)]
        assert finish == Finish(FinishReason.STOP_STRING, stop_string=string)
        assert string in DemoTokenizer.backend.decode(kept)
        assert string not in DemoTokenizer.backend.decode(kept[:-1]), "not the first token that completes it"


def naive(stop: StopParams, tokens: list[int]) -> tuple[tuple[int, ...], str, Finish | None]:
    """The definition, token by token over the whole text so far."""
    tokenizer, raw, num_passed = ToyTokenizer(), b"", 0
    for count, token in enumerate(tokens, 1):
        seen = tuple(tokens[:count])
        may_stop = count > stop.min_tokens
        if token == EOS and may_stop:
            return seen, raw.decode(errors="replace"), Finish(FinishReason.EOS, stop_token_id=EOS)
        raw += tokenizer.token_bytes(token)
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(raw)
        # Matches are to end behind the text of the tokens that complete none.
        ends = [
            (end, -len(s), s) for s in stop.strings for end in range(len(s), len(text) + 1) if text[:end].endswith(s)
        ]
        found = [match for match in ends if may_stop and match[0] > num_passed]
        if found:
            end, length, string = min(found)
            text = text[: end if stop.include_stop_string else end + length]
            return seen, text, Finish(FinishReason.STOP_STRING, stop_string=string)
        if not may_stop:
            num_passed = len(text)
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
        limit, least = sorted(rng.choices(range(1, 25), k=2), reverse=True)
        least = rng.choice([0, least])
        stop = StopParams(limit, strings, include_stop_string=rng.random() < 0.5, min_tokens=least)
        tokens = [EOS if rng.random() < 0.03 else rng.choice(vocabulary) for _ in range(25)]
        cuts = sorted(rng.choices(range(25), k=rng.randrange(10)))
        assert whole(feed(stop, splits(tuple(tokens), *cuts))) == naive(stop, tokens)
