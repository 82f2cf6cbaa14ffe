"""A widened checkpoint computes what its source computes, and is as honest to run as a trained one of its size."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.demo.widen import _Writer as Writer
from paceline.demo.widen import main, widen
from paceline.errors import InvalidArgument, ModelLoadError
from paceline.models import load_model_config
from paceline.models.tokenizer import load_tokenizer
from support.checkpoints import LLAMA3_ROPE, tiny_checkpoint

TARGET: dict[str, Any] = {"num_hidden_layers": 3}
DRAFT: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
# The shapes of the standard pair, a 64th of their size, and the corners of what is allowed.
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "target": (TARGET, {"hidden": 256, "layers": 8, "heads": 16, "kv_heads": 8, "intermediate": 192}),
    "draft": (DRAFT, {"hidden": 128, "layers": 4, "heads": 8, "kv_heads": 4, "intermediate": 128}),
    "untied": (
        {**TARGET, "tie_word_embeddings": False},
        {"hidden": 256, "layers": 4, "heads": 16, "kv_heads": 8, "intermediate": 100},
    ),
    "more heads to a KV head": (TARGET, {"hidden": 256, "layers": 5, "heads": 16, "kv_heads": 4, "intermediate": 97}),
    "one KV head shared by all": (DRAFT, {"hidden": 128, "layers": 2, "heads": 8, "kv_heads": 1, "intermediate": 96}),
    "not a power of 4": (TARGET, {"hidden": 96, "layers": 4, "heads": 6, "kv_heads": 3, "intermediate": 96}),
    "only the MLP": (TARGET, {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "intermediate": 128}),
    "llama3": (
        {**TARGET, "rope_parameters": LLAMA3_ROPE},
        {"hidden": 256, "layers": 4, "heads": 16, "kv_heads": 8, "intermediate": 96},
    ),
    "sharded": (
        {**TARGET, "max_shard_size": "60KB"},
        {"hidden": 256, "layers": 4, "heads": 16, "kv_heads": 8, "intermediate": 96},
    ),
}
GOOD = CASES["target"][1]


def small(path: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A tied Llama, as the embedded pair is."""
    overrides.setdefault("tie_word_embeddings", True)
    return tiny_checkpoint(path / "source", dtype=dtype, **overrides)


@torch.inference_mode()
def logits(path: Path) -> Tensor:
    ids = torch.arange(1, 200, 2)[None]
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_source(tmp_path: Path, case: str) -> None:
    overrides, sizes = CASES[case]
    source = small(tmp_path, **overrides)
    widen(source, tmp_path / "wide", **sizes)
    expected = logits(source)
    assert expected.std() > 0.5  # else the tolerance would mean nothing
    torch.testing.assert_close(logits(tmp_path / "wide"), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["target", "draft"])
def test_bfloat16_loses_nothing_where_hidden_is_a_power_of_4(tmp_path: Path, case: str) -> None:
    overrides, sizes = CASES[case]
    source = small(tmp_path, torch.bfloat16, **overrides)
    widen(source, tmp_path / "wide", **sizes)
    original = load_file(source / "model.safetensors")["model.norm.weight"]
    norm = load_file(tmp_path / "wide" / "model.safetensors")["model.norm.weight"]
    assert norm.dtype == torch.bfloat16
    assert torch.equal(2 * norm[: len(original)], original)
    torch.testing.assert_close(logits(tmp_path / "wide"), logits(source), atol=1e-4, rtol=0)


def test_no_constant_is_shared_and_no_matrix_is_zero(tmp_path: Path) -> None:
    source = small(tmp_path, torch.bfloat16, **TARGET)
    widen(source, tmp_path / "wide", **GOOD)
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    assert len(tensors) == 2 + 8 * 9
    assert len({tensor.view(torch.int16).numpy().tobytes() for tensor in tensors.values()}) == len(tensors)
    for name, tensor in tensors.items():
        assert tensor.count_nonzero() > 0.1 * tensor.numel(), name


