"""What the engine needs of a tokenizer, and transformers' tokenizers in that form."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.engine.detokenizer import Detokenizer
from paceline.engine.request import ChatMessage
from paceline.errors import FailedPrecondition, InvalidArgument, ModelLoadError, cut_short

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")


class TokenDecoder(Protocol):
    """The text of one completion, a token at a time. Mutated by both methods; used by one thread at a time."""

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; never a part of a character. Ids that stand for nothing have
        none."""
        ...

    def flush(self) -> str:
        """At the end: what is held back, with U+FFFD for an incomplete character."""
        ...


class Tokenizer(Protocol):
    """Pure and thread-safe: long prompts are encoded outside the event loop's thread."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """`apply_chat_template` works."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the special tokens that the model's tokenizer adds by itself and no others."""
        ...

    def encode_words(self, text: str) -> list[int]:
        """The ids of a piece of text, without special tokens added."""
        ...

    def apply_chat_template(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The ids of a conversation, up to where the assistant begins to answer.

        Raises:
            FailedPrecondition: the model has no chat template.
            InvalidArgument: the template refuses the messages.
        """
        ...

    def decoder(self, prompt_token_ids: Sequence[int], *, special_tokens: bool) -> TokenDecoder:
        """A decoder for one completion of this prompt.

        Args:
            special_tokens: special tokens are shown as text.
        """
        ...


class TransformersTokenizer:
    """A fast tokenizer of transformers.

    Raises:
        ModelLoadError: a slow tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ModelLoadError(f"{tokenizer.name_or_path}: a slow tokenizer: expected one that has a tokenizer.json")
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer")  # noqa: B009, slow tokenizers do not declare it
        # A tokenizer.json may ask for either; a prompt is never cut or padded.
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def encode(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=True)

    def encode_words(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)

    def apply_chat_template(self, messages: Sequence[ChatMessage]) -> list[int]:
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise FailedPrecondition("chat: this model has no chat template")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text: Any = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            allowed = f"messages that the model's chat template takes ({cut_short(str(error))})"
            raise InvalidArgument("chat.messages", [message.role for message in messages], allowed) from error
        except Exception as error:  # a template is a program
            logger.warning("the chat template fails", exc_info=True)
            raise FailedPrecondition(f"chat: the model's chat template fails: {cut_short(str(error))}") from error
        # The template has written every special token already.
        return self._encode(text, add_special_tokens=False)

    def decoder(self, prompt_token_ids: Sequence[int], *, special_tokens: bool) -> Detokenizer:
        return Detokenizer(self._backend, prompt_token_ids, hidden=frozenset() if special_tokens else self._special)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Not through transformers, which changes settings of the shared tokenizer on each call. And as a batch of one,
        # because that lets go of the interpreter while it works: other threads go on.
        [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids
