"""What a forward has to do at least."""

from __future__ import annotations

from paceline.models import ModelConfig
from paceline.models.weights import matrix_elements


def streamed_bytes(config: ModelConfig, itemsize: int) -> int:
    """Weights that a decode step reads: every matrix and the head; without embeddings, norms, scales and padding."""
    return (matrix_elements(config) + config.vocab_size * config.hidden_size) * itemsize


def prefill_operations(config: ModelConfig, rows: int) -> int:
    """Operations of a forward over the first `rows` tokens of a sequence, causal attention included, the head not."""
    attention = config.num_layers * config.num_heads * config.head_dim * 2 * rows * (rows + 1)
    return 2 * rows * matrix_elements(config) + attention
