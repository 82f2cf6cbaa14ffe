"""Tokenizers to constrain, and masks as sets of ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from paceline.core.grammar import GrammarKind, GrammarSpec, Mask, Matcher

CHAR_OF_BYTE: dict[int, str] = bytes_to_unicode()  # as byte-level vocabularies spell bytes


def byte_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """Ids 0 to 255 are bytes, then come `words`, `<end>` and `<tool>`, which are special, and `@note`, which is not."""
    vocab = {CHAR_OF_BYTE[byte]: byte for byte in range(256)}
    for word in words:
        vocab["".join(CHAR_OF_BYTE[byte] for byte in word.encode())] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<tool>"])
    backend.add_tokens([AddedToken("@note")])
    # As some published files have it.
    backend.enable_truncation(2)
    backend.enable_padding(length=9, pad_id=0)
    return PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call,no-any-return]


def sentencepiece_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerBase:
    """`<s>`, the 256 bytes, then `words`, in which a space is written as SentencePiece writes it."""
    vocab = {"<s>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for word in words:
        vocab[word.replace(" ", "\u2581")] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call,no-any-return]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """What the tokens of a byte-level vocabulary stand for."""
    byte_of_char = {char: byte for byte, char in CHAR_OF_BYTE.items()}
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return [bytes(byte_of_char[char] for char in token) for token in tokens]


def allowed(row: Mask) -> list[int]:
    return [int(index) for index in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]


def follows(matcher: Matcher) -> list[int]:
    return allowed(matcher.masks([])[0])


def json_schema(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text)


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


def lark(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.GRAMMAR, text)


def choice(*choices: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.CHOICE, choices=choices)
