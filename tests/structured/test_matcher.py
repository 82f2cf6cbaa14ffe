"""What may follow, behind the text and behind drafts."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import numpy as np
import pytest
import regex as partial_regex
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paceline.core.grammar import Grammar, GrammarSpec, Matcher
from paceline.errors import InvalidArgument
from paceline.structured import LLGuidanceCompiler
from paceline.structured import compiler as compiler_module
from paceline.structured.matcher import NOTHING_FOLLOWS
from structured.conftest import EOS, PADDED
from structured.vocabularies import (
    allowed,
    byte_tokenizer,
    choice,
    encode,
    follows,
    json_schema,
    lark,
    regex,
    sentencepiece_tokenizer,
    token_bytes,
)

PERSON = json_schema(
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},'
    ' "required": ["name"], "additionalProperties": false}'
)
ARITHMETIC = lark('start: sum\nsum: NUMBER | sum "+" NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}/')
COLOURS = choice("red", "redder", "blue", "green")
DATE = regex(r"[0-9]{4}-[0-9]{2}(-[0-9]{2})?")
NESTED = {
    "(": lark('start: e\ne: "(" e ")" e | ""'),
    "[": json_schema('{"type": "array", "items": {"$ref": "#"}}'),
}


def matcher_behind(grammar: Grammar, token_ids: Sequence[int]) -> Matcher:
    matcher = grammar.matcher()
    assert matcher.advance(token_ids)
    return matcher


def accepts(grammar: Grammar, token_ids: Sequence[int]) -> bool:
    return grammar.matcher().advance(token_ids)


# -- each kind, token by token ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "text", "complete"),
    [
        (PERSON, '{"name": "Zoë", "age": -12}', True),
        (PERSON, '{\n  "name": "a"\n}', True),
        (PERSON, '{"name": "Z', False),
        (PERSON, '{"name": "abcdefghi"', False),
        (ARITHMETIC, "(1+23)+456", True),
        (ARITHMETIC, "((1", False),
        (COLOURS, "red", True),
        (COLOURS, "redde", False),
        (COLOURS, "blue", True),
        (DATE, "2026-11", True),
        (DATE, "2026-11-2", False),
    ],
)
def test_texts_that_match_are_followed(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase, spec: GrammarSpec, text: str, complete: bool
) -> None:
    matcher = compiler.compile(spec).matcher()
    for token_id in encode(tokenizer, text):
        assert token_id in follows(matcher)
        assert matcher.advance([token_id])
    assert (EOS in follows(matcher)) == complete
    assert matcher.advance([EOS]) == complete
    assert (matcher.failure is None) == complete


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (PERSON, '{"name": 1'),
        (PERSON, '{"age": 1}'),
        (PERSON, '{"name": "abcdefghij'),
        (PERSON, " {"),
        (ARITHMETIC, "1++"),
        (ARITHMETIC, "1234"),
        (COLOURS, "reddest"),
        (COLOURS, "red "),
        (DATE, "2026-11-21-"),
    ],
)
def test_texts_that_do_not_match_are_refused(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase, spec: GrammarSpec, text: str
) -> None:
    token_ids = encode(tokenizer, text)
    matcher = compiler.compile(spec).matcher()
    assert not matcher.advance(token_ids)
    assert matcher.failure is not None
    assert "does not allow token" in matcher.failure


@pytest.mark.parametrize(
    "text", ["plain", 'quo"te', "back\\slash", "line\nbreak\ttab", "naïve ☕ 😀", "\x00\x01\x7f", "a|b", "/[x]*/", "//"]
)
def test_choices_are_taken_literally(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    grammar = compiler.compile(choice(text, "other"))
    matcher = matcher_behind(grammar, encode(tokenizer, text))
    assert matcher.ended
    assert not accepts(grammar, encode(tokenizer, text + "x"))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (DATE, ""),
        (DATE, "20"),
        (DATE, "2026-11"),
        (COLOURS, ""),
        (COLOURS, "re"),
        (COLOURS, "red"),
        (regex(r"(ab|cd)*[^a-z]{2}é?"), "abcd"),
    ],
)
def test_masks_are_what_a_regex_engine_says(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase, spec: GrammarSpec, text: str
) -> None:
    pattern = spec.text or "|".join(partial_regex.escape(text) for text in spec.choices)
    matcher = matcher_behind(compiler.compile(spec), encode(tokenizer, text))
    expected = [] if partial_regex.fullmatch(pattern, text) is None else [EOS]
    undecided = []
    for token_id, token in enumerate(token_bytes(tokenizer)[1:], start=1):
        try:
            whole = text + token.decode()
        except UnicodeDecodeError:
            undecided.append(token_id)  # a part of a character
            continue
        if partial_regex.fullmatch(pattern, whole, partial=True) is not None:
            expected.append(token_id)
    assert len(expected) > 1
    assert [token_id for token_id in follows(matcher) if token_id not in undecided] == expected


# -- masks against matchers that start anew ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (PERSON, ""),
        (PERSON, "{"),
        (PERSON, '{"name":'),
        (PERSON, '{"name": "ab'),
        (PERSON, '{"name": "abcdefgh'),
        (PERSON, '{"name": "a",'),
        (PERSON, '{"name": "a", "age": 1'),
        (ARITHMETIC, "(1"),
        (ARITHMETIC, "(1+2)"),
    ],
)
def test_masks_are_what_the_parser_accepts_token_by_token(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase, spec: GrammarSpec, text: str
) -> None:
    grammar = compiler.compile(spec)
    token_ids = encode(tokenizer, text)
    found = follows(matcher_behind(grammar, token_ids))
    parser = grammar.parser()  # type: ignore[attr-defined]
    assert parser.consume_tokens(token_ids)
    ends = [EOS] if parser.is_accepting() else []
    assert found == ends + [token_id for token_id in range(1, 4096) if parser.validate_tokens([token_id]) == 1]
    for token_id in {*random.Random(3).sample(range(PADDED), 30), *found[:20], EOS, 4096, PADDED - 1}:
        assert accepts(grammar, [*token_ids, token_id]) == (token_id in found)


def test_where_bytes_are_forced_there_is_one_way_to_write_them(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The parser accepts every spelling, the mask allows the tokenizer's own."""
    grammar = compiler.compile(json_schema('{"const": "hello world"}'))
    token_ids = encode(tokenizer, '"hello world"')
    for position, token_id in enumerate(token_ids):
        assert follows(matcher_behind(grammar, token_ids[:position])) == [token_id]
    assert accepts(grammar, encode(tokenizer, '"') + encode(tokenizer, "h") + encode(tokenizer, "e"))


