"""Executes plans on a model: draft, one flattened forward, verify, commit."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from paceline.core.params import Method
from paceline.core.plan import SequenceResult, SequenceWork, StepPlan, StepResult, StepTimes
from paceline.core.sequence import Sequence
from paceline.models import Decoder
from paceline.runner.drafter import Draft, Drafter
from paceline.runner.input_batch import Run, flatten
from paceline.runner.kv_cache import KVCache
from paceline.runner.verification import Verifier

NO_DRAFT = Draft([])


class ModelRunner:
    """Implements `StepRunner`. Owns the mirror of admitted sequences, the target's KV and the drafters."""

    def __init__(self, model: Decoder, kv_cache: KVCache, drafters: Mapping[Method, Drafter], seed: int) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.drafters = drafters
        self._verifier = Verifier(seed, model.device)
        self._sequences: dict[int, Sequence] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        self._apply_membership(plan)
        batch = [(self._sequences[work.request_id], work) for work in plan.work]
        for sequence, work in batch:
            sequence.extend(work)
        drafts = self._draft(batch)
        drafted = time.perf_counter()
        logits = self._forward(batch, drafts)
        verified = time.perf_counter()
        results = self._commit(batch, drafts, logits)
        ended = time.perf_counter()
        times = StepTimes(drafted - began, verified - drafted, ended - verified, ended - began)
        return StepResult(plan.step_id, results, times)

    def _apply_membership(self, plan: StepPlan) -> None:
        for request_id in plan.released:
            del self._sequences[request_id]
            for drafter in self.drafters.values():
                drafter.release(request_id)
        for admission in plan.admitted:
            self._sequences[admission.request_id] = Sequence(admission)

    def _draft(self, batch: list[tuple[Sequence, SequenceWork]]) -> dict[int, Draft]:
        """Every proposal of this step, by request id."""
        drafts: dict[int, Draft] = {}
        for method, drafter in self.drafters.items():
            mine = [(s, w) for s, w in batch if w.method is method and (w.num_drafts or w.draft_catch_up)]
            if mine:
                proposals = drafter.propose(mine)
                drafts.update((w.request_id, d) for (_, w), d in zip(mine, proposals, strict=True))
        return drafts

    def _forward(self, batch: list[tuple[Sequence, SequenceWork]], drafts: dict[int, Draft]) -> torch.Tensor:
        """One forward over all rows; logits of the rows that are sampled or verified, [rows, vocab] float32."""
        runs: list[Run] = []
        wanted: list[int] = []
        row = 0
        for sequence, work in batch:
            draft = drafts.get(work.request_id, NO_DRAFT).token_ids
            tokens = sequence.rows(work) + draft
            runs.append(Run(sequence.block_ids, sequence.num_computed, tokens))
            row += len(tokens)
            if work.samples:
                wanted.extend(range(row - len(draft) - 1, row))
        token_ids, layout = flatten(runs, self.kv_cache.block_size, self.model.device)
        hidden = self.model.forward(token_ids, layout, self.kv_cache)
        return self.model.logits(hidden[torch.tensor(wanted, dtype=torch.int64, device=hidden.device)])

    def _commit(
        self, batch: list[tuple[Sequence, SequenceWork]], drafts: dict[int, Draft], logits: torch.Tensor
    ) -> tuple[SequenceResult, ...]:
        sampling = [(s, w) for s, w in batch if w.samples]
        proposals = [drafts.get(w.request_id, NO_DRAFT) for _, w in sampling]
        verdicts = iter(self._verifier.verify(logits, proposals, [s.sampling for s, _ in sampling]))
        results = []
        for sequence, work in batch:
            if not work.samples:
                sequence.commit(work, [], 0)
                results.append(SequenceResult(work.request_id, num_draft_computed=sequence.num_draft_computed))
                continue
            verdict = next(verdicts)
            sequence.commit(work, verdict.token_ids, verdict.num_accepted)
            results.append(
                SequenceResult(
                    work.request_id,
                    tuple(verdict.token_ids),
                    num_drafted=len(drafts.get(work.request_id, NO_DRAFT).token_ids),
                    num_accepted=verdict.num_accepted,
                    acceptance=tuple(verdict.acceptance),
                    num_draft_computed=sequence.num_draft_computed,
                )
            )
        return tuple(results)
