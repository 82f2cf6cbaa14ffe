"""Tokens to text, one at a time."""

from __future__ import annotations

import codecs

from paceline.engine.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one completion. Mutated by `push` and `flush`.

    Characters whose bytes are spread over tokens come with the last of them; bytes that cannot become a character
    come as U+FFFD. All texts joined equal the decoding of all bytes at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = _utf8_decoder(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; special tokens have none."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """At the end: U+FFFD if a character is incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)
