"""Executes plans on a GPU: launched one ahead, with nobody waiting between drafts, forward and verification.

    launch n      the host lays out the rows of step n; the device finds their tokens and positions itself
    launch n + 1  while step n runs
    result n      what was accepted comes back, and the mirrors of the sequences follow

What a sequence's newest tokens are, the host learns a step late. Steps in which it has to know them before (grammars,
bad words, logprobs) wait for the step before them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from paceline.core.method import NGRAM
from paceline.core.plan import Done, Pending, SequenceResult, SequenceWork, StepPlan, StepResult, StepTimes
from paceline.errors import NotFinite
from paceline.runner.device_passes import DevicePasses, ModelAndKV
from paceline.runner.device_step import DeviceStep, Part
from paceline.runner.marks import Marks
from paceline.runner.memory import SPARE_SEATS, give_back
from paceline.runner.model_runner import Batch, LogitsOf, ModelRunner, reads_prompt
from paceline.runner.seats import Seats, is_plain
from paceline.runner.stage import MAX_LAUNCHED, pinned
from paceline_kernels.triton.state import SequenceTable

logger = logging.getLogger(__name__)

LOW_31: Final = 0x7FFFFFFF


@dataclass(slots=True)
class _Launched:
    """A step on the device.

    Attributes:
        landing: where its output comes back.
        num_seqs: padding included.
    """

    runner: DeviceRunner
    step_id: int
    parts: Sequence[Part]
    landing: Tensor
    num_seqs: int
    marks: Marks
    step: StepResult | None = None

    def result(self) -> StepResult:
        return self.runner.collect(self)


class DeviceRunner:
    """Implements `PipelinedRunner` for GPUs. Sequences whose tokens the device can choose by itself run there alone; a
    step with any other waits for a `ModelRunner`, which chooses the tokens of those by the logits that the device has
    computed for all. It also keeps the mirrors of all sequences.

    Args:
        host: on the same GPU.
        draft: model and KV of the drafter that `host` has for Method.DRAFT_MODEL, if there is one.
        max_num_seqs, max_num_batched_tokens, max_model_len, max_depth: limits of every plan.
    """

    def __init__(
        self,
        host: ModelRunner,
        seed: int,
        *,
        draft: ModelAndKV | None = None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_depth: int,
    ) -> None:
        self.host = host
        self._device = host.model.device
        max_blocks = -(-max_model_len // host.kv_cache.block_size) + 1
        seats, longest = max_num_seqs + SPARE_SEATS, max_model_len + max_depth + 1
        vocab, draws = host.model.config.vocab_size, draft is not None
        table = SequenceTable.allocate(seats, longest, max_blocks, max_depth, vocab, self._device, draws=draws)
        self._seats = Seats(table)
        self._passes = DevicePasses(
            ModelAndKV(host.model, host.kv_cache),
            draft,
            table,
            looks_up=NGRAM in host.drafters,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_depth=max_depth,
        )
        self._seed = (seed & LOW_31, (seed >> 31) & LOW_31)
        self._landings = [pinned(self._passes.output_words, self._device) for _ in range(MAX_LAUNCHED)]
        self._launched: deque[_Launched] = deque()
        self._turn = 0  # of the steps that may be under way
        self._lock = threading.RLock()  # launches and results come from different threads

    def record(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Record steps of every size ahead of the first that needs it; see `DevicePasses.record`."""
        self._passes.record(progress)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Start a step, in the order of plans. At most one other may be without a result."""
        with self._lock:
            while len(self._launched) >= MAX_LAUNCHED:
                self._finish_oldest()
            asking = self._asking(plan)
            if asking or not plan.work:
                self._finish_all()
                asking = self._asking(plan)  # more may have failed by what was under way
            self._begin(plan)
            if plan.work and not asking:
                launched = self._try_launch(plan, [Part(self._seats[work.request_id], work) for work in plan.work])
                if launched is not None:
                    return launched
        # Nothing is launched now, and nobody waits for the lock.
        return Done(self._compute_together(plan, asking) if asking else self._compute_on_host(plan))

    def collect(self, launched: _Launched) -> StepResult:
        """The result of a launched step, once it is there."""
        if launched.step is None:
            launched.marks.wait()
            with self._lock:
                while launched.step is None:
                    self._finish_oldest()
        return launched.step

    def _asking(self, plan: StepPlan) -> set[int]:
        """Those of the plan that have failed, or need the host to shape their logits or to look at them."""
        admitted = {admission.request_id: admission.params for admission in plan.admitted}
        asking = set()
        for work in plan.work:
            request_id = work.request_id
            params = admitted.get(request_id)
            plain = self._seats[request_id].plain if params is None else is_plain(params, self._seats.vocab)
            if not plain or self.host.failure(request_id) is not None:
                asking.add(request_id)
        return asking

    def _begin(self, plan: StepPlan) -> None:
        """Take over what a plan says of sequences and their blocks."""
        for request_id in plan.released:
            self._seats.leave(request_id)
        self.host.begin(plan)
        for admission in plan.admitted:
            self._seats.take(self.host.sequences[admission.request_id])

    # -- launch -------------------------------------------------------------------------------------------------------

    def _try_launch(self, plan: StepPlan, parts: list[Part], beside: Sequence[Part] = ()) -> _Launched | None:
        """None where memory ends; then nothing is launched, and the table may have any facts of these sequences."""
        with self._lock:
            try:
                return self._launch(plan, parts, beside)
            except torch.OutOfMemoryError as error:
                logger.warning("out of memory in a step of %d requests: %s", len(parts) + len(beside), str(error))
            # Behind the handler: until it is left, the error holds the tensors of the attempt.
            self._finish_all()
            give_back(self._device)
            return None

    def _launch(self, plan: StepPlan, parts: list[Part], beside: Sequence[Part] = ()) -> _Launched:
        """
        Args:
            beside: parts that are computed with the others; what their logits say is for the host to find out.
        """
        marks = Marks(self._device)
        self._turn = (self._turn + 1) % MAX_LAUNCHED
        self._passes.look_up(self._seats.tell([part.seat for part in (*parts, *beside)]))
        self._seats.propose((part.seat, part.proposed) for part in beside)
        step = DeviceStep([*parts, *beside], self._passes.sizes)
        stage, size = self._passes.stage, (step.size.num_seqs, step.size.num_rows)
        noise_key = (*self._seed, plan.step_id & LOW_31, 0)
        step.lay_out(stage.begin(self._turn, *size), noise_key, num_judged=len(parts))
        marks.begin()
        sent = stage.send(self._turn, *size)
        self._passes.catch_up(sent, step.num_read)
        self._passes.draft(sent, step.depths)
        marks.drafted()
        self._passes.verify(sent, step)
        landing = self._landings[self._turn]
        self._passes.bring_back(landing, step.size.num_seqs)
        marks.ended()
        launched = _Launched(self, plan.step_id, parts, landing, step.size.num_seqs, marks)
        self._launched.append(launched)
        return launched

    # -- with the host ------------------------------------------------------------------------------------------------

    def _compute_together(self, plan: StepPlan, asking: set[int]) -> StepResult:
        """A step in which the host chooses the tokens of some, by logits that the device computes for all."""
        began = time.perf_counter()
        own = [Part(self._seats[work.request_id], work) for work in plan.work if work.request_id not in asking]
        launched: list[_Launched | None] = []  # once

        def logits_of(batch: Batch) -> Tensor | None:
            beside = self._beside(batch)
            first, count = (sum(part.num_logits for part in parts) for parts in (own, beside))
            if launched or first + count > self._passes.most_logits or any(map(reads_prompt, batch)):
                return None
            launched.append(self._try_launch(plan, own, beside))
            return None if launched[0] is None else self._passes.logits(first, first + count)

        others = tuple(work for work in plan.work if work.request_id in asking)
        found = self._compute_on_host(replace(plan, work=others), logits_of)
        is_shared = any(launched)
        if own and not launched:
            launched.append(self._try_launch(plan, own))
        started = launched[0] if launched else None
        rest = replace(plan, work=tuple(part.work for part in own))
        mine = self._compute_on_host(rest) if started is None else self.collect(started)
        results = {result.request_id: result for result in (*found.sequences, *mine.sequences)}
        times = _times(found.times, mine.times, is_shared, time.perf_counter() - began)
        return StepResult(plan.step_id, tuple(results[work.request_id] for work in plan.work), times)

    def _compute_on_host(self, plan: StepPlan, logits_of: LogitsOf = lambda batch: None) -> StepResult:
        result = self.host.compute(plan, logits_of)
        for work in plan.work:
            self._seats[work.request_id].stale = True
        return result

    def _beside(self, batch: Batch) -> list[Part]:
        """The host's sequences, as the device is to compute them. Whoever has drafted, what was drafted is told as what
        n-grams propose is, and the draft model has read what it had to.
        """
        return [
            Part(
                self._seats[work.request_id],
                SequenceWork(work.request_id, work.num_tokens, work.samples, len(draft.token_ids), NGRAM),
                draft.token_ids,
            )
            for _, work, draft in batch
        ]

    # -- results ------------------------------------------------------------------------------------------------------

    def _finish_all(self) -> None:
        while self._launched:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        launched = self._launched[0]
        launched.marks.wait()
        output = self._passes.read(launched.landing, launched.num_seqs)
        accepted, tokens = output.num_accepted.tolist(), output.tokens.tolist()
        labels = output.labels.view(torch.float32).tolist()
        scores, matches, broken = output.scored.tolist(), output.match.tolist(), output.broken.tolist()
        rows = zip(launched.parts, accepted, tokens, labels, scores, matches, broken, strict=False)  # padding is behind
        results = tuple(
            self._failure(part, is_broken) or self._commit(part, count, row[: count + 1], some, score, match)
            for part, count, row, some, score, match, is_broken in rows
        )
        launched.step = StepResult(launched.step_id, results, launched.marks.times())
        self._launched.popleft()

    def _failure(self, part: Part, is_broken: int) -> SequenceResult | None:
        """The result of a request that fails by this step, or has by the one before, which was not through when this
        was launched; None of any other.
        """
        request_id = part.work.request_id
        return self.host.failure(request_id) or (self.host.fail(request_id, NotFinite()) if is_broken else None)

    def _commit(
        self, part: Part, accepted: int, tokens: list[int], labels: list[float], score: int, match: int
    ) -> SequenceResult:
        """Advance the mirror of one sequence by its part of a step, as the device has advanced the table."""
        seat, work, sequence = part.seat, part.work, part.seat.sequence
        until = sequence.num_computed + part.read_until
        read = max(sequence.num_draft_computed, min(sequence.num_draft_computed + part.num_read, until))
        sequence.num_draft_computed = read
        if not work.samples:
            sequence.commit(work, [], 0)
            return SequenceResult(work.request_id, num_draft_computed=sequence.num_draft_computed)
        if part.drafts_by_model and read >= until:
            sequence.num_draft_computed = len(sequence) + work.num_drafts - 1
        scored: tuple[float, ...] = ()
        if work.scores_ngram and score >= 0 and not (work.num_drafts and work.method is NGRAM):
            scored = (1.0,) * score + (0.0,) * (score < len(tokens))
        sequence.commit(work, tokens, accepted)
        seat.tokens_told = len(sequence)
        return SequenceResult(
            work.request_id,
            tuple(tokens),
            num_drafted=work.num_drafts,
            num_accepted=accepted,
            acceptance=tuple(labels[: min(accepted + 1, work.num_drafts)]),
            scored=scored,
            match=match if work.scores_ngram else 0,
            num_draft_computed=sequence.num_draft_computed,
        )


def _times(host: StepTimes, device: StepTimes, is_shared: bool, total: float) -> StepTimes:
    """The times of a step in which both had a part. While a shared forward runs, the host waits for it."""
    draft, verify = host.draft + device.draft, device.verify + host.verify * (not is_shared)
    return StepTimes(draft, verify, max(0.0, total - draft - verify), total)
