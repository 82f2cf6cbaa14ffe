"""The exact distribution of what a rule of verification emits: over every draft, acceptance and recovered token.

Nothing is drawn. A draft path x has the probability that the draft model proposes it. A rule keeps draft j while its
noise u_j is below some h_j, which is found by bisection; so each of the 2^k patterns of noise below and not below has
a probability too, and in each the rule is asked with such noise. Runs shorter than k + 1 tokens are continued by the
target alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.runner.drafter import Draft
from paceline.runner.positions import Positions
from paceline.runner.sampler import distribution_, edit_
from paceline.runner.verification import Run
from paceline.runner.verification.rejection import AcceptanceRule, Comparison, Ruling
from runner.rows import positions_of, state_of
from support import chain

VOCAB = 3
BISECTIONS = 48

Left = Callable[[Comparison, Ruling], Tensor]


@dataclass(frozen=True, eq=False)
class Case:
    """A sequence of parameters and state, with logits behind every prefix of a draft of `depth` tokens.

    Attributes:
        target, draft: element j has a row for each of the VOCAB ** j prefixes in lexical order; [., VOCAB] float64.
    """

    sequence: Sequence
    depth: int
    target: list[Tensor]
    draft: list[Tensor]

    @property
    def paths(self) -> list[tuple[int, ...]]:
        return list(itertools.product(range(VOCAB), repeat=self.depth))


@dataclass(frozen=True)
class Trial:
    """Draft paths of some cases, to be verified as one batch.

    Attributes:
        case, path: of each run, the case and the place among its paths, [n] int64.
        mass: probability that the run's path is drafted, [n]; of the runs of a case they sum to 1.
        p: target distributions, a row for each draft and the token behind them; [rows, VOCAB] float64.
    """

    cases: list[Case]
    runs: list[Run]
    case: Tensor
    path: Tensor
    mass: Tensor
    p: Tensor


def random_case(sequence: Sequence, depth: int, generator: torch.Generator) -> Case:
    def table(prefixes: int) -> Tensor:
        return 1.5 * torch.randn(prefixes, VOCAB, generator=generator, dtype=torch.float64)

    rows = [VOCAB**j for j in range(depth + 1)]
    return Case(sequence, depth, [table(n) for n in rows], [table(n) for n in rows[:-1]])


def drawn(cases: list[Case]) -> Trial:
    """Every path, each as probable as the draft model's own distributions make it."""
    positions = [positions_of(case.sequence, path) for case in cases for path in case.paths]
    q = q_of(cases)
    drafts, first = [], 0
    for place in positions:
        drafts.append(Draft(place.drafts, q, first))
        first += len(place.drafts)
    tokens = torch.tensor([token for draft in drafts for token in draft.token_ids])
    # Of a row of zeros `ops.draw` makes token 0.
    chosen = q.gather(1, tokens[:, None])[:, 0].where(q.any(-1), (tokens == 0).double())
    mass = torch.stack([part.prod() for part in chosen.split([len(draft.token_ids) for draft in drafts])])
    return Trial(
        cases,
        [Run(place, draft) for place, draft in zip(positions, drafts, strict=True)],
        torch.tensor([i for i, case in enumerate(cases) for _ in case.paths]),
        torch.tensor([i for case in cases for i in range(len(case.paths))]),
        mass,
        p_of(cases, positions),
    )


def chosen(cases: list[Case]) -> Trial:
    """Every path on its own, as a drafter would propose it that draws nothing."""
    every = drawn(cases)
    return Trial(
        [every.cases[i] for i in every.case.tolist()],
        [Run(run.positions, Draft(run.draft.token_ids)) for run in every.runs],
        torch.arange(len(every.runs)),
        every.path,
        torch.ones_like(every.mass),
        every.p,
    )


def p_of(cases: list[Case], batch: list[Positions]) -> Tensor:
    """The target's distributions at every row of every path, by the engine's own chain; `batch` says in which state."""
    return _distributions(torch.cat([_along_paths(case, case.target) for case in cases]), batch)


def q_of(cases: list[Case]) -> Tensor:
    """The draft's, likewise; each row as the draft model asks for it, one position at a time."""
    runs = [positions_of(case.sequence, path) for case in cases for path in case.paths]
    batch = [position for run in runs for position in run.only(range(len(run.drafts)))]
    return _distributions(torch.cat([_along_paths(case, case.draft) for case in cases]), batch)


