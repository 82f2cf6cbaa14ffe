"""A small model of the same vocabulary that runs ahead of the target, token by token."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from paceline.core.plan import SequenceWork
from paceline.core.sequence import Sequence
from paceline.models import Decoder
from paceline.runner.drafter import Draft
from paceline.runner.input_batch import Run, flatten
from paceline.runner.kv_cache import KVCache
from paceline.runner.noise import Stream, generator
from paceline.runner.sampler import distribution, draw


class DraftModel:
    """Implements `Drafter`. Its KV lies under the target's block ids, in tensors of its own.

    Pass 0 ingests the tokens the draft model has not seen yet, which includes the newest; pass j feeds draft j back in.
    A pass holds exactly the sequences whose depth goes beyond it, so each request pays for its own depth. The last
    draft of a sequence is never fed: `Sequence.commit` accounts for it.
    """

    def __init__(self, model: Decoder, kv_cache: KVCache, seed: int) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._noise = generator(seed, Stream.DRAFT, model.device)

    def propose(self, batch: Seq[tuple[Sequence, SequenceWork]]) -> list[Draft]:
        gaps = [sequence.draft_gap(work) for sequence, work in batch]
        runs = [Run(s.block_ids, s.num_draft_computed, gap) for (s, _), gap in zip(batch, gaps, strict=True) if gap]
        for (sequence, work), gap in zip(batch, gaps, strict=True):
            sequence.num_draft_computed += len(gap)
            assert work.num_drafts == 0 or sequence.num_draft_computed == len(sequence), work
        # Rows whose logits are wanted: the last of each run that is drafted from.
        ends = torch.tensor([len(run.token_ids) for run in runs]).cumsum(0) - 1
        drafting = [i for i, (_, work) in enumerate(batch) if work.num_drafts]
        run_of = {i: run for run, i in enumerate(i for i, gap in enumerate(gaps) if gap)}
        hidden = self._forward(runs) if runs else None
        tokens: list[list[int]] = [[] for _ in batch]
        probs: list[list[Tensor]] = [[] for _ in batch]
        if drafting:
            assert hidden is not None
            rows = ends[[run_of[i] for i in drafting]].to(hidden.device)
            self._choose(hidden[rows], drafting, batch, tokens, probs)
        depth = 1
        while going := [i for i in drafting if batch[i][1].num_drafts > depth]:
            hidden = self._forward(
                [Run(batch[i][0].block_ids, len(batch[i][0]) + depth - 1, tokens[i][-1:]) for i in going]
            )
            for i in going:
                batch[i][0].num_draft_computed += 1
            self._choose(hidden, going, batch, tokens, probs)
            depth += 1
        return [Draft(t, torch.stack(p) if p else None) for t, p in zip(tokens, probs, strict=True)]

    def release(self, request_id: int) -> None:
        """Nothing is kept per sequence: KV belongs to its blocks."""

    def _forward(self, runs: list[Run]) -> Tensor:
        token_ids, layout = flatten(runs, self.kv_cache.block_size, self.model.device)
        return self.model.forward(token_ids, layout, self.kv_cache)

    def _choose(
        self,
        hidden: Tensor,
        rows: list[int],
        batch: Seq[tuple[Sequence, SequenceWork]],
        tokens: list[list[int]],
        probs: list[list[Tensor]],
    ) -> None:
        """The next draft of each sequence in `rows`: the argmax, or a draw from q, which is kept for verification."""
        logits = self.model.logits(hidden)  # [len(rows), vocab]
        params = [batch[i][0].sampling for i in rows]
        chosen = logits.argmax(-1)
        sampled = [row for row, p in enumerate(params) if not p.greedy]
        if sampled:
            q = distribution(logits[sampled], [params[row] for row in sampled])
            chosen[sampled] = draw(q, self._noise)
            for row, distribution_row in zip(sampled, q, strict=True):
                probs[rows[row]].append(distribution_row)
        for i, token in zip(rows, chosen.tolist(), strict=True):
            tokens[i].append(token)
