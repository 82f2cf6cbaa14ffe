"""Which drafts are kept, and the token after them. Exact: emitted tokens are distributed as the target's own.

Greedy requests keep a draft while it is the argmax. Sampled ones follow Leviathan et al. 2023 (algorithm 1) and
Chen et al. 2023: draft x, drawn from q, is kept with probability min(1, p(x) / q(x)); at the first rejection the token
is drawn from the residual, norm(max(p - q, 0)); behind a full acceptance a bonus token is drawn from p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.params import SamplingParams
from paceline.runner.drafter import Draft
from paceline.runner.noise import Stream, generator
from paceline.runner.sampler import distribution, draw


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one sequence emits. `acceptance`: see `SequenceResult.acceptance`."""

    token_ids: list[int]
    num_accepted: int
    acceptance: list[float]


class Verifier:
    """Token-wise rejection. Owns the acceptance and the recovery noise, and nothing else."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._accept_noise = generator(seed, Stream.ACCEPT, device)
        self._sample_noise = generator(seed, Stream.SAMPLE, device)

    def verify(self, logits: Tensor, drafts: Sequence[Draft], params: Sequence[SamplingParams]) -> list[Verdict]:
        """Judge every draft of a step.

        Args:
            logits: [rows, vocab] float32. Sequence i has len(drafts[i].token_ids) + 1 consecutive rows: row j is the
                target's view of the token at draft position j, the last row that of the bonus token.
        """
        counts = [len(draft.token_ids) + 1 for draft in drafts]
        pieces = torch.split(logits, counts)
        verdicts: dict[int, Verdict] = {}
        for greedy, judge in ((True, _verify_greedy), (False, self._verify_sampled)):
            mine = [i for i, p in enumerate(params) if p.greedy is greedy]
            if mine:
                judged = judge([pieces[i] for i in mine], [drafts[i] for i in mine], [params[i] for i in mine])
                verdicts.update(zip(mine, judged, strict=True))
        return [verdicts[i] for i in range(len(drafts))]

    def _verify_sampled(self, pieces: list[Tensor], drafts: list[Draft], params: list[SamplingParams]) -> list[Verdict]:
        row_params = [p for piece, p in zip(pieces, params, strict=True) for _ in range(len(piece))]
        p = distribution(torch.cat(pieces), row_params)  # [rows, vocab]
        q = _draft_rows(p, drafts)  # [rows, vocab], 0 in bonus rows
        # p(x), q(x) and the overlap of each draft; bonus rows get a token too, whose values nobody reads.
        tokens = torch.tensor([t for d in drafts for t in (*d.token_ids, 0)], device=p.device)[:, None]
        p_x, q_x = p.gather(-1, tokens)[:, 0], q.gather(-1, tokens)[:, 0]  # [rows]
        u = torch.rand(len(p), generator=self._accept_noise, device=p.device)  # in [0, 1): p(x) = 0 is never accepted
        kept = (u * q_x < p_x).tolist()
        overlap = torch.minimum(p, q).sum(-1).clamp(max=1.0).tolist()

        row, accepted, reached = 0, [], []
        for draft in drafts:
            depth = len(draft.token_ids)
            count = next((j for j in range(depth) if not kept[row + j]), depth)
            accepted.append(count)
            reached.append(overlap[row : row + min(count + 1, depth)])
            row += depth + 1
        starts = torch.tensor([0, *(len(piece) for piece in pieces[:-1])], device=p.device).cumsum(0)
        last = starts + torch.tensor(accepted, device=p.device)  # the row of each sequence's final token
        final = draw(residual(p[last], q[last]), self._sample_noise).tolist()
        return [
            Verdict([*draft.token_ids[:count], token], count, seen)
            for draft, count, token, seen in zip(drafts, accepted, final, reached, strict=True)
        ]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), unnormalised: what is left of p where a draft from q was rejected; p itself where q is 0.

    p <= q everywhere means p = q, where no rejection happens but by rounding: then p.  # [rows, vocab]
    """
    left = (p - q).clamp(min=0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def _draft_rows(p: Tensor, drafts: list[Draft]) -> Tensor:
    """The draft distributions in the rows of p: one-hot where a token was chosen, 0 in each bonus row."""
    q = torch.zeros_like(p)
    row = 0
    for draft in drafts:
        depth = len(draft.token_ids)
        if draft.probs is not None:
            q[row : row + depth] = draft.probs
        elif depth:
            q[torch.arange(row, row + depth), torch.tensor(draft.token_ids)] = 1.0
        row += depth + 1
    return q


def _verify_greedy(pieces: list[Tensor], drafts: list[Draft], params: list[SamplingParams]) -> list[Verdict]:
    choices = torch.cat(pieces).argmax(-1).tolist()  # the first maximum: ties go to the lowest id
    verdicts, row = [], 0
    for draft in drafts:
        depth = len(draft.token_ids)
        wanted = choices[row : row + depth + 1]
        count = next((j for j, token in enumerate(draft.token_ids) if token != wanted[j]), depth)
        verdicts.append(Verdict(wanted[: count + 1], count, [1.0] * count + [0.0] * (count < depth)))
        row += depth + 1
    return verdicts
