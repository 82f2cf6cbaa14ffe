"""Tiny random checkpoints of every family, written by transformers, with a tokenizer that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
END_OF_TEXT = "<|end|>"
END_OF_TEXT_ID = 0
TEXT = (
    "A paceline is a line of cyclists who draft each other in turn. The first rider breaks the wind, and all the "
    "others follow close behind; after a while the leader pulls aside and drops to the back. Riders save up to a third "
    "of their effort this way, so a group travels faster than any of its members could alone.\n"
) * 4
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def tiny_checkpoint(
    path: Path,
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = 320,
    seed: int = 0,
    max_shard_size: str = "50GB",
    **config_overrides: Any,
) -> Path:
    """Write a random model of `family` (llama, qwen2, qwen3) and its tokenizer into the directory `path`; return it.

    Every weight is random, biases and norms too, and large enough that logits spread over several units: a mistake
    anywhere shows. `max_shard_size="60KB"` makes several files. Id 0 is the end of text, the others are bytes and
    merges of a byte-level BPE; above about 400 they have no text.
    """
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=vocab_size,
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": END_OF_TEXT_ID,
            "pad_token_id": None,
            **config_overrides,
        },
    )
    model = model_class(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1.0 + 0.2 * noise if "norm" in name else 0.15 * noise
    if config.tie_word_embeddings:
        model.tie_weights()
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    tiny_tokenizer(vocab_size).save_pretrained(path)
    return path


def tiny_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` entries. Below 257 it knows only the commonest bytes of TEXT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if vocab_size > 256 else [],
        limit_alphabet=min(256, vocab_size - 1),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
