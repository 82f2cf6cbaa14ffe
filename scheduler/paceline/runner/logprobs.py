"""How probable tokens were, told to whoever asks."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from paceline.core.params import LogprobsMode
from paceline.core.plan import TokenLogprobs
from paceline.runner.positions import Positions
from paceline.runner.sampler import edit_, temperatures, truncate_


def completion_logprobs(raw: Tensor, positions: Positions, token_ids: Seq[int]) -> tuple[TokenLogprobs, ...]:
    """Logprobs of a run's emitted tokens.

    Args:
        raw: the model's own logits of the run's rows, [rows, vocab] float32; row j is that of token_ids[j].
    """
    wanted = positions.params.logprobs
    assert wanted.completion is not None
    rows = list(range(len(token_ids)))
    logits = raw[: len(rows)]
    if wanted.mode is LogprobsMode.PROCESSED:
        # Again, and not kept from the verification: who does not ask pays nothing.
        logits = logits.clone()
        batch = positions.only(rows)
        edit_(logits, batch)
        if not positions.params.sampling.greedy:
            truncate_(logits, batch)
        logits -= logits.amax(-1, keepdim=True)  # first, so that nothing overflows
        logits /= temperatures(batch, logits.device)[:, None]
    return token_logprobs(logits, token_ids, wanted.completion)


def token_logprobs(logits: Tensor, token_ids: Seq[int], count: int) -> tuple[TokenLogprobs, ...]:
    """Tell the logprobs of one token per row, and of the `count` most probable.  # [rows, vocab]"""
    if not token_ids:
        return ()
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])  # [rows, 1]
    ranks = (logprobs > chosen).sum(-1) + 1
    values, top = _top(logprobs, min(count, logprobs.shape[1]))
    columns = zip(chosen[:, 0].tolist(), ranks.tolist(), top.tolist(), values.tolist(), strict=True)
    return tuple(TokenLogprobs(value, rank, tuple(ids), tuple(best)) for value, rank, ids, best in columns)


def _top(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of each row, ties by id: torch's own order of ties is left open.  # [rows, count] each"""
    if count == 0:
        empty = logprobs[:, :0]
        return empty, empty.long()
    least = logprobs.topk(count).values[:, -1:]
    ids = [row.nonzero()[:, 0] for row in logprobs >= least]  # ascending; more than count where the last ones tie
    picked = []
    for row, candidates in zip(logprobs, ids, strict=True):
        order = row[candidates].sort(descending=True, stable=True).indices[:count]
        picked.append(candidates[order])
    top = torch.stack(picked)
    return logprobs.gather(-1, top), top
