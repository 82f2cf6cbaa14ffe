"""A small model of the same vocabulary that runs ahead of the target, token by token."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

import paceline_kernels as ops
from paceline.core.params import Verification
from paceline.core.plan import SequenceWork
from paceline.core.sequence import Sequence
from paceline.models import Model, NativeDecoder
from paceline.runner.drafter import Draft
from paceline.runner.input_batch import InputBatch, TokenRun, logit_rows, row_bounds
from paceline.runner.kv_cache import KVCache
from paceline.runner.noise import Stream, Uniform
from paceline.runner.positions import Positions, noise_keys
from paceline.runner.sampler import distribution_, edit_, limits
from paceline.runner.verification.coupled import choose_
from paceline_kernels.cpu.decoder import Choice, Choices

DRAWN = (Verification.TOKEN_WISE, Verification.BLOCK)  # rules that need the distribution a draft was drawn from

CHOICES = {Verification.GREEDY: Choice.MOST_PROBABLE, Verification.COUPLED: Choice.BY_KEY}


class DraftModel:
    """Implements `Drafter`. Its KV lies under the target's block ids, in tensors of its own.

    Pass 0 ingests the tokens the draft model has not seen yet, which includes the newest; pass j feeds draft j back in.
    A pass holds exactly the sequences whose depth goes beyond it, so each request pays for its own depth. The last
    draft of a sequence is never fed: `Sequence.commit` accounts for it.
    """

    def __init__(self, model: Model, kv_cache: KVCache, seed: int) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._inputs = InputBatch(kv_cache.block_size, model.device)
        self._noise = Uniform(seed, Stream.DRAFT, model.device)

    @torch.inference_mode()
    def computes_numbers(self) -> bool:
        """Whether its logits behind one token are finite. Overwrites KV of block 0."""
        return bool(self._logits([TokenRun([0], 0, [0])]).isfinite().all())

    def propose(self, batch: Seq[tuple[Sequence, SequenceWork]]) -> list[Draft]:
        gaps = [sequence.draft_gap(work) for sequence, work in batch]
        proposal = _Proposal(batch, self.model.config.vocab_size, self.model.device)
        reading = [i for i, gap in enumerate(gaps) if gap]
        if isinstance(self.model, NativeDecoder):
            alone = [i for i in reading if not batch[i][0].params.edits_logits]
            self._run_ahead(self.model, batch, alone, gaps, proposal)
            reading = [i for i in reading if batch[i][0].params.edits_logits]
        self._pass_by_pass(batch, reading, gaps, proposal)
        return proposal.drafts()

    def _run_ahead(
        self,
        model: NativeDecoder,
        batch: Seq[tuple[Sequence, SequenceWork]],
        chosen: list[int],
        gaps: list[list[int]],
        proposal: _Proposal,
    ) -> None:
        """All passes of some sequences in one call; nothing but the model has to be asked for their logits."""
        if not chosen:
            return
        sequences, depths = [batch[i][0] for i in chosen], [batch[i][1].num_drafts for i in chosen]
        runs = [TokenRun(s.block_ids, s.num_draft_computed, gaps[i]) for i, s in zip(chosen, sequences, strict=True)]
        layout = self._inputs.flatten(runs, ahead=max(depths))
        choices = proposal.choices(chosen, self._noise)
        proposed = model.draft(*layout, self.kv_cache, depths, choices).tolist()
        for i, sequence, depth, tokens in zip(chosen, sequences, depths, proposed, strict=True):
            sequence.num_draft_computed += len(gaps[i]) + max(0, depth - 1)
            proposal.token_ids[i] = tokens[:depth]

    def _pass_by_pass(
        self,
        batch: Seq[tuple[Sequence, SequenceWork]],
        reading: list[int],
        gaps: list[list[int]],
        proposal: _Proposal,
    ) -> None:
        runs = [TokenRun(batch[i][0].block_ids, batch[i][0].num_draft_computed, gaps[i]) for i in reading]
        for i in reading:
            sequence, work = batch[i]
            sequence.num_draft_computed += len(gaps[i])
            assert work.num_drafts == 0 or sequence.num_draft_computed == len(sequence), work
        if not runs:
            return
        going = proposal.going()
        drafting = set(going)
        logits = self._logits(runs, logit_rows((len(gaps[i]), 0, i in drafting) for i in reading))
        while going:
            self._choose(logits, going, proposal)
            if going := proposal.going():
                logits = self._feed_back(batch, going, proposal)

    def _feed_back(self, batch: Seq[tuple[Sequence, SequenceWork]], going: list[int], proposal: _Proposal) -> Tensor:
        """The logits behind the newest draft of each, [going, vocab]."""
        runs = []
        for i in going:
            sequence = batch[i][0]
            runs.append(TokenRun(sequence.block_ids, sequence.num_draft_computed, proposal.token_ids[i][-1:]))
            sequence.num_draft_computed += 1
        return self._logits(runs)

    def release(self, request_id: int) -> None:
        """Nothing is kept per sequence: KV belongs to its blocks."""

    def _logits(self, runs: list[TokenRun], rows: list[int] | None = None) -> Tensor:
        """The draft model's logits of some rows, or of all."""
        token_ids, layout = self._inputs.flatten(runs)
        return self.model.logits_of(token_ids, layout, self.kv_cache, rows)

    def _choose(self, logits: Tensor, going: list[int], proposal: _Proposal) -> None:
        """The next draft of each sequence, as its rule wants it: by argmax, by the target's own noise, or drawn from q,
        which is kept for verification. A sequence to which no token is allowed proposes no more.

        Args:
            logits: [going, vocab]. Overwritten.
        """
        positions = [proposal.next_position(i) for i in going]
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


