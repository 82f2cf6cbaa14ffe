"""Text comes with the token that completes it, and is what decoding everything at once gives."""

from __future__ import annotations

import random

import pytest

from engine.toy import SPECIAL, VOCAB_SIZE, ToyTokenizer, decode
from paceline.engine.detokenizer import Detokenizer


def push_all(token_ids: list[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(ToyTokenizer())
    return [detokenizer.push(token) for token in token_ids], detokenizer.flush()


@pytest.mark.parametrize("text", ["plain", "é€🚴", "a🚴\u200d♀️b", "\x00\ufffd\uffff", "नमस्ते 🇪🇺"])
def test_every_character_comes_with_its_last_byte(text: str) -> None:
    pieces, rest = push_all(list(text.encode()))
    assert rest == ""
    assert "".join(pieces) == text
    shown = b""
    for byte, piece in zip(text.encode(), pieces, strict=True):
        shown += bytes([byte])
        complete = shown.decode(errors="ignore")
        assert "".join(pieces).startswith(complete)
        assert piece == "" or complete.endswith(piece)


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_equal_decoding_at_once(seed: int) -> None:
    rng = random.Random(seed)
    vocabulary = rng.sample(range(VOCAB_SIZE), k=rng.choice([8, 50, VOCAB_SIZE]))
    for _ in range(50):
        token_ids = rng.choices(vocabulary, k=rng.randrange(1, 30))
        pieces, rest = push_all(token_ids)
        assert "".join(pieces) + rest == decode(token_ids)


@pytest.mark.parametrize(
    "raw", [b"\xff\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf0\x9f\x80", b"\xe2\x82a", b"\xf4\x90\x80\x80"]
)
def test_bytes_that_are_no_text_are_replaced(raw: bytes) -> None:
    pieces, rest = push_all(list(raw))
    assert "".join(pieces) + rest == raw.decode(errors="replace")


def test_an_incomplete_character_is_shown_at_the_end_only() -> None:
    pieces, rest = push_all(list("a🚴".encode())[:-1])
    assert pieces == ["a", "", "", ""]
    assert rest == "\ufffd"


def test_text_before_an_incomplete_character_of_the_same_token_is_not_held_back() -> None:
    tokenizer = ToyTokenizer()
    token = next(token for token in range(VOCAB_SIZE) if tokenizer.token_bytes(token) == b"y\xf0\x9f")
    assert Detokenizer(tokenizer).push(token) == "y"


def test_special_tokens_have_no_text_even_within_a_character() -> None:
    first, second = "é".encode()
    assert push_all([first, SPECIAL, second]) == (["", "", "é"], "")
