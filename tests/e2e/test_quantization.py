"""`paceline bench quantization`: its arithmetic is transformers', and int8 weights stay close to the model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from paceline import demo
from paceline.bench import app, quantization
from paceline.bench.quantization import Accuracy, encode, measure_accuracy
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.wiring import EngineSettings, build_engine
from paceline_kernels.cpu import decoder
from paceline_loadtest import prompts
from support.pairs import tiny_pair

needs_native = pytest.mark.skipif(decoder.available() is not None, reason="no native backend")


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Of different lengths, some longer than the rows that are held at a time."""
    texts = encode(demo.TARGET, prompts.load_prompts()[:4])
    assert max(map(len, texts)) > 2 * 64
    return [texts[0][:2], texts[0][:65], *texts[1:]]


@pytest.fixture(scope="module")
def accuracies(texts: list[list[int]]) -> dict[str, Accuracy]:
    return {own.weights: own for own in measure_accuracy(demo.TARGET, texts)}


def test_sums_of_known_distributions() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.6, 0.3]], dtype=torch.float64)
    own = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.5, 0.4]], dtype=torch.float64)
    accuracy = Accuracy("any")
    accuracy.add(own.log(), reference.log(), torch.tensor([1, 2]))
    assert accuracy.tokens == 2
    assert accuracy.agreeing == 1
    assert accuracy.perplexity == pytest.approx((0.5 * 0.4) ** -0.5)
    divergences = 0.5 * math.log(2) - 0.25 * math.log(2), 0.6 * math.log(0.6 / 0.5) + 0.3 * math.log(0.3 / 0.4)
    assert accuracy.divergence == pytest.approx(sum(divergences))


@needs_native
def test_perplexity_is_that_of_transformers(texts: list[list[int]], accuracies: dict[str, Accuracy]) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo.TARGET, dtype=torch.float32)
    with torch.inference_mode():
        means = [float(model(ids, labels=ids).loss) for ids in (torch.tensor([text]) for text in texts)]
    predicted = [len(text) - 1 for text in texts]
    loss = sum(mean * count for mean, count in zip(means, predicted, strict=True)) / sum(predicted)
    assert accuracies["float32"].tokens == sum(predicted)
    assert accuracies["float32"].perplexity == pytest.approx(math.exp(loss), rel=1e-5)


@needs_native
def test_int8_stays_close(accuracies: dict[str, Accuracy]) -> None:
    reference, bfloat16, int8 = (accuracies[weights] for weights in ("float32", "bfloat16", "int8"))
    assert reference.divergence == 0
    assert reference.agreeing == reference.tokens
    assert int8.perplexity == pytest.approx(reference.perplexity, rel=0.02)
    assert 0 < bfloat16.divergence < int8.divergence < 0.01 * int8.tokens
    assert 0.95 * int8.tokens < int8.agreeing < int8.tokens


@needs_native
def test_pairs_are_drafted_with_the_weights_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tiny_pair(tmp_path)
    built: list[tuple[str, str]] = []

    def build(settings: EngineSettings) -> Engine:
        built.append((settings.quantization, settings.draft_quantization))
        return build_engine(settings)

    monkeypatch.setattr(quantization, "build_engine", build)
    lengths = quantization.measure_acceptance(str(target), str(draft), [(5, 6)], depth=2, max_tokens=8, samples=1)
    assert built == [("none", "none"), ("none", "int8"), ("int8", "int8")]
    assert [(own.target, own.draft) for own in lengths[::2]] == [
        ("bfloat16", "bfloat16"),
        ("bfloat16", "int8"),
        ("int8", "int8"),
    ]
    [tally] = lengths[0].trial.tallies
    assert lengths[0].interval.mean == pytest.approx((tally.accepted + tally.steps) / tally.steps)


@needs_native
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tiny_pair(tmp_path)
    monkeypatch.setattr(prompts, "load_prompts", lambda path: [(5, 6, 7), "A paceline is"])
    options = ["--depth", "2", "--max-tokens", "12", "--samples", "2", "--json", str(tmp_path / "out.json")]
    done = CliRunner().invoke(app, ["quantization", "--model", str(target), "--draft", str(draft), *options])
    assert done.exception is None
    assert "acceptance length" in done.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(row["model"], row["weights"]) for row in found["accuracy"]] == [
        (model, weights) for model in ("target", "draft") for weights in ("float32", "bfloat16", "int8")
    ]
    for row in found["accuracy"]:
        assert row["perplexity"] > 1
        if row["weights"] == "float32":
            assert (row["perplexity_change_percent"], row["kl_divergence"], row["same_argmax"]) == (0, 0, 1)
    assert [(row["target"], row["draft"], row["temperature"]) for row in found["acceptance"]] == [
        (*pair, temperature)
        for pair in (("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("int8", "int8"))
        for temperature in (0.0, 1.0)
    ]
    for row in found["acceptance"]:
        assert row["requests"] == (2 if row["temperature"] == 0 else 4)
        assert 1 <= row["low"] <= row["acceptance_length"] <= row["high"] <= 3


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_a_draft_without_weights_is_refused(draft: str) -> None:
    with pytest.raises(InvalidArgument, match=f"draft = '{draft}': must be a directory or demo"):
        CliRunner().invoke(app, ["quantization", "--draft", draft], catch_exceptions=False)
