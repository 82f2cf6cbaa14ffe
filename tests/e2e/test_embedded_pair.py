"""The embedded pair is what the README says it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline import demo
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SpeculationParams, StopParams
from paceline.demo.widen import widen
from paceline.engine import ChatMessage, GenerationRequest
from paceline.models import load_model_config
from paceline.wiring import EngineSettings, build_engine
from paceline_loadtest.prompts import load_prompts

README = Path(__file__).parents[2] / "README.md"


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in demo.CHECKPOINTS.rglob("*") if file.is_file()) <= 12_000_000


@pytest.mark.parametrize(
    ("path", "hidden", "layers", "heads", "kv_heads"), [(demo.TARGET, 256, 4, 4, 2), (demo.DRAFT, 128, 1, 2, 1)]
)
def test_shapes(path: Path, hidden: int, layers: int, heads: int, kv_heads: int) -> None:
    config = load_model_config(path)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (
        *(hidden, layers, heads, kv_heads),
        64,
    )
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (4096, 4096, True)
    assert config.dtype is torch.bfloat16


def test_readme_states_the_training_record() -> None:
    record = json.loads((demo.CHECKPOINTS / "training.json").read_text())
    readme = README.read_text()
    assert f"{record['target']['held_out_loss']:.2f}" in readme
    assert f"{record['draft']['held_out_loss']:.2f}" in readme
    assert f"{record['greedy_acceptance_position_1']:.2f}" in readme


def test_the_draft_agrees_with_the_target() -> None:
    """Acceptance at position 1, greedy, on prompts that neither was trained on."""
    engine = build_engine(EngineSettings(model="demo", draft="demo", dtype="float32", max_model_len=1024))
    prompts = load_prompts()
    assert len(prompts) == 64
    for prompt in prompts[:24]:
        engine.add(
            GenerationRequest(
                prompt,
                SamplingParams(temperature=0.0),
                StopParams(max_tokens=48, ignore_eos=True),
                SpeculationParams(Method.DRAFT_MODEL, min_depth=1, max_depth=1),
            )
        )
    drafted = accepted = 0
    while engine.has_work:
        for output in engine.step():
            if output.stats is not None:
                drafted += output.stats.drafted_tokens
                accepted += output.stats.accepted_tokens
    assert drafted > 500
    assert accepted / drafted >= 0.45


def test_chat_is_rendered_as_comments() -> None:
    engine = build_engine(EngineSettings(model="demo", max_model_len=256))
    messages = (ChatMessage("user", "add\nnumbers"), ChatMessage("assistant", "a + b"), ChatMessage("user", "again"))
    ids = engine.prepare(GenerationRequest(messages)).prompt_token_ids
    assert AutoTokenizer.from_pretrained(demo.TARGET).decode(ids) == "# add\n# numbers\na + b\n# again\n"


def test_a_widened_draft_computes_the_same(tmp_path: Path) -> None:
    """The shape of the standard widened draft, on trained weights."""
    widen(demo.DRAFT, tmp_path / "wide", hidden=512, layers=4, heads=8, kv_heads=4, intermediate=1408)
    ids = torch.randint(1, 4096, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        narrow, wide = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
            for path in (demo.DRAFT, tmp_path / "wide")
        )
    assert (narrow - wide).abs().max() < 1e-4
