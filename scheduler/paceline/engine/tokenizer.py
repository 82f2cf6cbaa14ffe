"""What the engine needs of a tokenizer, and transformers' tokenizers in that form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.engine.request import ChatMessage
from paceline.errors import FailedPrecondition, InvalidArgument, ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant", "tool")
SPACE = "\u2581"  # what SentencePiece writes for a space


class Tokenizer(Protocol):
    """Pure and thread-safe: long prompts are encoded outside the event loop's thread."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that are never shown as text."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the special tokens that the model's tokenizer adds by itself and no others."""
        ...

    def apply_chat_template(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The ids of a conversation, up to where the assistant begins to answer.

        Raises:
            FailedPrecondition: the model has no chat template.
            InvalidArgument: the template refuses the messages.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 that a token adds to a text, perhaps part of a character. Empty for special and unknown ids."""
        ...


class TransformersTokenizer:
    """A fast tokenizer of transformers.

    Text is put together from the bytes of tokens rather than by decoding ever longer lists of ids: that costs the
    same for every token and shows each character with the token that completes it. The result is what decoding all
    ids at once gives, with two exceptions that only SentencePiece vocabularies have: the first token keeps its
    leading space, as it does behind a prompt; and where bytes are not UTF-8, only those are replaced, not the valid
    ones beside them.

    Raises:
        ModelLoadError: a slow tokenizer, or one whose tokens do not stand for bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ModelLoadError(f"{tokenizer.name_or_path}: a slow tokenizer: expected one that has a tokenizer.json")
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer")  # noqa: B009, slow tokenizers do not declare it
        # A tokenizer.json may ask for either; a prompt is never cut or padded.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._byte_level = self._is_byte_level()
        added = self._backend.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        self._special = frozenset(special.union(tokenizer.all_special_ids))
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special

    def encode(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=True)

    def apply_chat_template(self, messages: Sequence[ChatMessage]) -> list[int]:
        from jinja2 import TemplateError

        if self._tokenizer.chat_template is None:
            raise FailedPrecondition("chat: this model has no chat template")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text: Any = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            allowed = f"messages that the model's chat template takes ({error})"
            raise InvalidArgument("chat.messages", [message.role for message in messages], allowed) from error
        # The template has written every special token already.
        return self._encode(text, add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._decode_token(token_id)
        return known

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Not through transformers, which changes settings of the shared tokenizer on each call. And as a batch of one,
        # because that lets go of the interpreter while it works: other threads go on.
        [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _decode_token(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None or token_id in self._special:
            return b""
        if self._byte_level:
            if all(char in BYTE_OF_CHAR for char in token):
                return bytes(BYTE_OF_CHAR[char] for char in token)
            return token.encode()  # an added token, written as it is
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(SPACE, " ").encode()

    def _is_byte_level(self) -> bool:
        """Are tokens spelled in GPT-2's alphabet of bytes? If not, as text with `<0x0A>`, as SentencePiece does."""
        decoder = self._backend.decoder
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        kinds = {part["type"] for part in state.get("decoders", [state]) if part}
        if "ByteLevel" in kinds:
            return True
        if kinds & {"ByteFallback", "Metaspace"}:
            return False
        raise ModelLoadError(
            f"{self._tokenizer.name_or_path}: tokenizer.json has the decoder {sorted(kinds)}: "
            "expected ByteLevel, ByteFallback or Metaspace"
        )


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for bytes: printable ones for themselves, the others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHAR = _byte_alphabet()
