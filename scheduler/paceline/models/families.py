"""What distinguishes the supported architectures. A new one that fits the decoder is one more entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Family:
    """Traits that config.json does not spell out."""

    model_type: str  # as config.json calls it
    attention_bias: bool | None = None  # of q, k and v; None: config.json's `attention_bias` decides
    output_bias: bool | None = None  # of o; None: likewise
    mlp_bias: bool | None = False  # of gate, up and down; None: config.json's `mlp_bias` decides
    qk_norm: bool = False  # RMSNorm over each head of q and k, before the rotation
    head_dim: int | None = None  # where config.json has none; None: hidden_size / num_attention_heads


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family("llama", mlp_bias=None),
        "Qwen2ForCausalLM": Family("qwen2", attention_bias=True, output_bias=False),
        "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_dim=128),
    }
)
