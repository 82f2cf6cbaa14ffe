"""A small model of the same vocabulary that runs ahead of the target, token by token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

import paceline_kernels as ops
from paceline.core.params import Verification
from paceline.core.plan import SequenceWork
from paceline.core.sequence import Sequence
from paceline.models import Model, NativeDecoder
from paceline.runner.drafter import Draft
from paceline.runner.input_batch import Run, flatten
from paceline.runner.kv_cache import KVCache
from paceline.runner.noise import Stream, Uniform
from paceline.runner.positions import Positions
from paceline.runner.sampler import distribution_, edit_
from paceline.runner.verification.coupled import choose_

DRAWN = (Verification.TOKEN_WISE, Verification.BLOCK)  # rules that need the distribution a draft was drawn from


class DraftModel:
    """Implements `Drafter`. Its KV lies under the target's block ids, in tensors of its own.

    Pass 0 ingests the tokens the draft model has not seen yet, which includes the newest; pass j feeds draft j back in.
    A pass holds exactly the sequences whose depth goes beyond it, so each request pays for its own depth. The last
    draft of a sequence is never fed: `Sequence.commit` accounts for it.
    """

    def __init__(self, model: Model, kv_cache: KVCache, seed: int) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._noise = Uniform(seed, Stream.DRAFT, model.device)

    def propose(self, batch: Seq[tuple[Sequence, SequenceWork]]) -> list[Draft]:
        gaps = [sequence.draft_gap(work) for sequence, work in batch]
        if isinstance(self.model, NativeDecoder) and all(_plain(sequence, work) for sequence, work in batch):
            return self._propose_natively(self.model, batch, gaps)
        runs = [Run(s.block_ids, s.num_draft_computed, gap) for (s, _), gap in zip(batch, gaps, strict=True) if gap]
        for (sequence, work), gap in zip(batch, gaps, strict=True):
            sequence.num_draft_computed += len(gap)
            assert work.num_drafts == 0 or sequence.num_draft_computed == len(sequence), work
        hidden = self._forward(runs) if runs else None
        proposal = _Proposal(batch, self.model.config.vocab_size, self.model.device)
        if going := proposal.going():
            assert hidden is not None
            # Rows whose logits are wanted: the last of each run that is drafted from.
            ends = torch.tensor([len(run.token_ids) for run in runs]).cumsum(0) - 1
            run_of = {i: run for run, i in enumerate(i for i, gap in enumerate(gaps) if gap)}
            self._choose(hidden[ends[[run_of[i] for i in going]].to(hidden.device)], going, proposal)
        while going := proposal.going():
            hidden = self._forward(
                [Run(batch[i][0].block_ids, batch[i][0].num_draft_computed, proposal.token_ids[i][-1:]) for i in going]
            )
            for i in going:
                batch[i][0].num_draft_computed += 1
            self._choose(hidden, going, proposal)
        return proposal.drafts()

    def _propose_natively(
        self, model: NativeDecoder, batch: Seq[tuple[Sequence, SequenceWork]], gaps: list[list[int]]
    ) -> list[Draft]:
        """All passes in one call, where every draft is an argmax of logits that nothing edits."""
        drafting = [(i, sequence, work) for i, (sequence, work) in enumerate(batch) if gaps[i]]
        drafts = [Draft([]) for _ in batch]
        if not drafting:
            return drafts
        runs = [Run(sequence.block_ids, sequence.num_draft_computed, gaps[i]) for i, sequence, _ in drafting]
        depths = [work.num_drafts for _, _, work in drafting]
        layout = flatten(runs, self.kv_cache.block_size, model.device, ahead=max(depths))
        proposed = model.draft(*layout, self.kv_cache, torch.tensor(depths, dtype=torch.int32)).tolist()
        for (i, sequence, work), tokens in zip(drafting, proposed, strict=True):
            sequence.num_draft_computed += len(gaps[i]) + max(0, work.num_drafts - 1)
            drafts[i] = Draft(tokens[: work.num_drafts])
        return drafts

    def release(self, request_id: int) -> None:
        """Nothing is kept per sequence: KV belongs to its blocks."""

    def _forward(self, runs: list[Run]) -> Tensor:
        token_ids, layout = flatten(runs, self.kv_cache.block_size, self.model.device)
        return self.model.forward(token_ids, layout, self.kv_cache)

    def _choose(self, hidden: Tensor, going: list[int], proposal: _Proposal) -> None:
        """The next draft of each sequence, as its rule wants it: by argmax, by the target's own noise, or drawn from q,
        which is kept for verification. A sequence to which no token is allowed proposes no more.
        """
        positions = [proposal.next_position(i) for i in going]
        logits = self.model.logits(hidden)  # [len(going), vocab]
        dead = set(edit_(logits, positions))
        groups: dict[str, list[int]] = {}
        for row, place in enumerate(positions):
            if row in dead:
                proposal.stop(going[row])
            else:
                rule = place.params.verification
                groups.setdefault("drawn" if rule in DRAWN else rule, []).append(row)
        for kind, rows in groups.items():
            mine = [positions[row] for row in rows]
            part = logits if len(rows) == len(logits) else logits[rows]
            if kind == "drawn":
                q = distribution_(part, mine)
                chosen = ops.draw(q, self._noise.draw((len(rows),)))
                proposal.keep([going[row] for row in rows], q)
            elif kind == Verification.COUPLED:
                chosen = choose_(part, mine)
            else:
                chosen = ops.argmax(part)
            for row, token in zip(rows, chosen.tolist(), strict=True):
                proposal.token_ids[going[row]].append(token)


def _plain(sequence: Sequence, work: SequenceWork) -> bool:
    """Whether a sequence drafts by argmax alone, or not at all."""
    params = sequence.params
    return work.num_drafts == 0 or (params.verification is Verification.GREEDY and not params.edits_logits)


class _Proposal:
    """The drafts of one step in the making."""

    def __init__(self, batch: Seq[tuple[Sequence, SequenceWork]], vocab: int, device: torch.device) -> None:
        self._batch = batch
        self._depths = [work.num_drafts for _, work in batch]
        self.token_ids: list[list[int]] = [[] for _ in batch]
        # Rows of q, those of one sequence side by side.
        drawn = [s.params.verification in DRAWN for s, _ in batch]
        rows = [depth if is_drawn else 0 for depth, is_drawn in zip(self._depths, drawn, strict=True)]
        *self._first_rows, num_rows = itertools.accumulate(rows, initial=0)
        self._probs = torch.empty(num_rows, vocab, device=device) if num_rows else None
        self._drawn = drawn

    def going(self) -> list[int]:
        """Who drafts one token more."""
        return [i for i, depth in enumerate(self._depths) if len(self.token_ids[i]) < depth]

    def stop(self, index: int) -> None:
        self._depths[index] = len(self.token_ids[index])

    def next_position(self, index: int) -> Positions:
        sequence, tokens = self._batch[index][0], self.token_ids[index]
        masks = None if sequence.matcher is None else sequence.matcher.mask(tokens)[None]
        return Positions(sequence, tokens[:], len(tokens), masks)

    def keep(self, indexes: list[int], q: Tensor) -> None:
        """Remember what the next draft of these sequences is drawn from.  # [indexes, vocab]"""
        assert self._probs is not None
        rows = [self._first_rows[i] + len(self.token_ids[i]) for i in indexes]
        self._probs[rows] = q

    def drafts(self) -> list[Draft]:
        return [
            Draft(tokens, self._probs if drawn and tokens else None, first_row)
            for tokens, drawn, first_row in zip(self.token_ids, self._drawn, self._first_rows, strict=True)
        ]
