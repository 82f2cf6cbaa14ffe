"""Executes plans on a model: draft, one flattened forward, verify, commit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.grammar import Mask, Matcher
from paceline.core.params import Method
from paceline.core.plan import SequenceResult, SequenceWork, StepPlan, StepResult, StepTimes, TokenLogprobs
from paceline.core.sequence import Sequence
from paceline.models import Decoder
from paceline.runner import input_batch
from paceline.runner.drafter import Draft, Drafter
from paceline.runner.kv_cache import KVCache
from paceline.runner.logprobs import completion_logprobs, token_logprobs
from paceline.runner.positions import Positions
from paceline.runner.sampler import edit_
from paceline.runner.verification import Run, Verdict, Verifier

NO_DRAFT = Draft([])
PROMPT_LOGPROB_ROWS = 64  # prompt positions whose logits are held at a time
DEAD_END = "no token is allowed here by the grammar and the other constraints together"

Batch = list[tuple[Sequence, SequenceWork]]


class ModelRunner:
    """Implements `StepRunner`. Owns the mirror of admitted sequences, the target's KV and the drafters."""

    def __init__(self, model: Decoder, kv_cache: KVCache, drafters: Mapping[Method, Drafter], seed: int) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.drafters = drafters
        self._verifier = Verifier(seed, model.device)
        self._sequences: dict[int, Sequence] = {}
        # Grammars are asked while the forward runs, by a thread that never computes tensors.
        self._mask_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-masks")

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        self._apply_membership(plan)
        batch = [(self._sequences[work.request_id], work) for work in plan.work]
        for sequence, work in batch:
            sequence.extend(work)
        drafts = self._draft(batch)
        drafted = time.perf_counter()
        masks = self._start_masks(batch, drafts)
        hidden = self._forward(batch, drafts)
        prompt_logprobs = self._prompt_logprobs(batch, drafts, hidden)
        logits = self._logits(batch, drafts, hidden)
        runs = self._runs(batch, drafts, masks.result())
        verified = time.perf_counter()
        results = self._commit(batch, runs, logits, prompt_logprobs)
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

    # -- draft --------------------------------------------------------------------------------------------------------

    def _draft(self, batch: Batch) -> dict[int, Draft]:
        """Every proposal of this step, by request id. What a grammar forces is proposed without asking a drafter."""
        drafts: dict[int, Draft] = {}
        for method, drafter in self.drafters.items():
            mine = []
            for sequence, work in batch:
                if work.method is not method or not (work.num_drafts or work.draft_catch_up):
                    continue
                forced = sequence.matcher.forced(work.num_drafts) if sequence.matcher and work.num_drafts else []
                if forced:
                    drafts[work.request_id] = Draft(forced)
                    work = replace(work, num_drafts=0)
                mine.append((sequence, work))
            if mine:
                proposals = drafter.propose(mine)
                for (_, work), draft in zip(mine, proposals, strict=True):
                    drafts.setdefault(work.request_id, draft)
        return drafts

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, batch: Batch, drafts: dict[int, Draft]) -> Tensor:
        """One forward over all rows; hidden states, [rows, hidden]."""
        runs = []
        for sequence, work in batch:
            tokens = sequence.rows(work) + drafts.get(work.request_id, NO_DRAFT).token_ids
            runs.append(input_batch.Run(sequence.block_ids, sequence.num_computed, tokens))
        token_ids, layout = input_batch.flatten(runs, self.kv_cache.block_size, self.model.device)
        return self.model.forward(token_ids, layout, self.kv_cache)

    def _logits(self, batch: Batch, drafts: dict[int, Draft], hidden: Tensor) -> Tensor:
        """Logits of the rows that are sampled or verified, [rows, vocab] float32."""
        wanted: list[int] = []
        end = 0
        for _, work in batch:
            depth = len(drafts.get(work.request_id, NO_DRAFT).token_ids)
            end += work.num_tokens + depth
            if work.samples:
                wanted.extend(range(end - depth - 1, end))
        return self.model.logits(hidden[torch.tensor(wanted, dtype=torch.int64, device=hidden.device)])

    def _prompt_logprobs(
        self, batch: Batch, drafts: dict[int, Draft], hidden: Tensor
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Logprobs of the prompt tokens behind each row of a chunk, for who wants them, by request id."""
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        row = 0
        for sequence, work in batch:
            first, row = row, row + work.num_tokens + len(drafts.get(work.request_id, NO_DRAFT).token_ids)
            count = sequence.params.logprobs.prompt
            start = sequence.num_computed + 1
            tokens = sequence.prompt[start : start + work.num_tokens] if count is not None else []
            if not tokens or count is None:
                continue
            parts: list[TokenLogprobs] = []
            for begin in range(0, len(tokens), PROMPT_LOGPROB_ROWS):
                targets = tokens[begin : begin + PROMPT_LOGPROB_ROWS]
                logits = self.model.logits(hidden[first + begin : first + begin + len(targets)])
                parts.extend(token_logprobs(logits, targets, count))
            found[work.request_id] = tuple(parts)
        return found

    # -- grammars -----------------------------------------------------------------------------------------------------

    def _start_masks(self, batch: Batch, drafts: dict[int, Draft]) -> Future[dict[int, Mask]]:
        """Ask the grammars what they allow at every row that is sampled or verified. Until the answer is there, nobody
        else may touch the matchers.
        """
        jobs = [
            (work.request_id, sequence.matcher, drafts.get(work.request_id, NO_DRAFT).token_ids)
            for sequence, work in batch
            if work.samples and sequence.matcher is not None
        ]
        if not jobs:
            nothing: Future[dict[int, Mask]] = Future()
            nothing.set_result({})
            return nothing
        return self._mask_worker.submit(_masks, jobs)

    def _runs(self, batch: Batch, drafts: dict[int, Draft], masks: dict[int, Mask]) -> list[Run]:
        """What there is to verify, in the order of the batch."""
        runs = []
        for sequence, work in batch:
            if work.samples:
                draft = drafts.get(work.request_id, NO_DRAFT)
                runs.append(Run(Positions(sequence, draft.token_ids, masks=masks.get(work.request_id)), draft))
        return runs

    # -- results ------------------------------------------------------------------------------------------------------

    def _commit(
        self, batch: Batch, runs: list[Run], logits: Tensor, prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]]
    ) -> tuple[SequenceResult, ...]:
        firsts = [0]
        for run in runs:
            firsts.append(firsts[-1] + run.depth + 1)
        raw = {
            index: logits[first : first + run.depth + 1].clone()
            for index, (run, first) in enumerate(zip(runs, firsts, strict=False))
            if run.positions.params.logprobs.completion is not None
        }
        dead = edit_(logits, [run.positions for run in runs])
        verdicts = self._verifier.verify(logits, runs)
        results = []
        index = -1
        for sequence, work in batch:
            start = sequence.num_computed + 1
            if not work.samples:
                sequence.commit(work, [], 0)
                result = SequenceResult(work.request_id, num_draft_computed=sequence.num_draft_computed)
            else:
                index += 1
                run, first = runs[index], firsts[index]
                dead_end = next((row - first for row in dead if first <= row < first + run.depth + 1), None)
                result = _emit(run, work, verdicts[index], dead_end, raw.get(index))
            if work.request_id in prompt_logprobs:
                result = replace(result, prompt_start=start, prompt_logprobs=prompt_logprobs[work.request_id])
            results.append(result)
        return tuple(results)


def _masks(jobs: list[tuple[int, Matcher, list[int]]]) -> dict[int, Mask]:
    return {request_id: matcher.masks(drafts) for request_id, matcher, drafts in jobs}


def _emit(run: Run, work: SequenceWork, verdict: Verdict, dead_end: int | None, raw: Tensor | None) -> SequenceResult:
    """Book a verdict in the sequence. What stands behind a dead end is void."""
    sequence, matcher = run.positions.sequence, run.positions.sequence.matcher
    token_ids, accepted, failure = verdict.token_ids, verdict.num_accepted, None
    if matcher is not None and matcher.failure is not None:
        token_ids, accepted, failure = [], 0, matcher.failure
    elif dead_end is not None and len(token_ids) > dead_end:
        # Behind drafts it is for the next step to say so, which stands right there.
        token_ids, accepted, failure = token_ids[:dead_end], dead_end, None if dead_end else DEAD_END
    logprobs = () if raw is None else completion_logprobs(raw, run.positions, token_ids)
    sequence.commit(work, token_ids, accepted)
    grammar_end = None
    if matcher is not None and failure is None:
        grammar_end, failure = _advance(matcher, token_ids, sequence.params.constraints.ends_with_grammar)
    return SequenceResult(
        work.request_id,
        tuple(token_ids),
        num_drafted=run.depth,
        num_accepted=accepted,
        acceptance=tuple(verdict.acceptance),
        num_draft_computed=sequence.num_draft_computed,
        logprobs=logprobs,
        grammar_end=grammar_end,
        failure=failure,
    )


def _advance(matcher: Matcher, token_ids: list[int], find_end: bool) -> tuple[int | None, str | None]:
    """Tell a grammar what was emitted. Where it ended, if that is to be found out, and why it broke down."""
    if find_end:
        for count, token in enumerate(token_ids, 1):
            if not matcher.advance([token]):
                return None, matcher.failure
            if matcher.ended:
                return count, None
    elif not matcher.advance(token_ids):
        return None, matcher.failure
    return None, None
