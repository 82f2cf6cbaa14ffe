"""A model's vocabulary as a grammar's parser sees it: text tokens for the parser, the end apart."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from llguidance import LLTokenizer

from paceline.core.grammar import WORD, Mask, mask_of

UNWRITTEN = "\ufdd0"  # a noncharacter: no text has it


class Vocabulary:
    """Immutable, and so shared by every grammar and matcher of a model.

    Attributes:
        tokenizer: llguidance's, with an end-of-sequence id of its own, so that the parser's masks hold text alone.
        num_words: the width of a mask.
        text: [num_words], the ids that stand for text: no special ones, none that pad the vocabulary.
        end: [num_words], the end-of-sequence ids.
        end_ids: the same as a set; empty if the model has none.
        special_ids: special and end-of-sequence ids.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int], special_token_ids: Iterable[int]
    ) -> None:
        state = json.loads(tokenizer_json)
        self._vocab_size = vocab_size
        self.end_ids = frozenset(eos_token_ids)
        flagged = {token["id"] for token in state["added_tokens"] if token["special"]}
        self.special_ids = self.end_ids.union(flagged, special_token_ids)
        own_end = _num_ids(state)
        _hide_special_tokens(state, self.special_ids)
        _add_end(state, own_end)
        # Forced text is encoded like any other: neither cut nor padded.
        state["truncation"] = state["padding"] = state["post_processor"] = None
        self.tokenizer = LLTokenizer(json.dumps(state), n_vocab=max(vocab_size, own_end + 1), eos_token=own_end)
        self.num_words = -(-vocab_size // WORD)
        self.end = mask_of((token_id for token_id in self.end_ids if token_id < vocab_size), vocab_size)
        self.text = mask_of(set(range(min(vocab_size, own_end))) - self.special_ids, vocab_size)

    def everything(self, num_rows: int) -> Mask:
        """[num_rows, num_words], all bits set."""
        return np.full((num_rows, self.num_words), -1, np.int32)

    def parser_row(self) -> Mask:
        """Room for a mask of the parser's, which is at least as wide as ours."""
        return np.zeros(-(-self.tokenizer.vocab_size // WORD), np.int32)

    def allows(self, row: Mask, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size and bool(row[token_id // WORD] >> (token_id % WORD) & 1)


def only_token(row: Mask) -> int | None:
    """The one id that a row allows; None if there are several, or none."""
    words = np.flatnonzero(row)
    if len(words) != 1:
        return None
    word = int(row[words[0]]) & (1 << WORD) - 1
    if word & (word - 1):
        return None
    return int(words[0]) * WORD + word.bit_length() - 1


def _num_ids(state: dict[str, Any]) -> int:
    """One more than the highest id in a tokenizer.json."""
    vocab: dict[str, int] | list[Any] = state["model"]["vocab"]  # Unigram lists its tokens in the order of their ids
    highest = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    highest_added: int = max((token["id"] for token in state["added_tokens"]), default=-1)
    return 1 + max(highest, highest_added)


def _hide_special_tokens(state: dict[str, Any], special_ids: frozenset[int]) -> None:
    """Give special tokens names that no text has, in a tokenizer.json.

    Forced text is encoded to see how the model would write it, and text that spells a special token is only text.
    """
    model = state["model"]
    vocab: dict[str, int] | list[Any] = model["vocab"]
    for token in state["added_tokens"]:
        if token["id"] not in special_ids:
            continue
        name, token["content"] = token["content"], f"{UNWRITTEN}{token['id']}"
        if isinstance(vocab, list):
            if token["id"] < len(vocab):
                vocab[token["id"]][0] = token["content"]
        elif name in vocab:
            vocab[token["content"]] = vocab.pop(name)
        if model.get("unk_token") == name:
            model["unk_token"] = token["content"]


def _add_end(state: dict[str, Any], token_id: int) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    state["added_tokens"].append({"id": token_id, "content": UNWRITTEN, **flags})