def test_where_zeros_stand_and_how_large_the_noise_is(tmp_path: Path) -> None:
    """Three real layers among eight: 0, 3 and 6. The others are identities."""
    source = small(tmp_path, torch.bfloat16, **TARGET)
    widen(source, tmp_path / "wide", **GOOD)
    tensors, originals = (load_file(path / "model.safetensors") for path in (tmp_path / "wide", source))
    assert not tensors["model.embed_tokens.weight"][:, 64:].any()
    for index in range(8):
        layer = {name.split(".")[-2]: w for name, w in tensors.items() if name.startswith(f"model.layers.{index}.")}
        real = index in (0, 3, 6)
        prefix = f"model.layers.{index * 3 // 8}."
        original = {name.split(".")[-2]: w for name, w in originals.items() if name.startswith(prefix)}
        for kind in ("v_proj", "up_proj"):
            used = len(original[kind]) if real else 0
            assert torch.equal(layer[kind][:used, :64], original[kind][:used])
            assert not layer[kind][used:, :64].any()
        for kind in ("o_proj", "down_proj"):
            assert bool(layer[kind][64:].any()) != real
            assert layer[kind][:64].all()  # here heads per KV head do not grow, so no column of o is idle
        for kind in ("q_proj", "k_proj", "gate_proj"):
            assert layer[kind].all()
            assert torch.equal(layer[kind][: len(original[kind]), :64], original[kind]) == real
        for kind, weight in layer.items():
            limit = original[kind].abs().amax(-1, keepdim=True) / (2 if weight.ndim == 1 else 1)
            if real and weight.ndim == 2:  # rows of the source stand in front, as heads keep their places here
                assert (weight[: len(limit)].abs() <= limit).all(), kind
            assert weight.abs().max() <= limit.max(), kind


def test_noise_in_a_row_that_moves_keeps_to_the_absmax_of_that_row(tmp_path: Path) -> None:
    source = small(tmp_path)
    widen(source, tmp_path / "wide", **{**GOOD, "kv_heads": 4})
    name = "model.layers.0.self_attn.q_proj.weight"
    wide, original = (load_file(path / "model.safetensors")[name] for path in (tmp_path / "wide", source))
    heads = wide.view(16, 16, 256)[[0, 1, 4, 5]]  # two of every four, where it was two of two
    assert torch.equal(heads[..., :64], original.view(4, 16, 64))
    assert (heads.abs().amax(-1) == original.view(4, 16, 64).abs().amax(-1)).all()


def test_noise_follows_the_seed(tmp_path: Path) -> None:
    source = small(tmp_path, **DRAFT)
    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        widen(source, tmp_path / name, **CASES["draft"][1], seed=seed)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    assert files[0] != files[2]
    assert len(files[0]) == len(files[2])


