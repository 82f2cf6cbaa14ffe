"""What a forward has to do at least."""

from __future__ import annotations

from paceline.models import ModelConfig


def matrix_elements(config: ModelConfig) -> int:
    """Weights that the matrices of all layers hold, without the head."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (heads + 2 * kv) + heads * config.hidden_size
    layer += 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * layer


def streamed_bytes(config: ModelConfig, itemsize: int) -> int:
    """Weights that a decode step reads: every matrix and the head; without embeddings, norms, scales and padding."""
    return (matrix_elements(config) + config.vocab_size * config.hidden_size) * itemsize


def prefill_operations(config: ModelConfig, rows: int) -> int:
    """Of a forward over the first `rows` tokens of a sequence, causal attention included, the head not."""
    attention = config.num_layers * config.num_heads * config.head_dim * 2 * rows * (rows + 1)
    return 2 * rows * matrix_elements(config) + attention
