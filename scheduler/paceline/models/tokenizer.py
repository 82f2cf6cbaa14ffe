"""Tokenizers, through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from paceline.errors import ModelLoadError

# Without one of these transformers may build an empty tokenizer instead of failing.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(path: Path, *, chats: bool = True) -> PreTrainedTokenizerBase:
    """Load the tokenizer, and its chat template if any, from the model directory `path`; never from the network.

    Args:
        chats: the template will be used.

    Raises:
        ModelLoadError: the directory has no tokenizer, or one that transformers cannot load; its chat
            template cannot be read.
    """
    if not any((path / name).is_file() for name in VOCABULARIES):
        raise ModelLoadError(f"{path}: no tokenizer: expected one of {', '.join(VOCABULARIES)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception, transformers nearly every builtin
        raise ModelLoadError(f"{path}: the tokenizer cannot be loaded: {type(error).__name__}: {error}") from error
    if chats:
        _check_chat_template(path, tokenizer)
    return cast(PreTrainedTokenizerBase, tokenizer)


def _check_chat_template(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Else every chat would be refused, as if its messages were wrong."""
    from jinja2 import TemplateSyntaxError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        reason = f"{error.message}, line {error.lineno}"
        raise ModelLoadError(f"{path}: the chat template cannot be read: {reason}") from error
    except Exception:  # there is none, or it wants other messages
        return