def test_tensors_of_any_size_go_to_their_places(tmp_path: Path) -> None:
    """Larger than a stage, as large, smaller, more of them than stages; and not contiguous."""
    tensors = [torch.randn(size).to(torch.bfloat16) for size in (500, 32, 1, 31, 33, 64, 2, 3, 4)]
    tensors.append(torch.randn(20, 30).T)
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"header")
        file.flush()
        with Writer(file.fileno(), 6, torch.device("cpu"), stage_bytes=64) as writer:
            for tensor in tensors:
                writer.append(tensor)
    expected = b"".join(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    assert (tmp_path / "file").read_bytes() == b"header" + expected


def test_writes_may_be_short_and_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, write, left = torch.arange(200, dtype=torch.uint8), os.pwrite, 150

    def short(file: int, view: memoryview, offset: int) -> int:
        nonlocal left
        if not left:
            raise OSError("disk full")
        count = write(file, view[: min(7, left)], offset)
        left -= count
        return count

    monkeypatch.setattr(os, "pwrite", short)
    with (tmp_path / "file").open("wb") as file:
        with Writer(file.fileno(), 0, torch.device("cpu")) as writer:
            writer.append(data[:100])
        assert (tmp_path / "file").read_bytes() == bytes(range(100))
        with (
            pytest.raises(OSError, match="disk full"),
            Writer(file.fileno(), 100, torch.device("cpu")) as writer,
        ):
            writer.append(data[100:])


def test_everything_else_is_copied(tmp_path: Path) -> None:
    source = small(tmp_path, torch.bfloat16, **TARGET)
    (source / "generation_config.json").write_text('{"eos_token_id": [0, 5], "temperature": 0.5}')
    (source / "notes.txt").touch()
    wide = tmp_path / "wide"
    widen(source, wide, **GOOD)
    assert not (wide / "notes.txt").exists()
    config, original = load_model_config(wide), load_model_config(source)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (256, 8, 16, 8)
    assert (config.intermediate_size, config.head_dim, config.rms_norm_eps) == (192, 16, original.rms_norm_eps / 4)
    assert json.loads((wide / "config.json").read_text())["head_dim"] == 16
    assert (config.dtype, config.vocab_size) == (torch.bfloat16, original.vocab_size)
    assert (config.eos_token_ids, config.generation.temperature) == ((0, 5), 0.5)
    tokenizer = load_tokenizer(wide)
    assert tokenizer.get_vocab() == load_tokenizer(source).get_vocab()
    assert tokenizer.chat_template


@pytest.mark.parametrize(
    ("changes", "field", "allowed"),
    [
        ({"hidden": 32, "heads": 4}, "hidden", "at least the source's 64"),
        ({"hidden": 512}, "hidden", "heads * the source's head_dim = 16 * 16"),
        ({"heads": 8}, "hidden", "heads * the source's head_dim = 8 * 16"),
        ({"layers": 1}, "layers", "at least the source's 2"),
        ({"heads": 2}, "heads", "at least the source's 4"),
        ({"kv_heads": 1}, "kv_heads", "at least the source's 2"),
        ({"kv_heads": 0}, "kv_heads", "at least the source's 2"),
        ({"kv_heads": 16}, "kv_heads", "at least the source's 2 heads to a KV head"),
        ({"kv_heads": 3}, "kv_heads", "a divisor of heads = 16"),
        ({"intermediate": 95}, "intermediate", "at least the source's 96"),
        ({"hidden": 64, "heads": 4, "kv_heads": 2}, "layers", "the source's 2 while hidden stays"),
    ],
)
def test_sizes_that_are_refused(tmp_path: Path, changes: dict[str, int], field: str, allowed: str) -> None:
    source = small(tmp_path)
    with pytest.raises(InvalidArgument) as error:
        widen(source, tmp_path / "wide", **{**GOOD, **changes})
    assert error.value.field == field
    assert allowed in str(error.value)
    assert not (tmp_path / "wide").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    source = small(tmp_path)
    with pytest.raises(InvalidArgument, match="device = 'cuda': must be cpu, or cuda on a machine that has it"):
        widen(source, tmp_path / "wide", **GOOD, device="cuda")
    assert not (tmp_path / "wide").exists()


def test_sources_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"source\.architecture = 'Qwen2ForCausalLM': must be Llama"):
        widen(tiny_checkpoint(tmp_path / "qwen2", "qwen2"), tmp_path / "wide", **GOOD)
    with pytest.raises(InvalidArgument, match="bias"):
        widen(tiny_checkpoint(tmp_path / "bias", attention_bias=True), tmp_path / "wide", **GOOD)
    source = small(tmp_path)
    with pytest.raises(InvalidArgument, match="another directory"):
        widen(source, tmp_path / "qwen2" / ".." / "source", **GOOD)
    (source / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        widen(source, tmp_path / "wide", **GOOD)
    assert not (tmp_path / "wide").exists()


def test_a_failed_run_leaves_nothing_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, wide = small(tmp_path), tmp_path / "wide"
    widen(source, wide, **GOOD)
    (wide / "model.safetensors").unlink()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("paceline.demo.widen._noise", fail)
    with pytest.raises(OSError, match="disk full"):
        widen(source, wide, **GOOD)
    assert not (wide / "config.json").exists()
    assert not list(wide.glob("model*"))


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    source, wide = small(tmp_path, torch.bfloat16), tmp_path / "wide"

    def run(hidden: int) -> None:
        sizes = ["--layers", "3", "--heads", "8", "--kv-heads", "4", "--intermediate", "96"]
        monkeypatch.setattr("sys.argv", ["widen", str(source), str(wide), "--hidden", str(hidden), *sizes])
        main()

    with pytest.raises(SystemExit) as exit_:
        run(60)
    assert exit_.value.code == "error: hidden = 60: must be at least the source's 64"  # a text: status 1, on stderr
    capsys.readouterr()
    run(128)
    assert capsys.readouterr().err == "note: hidden grows 2 times, not 4^n times: 16-bit norm weights are rounded\n"
    assert load_model_config(wide).hidden_size == 128
