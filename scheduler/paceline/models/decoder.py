"""One configurable decoder for every supported family. Inference only; all weights are allocated once, fused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.config import Llama3Scaling, ModelConfig
from paceline.models.model import Slot
from paceline_kernels import Int8Weight, PagedBatch, reference
from paceline_kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer. With q = num_heads * head_dim and kv = num_kv_heads * head_dim:"""

    input_norm: Tensor  # [hidden]
    qkv: Tensor | Int8Weight  # [q + 2 * kv, hidden]
    qkv_bias: Tensor | None  # [q + 2 * kv]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Tensor | Int8Weight  # [hidden, q]
    output_bias: Tensor | None  # [hidden]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor | Int8Weight  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None  # [2 * intermediate]
    down: Tensor | Int8Weight  # [hidden, intermediate]
    down_bias: Tensor | None  # [hidden]

    def weights(self) -> list[Tensor | Int8Weight]:
        values = (getattr(self, item.name) for item in fields(self))
        return [value for value in values if value is not None]


class Decoder:
    """A decoder-only transformer over paged KV.

    The weights start uninitialised; a loader fills them through `slots`. Afterwards nothing here changes,
    and calls may come from any thread. `torch.inference_mode` is the caller's.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops = reference,
        max_positions: int | None = None,
        *,
        int8: bool = False,
    ) -> None:
        """Matrices are of `dtype`, or of 8 bits but for the embedding. Positions are below `max_positions`, at most and
        by default the config's max_position_embeddings.
        """
        self.config = config
        self.dtype = dtype
        self.device = device
        self.int8 = int8
        self.kv_lanes = 1
        self._ops = ops
        self._q_size = config.num_heads * config.head_dim
        self._kv_size = config.num_kv_heads * config.head_dim
        self._scale = config.head_dim**-0.5
        tables = rotary_tables(config, max_positions or config.max_position_embeddings)
        self._cos, self._sin = (table.to(device, dtype) for table in tables)  # [max_positions, head_dim / 2]
        self._embedding = self._empty(config.vocab_size, config.hidden_size)
        self._layers = [self._allocate_layer() for _ in range(config.num_layers)]
        self._norm = self._empty(config.hidden_size)
        # A tied head of 8 bits is a copy, since the embedding has none.
        shared = config.tie_word_embeddings and not int8
        self._head = self._embedding if shared else self._matrix(config.vocab_size, config.hidden_size)

    @property
    def num_parameters(self) -> int:
        """Weights of the checkpoint: a tied head counts once, in memory twice or not."""
        weights = [self._embedding, self._norm, *(weight for layer in self._layers for weight in layer.weights())]
        if not self.config.tie_word_embeddings:
            weights.append(self._head)
        return sum(weight.numel() for weight in weights)

    def forward(self, token_ids: Tensor, batch: PagedBatch, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Run all layers over the rows of a batch.

        Args:
            token_ids: [num_tokens] int64, on the model's device as everything else.
            batch: where the rows belong.
            kv_cache: (keys, values) of each layer, [num_blocks, block_size, num_kv_heads, head_dim], of the model's
                dtype. Mutated: the rows' K and V are written at `batch.slots`. Earlier positions must be there already.

        Returns:
            The hidden states after the final norm, [num_tokens, hidden] of the model's dtype.
        """
        ops, eps = self._ops, self.config.rms_norm_eps
        positions, slots = batch.positions, batch.slots
        hidden = F.embedding(token_ids, self._embedding)
        added: Tensor | None = None  # of the layer before, which the next norm takes in
        for layer, (key_cache, value_cache) in zip(self._layers, kv_cache, strict=True):
            if added is None:
                normed = ops.rms_norm(hidden, layer.input_norm, eps)
            else:
                normed, hidden = ops.add_rms_norm(added, hidden, layer.input_norm, eps)
            query, key, value = self._qkv(layer, normed)
            query = ops.rotate_and_store(
                query, key, value, self._cos, self._sin, positions, key_cache, value_cache, slots
            )
            attended = ops.paged_attention(query, key_cache, value_cache, batch, self._scale)
            added = ops.linear(attended.flatten(1), layer.output, layer.output_bias)
            normed, hidden = ops.add_rms_norm(added, hidden, layer.post_norm, eps)
            gated = ops.linear_silu_mul(normed, layer.gate_up, layer.gate_up_bias)
            added = ops.linear(gated, layer.down, layer.down_bias)
        if added is None:
            return ops.rms_norm(hidden, self._norm, eps)
        return ops.add_rms_norm(added, hidden, self._norm, eps)[0]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows that `forward` returned, [rows, hidden], to [rows, vocab] float32; in `out`, if that is given."""
        logits = self._ops.linear(hidden, self._head)
        return logits.float() if out is None else out.copy_(logits)

    def logits_of(
        self,
        token_ids: Tensor,
        batch: PagedBatch,
        kv_cache: Sequence[tuple[Tensor, Tensor]],
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """`forward`, and the logits of some of its rows, ascending, or of all -> [rows, vocab] float32."""
        hidden = self.forward(token_ids, batch, kv_cache)
        if rows is not None and len(rows) < len(hidden):
            hidden = hidden[torch.tensor(rows, dtype=torch.int64, device=hidden.device)]
        return self.logits(hidden)

    def slots(self) -> dict[str, Slot]:
        """For every tensor of a checkpoint, by its name there, where it belongs."""
        slots = {name: Slot(tuple(view.shape), view.copy_) for name, view in self.checkpoint_views().items()}
        if self.config.tie_word_embeddings and self._head is not self._embedding:
            slots["model.embed_tokens.weight"] = Slot(tuple(self._embedding.shape), self._fill_tied)
        return slots

    def checkpoint_views(self) -> dict[str, Tensor | Int8Weight]:
        """For every tensor of a checkpoint, by its name there, the part of our weights that it fills."""
        config = self.config
        views: dict[str, Tensor | Int8Weight] = {
            "model.embed_tokens.weight": self._embedding,
            "model.norm.weight": self._norm,
        }
        if not config.tie_word_embeddings:
            views["lm_head.weight"] = self._head
        qkv_sizes = [self._q_size, self._kv_size, self._kv_size]
        gate_up_sizes = [config.intermediate_size] * 2
        for index, layer in enumerate(self._layers):
            fused = (
                (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), qkv_sizes, layer.qkv, layer.qkv_bias),
                (("self_attn.o_proj",), [config.hidden_size], layer.output, layer.output_bias),
                (("mlp.gate_proj", "mlp.up_proj"), gate_up_sizes, layer.gate_up, layer.gate_up_bias),
                (("mlp.down_proj",), [config.hidden_size], layer.down, layer.down_bias),
                (("input_layernorm",), [config.hidden_size], layer.input_norm, None),
                (("post_attention_layernorm",), [config.hidden_size], layer.post_norm, None),
                (("self_attn.q_norm",), [config.head_dim], layer.q_norm, None),
                (("self_attn.k_norm",), [config.head_dim], layer.k_norm, None),
            )
            for modules, sizes, weight, bias in fused:
                for kind, tensor in (("weight", weight), ("bias", bias)):
                    if tensor is not None:
                        names = (f"model.layers.{index}.{module}.{kind}" for module in modules)
                        parts = tensor.split(sizes) if isinstance(tensor, Int8Weight) else torch.split(tensor, sizes)
                        views.update(zip(names, parts, strict=True))
        return views

    def linears(self) -> list[tuple[Tensor | Int8Weight, bool]]:
        """Every matrix that rows are multiplied by, and whether half of what comes of it gates the other, in the order
        of a forward and the head last; for who finds out how to multiply by them.
        """
        linears: list[tuple[Tensor | Int8Weight, bool]] = []
        for layer in self._layers:
            linears += [(layer.qkv, False), (layer.output, False), (layer.gate_up, True), (layer.down, False)]
        return [*linears, (self._head, False)]

    def _fill_tied(self, rows: Tensor) -> None:
        self._embedding.copy_(rows)
        self._head.copy_(rows)

    def _qkv(self, layer: _Layer, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[num_tokens, hidden] -> query, key and value, [num_tokens, heads of each, head_dim]."""
        config, ops = self.config, self._ops
        heads = ops.linear(normed, layer.qkv, layer.qkv_bias).view(len(normed), -1, config.head_dim)
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = ops.rms_norm(query, layer.q_norm, config.rms_norm_eps)
            key = ops.rms_norm(key, layer.k_norm, config.rms_norm_eps)
        return query, key, value

    def _allocate_layer(self) -> _Layer:
        config = self.config
        qkv_size, gate_up_size = self._q_size + 2 * self._kv_size, 2 * config.intermediate_size
        return _Layer(
            input_norm=self._empty(config.hidden_size),
            qkv=self._matrix(qkv_size, config.hidden_size),
            qkv_bias=self._empty(qkv_size) if config.attention_bias else None,
            q_norm=self._empty(config.head_dim) if config.qk_norm else None,
            k_norm=self._empty(config.head_dim) if config.qk_norm else None,
            output=self._matrix(config.hidden_size, self._q_size),
            output_bias=self._empty(config.hidden_size) if config.output_bias else None,
            post_norm=self._empty(config.hidden_size),
            gate_up=self._matrix(gate_up_size, config.hidden_size),
            gate_up_bias=self._empty(gate_up_size) if config.mlp_bias else None,
            down=self._matrix(config.hidden_size, config.intermediate_size),
            down_bias=self._empty(config.hidden_size) if config.mlp_bias else None,
        )

    def _matrix(self, outputs: int, inputs: int) -> Tensor | Int8Weight:
        return Int8Weight.empty(outputs, inputs, self.device) if self.int8 else self._empty(outputs, inputs)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def rotary_tables(config: ModelConfig, max_positions: int) -> tuple[Tensor, Tensor]:
    """Cos and sin of the angles of every position, float32 [max_positions, head_dim / 2].

    A table, because torch does not promise that the cosine of an element has the same bits wherever it stands in a
    tensor, and a position must get the same ones in every batch.
    """
    positions = torch.arange(max_positions).float()
    angles = positions[:, None] * _inverse_frequencies(config)  # [max_positions, head_dim / 2]
    return angles.cos(), angles.sin()


def _inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair of dimensions, after scaling.  # [head_dim / 2] float32"""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    return plain if config.rope_scaling is None else _stretch(plain, config.rope_scaling)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide by `factor` what turns less than low_freq_factor times over the original context, keep what turns more
    than high_freq_factor times, and blend linearly in the number of turns between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)
