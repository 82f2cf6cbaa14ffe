"""Sampled requests without a seed: drafts are kept with probabilities that make up for having been drawn from q.

Token-wise (Leviathan et al. 2023, algorithm 1; Chen et al. 2023): draft x is kept with probability min(1, p(x) / q(x)),
up to the first that is not.

Block (Sun et al. 2024, "Block verification accelerates speculative decoding", algorithm 2): with w_0 = 1 and
w_i = min(1, w_(i-1) p(x_i) / q(x_i)), the first i drafts may be kept as a whole with probability
h_i = Z_i / (Z_i + 1 - w_i), where Z_i = sum(max(w_i p - q, 0)) over the tokens behind them, and h_k = w_k. The longest
prefix that may be kept is, so a later draft can rescue an earlier one. It keeps at least as many as any other lossless
rule on a single path.

One-hot: drafts were chosen and not drawn, so that q is 1 at each of them: both rules keep x with probability p(x).

Behind i < k kept drafts the next token is drawn from norm(max(w_i p - q, 0)), with w_i = 1 but for Block; behind all of
them from p.

Where a draft model computes no numbers q is 0 for every token, and what stands there was not drawn: neither rule keeps
it, and to both it is as though the drafts had ended before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

import paceline_kernels as ops
from paceline.runner.noise import RejectionNoise
from paceline.runner.sampler import distribution_
from paceline.runner.verification.rule import Run, Verdict

ROUNDING = 1e-6  # of a probability in float32


@dataclass(frozen=True, slots=True)
class Ruling:
    """What an acceptance rule decides for n runs of at most k drafts.

    Attributes:
        accepted: drafts kept, [n] int64.
        weight: of p in what is left behind them, [n].
        labels: acceptance of each draft, [n, k]; read up to the first rejection.
    """

    accepted: Tensor
    weight: Tensor
    labels: Tensor


class AcceptanceRule(Protocol):
    """Decides by probabilities alone, given uniform noise; so a test can go through every outcome."""

    def __call__(self, drafts: Comparison, u: Tensor) -> Ruling:
        """`u` is [n, k] in [0, 1). A draft is kept if u is *below* its probability: with u = 0, too, none of
        probability 0 is.
        """
        ...


class Rejection:
    """Implements `VerificationRule` by an acceptance rule. Draws from `noise`, which it shares with others."""

    def __init__(self, accept: AcceptanceRule, noise: RejectionNoise) -> None:
        self._accept = accept
        self._noise = noise
        self._room: Tensor | None = None

    def judge(self, logits: Tensor, runs: Seq[Run]) -> list[Verdict]:
        p = distribution_(logits, [run.positions for run in runs])
        drafts = Comparison(p, runs, self._room_for(len(runs), p))
        ruling = self._accept(drafts, self._noise.accept(drafts.real.shape))
        final = ops.draw(drafts.left(ruling), self._noise.sample(len(runs))).tolist()
        columns = zip(runs, ruling.accepted.tolist(), final, ruling.labels.tolist(), strict=True)
        return [
            Verdict([*run.draft.token_ids[:count], token], count, labels[: min(count + 1, run.depth)])
            for run, count, token, labels in columns
        ]

    def _room_for(self, count: int, p: Tensor) -> Tensor:
        """[count, vocab], kept from step to step: fresh memory of that size costs more than what is done with it."""
        room = self._room
        if room is None or len(room) < count or room.shape[1] != p.shape[1] or room.dtype != p.dtype:
            room = self._room = torch.empty(count, p.shape[1], dtype=p.dtype, device=p.device)
        return room[:count]


class Comparison:
    """p beside q, for n runs of at most k drafts.

    Attributes:
        p: [rows, vocab], depth + 1 rows for each run.
        real: which of the [n, k] drafts there are.
        p_x, q_x: probabilities of each draft, [n, k]; 0 and 1 where there is none. q_x is 1 for one-hot drafts.
    """

    def __init__(self, p: Tensor, runs: Seq[Run], room: Tensor | None = None) -> None:
        """`room` [n, vocab] is where `left` writes; without it, to a new tensor."""
        device = p.device
        depths = torch.tensor([run.depth for run in runs], device=device)
        columns = torch.arange(int(depths.max()), device=device)
        padded = [run.draft.token_ids + [0] * (len(columns) - run.depth) for run in runs]
        self.p = p
        self._room = room
        self.q = _shared_q(runs)
        self.depths = depths
        self.real = columns < depths[:, None]
        self.tokens = torch.tensor(padded, dtype=torch.int64, device=device)
        self._starts = (depths + 1).cumsum(0) - depths - 1  # [n]: each run's first row of p
        self._q_starts = torch.tensor([run.draft.first_row for run in runs], device=device)
        p_x = p[self.p_rows(columns), self.tokens]
        self.p_x = p_x.where(self.real, 0)
        self.q_x = torch.ones_like(p_x)
        if self.q is not None:
            self.q_x = self.q[self.q_rows(columns), self.tokens].where(self.real, self.q_x)

    def p_rows(self, columns: Tensor) -> Tensor:
        """Rows of p that stand behind so many drafts, [n, ...]; those behind more than there are stay at the last."""
        return self._starts[:, None] + torch.minimum(columns, self.depths[:, None])

    def q_rows(self, columns: Tensor) -> Tensor:
        """The same for q, which has no row behind the last draft."""
        return self._q_starts[:, None] + torch.minimum(columns, (self.depths - 1).clamp(min=0)[:, None])

    def left(self, ruling: Ruling) -> Tensor:
        """What the next token of each run is drawn from, unnormalised, [n, vocab].

        Where nothing is left p = q, and nothing is rejected but by rounding: then p.
        """
        rejected = ruling.accepted < self.depths
        p_rows = self.p_rows(ruling.accepted[:, None])[:, 0]
        if self.q is not None:
            q_rows = self.q_rows(ruling.accepted[:, None])[:, 0]
            return ops.residual(self.p, self.q, p_rows, torch.where(rejected, q_rows, -1), ruling.weight, self._room)
        left = self.p[p_rows] if self._room is None else torch.index_select(self.p, 0, p_rows, out=self._room)
        rows = rejected.nonzero()[:, 0]
        tokens = self.tokens[rows, ruling.accepted[rows]]
        own = left[rows, tokens]
        left[rows, tokens] = 0
        # Where nothing else is left the token has all of p, and was rejected by rounding alone.
        sure = own > 1 - ROUNDING
        nothing = left[rows[sure]].amax(-1) == 0
        left[rows[sure], tokens[sure]] = own[sure] * nothing
        return left


def token_wise(drafts: Comparison, u: Tensor) -> Ruling:
    """Needs q."""
    assert drafts.q is not None
    # What was drawn has q above 0, unless the draft's logits were no numbers.
    accepted = _until_first_failure((u * drafts.q_x < drafts.p_x) & (drafts.q_x > 0) & drafts.real)
    labels = torch.zeros_like(drafts.p_x)
    columns = torch.arange(drafts.real.shape[1], device=u.device)
    rows = drafts.p_rows(columns)[drafts.real], drafts.q_rows(columns)[drafts.real]
    labels[drafts.real] = ops.overlap(drafts.p, drafts.q, *rows).to(labels.dtype)
    return Ruling(accepted, torch.ones_like(drafts.p_x[:, 0]), labels)


def one_hot(drafts: Comparison, u: Tensor) -> Ruling:
    """Needs no q."""
    accepted = _until_first_failure((u < drafts.p_x) & drafts.real)
    return Ruling(accepted, torch.ones_like(accepted), drafts.p_x)


def block(drafts: Comparison, u: Tensor) -> Ruling:
    """Needs q."""
    assert drafts.q is not None
    k = drafts.real.shape[1]
    columns = torch.arange(k, device=u.device)
    ratios = torch.where(drafts.q_x > 0, drafts.p_x / drafts.q_x, 0)
    weights = [torch.ones_like(drafts.p_x[:, 0])]  # w_0, w_1, ... [n] each
    for j in range(k):
        weights.append((weights[-1] * ratios[:, j]).clamp(max=1))
    w = torch.stack(weights[1:], dim=1)  # [n, k]: behind 1, 2, ... drafts
    inner = columns + 1 < drafts.depths[:, None]  # [n, k]: prefixes with a draft behind them
    z = torch.zeros_like(w)
    rows = drafts.p_rows(columns + 1)[inner], drafts.q_rows(columns + 1)[inner]
    z[inner] = ops.residual_mass(drafts.p, drafts.q, *rows, w[inner]).to(z.dtype)
    h = torch.where(inner & (w < 1), z / (z + 1 - w), w)
    kept = (u < h) & drafts.real
    accepted = (kept * (columns + 1)).amax(-1)
    weight = torch.stack(weights, dim=1).gather(1, accepted[:, None])[:, 0]
    return Ruling(accepted, weight, (columns < accepted[:, None]).to(w.dtype))


def _until_first_failure(kept: Tensor) -> Tensor:
    """[n, k] bool -> [n] int64."""
    return kept.long().cumprod(-1).sum(-1)


def _shared_q(runs: Seq[Run]) -> Tensor | None:
    """The tensor that holds q for all drafts of a step; None if they are one-hot."""
    shared = runs[0].draft.probs
    assert all(run.draft.probs is shared for run in runs), "drafts of one step share one tensor"
    return shared