def _along_paths(case: Case, tables: list[Tensor]) -> Tensor:
    """Logits of each path's rows one after the other, [paths * len(tables), VOCAB]."""
    columns = [table.repeat_interleave(len(case.paths) // len(table), 0) for table in tables]
    return torch.stack(columns, dim=1).flatten(0, 1)


def has_dead_end(case: Case) -> bool:
    """Some path leads to a position at which no token is allowed."""
    batch = [positions_of(case.sequence, path) for path in case.paths]
    return bool(edit_(_along_paths(case, case.target), batch))


def _distributions(logits: Tensor, batch: list[Positions]) -> Tensor:
    dead = edit_(logits, batch)
    assert not dead
    return distribution_(logits, batch)


def emitted(trial: Trial, rule: AcceptanceRule, left: Left = Comparison.left) -> list[Tensor]:
    """For each case, the probability of every run of depth + 1 tokens in lexical order, [VOCAB ** (depth + 1)]."""
    lengths = [[VOCAB ** (a + 1) for a in range(case.depth + 1)] for case in trial.cases]
    bounds = list(itertools.accumulate(itertools.chain([0], *lengths)))
    sums = torch.zeros(bounds[-1], dtype=torch.float64)  # of each case and number of accepted drafts, by prefix
    firsts = list(itertools.accumulate([0] + [len(sizes) for sizes in lengths]))
    deepest = max(case.depth for case in trial.cases)
    columns = torch.arange(deepest + 1).minimum(_depths(trial)[:, None])
    starts = torch.tensor(bounds)[torch.tensor(firsts)[trial.case][:, None] + columns]  # [n, k + 1], in `sums`
    for mass, drafts, ruling in outcomes(trial, rule):
        rest = left(drafts, ruling)
        rest = rest / rest.sum(-1, keepdim=True)
        shorter = VOCAB ** (_depths(trial) - ruling.accepted)
        prefix = torch.div(trial.path, shorter, rounding_mode="floor")
        index = starts.gather(1, ruling.accepted[:, None]) + prefix[:, None] * VOCAB + torch.arange(VOCAB)
        sums.index_put_((index,), mass[:, None] * rest, accumulate=True)
    parts = sums.split([size for sizes in lengths for size in sizes])
    return [
        _continued(parts[first : first + case.depth + 1], conditionals(case))
        for case, first in zip(trial.cases, firsts, strict=False)
    ]


def outcomes(trial: Trial, rule: AcceptanceRule) -> Iterable[tuple[Tensor, Comparison, Ruling]]:
    """Every pattern of acceptance noise: the probability of path and pattern, [n], and what the rule decides."""
    drafts = Comparison(trial.p, trial.runs)
    below, h = thresholds(trial, rule)
    for pattern in itertools.product([True, False], repeat=h.shape[1]):
        kept = torch.tensor(pattern)
        yield trial.mass * torch.where(kept, h, 1 - h).prod(-1), drafts, rule(drafts, torch.where(kept, below, h))


def thresholds(trial: Trial, rule: AcceptanceRule) -> tuple[Tensor, Tensor]:
    """For each draft the largest noise that keeps it and the smallest that does not, as near as can be; [n, k] each.

    Draft j is looked at while all before it are kept, if noise can do that, and none behind it is.
    """
    k = max(run.depth for run in trial.runs)
    everything = Comparison(trial.p.repeat(k, 1), trial.runs * k)  # once for each j
    j = torch.arange(k).repeat_interleave(len(trial.runs))[:, None]
    columns = torch.arange(k)
    noise = torch.where(columns < j, 0.0, 1.0).double()  # [k * n, k]
    below, h = torch.zeros(len(j), 1).double(), torch.ones(len(j), 1).double()
    for _ in range(BISECTIONS):
        middle = (below + h) / 2
        accepted = rule(everything, torch.where(columns == j, middle, noise)).accepted
        kept = accepted[:, None] > j
        below, h = torch.where(kept, middle, below), torch.where(kept, h, middle)
    return below.view(k, -1).T, h.view(k, -1).T


def mean_accepted(trial: Trial, rule: AcceptanceRule) -> Tensor:
    """Expected number of accepted drafts, [cases]."""
    mean = torch.zeros(len(trial.cases), dtype=torch.float64)
    for mass, _, ruling in outcomes(trial, rule):
        mean.index_put_((trial.case,), mass * ruling.accepted, accumulate=True)
    return mean


def expected(case: Case) -> Tensor:
    """What the target alone emits, [VOCAB ** (depth + 1)]."""
    first, *others = conditionals(case)
    runs = first[0]
    for rows in others:
        runs = (runs[:, None] * rows).flatten()
    return runs


@functools.cache
def conditionals(case: Case) -> list[Tensor]:
    """The target's distribution behind every prefix by the oracle of the chain, in the form of `Case.target`."""
    params = case.sequence.params
    found = []
    for length, table in enumerate(case.target):
        rows = []
        for logits, prefix in zip(table.numpy(), itertools.product(range(VOCAB), repeat=length), strict=True):
            state, allowed = state_of(Positions(case.sequence, list(prefix)), length)
            processed = chain.process(logits, params.sampling, params.constraints, state, allowed)
            rows.append(torch.from_numpy(chain.distribution(processed, params.sampling)))
        found.append(torch.stack(rows))
    return found


def _continued(parts: Seq[Tensor], conditionals: Seq[Tensor]) -> Tensor:
    """Runs that end with so many tokens, lengthened by the target."""
    runs = parts[0]
    for part, rows in zip(parts[1:], conditionals[1:], strict=True):
        runs = (runs[:, None] * rows).flatten() + part
    return runs


def _depths(trial: Trial) -> Tensor:
    return torch.tensor([case.depth for case in trial.cases])[trial.case]


def error(trial: Trial, rule: AcceptanceRule, left: Left = Comparison.left) -> float:
    """The largest difference to what the target alone emits, over all runs of all cases."""
    found = zip(trial.cases, emitted(trial, rule, left), strict=True)
    return max(float((runs - expected(case)).abs().max()) for case, runs in found)