class _Proposal:
    """The drafts of one step in the making."""

    def __init__(self, batch: Seq[tuple[Sequence, SequenceWork]], vocab: int, device: torch.device) -> None:
        self._batch = batch
        self._depths = [work.num_drafts for _, work in batch]
        self.token_ids: list[list[int]] = [[] for _ in batch]
        # Rows of q, those of one sequence side by side.
        drawn = [s.params.verification in DRAWN for s, _ in batch]
        rows = [depth if is_drawn else 0 for depth, is_drawn in zip(self._depths, drawn, strict=True)]
        *self._first_rows, num_rows = row_bounds(rows)
        self._probs = torch.empty(num_rows, vocab, device=device) if num_rows else None
        self._vocab = vocab
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

    def choices(self, indexes: list[int], noise: Uniform) -> Choices | None:
        """How the drafts of some sequences are chosen, for who makes all of them at once; None: the most probable."""
        rules = [self._batch[i][0].params.verification for i in indexes]
        kinds = [CHOICES.get(rule, Choice.DRAWN) for rule in rules]
        if all([kind is Choice.MOST_PROBABLE for kind in kinds]):
            return None
        positions = [self.next_position(i) for i in indexes]
        keys = torch.zeros(len(indexes), 4, dtype=torch.int64)
        if seeded := [row for row, kind in enumerate(kinds) if kind is Choice.BY_KEY]:
            keys[seeded] = noise_keys([positions[row] for row in seeded], keys.device)
        temperature, top_k, top_p, min_p, typical_p = limits(positions, self._vocab, keys.device)
        drawn = Choice.DRAWN in kinds
        shape = (len(indexes), max(self._depths[i] for i in indexes))
        return Choices(
            kinds=torch.tensor(kinds, dtype=torch.int32),
            temperatures=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            keys=keys,
            uniforms=noise.draw(shape) if drawn else torch.empty(shape, dtype=torch.float64),
            first_rows=torch.tensor([self._first_rows[i] for i in indexes]),
            probs=self._probs if drawn and self._probs is not None else torch.empty(0),
        )

    def drafts(self) -> list[Draft]:
        return [
            Draft(tokens, self._probs if drawn and tokens else None, first_row)
            for tokens, drawn, first_row in zip(self.token_ids, self._drawn, self._first_rows, strict=True)
        ]
