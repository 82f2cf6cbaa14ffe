"""The decoder on the CPU: packed weights, and one native call for all layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from paceline.models.config import ModelConfig
from paceline.models.decoder import rotary_tables
from paceline.models.model import Slot
from paceline_kernels.cpu import decoder
from paceline_kernels.cpu.decoder import Kind, Layer, Matrix, Weights
from paceline_kernels.cpu.memory import LargePages


class NativeDecoder:
    """Implements `Model` for CPUs with a C++ compiler; every family that `Decoder` runs.

    Results of a row are the same to the bit in every batch. The weights start as zeros; a loader fills them through
    `slots`. One call at a time, from any thread.
    """

    kv_lanes = decoder.LANES

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, int8: bool = False, max_positions: int | None = None
    ) -> None:
        """Matrices are of `dtype`, or of 8 bits; positions are below `max_positions`, by default the config's."""
        self.config = config
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.int8 = int8
        self._kind = Kind.INT8 if int8 else Kind.BFLOAT16 if dtype == torch.bfloat16 else Kind.FLOAT32
        hidden, heads = config.hidden_size, config.num_heads * config.head_dim
        cos, sin = rotary_tables(config, max_positions or config.max_position_embeddings)
        tied = config.tie_word_embeddings
        pages = LargePages()
        self._weights = Weights(
            layers=[self._layer(hidden, heads, pages) for _ in range(config.num_layers)],
            norm=torch.zeros(hidden),
            cos=cos.contiguous(),
            sin=sin.contiguous(),
            embedding=None if tied else torch.zeros(config.vocab_size, hidden, dtype=dtype),
            head=Matrix(self._kind, config.vocab_size, hidden, pages),
        )
        self._decoder = decoder.Decoder(
            self._weights,
            dtype,
            head_dim=config.head_dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
        )
        self.forward = self._decoder.forward
        self.logits = self._decoder.logits
        self.logits_of = self._decoder.logits_of
        self.draft = self._decoder.draft

    def _layer(self, hidden: int, heads: int, pages: LargePages) -> Layer:
        config = self.config
        kv = config.num_kv_heads * config.head_dim
        head_norm = torch.zeros(config.head_dim) if config.qk_norm else None
        return Layer(
            input_norm=torch.zeros(hidden),
            post_norm=torch.zeros(hidden),
            q_norm=head_norm,
            k_norm=None if head_norm is None else head_norm.clone(),
            qkv=Matrix(self._kind, heads + 2 * kv, hidden, pages, bias=config.attention_bias),
            output=Matrix(self._kind, hidden, heads, pages, bias=config.output_bias),
            gate_up=Matrix(self._kind, config.intermediate_size, hidden, pages, bias=config.mlp_bias, interleaved=True),
            down=Matrix(self._kind, hidden, config.intermediate_size, pages, bias=config.mlp_bias),
        )

    def slots(self) -> dict[str, Slot]:
        """For every tensor of a checkpoint, by its name there, where it belongs."""
        config, weights = self.config, self._weights
        hidden, heads = config.hidden_size, config.num_heads * config.head_dim
        kv = config.num_kv_heads * config.head_dim
        slots = {"model.norm.weight": _vector(weights.norm)}
        if weights.embedding is None:
            slots["model.embed_tokens.weight"] = Slot((config.vocab_size, hidden), weights.head.fill)
        else:
            slots["model.embed_tokens.weight"] = Slot((config.vocab_size, hidden), weights.embedding.copy_)
            slots["lm_head.weight"] = Slot((config.vocab_size, hidden), weights.head.fill)
        for index, layer in enumerate(weights.layers):
            prefix = f"model.layers.{index}."
            slots[prefix + "input_layernorm.weight"] = _vector(layer.input_norm)
            slots[prefix + "post_attention_layernorm.weight"] = _vector(layer.post_norm)
            if layer.q_norm is not None and layer.k_norm is not None:
                slots[prefix + "self_attn.q_norm.weight"] = _vector(layer.q_norm)
                slots[prefix + "self_attn.k_norm.weight"] = _vector(layer.k_norm)
            for module, matrix, outputs, first, part in (
                ("self_attn.q_proj", layer.qkv, heads, 0, 0),
                ("self_attn.k_proj", layer.qkv, kv, heads, 0),
                ("self_attn.v_proj", layer.qkv, kv, heads + kv, 0),
                ("self_attn.o_proj", layer.output, hidden, 0, 0),
                ("mlp.gate_proj", layer.gate_up, config.intermediate_size, 0, 0),
                ("mlp.up_proj", layer.gate_up, config.intermediate_size, 0, 1),
                ("mlp.down_proj", layer.down, hidden, 0, 0),
            ):
                fill = partial(matrix.fill, first=first, part=part)
                slots[f"{prefix}{module}.weight"] = Slot((outputs, matrix.inputs), fill)
                if matrix.has_bias:
                    fill_bias: Callable[[Tensor], None] = partial(matrix.fill_bias, first=first, part=part)
                    slots[f"{prefix}{module}.bias"] = Slot((outputs,), fill_bias)
        return slots


def _vector(tensor: Tensor) -> Slot:
    return Slot(tuple(tensor.shape), tensor.copy_)