token_ids_of_any_kind = st.lists(st.integers(0, PADDED - 1), max_size=6)


@st.composite
def drafts_and_text(draw: st.DrawFn) -> tuple[GrammarSpec, random.Random, int, int, list[int]]:
    """A grammar, a walk of some length, drafts that go on along the grammar for some time, and then do not."""
    spec = draw(st.sampled_from([PERSON, ARITHMETIC, COLOURS, DATE]))
    rng = draw(st.randoms(use_true_random=False))
    return spec, rng, draw(st.integers(0, 12)), draw(st.integers(0, 5)), draw(token_ids_of_any_kind)


def walk(matcher: Matcher, rng: random.Random, num_tokens: int, among: Collection[int] = range(PADDED)) -> list[int]:
    """Advance by random tokens that the mask allows, while there are some `among` these; all that were taken."""
    taken: list[int] = []
    while len(taken) < num_tokens and EOS not in taken:
        choices = [token_id for token_id in follows(matcher) if token_id in among]
        if not choices:
            break
        taken.append(rng.choice(choices))
        assert matcher.advance(taken[-1:])
    return taken


@settings(max_examples=150, deadline=None)
@given(drafts_and_text())
def test_masks_behind_drafts_leave_everything_as_it_was(
    compiler: LLGuidanceCompiler, case: tuple[GrammarSpec, random.Random, int, int, list[int]]
) -> None:
    spec, rng, length, along, wild = case
    grammar = compiler.compile(spec)
    matcher = grammar.matcher()
    emitted = walk(matcher, rng, length)
    drafts = walk(matcher_behind(grammar, emitted), rng, along) + wild
    before = (matcher.masks([]), matcher.forced(9), matcher.ended)
    rows = matcher.masks(drafts)
    assert rows.shape == (len(drafts) + 1, -(-PADDED // 32))
    assert rows.dtype == np.int32
    assert np.array_equal(matcher.masks([]), before[0])
    assert (matcher.forced(9), matcher.ended, matcher.failure) == (*before[1:], None)
    # Row by row against a matcher that has only ever seen the text, up to the first draft that is refused or ends it.
    for position in range(len(drafts) + 1):
        fresh = matcher_behind(grammar, emitted + drafts[:position])
        assert np.array_equal(rows[position], fresh.masks([])[0])
        if position < len(drafts) and (drafts[position] not in follows(fresh) or drafts[position] == EOS):
            assert (rows[position + 1 :] == -1).all()
            break
    # And the drafts can be taken, as far as they go.
    assert matcher.advance(drafts[:position])
    assert np.array_equal(matcher.masks([]), matcher_behind(grammar, emitted + drafts[:position]).masks([]))


def test_another_text_of_as_many_rows_has_another_mask(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    """llguidance's rollback left it the mask behind a rejected draft, which it then gave behind what was emitted."""
    grammar = compiler.compile(NESTED["("])
    matcher = matcher_behind(grammar, encode(tokenizer, "(("))
    matcher.masks(encode(tokenizer, "("))
    assert matcher.advance(encode(tokenizer, ")"))
    assert follows(matcher) == follows(matcher_behind(grammar, encode(tokenizer, "(()")))
    assert not set(encode(tokenizer, "))")) & set(follows(matcher))


@pytest.mark.parametrize("opened", ["((", "[[["])
@pytest.mark.parametrize("draft_by_draft", [False, True])
def test_rejected_drafts_leave_no_trace(opened: str, draft_by_draft: bool) -> None:
    """At every step against matchers that never saw a draft: texts differ by their depth, of which tokens tell."""
    words = ["((", "))", ")))", "()", "[[", "]]", "]]]", "[]"]
    tokenizer = byte_tokenizer(words)
    grammar = LLGuidanceCompiler(tokenizer, 300, [258 + len(words)], limits=None).compile(NESTED[opened[0]])
    brackets = {*b"()[],", *range(256, 256 + len(words))}
    for seed in range(200):
        rng = random.Random(seed)
        emitted = [*opened.encode()]
        matcher = matcher_behind(grammar, emitted)
        for _ in range(9):
            drafts = walk(matcher_behind(grammar, emitted), rng, rng.randrange(5), brackets)
            untouched = [matcher_behind(grammar, emitted + drafts[:j]) for j in range(len(drafts) + 1)]
            expected = [one.masks([])[0] for one in untouched]
            if draft_by_draft:  # as a draft model asks
                for j in range(len(drafts)):
                    assert np.array_equal(matcher.mask(drafts[:j]), expected[j])
            assert np.array_equal(matcher.masks(drafts), expected)
            assert (matcher.forced(4), matcher.ended) == (untouched[0].forced(4), untouched[0].ended)
            new = walk(untouched[0], rng, rng.randint(1, 2), brackets)
            assert matcher.advance(new)
            emitted += new


def test_masks_differ_from_position_to_position(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    """One state for all positions of a run is a known fault of other engines."""
    drafts = encode(tokenizer, '{"name": "a", "age": 1')
    rows = compiler.compile(PERSON).matcher().masks(drafts)
    assert all(draft in allowed(row) for draft, row in zip(drafts, rows, strict=False))
    assert len({row.tobytes() for row in rows}) > len(drafts) // 2


def test_drafts_may_run_past_the_end(compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    """The grammar ends inside the run: the end alone may follow there, and nobody reads the rows behind."""
    grammar = compiler.compile(COLOURS)
    blue = encode(tokenizer, "blue")
    for beyond in ([EOS, EOS], encode(tokenizer, "blue"), [PADDED - 1], [EOS, *blue]):
        matcher = grammar.matcher()
        rows = matcher.masks(blue + beyond)
        assert allowed(rows[len(blue)]) == [EOS]
        assert (rows[len(blue) + 1 :] == -1).all()
        assert not matcher.ended
        assert matcher.advance([*blue, EOS])
        assert matcher.ended


def test_a_new_matcher_catches_up_after_a_preemption(compiler: LLGuidanceCompiler) -> None:
    grammar = compiler.compile(PERSON)
    for seed in range(20):
        rng = random.Random(seed)
        old = grammar.matcher()
        emitted = walk(old, rng, rng.randrange(20))
        new = matcher_behind(grammar, emitted)
        drafts = walk(matcher_behind(grammar, emitted), rng, 4)
        assert np.array_equal(old.masks(drafts), new.masks(drafts))
        assert (old.forced(8), old.ended) == (new.forced(8), new.ended)


def test_matchers_of_one_grammar_do_not_see_each_other(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    grammar = compiler.compile(COLOURS)
    first, second = grammar.matcher(), grammar.matcher()
    start = follows(second)
    assert first.advance(encode(tokenizer, "blue"))
    assert follows(second) == start
    assert not first.advance(encode(tokenizer, "blue"))
    assert second.failure is None


# -- the end -----------------------------------------------------------------------------------------------------------


def test_the_end_is_allowed_where_the_grammar_is_matched(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    matcher = compiler.compile(COLOURS).matcher()
    assert EOS not in follows(matcher)
    assert matcher.advance(encode(tokenizer, "red"))
    assert EOS in follows(matcher)
    assert len(follows(matcher)) > 1
    assert not matcher.ended
    assert matcher.advance(encode(tokenizer, "der"))
    assert follows(matcher) == [EOS]
    assert matcher.ended


def test_an_early_end_kills(compiler: LLGuidanceCompiler) -> None:
    matcher = compiler.compile(COLOURS).matcher()
    assert not matcher.advance([EOS])
    assert matcher.failure is not None
    assert "where the grammar does not" in matcher.failure


def test_an_ended_matcher_may_be_asked_and_told_again(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    """As when end-of-sequence ids are ignored: nothing else ever follows."""
    matcher = compiler.compile(COLOURS).matcher()
    assert matcher.advance([*encode(tokenizer, "red"), EOS])
    for _ in range(3):
        assert matcher.ended
        rows = matcher.masks([EOS, 5])
        assert allowed(rows[0]) == [EOS]
        assert (rows[1:] == -1).all()
        assert matcher.forced(3) == []
        assert matcher.advance([EOS])
    assert not matcher.advance(encode(tokenizer, "der"))
    assert matcher.failure is not None


def test_several_ids_may_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """One is special, one looks like text, and one only pads the vocabulary."""
    exclamation, padding = encode(tokenizer, "!")[0], PADDED - 2
    compiler = LLGuidanceCompiler(tokenizer, PADDED, [EOS, exclamation, padding])
    grammar = compiler.compile(regex("a!*"))
    matcher = matcher_behind(grammar, encode(tokenizer, "a"))
    ends = {EOS, exclamation, padding}
    assert ends <= set(follows(matcher))
    assert not ends & set(follows(grammar.matcher()))
    for end in ends:
        ended = matcher_behind(grammar, [*encode(tokenizer, "a"), end])
        assert ended.ended
        assert follows(ended) == sorted(ends)
        assert ended.advance([EOS])


def test_a_model_without_an_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """The engine ends the completion when `ended` says so: there is no token for it."""
    grammar = LLGuidanceCompiler(tokenizer, PADDED).compile(choice("red", "redder"))
    matcher = matcher_behind(grammar, encode(tokenizer, "red"))
    assert not matcher.ended
    assert EOS not in follows(matcher)
    assert matcher.advance(encode(tokenizer, "der"))
    assert matcher.ended
    assert matcher.forced(3) == []
    assert (matcher.masks([1, 2]) == -1).all()
    assert matcher.failure is None


def test_a_model_without_an_end_cannot_write_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    """Whatever it wrote would not match."""
    with pytest.raises(InvalidArgument, match=NOTHING_FOLLOWS):
        LLGuidanceCompiler(tokenizer, PADDED).compile(regex("()"))
    assert LLGuidanceCompiler(tokenizer, PADDED, [EOS]).compile(regex("()")).matcher().forced(2) == [EOS]


def test_a_stop_id_at_the_end_is_no_part_of_the_text() -> None:
    tokenizer = byte_tokenizer()
    end, tool = (tokenizer.convert_tokens_to_ids(token) for token in ("<end>", "<tool>"))
    grammar = LLGuidanceCompiler(tokenizer, 300, [end]).compile(regex("ab"))
    matcher = matcher_behind(grammar, [ord("a"), tool])
    assert matcher.failure is None
    assert not grammar.matcher().advance([tool, ord("a")])


# -- vocabularies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [259, 270, 288, 289, 320])
def test_special_and_padding_ids_are_never_allowed(vocab_size: int) -> None:
    tokenizer = byte_tokenizer(["<tool", "ol>"])
    end, tool, note = (tokenizer.convert_tokens_to_ids(token) for token in ("<end>", "<tool>", "@note"))
    compiler = LLGuidanceCompiler(tokenizer, vocab_size, [end])
    assert (end, tool, note) == (258, 259, 260)
    for spec in (regex(r"(.|\n)*"), lark("start: (/(.|\\n)/ | <[0-258]>)*")):
        matcher = compiler.compile(spec).matcher()
        words = {token_id for token_id in (256, 257, note) if token_id < vocab_size}
        found = set(follows(matcher))
        assert found >= set(range(128))
        assert found - set(range(256)) == words | {end}
        assert matcher.masks([]).shape == (1, -(-vocab_size // 32))
        assert not accepts(compiler.compile(spec), [tool, ord("a")])
    # The name of a special token is text like any other, and written as text.
    spelled = compiler.compile(choice("a<tool>b")).matcher()
    assert spelled.forced(20) == [*b"a<tool>b", end]


def test_text_may_spell_a_special_token(compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    """Encoded as a prompt is, the text would be the token."""
    matcher = compiler.compile(json_schema('{"const": "<|endoftext|>"}')).matcher()
    forced = matcher.forced(50)
    assert EOS not in forced[:-1]
    assert matcher.advance(forced)
    assert matcher.ended
    assert b"".join(token_bytes(tokenizer)[token_id] for token_id in forced[:-1]) == b'"<|endoftext|>"'


def test_drafts_may_be_any_number(compiler: LLGuidanceCompiler) -> None:
    for draft in (EOS, 4096, PADDED - 1, PADDED, 10**9, -1):
        matcher = compiler.compile(COLOURS).matcher()
        rows = matcher.masks([draft, 1])
        assert np.array_equal(rows[0], matcher.masks([])[0])
        assert (rows[1:] == -1).all()
        assert matcher.failure is None


def test_a_vocabulary_smaller_than_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    matcher = LLGuidanceCompiler(tokenizer, 1000, [EOS]).compile(regex("[a-z]+")).matcher()
    assert matcher.masks([]).shape == (1, 32)
    assert max(follows(matcher)) < 1000
    assert (matcher.masks([2000])[1:] == -1).all()


def test_a_sentencepiece_vocabulary() -> None:
    tokenizer = sentencepiece_tokenizer(["a", " a", "é", " ", "aa"])
    matcher = LLGuidanceCompiler(tokenizer, 300, [0]).compile(regex("a( a|é)*")).matcher()
    names = tokenizer.convert_ids_to_tokens
    assert names(follows(matcher)) == ["a"]  # forced
    assert matcher.advance([257])
    assert set(names(follows(matcher))) == {"<s>", "<0x20>", "<0xC3>", "\u2581", "\u2581a", "é"}
    assert matcher.advance([1 + 0xC3])
    assert names(follows(matcher)) == ["<0xA9>"]


# -- forced tokens -----------------------------------------------------------------------------------------------------


def test_a_constant_is_forced_to_its_end(compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    grammar = compiler.compile(json_schema('{"const": "hello world"}'))
    token_ids = [*encode(tokenizer, '"hello world"'), EOS]
    for position in range(len(token_ids)):
        matcher = matcher_behind(grammar, token_ids[:position])
        for limit in (0, 1, 2, 100):
            assert matcher.forced(limit) == token_ids[position:][:limit]
        assert matcher.advance(matcher.forced(100))
        assert matcher.ended


def test_forced_tokens_end_where_there_is_a_choice(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    matcher = compiler.compile(regex("const [a-z]= final")).matcher()
    forced = matcher.forced(50)
    assert tokenizer.decode(forced).startswith("const")
    assert matcher.advance(forced)
    assert matcher.forced(50) == []
    assert len(follows(matcher)) > 1
    assert compiler.compile(DATE).matcher().forced(5) == []


def test_a_choice_of_ends_is_a_choice(tokenizer: PreTrainedTokenizerBase) -> None:
    matcher = LLGuidanceCompiler(tokenizer, PADDED, [EOS, PADDED - 1]).compile(choice("red")).matcher()
    assert matcher.forced(10) == encode(tokenizer, "red")


# -- death -------------------------------------------------------------------------------------------------------------


def test_a_dead_matcher_allows_everything_and_stays_dead(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    matcher = compiler.compile(COLOURS).matcher()
    assert matcher.advance(encode(tokenizer, "red"))
    assert not matcher.advance(encode(tokenizer, "x"))
    failure = matcher.failure
    assert failure is not None
    assert (matcher.masks([1, 2]) == -1).all()
    assert matcher.forced(3) == []
    assert not matcher.ended
    assert not matcher.advance([EOS])
    assert not matcher.advance([])
    assert matcher.failure == failure


TWINS = regex("(a|b)*a(a|b){18}")  # remembers which of the last 18 were an a: a state for each way


def test_a_full_lexer_is_replaced(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions of one grammar share its lexer; what the others have filled it with is no reason to fail."""
    monkeypatch.setattr(compiler_module, "LIMITS", LLParserLimits(max_lexer_states=3000, verbose_errors=False))
    grammar = LLGuidanceCompiler(tokenizer, PADDED, [EOS]).compile(TWINS)
    renewed = []
    renew = grammar.renewed_parser  # type: ignore[attr-defined]
    monkeypatch.setattr(grammar, "renewed_parser", lambda: renewed.append(1) or renew())
    matchers = [grammar.matcher() for _ in range(12)]
    letters = [encode(tokenizer, letter)[0] for letter in "ab"]
    rng = random.Random(0)
    for _ in range(60):
        for matcher in matchers:
            drafts = rng.choices(letters, k=2)
            rows = matcher.masks(drafts)
            assert set(letters) <= set(allowed(rows[2]))
            assert len(allowed(rows[2])) < 100
            assert matcher.advance(drafts)
            assert matcher.failure is None
    assert renewed


def test_a_text_that_is_read_in_too_many_ways_has_no_grammar_compiled_anew(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stop there again, and the batch waits for it."""
    grammar = compiler.compile(lark("start: " + "|".join(['"a"'] * 3000)))
    monkeypatch.setattr(grammar, "renewed_parser", None)
    matcher = grammar.matcher()
    assert not matcher.masks(encode(tokenizer, "a"))[1].any()
    assert not matcher.advance(encode(tokenizer, "a"))
    assert "too complex" in (matcher.failure or "")


def test_why_other_drafts_could_not_be_read_does_not_matter(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a full lexer cannot tell a new one does, also where earlier drafts were read in too many ways."""
    monkeypatch.setattr(compiler_module, "LIMITS", LLParserLimits(max_lexer_states=300, verbose_errors=False))
    ways = "|".join(['"d"'] * 3000)
    grammar = LLGuidanceCompiler(tokenizer, PADDED, [EOS]).compile(
        lark(f'start: /{TWINS.text}/ | "d" ways\nways: {ways}')
    )
    letters = [encode(tokenizer, letter)[0] for letter in "ab"]
    drafts = random.Random(0).choices(letters, k=200)
    matcher = grammar.matcher()
    assert not matcher.masks([*encode(tokenizer, "d"), *encode(tokenizer, "d")])[1].any()
    for row in matcher.masks(drafts)[1:]:
        assert set(letters) <= set(allowed(row))


def test_a_full_lexer_is_no_end(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "LIMITS", LLParserLimits(max_lexer_states=300, verbose_errors=False))
    grammar = LLGuidanceCompiler(tokenizer, PADDED, [EOS]).compile(regex(f"ca*|{TWINS.text}"))
    letters = [encode(tokenizer, letter)[0] for letter in "ab"]
    matcher = matcher_behind(grammar, encode(tokenizer, "c"))
    grammar.matcher().masks(random.Random(0).choices(letters, k=200))  # fills the lexer that both have
    assert not matcher.ended
    assert matcher.advance([*encode(tokenizer, "aa"), EOS])


@pytest.mark.parametrize(
    "spec", [lark('start: a "!"\na[max_tokens=5]: /[a-z]+/'), lark('start: a "!"\na[stop="z"]: /[a-y]*/')]
)
def test_drafts_do_not_have_a_grammar_compiled_anew(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, spec: GrammarSpec
) -> None:
    """Nor where llguidance knows no way back, as in these."""
    grammar = compiler.compile(spec)
    monkeypatch.setattr(grammar, "renewed_parser", None)
    matcher = grammar.matcher()
    for letter in "abcd":
        matcher.masks(encode(tokenizer, "xy"))
        assert matcher.advance(encode(tokenizer, letter))


def test_a_full_lexer_is_replaced_while_reading(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for a completion that is not asked for masks, such as one that catches up."""
    monkeypatch.setattr(compiler_module, "LIMITS", LLParserLimits(max_lexer_states=1000, verbose_errors=False))
    grammar = LLGuidanceCompiler(tokenizer, PADDED, [EOS]).compile(TWINS)
    letters = [encode(tokenizer, letter)[0] for letter in "ab"]
    rng = random.Random(0)
    glutton, other = grammar.matcher(), grammar.matcher()
    for _ in range(300):
        assert glutton.advance([rng.choice(letters)])
        glutton.masks([])
    for _ in range(3):
        assert other.advance(rng.choices(letters, k=100)), other.failure


def test_a_text_that_is_too_complex_dies(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "LIMITS", LLParserLimits(max_lexer_states=100, verbose_errors=False))
    grammar = LLGuidanceCompiler(tokenizer, PADDED, [EOS]).compile(TWINS)
    letters = [encode(tokenizer, letter)[0] for letter in "ab"]
    rng = random.Random(0)
    matcher = grammar.matcher()
    for _ in range(200):
        rows = matcher.masks([])
        if matcher.failure is not None:
            break
        assert len(allowed(rows[0])) < 100
        matcher.advance([rng.choice(letters)])
    assert matcher.failure is not None
    assert "too complex" in matcher.failure
    assert (matcher.masks([1]) == -1).all()
    assert not matcher.advance(letters)
    # Others go on.
    assert follows(grammar.matcher())


def test_a_draft_that_is_too_complex_does_no_harm(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What drafts do to the parser is forgotten with them, nor do they cost the rows behind them their masks."""
    monkeypatch.setattr(compiler_module, "LIMITS", LLParserLimits(max_lexer_states=300, verbose_errors=False))
    grammar = LLGuidanceCompiler(tokenizer, PADDED, [EOS]).compile(regex(f"c|{TWINS.text}"))
    letters = [encode(tokenizer, letter)[0] for letter in "ab"]
    drafts = random.Random(0).choices(letters, k=200)
    matcher = grammar.matcher()
    expected = matcher.masks([])
    rows = matcher.masks(drafts)
    assert np.array_equal(rows[:1], expected)
    for row in rows[1:]:
        assert set(letters) <= set(allowed(row))
        assert len(allowed(row)) < 100
    assert matcher.failure is None
    assert np.array_equal(matcher.masks([]), expected)
    assert matcher.advance([*encode(tokenizer, "c"), EOS])


def test_where_drafts_lead_to_what_cannot_be_read_nothing_is_allowed(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row behind drafts that the grammar allows never allows everything: what is sampled there would be emitted."""
    monkeypatch.setattr(compiler_module, "LIMITS", LLParserLimits(max_lexer_states=100, verbose_errors=False))
    grammar = LLGuidanceCompiler(tokenizer, PADDED, [EOS]).compile(TWINS)
    letters = [encode(tokenizer, letter)[0] for letter in "ab"]
    drafts = random.Random(0).choices(letters, k=200)
    matcher = grammar.matcher()
    rows = matcher.masks(drafts)
    sizes = [len(allowed(row)) for row in rows]
    readable = sizes.index(0)
    assert readable > 1
    assert max(sizes[:readable]) < 100
    assert matcher.failure is None
    assert not matcher.mask(drafts[:readable]).any()
    # Without drafts the completion comes as far.
    assert matcher.advance(drafts[:readable])
    matcher.masks([])
    assert matcher.failure is not None


@pytest.mark.parametrize("end", [[3], []], ids=["end", "no end"])
def test_drafts_may_lead_where_nothing_follows(end: list[int]) -> None:
    """Of a vocabulary that cannot spell what the grammar wants, and the same without drafts."""
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    grammar = LLGuidanceCompiler(tokenizer, PADDED, end).compile(regex("abz|ac"))
    matcher = grammar.matcher()
    rows = matcher.masks([0, 1])
    assert [allowed(row) for row in rows] == [[0], [1, 2], []]
    assert not matcher.mask([0, 1]).any()
    assert matcher.failure is None
    assert matcher.advance([0, 1])
    matcher.masks([])
    assert matcher.failure == NOTHING_FOLLOWS
