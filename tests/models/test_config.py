"""config.json and generation_config.json, as transformers 4 and 5 write them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import ModelLoadError
from paceline.models import load_model_config
from paceline.models.config import GenerationDefaults, Llama3Scaling

# What transformers 4 wrote for a small Llama 3: everything at the top level.
LLAMA_4X: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [7, 8],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 100,
}
# And what transformers 5 writes for the same model.
LLAMA_5X: dict[str, Any] = {
    **{key: value for key, value in LLAMA_4X.items() if key not in {"rope_scaling", "rope_theta", "torch_dtype"}},
    "dtype": "bfloat16",
    "head_dim": 16,
    "rope_parameters": {**LLAMA_4X["rope_scaling"], "rope_theta": 500000.0},
}
QWEN2: dict[str, Any] = {
    **LLAMA_4X,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_scaling": None,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 1,
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(values: dict[str, Any], generation: dict[str, Any] | None = None, **changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write


def test_both_generations_of_transformers_mean_the_same(write: Callable[..., Path]) -> None:
    config = load_model_config(write(LLAMA_4X))
    assert load_model_config(write(LLAMA_5X)) == config
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == (7, 8)


def test_missing_and_null_values_have_the_defaults_of_transformers(write: Callable[..., Path]) -> None:
    small = {key: LLAMA_4X[key] for key in LLAMA_4X if key not in {"rope_scaling", "torch_dtype", "eos_token_id"}}
    config = load_model_config(write(small, head_dim=None, num_key_value_heads=None, rope_theta=None))
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (16, 4, 10000.0)
    assert (config.rope_scaling, config.dtype, config.eos_token_ids) == (None, None, ())
    qwen3 = load_model_config(write(small, architectures=["Qwen3ForCausalLM"], model_type=None))
    assert (qwen3.head_dim, qwen3.qk_norm) == (128, True)


@pytest.mark.parametrize(
    ("changes", "biases"),
    [
        ({}, (False, False, False)),
        ({"attention_bias": True}, (True, True, False)),
        ({"mlp_bias": True}, (False, False, True)),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, (True, False, False)),
        (
            {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": True},
            (True, True, False),
        ),
    ],
)
def test_biases_by_family(write: Callable[..., Path], changes: dict[str, Any], biases: tuple[bool, ...]) -> None:
    config = load_model_config(write(LLAMA_5X, **changes))
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == biases


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LLAMA_5X["rope_parameters"]},
        {"rope_scaling": {}},
        {"rope_parameters": {}, "rope_scaling": LLAMA_4X["rope_scaling"], "rope_theta": 500000.0},
    ],
)
def test_rope_parameters_by_two_names_that_agree(write: Callable[..., Path], changes: dict[str, Any]) -> None:
    assert load_model_config(write(LLAMA_5X, **changes)) == load_model_config(write(LLAMA_5X))


def test_a_sliding_window_that_is_switched_off_is_fine(write: Callable[..., Path]) -> None:
    assert load_model_config(write(QWEN2, layer_types=["full_attention"] * 2)).attention_bias


def test_generation_config_decides_the_end_and_the_defaults(write: Callable[..., Path]) -> None:
    generation = {"eos_token_id": [3, 4, 3], "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    config = load_model_config(write(LLAMA_5X, generation))
    assert config.eos_token_ids == (3, 4)
    assert config.generation == GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20)
    assert load_model_config(write(LLAMA_5X, {"eos_token_id": 0})).eos_token_ids == (0,)
    silent = load_model_config(write(LLAMA_5X, {"bos_token_id": 1}))
    assert silent.eos_token_ids == (7, 8)
    assert silent.generation == GenerationDefaults()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["architectures", "MambaForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None}, ["architectures", "None"]),
        ({"model_type": "mistral"}, ["model_type", "'mistral'", "'llama'", "LlamaForCausalLM"]),
        ({"model_type": ["llama"]}, ["model_type", "found ['llama']"]),
        ({"architectures": ["Qwen2ForCausalLM"]}, ["model_type", "'llama'", "'qwen2'"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'", "positive integer"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"hidden_size": 66, "head_dim": None}, ["num_attention_heads", "66"]),
        ({"head_dim": 15}, ["head_dim", "15", "even"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "divisor"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"max_position_embeddings": 1}, ["max_position_embeddings", "found 1", "at least 2"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps", "-1"]),
        ({"rms_norm_eps": True}, ["rms_norm_eps", "True"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
        ({"eos_token_id": [7, 100]}, ["eos_token_id", "[7, 100]", "below vocab_size = 100"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn", "bfloat16"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"use_sliding_window": True, "sliding_window": 8}, ["use_sliding_window"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"layer_types": 5}, ["layer_types", "found 5"]),
        ({"layer_types": [["full_attention"]]}, ["layer_types", "full_attention"]),
        ({"dtype": []}, ["dtype", "found []"]),
        ({"architectures": [{}]}, ["architectures", "[{}]"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps", "positive number"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, ["yarn", "llama3"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3"}}, ["factor", "nothing"]),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "linear"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["rope_scaling", "linear", "rope_parameters"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    write: Callable[..., Path], changes: dict[str, Any], words: list[str]
) -> None:
    path = write(LLAMA_5X, **changes)
    with pytest.raises(ModelLoadError) as error:
        load_model_config(path)
    for word in [str(path / "config.json"), *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "generation", [{"temperature": "hot"}, {"top_k": 1.5}, {"top_p": True}, {"eos_token_id": -1}, {"eos_token_id": 100}]
)
def test_a_malformed_generation_config_is_refused(write: Callable[..., Path], generation: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=f"generation_config.json: {next(iter(generation))}"):
        load_model_config(write(LLAMA_5X, generation))


def test_files_that_are_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere: no such model directory"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"config\.json: No such file"):
        load_model_config(tmp_path)
    for text, message in (("{", "not valid JSON"), ("[]", "expected an object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=message):
            load_model_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"\xff": 1}')
    with pytest.raises(ModelLoadError, match="not valid JSON"):
        load_model_config(tmp_path)
