"""The shape of a model, read from config.json and generation_config.json as transformers 4 and 5 write them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from paceline.errors import ModelLoadError
from paceline.models.families import FAMILIES

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths are stretched by `factor`, short ones stay, those in between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling parameters that the checkpoint recommends; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that the decoder and its callers need to know about a checkpoint."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tie_word_embeddings: bool
    attention_bias: bool  # of q, k and v
    output_bias: bool  # of o
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]  # generation_config.json's if it has any, else config.json's
    dtype: torch.dtype | None = None  # what config.json says the weights are stored in
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)


def load_model_config(path: Path) -> ModelConfig:
    """Read the model directory `path`.

    Raises:
        ModelLoadError: no such directory or file, invalid JSON, or a value that is missing, malformed or not supported;
            names the file, the key, what was found and what is supported.
    """
    if not path.is_dir():
        raise ModelLoadError(f"{path}: no such model directory")
    config = _Section(path / "config.json", read_json(path / "config.json"))
    _refuse_unsupported(config)
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        config.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    hidden = config.size("hidden_size")
    if config.get("head_dim") is None and family.head_dim is None and hidden % heads:
        config.refuse("num_attention_heads", f"a divisor of hidden_size = {hidden}, as there is no head_dim")
    head_dim = config.size("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        config.refuse("head_dim", "an even number")
    max_positions = config.size("max_position_embeddings")
    if max_positions < 2:
        config.refuse("max_position_embeddings", "at least 2: a prompt and a completion of one token each")
    theta, scaling = _rope(config, max_positions)
    attention_bias = config.flag("attention_bias", False)
    vocab_size = config.size("vocab_size")
    generation, generation_eos = _generation(path / "generation_config.json", vocab_size)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=config.size("intermediate_size"),
        num_layers=config.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=attention_bias if family.attention_bias is None else family.attention_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=config.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        eos_token_ids=generation_eos or config.token_ids("eos_token_id", vocab_size),
        dtype=_dtype(config),
        generation=generation,
    )


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelLoadError naming the file."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{file}: {error.strerror or error}") from error
    except ValueError as error:  # malformed JSON or UTF-8
        raise ModelLoadError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{file}: found a JSON {type(values).__name__}, expected an object")
    return values


@dataclass(frozen=True, slots=True)
class _Section:
    """One JSON object of a file, read key by key; a null counts as missing."""

    file: Path
    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def refuse(self, key: str, expected: str) -> NoReturn:
        found = repr(self.values[key]) if key in self.values else "nothing"
        raise ModelLoadError(f"{self.file}: {key}: found {found}, expected {expected}")

    def size(self, key: str, default: int | None = None) -> int:
        value = default if self.get(key) is None else self.get(key)
        if type(value) is not int or value < 1:
            self.refuse(key, "a positive integer")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = default if self.get(key) is None else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            self.refuse(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            self.refuse(key, f"a token id or a list of them, below vocab_size = {vocab_size}")
        return tuple(dict.fromkeys(ids))


def _architecture(config: _Section) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(FAMILIES):
        config.refuse("architectures", f"one of {', '.join(FAMILIES)}")
    architecture = str(names[0])
    model_type = FAMILIES[architecture].model_type
    if config.get("model_type") not in (None, model_type):  # by which transformers goes
        config.refuse("model_type", f"{model_type!r}, as of {architecture}")
    return architecture


def _refuse_unsupported(config: _Section) -> None:
    if config.get("quantization_config") is not None:
        config.refuse("quantization_config", "none: quantized checkpoints are not supported")
    if config.get("hidden_act") not in (None, "silu"):
        config.refuse("hidden_act", "'silu'")
    if config.flag("use_sliding_window", False):
        config.refuse("use_sliding_window", "false: sliding windows are not supported")
    layers = config.get("layer_types") or []
    if not isinstance(layers, list) or any(kind != "full_attention" for kind in layers):
        config.refuse("layer_types", "'full_attention' only: sliding windows are not supported")


def _dtype(config: _Section) -> torch.dtype | None:
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"  # transformers 5, 4
    name = config.get(key)
    if name is None:
        return None
    if not isinstance(name, str) or name not in DTYPES:
        config.refuse(key, f"one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _rope(config: _Section, max_positions: int) -> tuple[float, Llama3Scaling | None]:
    """Theta and scaling: all in rope_parameters (transformers 5), or rope_theta beside rope_scaling (4)."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    values = config.get(key) or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        config.refuse(key, "one set of parameters for all layers")
    if (config.get("rope_scaling") or values) != values:  # transformers would not look at the latter
        config.refuse("rope_scaling", f"none beside rope_parameters = {values}")
    rope = _Section(config.file, {"rope_theta": config.get("rope_theta"), **values})
    theta = rope.positive("rope_theta", 10000.0)
    for section in (config, rope):
        if section.get("partial_rotary_factor") not in (None, 1):
            section.refuse("partial_rotary_factor", "1: partial rotation is not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        config.refuse(key, "rope_type 'default' or 'llama3'")
    scaling = Llama3Scaling(
        factor=rope.positive("factor"),
        low_freq_factor=rope.positive("low_freq_factor"),
        high_freq_factor=rope.positive("high_freq_factor"),
        original_max_position_embeddings=rope.size("original_max_position_embeddings", max_positions),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        rope.refuse("high_freq_factor", f"more than low_freq_factor = {scaling.low_freq_factor}")
    return theta, scaling


def _generation(file: Path, vocab_size: int) -> tuple[GenerationDefaults, tuple[int, ...]]:
    """The optional generation_config.json: its sampling defaults and its end-of-sequence ids."""
    if not file.exists():
        return GenerationDefaults(), ()
    section = _Section(file, read_json(file))
    # Kept as written, 0 and all: what they mean is for the validation of sampling parameters.
    numbers: dict[str, Any] = {item.name: section.get(item.name) for item in fields(GenerationDefaults)}
    for key, value in numbers.items():
        if value is not None and type(value) not in ((int,) if key == "top_k" else (int, float)):
            section.refuse(key, "an integer" if key == "top_k" else "a number")
    return GenerationDefaults(**numbers), section.token_ids("eos_token_id", vocab_size)
