"""What int8 weights cost: perplexity on held-out text, and drafts that are no longer kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import kl_div, nll_loss

from paceline.bench.acceptance import Interval, Trial, fill
from paceline.bench.console import console
from paceline.core.params import Verification
from paceline.engine.tokenizer import TransformersTokenizer
from paceline.models import Model, load_native
from paceline.models.tokenizer import load_tokenizer
from paceline.runner import KVCache
from paceline.runner.input_batch import TokenRun, flatten
from paceline.wiring import EngineSettings, build_engine

REFERENCE = "float32"
# Dtype of hidden states, and whether the weights have 8 bits; the reference first.
WEIGHTS = {
    REFERENCE: (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "int8": (torch.bfloat16, True),
}
PAIRS = (("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("int8", "int8"))  # weights of target and draft
QUANTIZATION = {"bfloat16": "none", "int8": "int8"}
BLOCK_SIZE = 16
ROWS = 64  # positions whose distributions are held at a time


@dataclass(slots=True)
class Accuracy:
    """One model with one kind of weights, on text; sums over the tokens that had another before them.

    Attributes:
        loss: minus the log probabilities of the tokens, in nats.
        divergence: KL(reference || this), in nats.
        agreeing: positions where the most probable token is the reference's.
    """

    weights: str
    tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    agreeing: int = 0

    def add(self, log_probs: Tensor, reference: Tensor, token_ids: Tensor) -> None:
        """Count some positions, given both distributions, [rows, vocab] float64, and what came there, [rows] int64."""
        self.tokens += len(token_ids)
        self.loss += float(nll_loss(log_probs, token_ids, reduction="sum"))
        self.divergence += float(kl_div(log_probs, reference, reduction="sum", log_target=True))
        self.agreeing += int((log_probs.argmax(-1) == reference.argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.tokens)


@dataclass(frozen=True, slots=True)
class AcceptanceLength:
    """Tokens emitted per verify step, by a pair with these weights."""

    target: str
    draft: str
    trial: Trial

    @property
    def interval(self) -> Interval:
        kept = self.trial.per_step()
        return Interval(1 + kept.mean, 1 + kept.low, 1 + kept.high)


class Reader:
    """A model that reads one text at a time, from its start."""

    def __init__(self, model: Model, longest: int) -> None:
        """Texts have at most `longest` tokens."""
        num_blocks = -(-longest // BLOCK_SIZE)
        self._model = model
        self._kv_cache = KVCache(model, num_blocks, BLOCK_SIZE)
        self._block_ids = list(range(num_blocks))

    def log_probs(self, token_ids: list[int]) -> Iterator[Tensor]:
        """What may follow each token, [rows, vocab] float64, `ROWS` at a time."""
        rows, batch = flatten([TokenRun(self._block_ids, 0, token_ids)], BLOCK_SIZE, self._model.device)
        for hidden in torch.split(self._model.forward(rows, batch, self._kv_cache), ROWS):
            # In 64 bits, because most divergences are below the rounding of 32.
            yield self._model.logits(hidden).double().log_softmax(-1)


def encode(path: Path, prompts: Sequence[str | tuple[int, ...]]) -> list[list[int]]:
    """The token ids of the prompts, by the tokenizer of a model directory.

    Raises:
        ModelLoadError: it has none that can be loaded.
    """
    tokenizer = TransformersTokenizer(load_tokenizer(path))
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]


@torch.inference_mode()
def measure_accuracy(path: Path, texts: Sequence[list[int]]) -> list[Accuracy]:
    """Read the texts under every kind of weights, side by side.

    Args:
        texts: token ids; at least two of each text, and no more than the model's length.

    Raises:
        ModelLoadError: the directory cannot be served.
        BuildError: there is no native code on this machine.
    """
    longest = max(map(len, texts))
    readers = [Reader(load_native(path, dtype, int8=int8), longest) for dtype, int8 in WEIGHTS.values()]
    found = [Accuracy(weights) for weights in WEIGHTS]
    for text in track(texts, description="reading"):
        parts = (reader.log_probs(text[:-1]) for reader in readers)
        for token_ids, *log_probs in zip(torch.split(torch.tensor(text[1:]), ROWS), *parts, strict=True):
            for accuracy, own in zip(found, log_probs, strict=True):
                accuracy.add(own, log_probs[0], token_ids)
    return found


def measure_acceptance(
    model: str, draft: str, prompts: Sequence[str | tuple[int, ...]], depth: int, max_tokens: int, samples: int
) -> list[AcceptanceLength]:
    """Complete every prompt with each pair of weights: once greedily, and `samples` times at temperature 1.

    Raises as `build_engine`; FailedPrecondition where there is no native backend.
    """
    found = []
    for target_weights, draft_weights in track(PAIRS, description="drafting"):
        engine = build_engine(
            EngineSettings(
                model=model,
                draft=draft,
                dtype="bfloat16",
                backend="native",
                quantization=QUANTIZATION[target_weights],
                draft_quantization=QUANTIZATION[draft_weights],
                prefix_cache="off",
            )
        )
        # A second greedy completion would be the first again, and narrow the interval without telling anything.
        for trial, times in ((Trial(Verification.GREEDY, 0.0), 1), (Trial(Verification.BLOCK, 1.0), samples)):
            fill(trial, engine, prompts, depth, max_tokens, times)
            found.append(AcceptanceLength(target_weights, draft_weights, trial))
    return found


def summary(accuracies: dict[str, list[Accuracy]], lengths: list[AcceptanceLength]) -> dict[str, Any]:
    """All that is told, for tables and JSON; accuracies by the name of the model."""
    return {
        "accuracy": [
            {
                "model": name,
                "weights": own.weights,
                "tokens": own.tokens,
                "perplexity": own.perplexity,
                "perplexity_change_percent": 100 * (own.perplexity / rows[0].perplexity - 1),
                "kl_divergence": own.divergence / own.tokens,
                "same_argmax": own.agreeing / own.tokens,
            }
            for name, rows in accuracies.items()
            for own in rows
        ],
        "acceptance": [
            {
                "target": own.target,
                "draft": own.draft,
                "temperature": own.trial.temperature,
                "rule": own.trial.rule,
                "requests": len(own.trial.tallies),
                "acceptance_length": own.interval.mean,
                "low": own.interval.low,
                "high": own.interval.high,
            }
            for own in lengths
        ],
    }


def render(accuracies: dict[str, list[Accuracy]], lengths: list[AcceptanceLength], title: str) -> None:
    rows = summary(accuracies, lengths)["accuracy"]
    accuracy = Table(title=f"{title}: perplexity of {rows[0]['tokens']} tokens")
    for heading in ("model", "weights", "perplexity", f"to {REFERENCE}", f"KL({REFERENCE} || it), nats", "same argmax"):
        accuracy.add_column(heading, justify="right")
    for row in rows:
        compared = (
            f"{row['perplexity_change_percent']:+.3f} %",
            f"{row['kl_divergence']:.6f}",
            f"{100 * row['same_argmax']:.2f} %",
        )
        accuracy.add_row(
            row["model"],
            row["weights"],
            f"{row['perplexity']:.4f}",
            *(("", "", "") if row["weights"] == REFERENCE else compared),
            end_section=row["weights"] == list(WEIGHTS)[-1],
        )
    acceptance = Table(title=f"{title}: acceptance length, 95 % intervals over requests")
    for heading in ("temperature", "rule", "target", "draft", "requests", "acceptance length"):
        acceptance.add_column(heading, justify="right")
    for own in sorted(lengths, key=lambda own: own.trial.temperature):
        temperature, requests = str(own.trial.temperature), str(len(own.trial.tallies))
        acceptance.add_row(temperature, own.trial.rule, own.target, own.draft, requests, str(own.interval))
    out = console()
    out.print(accuracy)
    out.print(acceptance)
