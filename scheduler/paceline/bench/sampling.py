"""What it costs to sample and verify a step's logits, in reads of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor

from paceline.bench.console import console
from paceline.bench.ratio import median_ratio
from paceline.core.params import SamplingParams, SequenceParams, SpeculationParams, Verification
from paceline.core.plan import Admission
from paceline.core.sequence import Sequence
from paceline.runner.drafter import Draft
from paceline.runner.positions import Positions
from paceline.runner.sampler import distribution_, edit_
from paceline.runner.verification import Run, Verifier

SPREAD = 2.5  # standard deviation of the random logits, about that of a language model's
DISAGREEMENT = 0.3  # of the noise that makes the draft's logits out of the target's


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of request, and the most reads that it should cost."""

    name: str
    sampling: SamplingParams
    limit: float
    verification: Verification | None = None
    drawn: bool = False  # drafts were drawn from q, which is read too


CASES = (
    Case("greedy", SamplingParams(temperature=0.0), 1.3),
    Case("plain, no q", SamplingParams(), 5.0),
    Case("plain, block", SamplingParams(), 5.0, drawn=True),
    Case("plain, token-wise", SamplingParams(), 5.0, Verification.TOKEN_WISE, drawn=True),
    Case("seeded", SamplingParams(seed=1), 5.0),
    Case("top-k 50, no q", SamplingParams(top_k=50), 10.0),
    Case("top-k 50, block", SamplingParams(top_k=50), 10.0, drawn=True),
    Case("top-p 0.9, no q", SamplingParams(top_p=0.9), 10.0),
    Case("top-p 0.9, block", SamplingParams(top_p=0.9), 10.0, drawn=True),
    Case("top-k 50, top-p 0.9, seeded", SamplingParams(top_k=50, top_p=0.9, seed=1), 10.0),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one case, and of reading what it works on, by round."""

    case: Case
    verify: list[float]
    read: list[float]

    @property
    def reads(self) -> float:
        """Median over rounds of one over the other."""
        return median_ratio(self.verify, self.read)


@torch.inference_mode()
def measure(requests: int, depth: int, vocab: int, rounds: int) -> list[Cost]:
    """Verify one step's drafts under every case; reads and verifications in turn, each on logits just written."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(requests * (depth + 1), vocab, generator=generator) * SPREAD
    draft = target.view(requests, depth + 1, vocab)[:, :depth].reshape(-1, vocab)
    draft = draft + torch.randn(draft.shape, generator=generator) * DISAGREEMENT
    buffer = torch.empty_like(target)
    verifier = Verifier(0, target.device)
    costs = [Cost(case, [], []) for case in CASES]
    prepared = [_runs(case, draft, requests, depth) for case in CASES]
    for number in track(range(-1, rounds), description="measuring"):
        for cost, (runs, q) in zip(costs, prepared, strict=True):
            read = _timed(buffer, target, partial(_read, buffer, q))
            verify = _timed(buffer, target, partial(_verify, verifier, buffer, runs))
            if number >= 0:
                cost.read.append(read)
                cost.verify.append(verify)
    return costs


def render(costs: list[Cost], title: str) -> None:
    table = Table(title=title)
    for name in ("case", "ms", "one read, ms", "reads", "at most"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for cost in costs:
        milliseconds = (f"{1e3 * median(seconds):.1f}" for seconds in (cost.verify, cost.read))
        table.add_row(cost.case.name, *milliseconds, f"{cost.reads:.2f}", f"{cost.case.limit:.1f}")
    console().print(table)


def _runs(case: Case, draft_logits: Tensor, requests: int, depth: int) -> tuple[list[Run], Tensor | None]:
    """A draft for every request, and what it was drawn from if it was."""
    rule = SpeculationParams(verification=case.verification).rule_for(case.sampling)
    params = SequenceParams(case.sampling, verification=rule)
    sequences = [Sequence(Admission(i, (0,), 1, params)) for i in range(requests)]
    q = None
    if case.drawn:
        rows = [Positions(sequence, [0] * (depth - 1)) for sequence in sequences]
        q = distribution_(draft_logits.clone(), rows)
        tokens = q.argmax(-1).view(requests, depth).tolist()
    else:
        tokens = draft_logits.argmax(-1).view(requests, depth).tolist()
    drafts = [Draft(ids, q, i * depth) for i, ids in enumerate(tokens)]
    return [Run(Positions(s, draft.token_ids), draft) for s, draft in zip(sequences, drafts, strict=True)], q


def _read(logits: Tensor, q: Tensor | None) -> None:
    logits.sum(-1)
    if q is not None:
        q.sum(-1)


def _verify(verifier: Verifier, logits: Tensor, runs: list[Run]) -> None:
    edit_(logits, [run.positions for run in runs])
    verifier.verify(logits, runs)


def _timed(buffer: Tensor, logits: Tensor, work: Callable[[], None]) -> float:
    buffer.copy_(logits)  # verification overwrites it
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
