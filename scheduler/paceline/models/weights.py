"""How large a model is, told by its config."""

from __future__ import annotations

import torch

from paceline.models.config import ModelConfig


def num_parameters(config: ModelConfig) -> int:
    """Count all weights; a tied head counts once."""
    tables = 1 if config.tie_word_embeddings else 2
    return tables * config.vocab_size * config.hidden_size + matrix_elements(config) + _in_vectors(config)


def weight_bytes(config: ModelConfig, dtype: torch.dtype, *, int8: bool = False) -> int:
    """Bytes that all weights take, at least. Left out are the tables of rotary positions, scales of 8-bit weights, and
    the embedding that triton keeps beside a tied head of 8 bits. What is resident is measured, once it is loaded.
    """
    matrices = matrix_elements(config) + config.vocab_size * config.hidden_size  # the head's
    return (num_parameters(config) - matrices) * dtype.itemsize + matrices * (1 if int8 else dtype.itemsize)


def matrix_elements(config: ModelConfig) -> int:
    """Count the weights that the matrices of all layers hold, without the head."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (query + 2 * kv) + query * config.hidden_size
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def _in_vectors(config: ModelConfig) -> int:
    """Count those in norms and biases."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = 2 * config.hidden_size
    layer += 2 * config.head_dim if config.qk_norm else 0
    layer += query + 2 * kv if config.attention_bias else 0
    layer += config.hidden_size if config.output_bias else 0
    layer += 2 * config.intermediate_size + config.hidden_size if config.mlp_bias else 0
    return config.num_layers * layer + config.hidden_size
