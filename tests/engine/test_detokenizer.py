"""Text comes with the token that completes it, and is what decoding everything at once gives."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from paceline.demo import TARGET
from paceline.engine.detokenizer import MAX_PENDING, REPLACEMENT, Detokenizer

# Behind the 256 bytes: words, whole characters, halves of them, and tokens that end one and begin the next.
PIECES = (
    *(b" the", "é".encode(), "€".encode(), "🚴".encode()),
    *("€".encode()[:2], "🚴".encode()[:3]),
    *(b"\x80\xb4x", b"y\xf0\x9f", b"\x9f\x98\x80\xf0"),
)
SPECIAL = "<|end|>"

profile = settings(deadline=None, derandomize=True, database=None, max_examples=150)


def byte_chars() -> list[str]:
    """The characters that byte-level vocabularies write for the bytes."""
    others = itertools.count(256)
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_level() -> Tokenizer:
    chars = byte_chars()
    tokens = [bytes([byte]) for byte in range(256)] + [*PIECES]
    vocabulary = {"".join(chars[byte] for byte in token): index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def sentence_piece() -> Tokenizer:
    pieces = ["\u2581", "\u2581the", "a", "é", REPLACEMENT, "\u2581" + REPLACEMENT]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


BYTES = byte_level()
SPECIAL_ID = BYTES.get_vocab_size() - 1
DEMO = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
PIECE = sentence_piece()
THE = PIECE.token_to_id("\u2581the")


def hidden_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def push_all(
    tokenizer: Tokenizer, token_ids: Sequence[int], prompt: Sequence[int] = (), show_special: bool = False
) -> tuple[list[str], str]:
    hidden = frozenset() if show_special else hidden_ids(tokenizer)
    detokenizer = Detokenizer(tokenizer, prompt, hidden)
    return [detokenizer.push(token) for token in token_ids], detokenizer.flush()


def joined(*args: object, **kwargs: object) -> str:
    pieces, rest = push_all(*args, **kwargs)  # type: ignore[arg-type]
    return "".join(pieces) + rest


@pytest.mark.parametrize("text", ["plain", "é€🚴", "a🚴\u200d♀️b", "漢字かな交じり文", "\x00\uffff", "नमस्ते 🇪🇺"])
@pytest.mark.parametrize("tokenizer", [BYTES, PIECE])
def test_every_character_comes_with_its_last_byte(tokenizer: Tokenizer, text: str) -> None:
    pieces, rest = push_all(tokenizer, list(text.encode()))
    assert rest == ""
    for count in range(len(pieces) + 1):
        assert "".join(pieces[:count]) == text.encode()[:count].decode(errors="ignore")


@pytest.mark.parametrize(
    "text", ["漢字とemoji 🚴\u200d♀️ 🇪🇺", "for i in range(3):\n\tprint('€')\n", "ñ👩\u200d👩\u200d👧"]
)
def test_the_demo_model_s_tokens_show_no_part_of_a_character(text: str) -> None:
    token_ids = DEMO.encode(text).ids
    pieces, rest = push_all(DEMO, token_ids)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert rest == ""
    assert not text.isascii()
    assert "" in pieces, "no character was spread over tokens"


@pytest.mark.parametrize("show_special", [False, True])
@pytest.mark.parametrize("tokenizer", [BYTES, DEMO])
@profile
@given(data=st.data())
def test_random_tokens_equal_decoding_at_once(tokenizer: Tokenizer, show_special: bool, data: st.DataObject) -> None:
    ids = st.integers(0, tokenizer.get_vocab_size() - 1)
    few = st.lists(ids, min_size=1, max_size=4).flatmap(lambda some: st.lists(st.sampled_from(some), max_size=60))
    token_ids, prompt = data.draw(st.lists(ids) | few), data.draw(st.lists(ids, max_size=5))
    whole = tokenizer.decode(token_ids, skip_special_tokens=not show_special)
    assert joined(tokenizer, token_ids, prompt, show_special) == whole


@profile
@given(st.lists(st.integers(0x80, 0xFF) | st.sampled_from([256 + PIECES.index(b"\x9f\x98\x80\xf0")]), max_size=80))
@example(list(b"\x80" * 5 + b"\xf0\x9f\x98" + b"\x80"))
@example([0xF0] + [256 + PIECES.index(b"\x9f\x98\x80\xf0")] * 40 + list(b"\x9f\x98\x80"))
def test_bytes_that_are_no_text_wait_for_a_few_tokens_only(token_ids: list[int]) -> None:
    pieces, rest = push_all(BYTES, token_ids)
    assert "".join(pieces) + rest == BYTES.decode(token_ids)
    for count in range(MAX_PENDING, len(pieces) + 1):
        # The last character of these may have been incomplete, and its end may be waiting still.
        assert len("".join(pieces[:count])) >= len(BYTES.decode(token_ids[: count - MAX_PENDING])) - 1
    assert rest in ("", REPLACEMENT * len(rest))


@pytest.mark.parametrize("tokenizer", [BYTES, PIECE])
def test_a_long_run_of_garbage_costs_the_same_for_each_token(tokenizer: Tokenizer) -> None:
    decoded = []

    class Counting(Detokenizer):
        def _decode(self, token_ids: list[int]) -> str:
            decoded.append(len(token_ids))
            return super()._decode(token_ids)

    detokenizer = Counting(tokenizer, [], frozenset())
    text = "".join(detokenizer.push(0x80) for _ in range(2000)) + detokenizer.flush()
    assert text == REPLACEMENT * 2000
    assert max(decoded) == MAX_PENDING + 1


@pytest.mark.parametrize(
    "raw", [b"\xff\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf0\x9f\x80", b"\xe2\x82a", b"\xf4\x90\x80\x80"]
)
def test_bytes_that_are_no_text_are_replaced(raw: bytes) -> None:
    assert joined(BYTES, list(raw)) == raw.decode(errors="replace")


def test_an_incomplete_character_is_shown_at_the_end_only() -> None:
    assert push_all(BYTES, list("a🚴".encode())[:-1]) == (["a", "", "", ""], REPLACEMENT)


def test_a_replacement_character_of_the_text_itself_is_kept() -> None:
    assert push_all(BYTES, list("a\ufffdb".encode())) == (["a", "", "", "", "\ufffdb"], "")
    assert push_all(BYTES, list("\ufffd".encode())) == ([""] * 3, "\ufffd")


def test_text_before_an_incomplete_character_of_the_same_token_is_not_held_back() -> None:
    token = 256 + PIECES.index(b"y\xf0\x9f")
    assert push_all(BYTES, [token, 0x98, 0x80]) == (["y", "", "😀"], "")


def test_hidden_special_tokens_have_no_text_even_within_a_character() -> None:
    first, second = "é".encode()
    for count in (1, 3 * MAX_PENDING):
        pieces, rest = push_all(BYTES, [first, *[SPECIAL_ID] * count, second])
        assert ("".join(pieces), pieces[-1], rest) == ("é", "é", "")


@pytest.mark.parametrize("tokenizer", [BYTES, PIECE])
def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    special = tokenizer.token_to_id(SPECIAL)
    token_ids = [*b"a", special, special, *b"b"]
    assert push_all(tokenizer, token_ids) == (["a", "", "", "b"], "")
    assert push_all(tokenizer, token_ids, show_special=True) == (["a", SPECIAL, SPECIAL, "b"], "")


@pytest.mark.parametrize("tokenizer", [BYTES, PIECE])
def test_unknown_ids_have_no_text(tokenizer: Tokenizer) -> None:
    unknown = tokenizer.get_vocab_size() + 5
    pieces, rest = push_all(tokenizer, [*b"a", *[unknown] * 50, *b"b"])
    assert ("".join(pieces), pieces[-1], rest) == ("ab", "b", "")


class TestPrompt:
    @pytest.mark.parametrize("tail", [(), (PIECE.token_to_id(SPECIAL),), (PIECE.token_to_id("\u2581"),), (0xE2, 0x82)])
    def test_a_leading_space_is_kept_behind_text(self, tail: tuple[int, ...]) -> None:
        assert push_all(PIECE, [THE, THE], [THE, *tail]) == ([" the", " the"], "")

    def test_a_text_s_own_beginning_has_none(self) -> None:
        """As in decoding at once, where only special tokens, or nothing, come before."""
        assert push_all(PIECE, [THE, THE], [PIECE.token_to_id(SPECIAL)]) == (["the", " the"], "")

    @pytest.mark.parametrize("tokenizer", [BYTES, PIECE])
    def test_a_character_that_the_prompt_began_is_not_the_completion_s(self, tokenizer: Tokenizer) -> None:
        first, second = "é".encode()
        letter = tokenizer.token_to_id("a")
        assert push_all(tokenizer, [second, letter], [letter, first]) == (["", "\ufffda"], "")

    def test_only_the_end_of_a_long_prompt_is_read(self) -> None:
        class Prompt(tuple[int, ...]):
            def __getitem__(self, index: object) -> tuple[int, ...]:  # type: ignore[override]
                assert isinstance(index, slice)
                taken = super().__getitem__(index)
                assert len(taken) < 100
                return taken

            def __iter__(self) -> object:  # type: ignore[override]
                raise AssertionError("the whole prompt is read")

        assert joined(PIECE, [THE], Prompt([THE] * 10_000)) == " the"


class TestByteFallback:
    """SentencePiece decodes a whole run of byte tokens to U+FFFD if some of them are not UTF-8."""

    @pytest.mark.parametrize("prompt", [(), (THE,), (0x0A,)])
    def test_garbage_behind_a_character_does_not_take_it_back(self, prompt: tuple[int, ...]) -> None:
        token_ids = [*"€".encode(), 0x80, PIECE.token_to_id("a"), *"€".encode()]
        assert push_all(PIECE, token_ids, prompt) == (["", "", "€", "", "\ufffda", "", "", "€"], "")
        assert joined(PIECE, token_ids[:4], prompt) == "€\ufffd"

    @pytest.mark.parametrize("prompt", [(THE,), (0x0A,)])
    def test_text_goes_on_behind_any_amount_of_garbage(self, prompt: tuple[int, ...]) -> None:
        for count in range(1, 40):
            text = joined(PIECE, [0x80] * count + [THE, *"🚴".encode()], prompt)
            assert text == REPLACEMENT * count + " the🚴"
            run = [*[0x80] * count, *"🚴".encode()]
            assert joined(PIECE, [*run, THE], prompt) == REPLACEMENT * len(run) + " the"

    @pytest.mark.parametrize("prompt", [THE, 0x0A])
    def test_words_keep_their_space_behind_garbage(self, prompt: int) -> None:
        letter = PIECE.token_to_id("a")
        assert joined(PIECE, [*"€".encode(), 0x80, letter, THE], [prompt]) == "€\ufffda the"

    def test_replacement_characters_are_tokens_too(self) -> None:
        own = PIECE.token_to_id("\u2581" + REPLACEMENT)
        for count in range(1, 40):
            assert joined(PIECE, [own] * count, [THE]) == f" {REPLACEMENT}" * count

    @profile
    @given(st.text(alphabet="aé€🚴\n"), st.lists(st.sampled_from([THE, PIECE.token_to_id("a")]), max_size=3))
    def test_text_is_decoded_as_at_once(self, text: str, words: list[int]) -> None:
        token_ids = [*words, *text.encode(), *words]
        assert joined(PIECE, token_ids, [THE]) == PIECE.decode([THE, *token_ids]).removeprefix("the")

    @profile
    @given(st.lists(st.sampled_from([THE, PIECE.token_to_id("a"), 0x80, 0xC3, 0xA9, 0xF0, 0x9F, 0x98]), max_size=60))
    def test_no_garbage_takes_a_word_along(self, token_ids: list[int]) -> None:
        words = [{THE: " the", PIECE.token_to_id("a"): "a"}.get(token, "") for token in token_ids]
        assert "".join(filter(str.isascii, joined(PIECE, token_ids, [THE]))) == "".join(words)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()])
def test_any_other_decoder_will_do(decoder: decoders.Decoder | None) -> None:
    words = ["\u2581one", "\u2581two", "##three", "."]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="."))
    if decoder is not None:
        tokenizer.decoder = decoder
    for token_ids in itertools.product(range(len(words)), repeat=4):
        first = tokenizer.decode([0])
        assert joined(tokenizer, token_ids, [0]) == tokenizer.decode([0, *token_ids]).removeprefix(first)


def test_prompts_are_encoded_meanwhile() -> None:
    """The tokenizer is shared with threads that encode."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    text = "def f(x):\n    return x  # 漢字 🚴\n" * 50
    [token_ids] = [encoding.ids for encoding in tokenizer.encode_batch([text])]
    done = threading.Event()
    wrong = []

    def encode() -> None:
        while not done.is_set():
            [encoding] = tokenizer.encode_batch([text])
            if encoding.ids != token_ids:
                wrong.append(encoding.ids)

    threads = [threading.Thread(target=encode) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert joined(tokenizer, token_ids) == text
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong
