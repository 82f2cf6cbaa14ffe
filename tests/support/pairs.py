"""A target and a draft that agree now and then."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.checkpoints import END_OF_TEXT, tiny_checkpoint


def tiny_pair(folder: Path, family: str = "llama", *, noise: float = 0.02, **overrides: Any) -> tuple[Path, Path]:
    """A tiny random target, and as its draft a copy with noise on every weight: the more, the fewer drafts are
    right.
    """
    target = tiny_checkpoint(folder / "target", family, **overrides)
    draft = folder / "draft"
    shutil.copytree(target, draft)
    generator = torch.Generator().manual_seed(99)
    tensors = load_file(target / "model.safetensors")
    noisy = {name: t + noise * torch.randn(t.shape, generator=generator).to(t.dtype) for name, t in tensors.items()}
    save_file(noisy, draft / "model.safetensors", metadata={"format": "pt"})
    return target, draft


def letter_pair(folder: Path, letters: str, **overrides: Any) -> tuple[Path, Path]:
    """A tiny pair with a known vocabulary: id 0 is the end of text, each other id a letter of ASCII."""
    pair = tiny_pair(folder, vocab_size=1 + len(letters), **overrides)
    vocab = {END_OF_TEXT: 0} | {letter.replace(" ", "Ġ"): 1 + index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)  # type: ignore[no-untyped-call]
    for path in pair:
        fast.save_pretrained(path)
    return pair
