"""The demo vocabulary with a padded model behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

import paceline.demo
from paceline.models.tokenizer import load_tokenizer
from paceline.structured import LLGuidanceCompiler

CHECKPOINT = Path(paceline.demo.__file__).parent / "checkpoints" / "target"
PADDED = 4100  # the tokenizer has 4096 tokens
EOS = 0


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(CHECKPOINT)


@pytest.fixture(scope="session")
def compiler(tokenizer: PreTrainedTokenizerBase) -> LLGuidanceCompiler:
    return LLGuidanceCompiler(tokenizer, PADDED, [EOS])
