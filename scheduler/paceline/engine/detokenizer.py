"""Tokens to text, one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"
CONTEXT_REACH = 32  # tokens at the end of a prompt among which one is looked for that has text
MAX_CHAR_TOKENS = 4  # a character has at most 4 bytes
MAX_PENDING = 2 * MAX_CHAR_TOKENS


class Detokenizer:
    """The text of one completion, through the decode stream of `tokenizers`. Mutated by `push` and `flush`.

    The stream decodes a token behind the few before it, so that a token costs the same however long the text is, and
    holds text back while it ends with U+FFFD, which is how an incomplete character is decoded. Here the text before
    that character is shown at once, and at most `MAX_PENDING` tokens wait for more, whatever bytes they are.

    With a byte-level vocabulary all texts joined are the decoding of all ids at once. In a SentencePiece vocabulary
    there are differences: the first token keeps its leading space, as it does behind a prompt; and bytes that are
    not UTF-8 do not take back the valid ones that were shown before them. Behind a prompt without any text, the first
    word has no leading space, nor has one behind bytes that had to be given up.

    Args:
        prompt_token_ids: what the completion follows; only the end is read, and none of its text is shown.
        hidden: ids without text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._context = self._find_context(prompt_token_ids[-CONTEXT_REACH:])
        self._context_text = self._text_of(self._context)
        self._stream = DecodeStream(self._context)
        self._pending: list[int] = []  # pushed since the stream last gave text
        self._shown = ""  # the beginning of their text, as far as it was shown

    def push(self, token_id: int) -> str:
        """The text that is complete with this token."""
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # "Invalid prefix": the token changes text that was shown. It has no type of its own.
            return self.flush()
        if text is None:
            return self._show_pending()
        new = text.removeprefix(self._shown)
        self._pending, self._shown = [], ""
        return new

    def flush(self) -> str:
        """What is held back: U+FFFD if a character is incomplete. What comes next begins a new character."""
        new = self._decode(self._pending).removeprefix(self._shown)
        self._restart([])
        return new

    def _show_pending(self) -> str:
        """The text of the pending tokens that is new and cannot change any more."""
        text = self._decode(self._pending)
        if len(self._pending) > MAX_PENDING:
            return self._drop_pending(text)
        settled = text.rstrip(REPLACEMENT)
        if len(settled) <= len(self._shown):
            return ""
        new = settled.removeprefix(self._shown)
        self._shown = settled
        return new

    def _drop_pending(self, text: str) -> str:
        """Give up on all pending tokens but those that may be part of one last character."""
        tail = self._pending[-MAX_CHAR_TOKENS:]
        tail_text = self._decode(tail)
        if not tail_text.endswith(REPLACEMENT):
            return self.flush()
        new = text[:-1].removeprefix(self._shown)
        self._restart(tail)
        self._shown = tail_text[:-1]
        return new

    def _restart(self, token_ids: list[int]) -> None:
        """Begin a stream behind the context, with these tokens, of which nothing counts as shown."""
        self._stream = DecodeStream(self._context)
        self._pending = token_ids
        self._shown = ""
        if token_ids:
            self._stream.step(self._tokenizer, token_ids)

    def _find_context(self, token_ids: Sequence[int]) -> list[int]:
        """The newest token that is text by itself: behind it, a decoder does not take the completion for a beginning.

        One token alone, since a prompt may end within a character, which is no part of the completion.
        """
        for token_id in reversed(token_ids):
            text = "" if token_id in self._hidden else self._text_of([token_id])
            if text and REPLACEMENT not in text:
                return [token_id]
        return []

    def _decode(self, token_ids: list[int]) -> str:
        """The text of tokens behind the context."""
        return self._text_of([*self._context, *token_ids])[len(self._context_text) :]

    def _text_of(self, token_ids: list[int]) -> str:
        # Special tokens that are to be hidden do not come this far.
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
