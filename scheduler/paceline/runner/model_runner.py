"""Executes plans on a model: draft, one flattened forward, verify, commit."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.grammar import Mask, Matcher
from paceline.core.method import Method
from paceline.core.plan import (
    LONGEST_MATCH,
    SequenceResult,
    SequenceWork,
    StepPlan,
    StepResult,
    StepTimes,
    TokenLogprobs,
)
from paceline.core.sequence import Sequence
from paceline.errors import NotFinite, PacelineError, ResourceExhausted
from paceline.models import Model
from paceline.runner import input_batch
from paceline.runner.drafter import Draft, Drafter, Scorer
from paceline.runner.kv_cache import KVCache
from paceline.runner.logprobs import completion_logprobs, token_logprobs
from paceline.runner.memory import give_back
from paceline.runner.positions import Positions
from paceline.runner.sampler import edit_
from paceline.runner.verification import Run, Verdict, Verifier

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 64  # prompt positions whose logits are held at a time
DEAD_END = "no token is allowed here by the grammar and the other constraints together"
OUT_OF_MEMORY = "out of memory: the server could not compute this request's part of a step, not even alone"

NO_DRAFT = Draft([])

Planned = list[tuple[Sequence, SequenceWork]]
Entry = tuple[Sequence, SequenceWork, Draft]
Batch = list[Entry]
LogitsOf = Callable[[Batch], Tensor | None]
Masks = Callable[[], dict[int, Mask]]  # what the grammars allow, by request id; waits for it


# Not frozen: docs/decisions/012.
@dataclass(slots=True)
class _Judged:
    """What a work comes to, before anything is booked: until then the step may be taken back.

    Attributes:
        run: None if the work does not sample; then nothing is emitted.
        error: why the request fails; then nothing is booked.
    """

    run: Run | None = None
    token_ids: tuple[int, ...] = ()
    num_accepted: int = 0
    acceptance: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    failure: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: PacelineError | None = None


class ModelRunner:
    """Implements `StepRunner`. Owns the mirror of admitted sequences, the target's KV and the drafters.

    Where a step runs out of memory it is computed in halves, and a request that does not fit alone fails alone. For
    that, everything that takes memory comes before the first change to a sequence. One whose logits are no numbers
    fails alone, too.

    Args:
        scorer: the n-gram drafter, for work that wants it scored.

    Attributes:
        sequences: the mirrors, by request id.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        drafters: Mapping[Method, Drafter],
        seed: int,
        scorer: Scorer | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.drafters = drafters
        self.scorer = scorer
        self.verifier = Verifier(seed, model.device)
        self.sequences: dict[int, Sequence] = {}
        self._inputs = input_batch.InputBatch(kv_cache.block_size, model.device)
        self._failed: dict[int, PacelineError] = {}  # until they are released
        # Grammars are asked while the forward runs, by a thread that never computes tensors.
        self._mask_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-masks")

    def execute(self, plan: StepPlan) -> StepResult:
        self.begin(plan)
        return self.compute(plan)

    def begin(self, plan: StepPlan) -> None:
        """Take over what a plan says of sequences and their blocks."""
        self._apply_membership(plan)
        for work in plan.work:
            if work.request_id not in self._failed:
                self.sequences[work.request_id].extend(work)

    def failure(self, request_id: int) -> SequenceResult | None:
        """What comes of a request that has failed, which a plan made meanwhile may still name; None if it has not."""
        error = self._failed.get(request_id)
        return None if error is None else SequenceResult(request_id, error=error)

    def fail(self, request_id: int, error: PacelineError) -> SequenceResult:
        """The request ends here, alone. If it was released after this step was launched, nobody is told again."""
        if request_id in self.sequences:
            logger.error("a request fails in a step, alone: %s", error)
            self._failed[request_id] = error
        return SequenceResult(request_id, error=error)

    @torch.inference_mode()
    def compute(self, plan: StepPlan, logits_of: LogitsOf = lambda batch: None) -> StepResult:
        """Do the work of a plan that was begun.

        Args:
            logits_of: a faster way to the logits of a batch, [rows, vocab] float32, which this runner may change; None
                where it does not go. Asked again for each half of a batch for which memory ended.
        """
        if not plan.work:
            return StepResult(plan.step_id, ())
        began = time.perf_counter()
        results = {w.request_id: failure for w in plan.work if (failure := self.failure(w.request_id)) is not None}
        going = [work for work in plan.work if work.request_id not in results]
        batch = self._draft([(self.sequences[work.request_id], work) for work in going])
        drafted = time.perf_counter()
        judged, verifying = self._judge(batch, self._start_masks(batch), logits_of) if batch else ([], 0.0)
        for entry, found in judged:
            result = self._book(entry, found)
            results[result.request_id] = result
        ended = time.perf_counter()
        times = StepTimes(drafted - began, verifying, ended - drafted - verifying, ended - began)
        return StepResult(plan.step_id, tuple([results[work.request_id] for work in plan.work]), times)

    def _apply_membership(self, plan: StepPlan) -> None:
        for request_id in plan.released:
            del self.sequences[request_id]
            self._failed.pop(request_id, None)
            for drafter in self.drafters.values():
                drafter.release(request_id)
        for admission in plan.admitted:
            self.sequences[admission.request_id] = Sequence(admission)

    # -- draft --------------------------------------------------------------------------------------------------------

    def _draft(self, planned: Planned) -> Batch:
        """The batch with the draft of every sequence. What a grammar forces is proposed without asking a drafter."""
        drafts: dict[int, Draft] = {}
        for method, drafter in self.drafters.items():
            mine = []
            for sequence, work in planned:
                if not (work.num_drafts or work.draft_catch_up) or work.method is not method:
                    continue
                forced = sequence.matcher.forced(work.num_drafts) if sequence.matcher and work.num_drafts else []
                if forced:
                    drafts[work.request_id] = Draft(forced, is_forced=True)
                only_reads = forced or self._is_behind(sequence, work)
                mine.append((sequence, replace(work, num_drafts=0) if only_reads else work))
            if mine:
                proposals = self._propose(drafter, mine)
                for (_, work), draft in zip(mine, proposals, strict=True):
                    drafts.setdefault(work.request_id, draft)
        return [(sequence, work, drafts.get(work.request_id, NO_DRAFT)) for sequence, work in planned]

    def _propose(self, drafter: Drafter, mine: Planned) -> list[Draft]:
        """Without memory for drafts, the step goes on without them."""
        before = [sequence.num_draft_computed for sequence, _ in mine]
        try:
            return drafter.propose(mine)
        except torch.OutOfMemoryError as error:
            logger.warning("out of memory while drafting for %d requests: %s", len(mine), str(error))
        give_back(self.model.device)
        for (sequence, _), computed in zip(mine, before, strict=True):
            sequence.num_draft_computed = computed
        return [NO_DRAFT] * len(mine)

    def _is_behind(self, sequence: Sequence, work: SequenceWork) -> bool:
        """A plan that was made before a draft was dropped leaves its draft model too little to read."""
        if work.method is not Method.DRAFT_MODEL or not work.num_drafts:
            return False
        return sequence.num_draft_computed + work.draft_catch_up < len(sequence)

    # -- in halves ----------------------------------------------------------------------------------------------------

    def _judge(self, batch: Batch, masks: Masks, logits_of: LogitsOf) -> tuple[list[tuple[Entry, _Judged]], float]:
        """Every work with what it comes to, and the seconds that the forwards took."""
        try:
            judged, seconds = self._compute(batch, masks, logits_of)
            return list(zip(batch, judged, strict=True)), seconds
        except torch.OutOfMemoryError as error:
            masks()  # whoever fails must not leave the matchers to two threads
            logger.warning("out of memory in a step of %d requests: %s", len(batch), str(error))
        # Behind the handler: until it is left, the error holds the tensors of the attempt.
        give_back(self.model.device)
        if len(batch) == 1:
            return [(batch[0], _Judged(error=ResourceExhausted(OUT_OF_MEMORY)))], 0.0
        middle = len(batch) // 2
        first, seconds = self._judge(batch[:middle], masks, logits_of)
        second, more = self._judge(batch[middle:], masks, logits_of)
        return first + second, seconds + more

    def _compute(self, batch: Batch, masks: Masks, logits_of: LogitsOf) -> tuple[list[_Judged], float]:
        """All that takes memory; no sequence is changed, and KV is written where the next attempt writes the same."""
        began = time.perf_counter()
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        logits = logits_of(batch)
        if logits is None:
            logits, prompt_logprobs = self._forward(batch)
        witnesses = _witnesses(logits)
        runs = self._runs(batch, masks())
        seconds = time.perf_counter() - began
        raw = _raw(logits, runs)
        dead_ends = _first_of(edit_(logits, [run.positions for run in runs]), runs)
        verdicts = self.verifier.verify(logits, runs)
        # Behind the verdicts, which a GPU has been waited for.
        broken = _first_of([row for row, x in enumerate(witnesses()) if not math.isfinite(x)], runs)
        sampled = iter([_judged(*found) for found in zip(runs, verdicts, broken, dead_ends, raw, strict=True)])
        judged = [next(sampled) if work.samples else _Judged() for _, work, _ in batch]
        if prompt_logprobs:
            for found, (_, work, _) in zip(judged, batch, strict=True):
                found.prompt_logprobs = prompt_logprobs.get(work.request_id)
        return judged, seconds

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, batch: Batch) -> tuple[Tensor, dict[int, tuple[TokenLogprobs, ...]]]:
        """One forward over all rows: the logits of those that are sampled or verified, [rows, vocab] float32, and what
        `_prompt_logprobs` finds.
        """
        runs = [
            input_batch.TokenRun(sequence.block_ids, sequence.num_computed, sequence.rows(work) + draft.token_ids)
            for sequence, work, draft in batch
        ]
        token_ids, layout = self._inputs.flatten(runs)
        parts = [(work.num_tokens, len(draft.token_ids), work.samples) for _, work, draft in batch]
        wanted = input_batch.logit_rows(parts)
        if not any(map(reads_prompt, batch)):
            return self.model.logits_of(token_ids, layout, self.kv_cache, wanted), {}
        hidden = self.model.forward(token_ids, layout, self.kv_cache)
        prompt_logprobs = self._prompt_logprobs(batch, hidden)  # first: it takes memory for a while
        rows = torch.tensor(wanted, dtype=torch.int64, device=hidden.device)
        return self.model.logits(hidden[rows]), prompt_logprobs

    def _prompt_logprobs(self, batch: Batch, hidden: Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Logprobs of the prompt tokens behind each row of a chunk, for who wants them, by request id."""
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        *firsts, _ = input_batch.row_bounds(work.num_tokens + len(draft.token_ids) for _, work, draft in batch)
        for (sequence, work, _), first in zip(batch, firsts, strict=True):
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

    def _start_masks(self, batch: Batch) -> Masks:
        """Ask the grammars what they allow at every row that is sampled or verified. Until the answer is there, nobody
        else may touch the matchers.
        """
        jobs = [
            (work.request_id, sequence.matcher, draft.token_ids)
            for sequence, work, draft in batch
            if work.samples and sequence.matcher is not None
        ]
        return self._mask_worker.submit(_masks, jobs).result if jobs else dict

    def _runs(self, batch: Batch, masks: dict[int, Mask]) -> list[Run]:
        """What there is to verify, in the order of the batch."""
        return [
            Run(Positions(sequence, draft.token_ids, masks=masks.get(work.request_id)), draft)
            for sequence, work, draft in batch
            if work.samples
        ]

    # -- results ------------------------------------------------------------------------------------------------------

    def _book(self, entry: Entry, judged: _Judged) -> SequenceResult:
        """Advance the mirror, and tell of it."""
        sequence, work, _ = entry
        start = sequence.num_computed + 1
        if judged.error is not None:
            return self.fail(work.request_id, judged.error)
        if judged.run is None:
            sequence.commit(work, [], 0)
            result = SequenceResult(work.request_id, num_draft_computed=sequence.num_draft_computed)
        else:
            result = _emit(work, judged.run, judged, self.scorer if work.scores_ngram else None)
        if judged.prompt_logprobs is not None:
            result = replace(result, prompt_start=start, prompt_logprobs=judged.prompt_logprobs)
        return result


def reads_prompt(entry: Entry) -> bool:
    """Logprobs of prompt tokens are wanted, which take the hidden states of their rows."""
    sequence, _, _ = entry
    return sequence.params.logprobs.prompt is not None and sequence.num_computed + 1 < sequence.num_prompt_tokens


def _witnesses(logits: Tensor) -> Callable[[], list[float]]:
    """Gives one logit of each row, as it is now, before any is forbidden: a state that is no number makes all logits of
    its row such. A GPU is waited for only when they are asked for.
    """
    if logits.is_cuda:
        return logits[:, 0].clone().tolist
    values: list[float] = logits[:, 0].tolist()
    return lambda: values


def _raw(logits: Tensor, runs: list[Run]) -> list[Tensor | None]:
    """For each run a copy of its logits, [depth + 1, vocab], if it wants logprobs."""
    wanted = [run.positions.params.logprobs.completion is not None for run in runs]
    if not any(wanted):
        return [None] * len(runs)
    rows = torch.split(logits, [run.depth + 1 for run in runs])
    return [own.clone() if is_wanted else None for own, is_wanted in zip(rows, wanted, strict=True)]


def _first_of(rows: list[int], runs: list[Run]) -> list[int | None]:
    """For each run the first of its rows that is among these, which are ascending."""
    if not rows:
        return [None] * len(runs)
    bounds = itertools.pairwise(input_batch.row_bounds(run.depth + 1 for run in runs))
    return [next((row - first for row in rows if first <= row < end), None) for first, end in bounds]


def _masks(jobs: list[tuple[int, Matcher, list[int]]]) -> dict[int, Mask]:
    return {request_id: matcher.masks(drafts) for request_id, matcher, drafts in jobs}


def _judged(run: Run, verdict: Verdict, broken: int | None, dead_end: int | None, raw: Tensor | None) -> _Judged:
    """What stands behind a dead end is void, and rows behind a rejection are nobody's."""
    if broken is not None and broken <= verdict.num_accepted:
        return _Judged(error=NotFinite())
    matcher = run.positions.sequence.matcher
    token_ids, accepted, failure = verdict.token_ids, verdict.num_accepted, None
    if matcher is not None and matcher.failure is not None:
        token_ids, accepted, failure = [], 0, matcher.failure
    elif dead_end is not None and len(token_ids) > dead_end:
        # Behind drafts it is for the next step to say so, which stands right there.
        token_ids, accepted, failure = token_ids[:dead_end], dead_end, None if dead_end else DEAD_END
    logprobs = () if raw is None else completion_logprobs(raw, run.positions, token_ids)
    return _Judged(run, tuple(token_ids), accepted, tuple(verdict.acceptance), logprobs, failure)


def _emit(work: SequenceWork, run: Run, judged: _Judged, scorer: Scorer | None) -> SequenceResult:
    """Book a verdict in the sequence."""
    sequence, matcher = run.positions.sequence, run.positions.sequence.matcher
    token_ids, failure = list(judged.token_ids), judged.failure
    scored = () if scorer is None else _score(work, sequence, scorer, token_ids)
    sequence.commit(work, token_ids, judged.num_accepted)
    grammar_end = None
    if matcher is not None and failure is None:
        grammar_end, failure = _advance(matcher, token_ids, sequence.params.constraints.ends_with_grammar)
    return SequenceResult(
        work.request_id,
        judged.token_ids,
        num_drafted=run.depth,
        num_accepted=judged.num_accepted,
        acceptance=judged.acceptance,
        scored=scored,
        match=0 if scorer is None else _match(sequence, scorer),
        is_forced=run.draft.is_forced,
        num_draft_computed=sequence.num_draft_computed,
        logprobs=judged.logprobs,
        grammar_end=grammar_end,
        failure=failure,
    )


def _score(work: SequenceWork, sequence: Sequence, scorer: Scorer, token_ids: list[int]) -> tuple[float, ...]:
    """How n-grams would have done, unless they drafted, or a grammar would have in their stead."""
    if (work.num_drafts and work.method is Method.NGRAM) or _is_forced(sequence):
        return ()
    return scorer.score(sequence, token_ids)


def _match(sequence: Sequence, scorer: Scorer) -> int:
    """What n-grams can go on from; what a grammar forces is drafted in their stead."""
    return LONGEST_MATCH if _is_forced(sequence) else scorer.match(sequence)


def _is_forced(sequence: Sequence) -> bool:
    return sequence.matcher is not None and bool(sequence.matcher.forced(1))


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
