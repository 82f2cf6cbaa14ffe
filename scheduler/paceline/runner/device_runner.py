"""Executes plans on a GPU: launched one ahead, with nobody waiting between drafts, forward and verification.

    launch n      the host lays out the rows of step n; the device finds their tokens and positions itself
    launch n + 1  while step n runs
    result n      what was accepted comes back, and the mirrors of the sequences follow

What a sequence's newest tokens are, the host learns a step late. Steps in which it has to know them before (n-grams,
grammars, penalties, logprobs, a draft model far behind) wait for the step before them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from paceline.core.method import DRAFT_MODEL, NGRAM
from paceline.core.plan import Done, Pending, SequenceResult, StepPlan, StepResult
from paceline.runner.device_passes import FIRST_PASS_ROWS, DevicePasses, ModelAndKV
from paceline.runner.device_step import DeviceStep, Part
from paceline.runner.input_batch import Run
from paceline.runner.marks import Marks
from paceline.runner.memory import give_back
from paceline.runner.model_runner import ModelRunner
from paceline.runner.seats import Seats, is_plain
from paceline.runner.stage import MAX_LAUNCHED, pinned
from paceline_kernels.triton.state import SequenceTable

logger = logging.getLogger(__name__)

SPARE_SEATS: Final = 8  # for who has finished, but was not released yet when a measured step fills all others
MOST_UNPLANNED: Final = 64  # tokens that a draft model reads beyond its plan, which did not know how far it was
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
    step: StepResult | None = field(default=None)

    def result(self) -> StepResult:
        return self.runner.collect(self)


class DeviceRunner:
    """Implements `PipelinedRunner` for GPUs. Sequences whose logits only the model shapes run on the device alone; a
    step with any other is left to a `ModelRunner`, which also keeps the mirrors of all sequences.

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
        self._has_draft_model = draft is not None
        max_blocks = -(-max_model_len // host.kv_cache.block_size) + 1
        table = SequenceTable.allocate(
            max_num_seqs + SPARE_SEATS,
            max_blocks,
            max_depth,
            host.model.config.vocab_size if self._has_draft_model else 1,
            self._device,
        )
        self._seats = Seats(table)
        self._passes = DevicePasses(
            ModelAndKV(host.model, host.kv_cache),
            draft,
            table,
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
            on_device = bool(plan.work) and self._on_device(plan)
            if not on_device:
                self._finish_all()
            self._begin(plan)
            if on_device:
                try:
                    return self._launch(plan)
                except torch.OutOfMemoryError as error:
                    logger.warning("out of memory in a step of %d requests: %s", len(plan.work), str(error))
                self._finish_all()
        # Nothing is launched now, and nobody waits for the lock.
        if on_device:
            give_back(self._device)
        result = self.host.compute(plan)
        for work in plan.work:
            self._seats[work.request_id].moved()
        return Done(result)

    def collect(self, launched: _Launched) -> StepResult:
        """The result of a launched step, once it is there."""
        if launched.step is None:
            launched.marks.wait()
            with self._lock:
                while launched.step is None:
                    self._finish_oldest()
        return launched.step

    def _on_device(self, plan: StepPlan) -> bool:
        """No sequence of the plan needs the host to shape its logits or to look at them."""
        admitted = {admission.request_id: admission.params for admission in plan.admitted}
        for work in plan.work:
            if self.host.is_exhausted(work.request_id):
                return False
            params = admitted.get(work.request_id)
            if not (self._seats[work.request_id].plain if params is None else is_plain(params)):
                return False
        return True

    def _begin(self, plan: StepPlan) -> None:
        """Take over what a plan says of sequences and their blocks."""
        for request_id in plan.released:
            self._seats.leave(request_id)
        self.host.begin(plan)
        for admission in plan.admitted:
            self._seats.take(self.host.sequences[admission.request_id])

    # -- launch -------------------------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> _Launched:
        marks = Marks(self._device)
        self._turn = (self._turn + 1) % MAX_LAUNCHED
        parts = [Part(self._seats[work.request_id], work) for work in plan.work]
        if any(self._must_know(part) for part in parts):
            self._finish_all()
        proposals = self._propose(parts)
        self._seats.tell(part.seat for part in parts)
        self._seats.tell_drafts(proposals)
        self._catch_up(parts, marks)
        step = DeviceStep(parts)
        stage, size = self._passes.stage, (step.num_seqs, step.num_rows)
        step.lay_out(stage.begin(self._turn, *size), (*self._seed, plan.step_id & LOW_31, 0))
        marks.begin()
        sent = stage.send(self._turn, *size)
        self._passes.draft(sent, step.depths)
        marks.drafted()
        self._passes.verify(sent, step)
        landing = self._landings[self._turn]
        self._passes.bring_back(landing, step.num_seqs)
        marks.ended()
        for part in parts:
            part.seat.look_ahead(part.work, part.read)
        launched = _Launched(self, plan.step_id, parts, landing, step.num_seqs, marks)
        self._launched.append(launched)
        return launched

    def _must_know(self, part: Part) -> bool:
        """The host cannot lay out this part before the step that runs is through."""
        seat, work = part.seat, part.work
        if not seat.num_launched:
            return False
        if work.method is NGRAM or not work.num_drafts:
            return bool(work.num_drafts or work.draft_catch_up)
        running = self._launched[-1].parts if self._launched else ()
        return not any(other.seat is seat and other.drafts_by_model for other in running)

    def _propose(self, parts: Sequence[Part]) -> dict[int, list[int]]:
        """Settle how many drafts each part has. Those that n-grams propose, by seat."""
        proposals: dict[int, list[int]] = {}
        looked_up = []
        for part in parts:
            if not part.work.num_drafts:
                continue
            if part.work.method is NGRAM:
                looked_up.append(part)
            else:
                part.num_drafts = part.work.num_drafts
        if looked_up:
            drafts = self.host.drafters[NGRAM].propose([(part.seat.sequence, part.work) for part in looked_up])
            for part, draft in zip(looked_up, drafts, strict=True):
                part.num_drafts = len(draft.token_ids)
                proposals[part.seat.index] = draft.token_ids
        return proposals

    def _catch_up(self, parts: Sequence[Part], marks: Marks) -> None:
        """Let the draft model read what it has not: all of it, or all but what its first pass reads anyway."""
        if not self._has_draft_model:
            return
        runs: list[Run] = []
        for part in parts:
            seat, work = part.seat, part.work
            if work.method is not DRAFT_MODEL or not work.draft_catch_up or seat.num_launched:
                continue
            known = seat.computed + work.num_tokens
            end = min(known, seat.draft_computed + work.draft_catch_up)
            if part.num_drafts and known - end > MOST_UNPLANNED:
                part.num_drafts = 0  # it cannot get to where drafts begin
            elif part.num_drafts:
                end = known - FIRST_PASS_ROWS
            if end > seat.draft_computed:
                tokens = seat.sequence.token_ids[seat.draft_computed : end]
                runs.append(Run(seat.sequence.block_ids, seat.draft_computed, tokens))
                part.read = len(tokens)
        if runs:
            marks.begin()
            self._passes.catch_up(runs)

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
        rows = zip(launched.parts, accepted, tokens, labels, strict=False)  # padding is behind
        results = tuple(self._commit(part, count, row[: count + 1], some) for part, count, row, some in rows)
        launched.step = StepResult(launched.step_id, results, launched.marks.times())
        self._launched.popleft()

    def _commit(self, part: Part, accepted: int, tokens: list[int], labels: list[float]) -> SequenceResult:
        """Advance the mirror of one sequence by its part of a step."""
        seat, work, sequence = part.seat, part.work, part.seat.sequence
        depth = part.num_drafts
        sequence.num_draft_computed += part.read
        if not work.samples:
            sequence.commit(work, [], 0)
            return SequenceResult(work.request_id, num_draft_computed=sequence.num_draft_computed)
        if part.drafts_by_model:
            sequence.num_draft_computed = len(sequence) + depth - 1
        lives = self.host.sequences.get(work.request_id) is sequence
        scorer = self.host.scorer if work.scores_ngram and lives else None
        scored: tuple[float, ...] = ()
        if scorer is not None and not (work.num_drafts and work.method is NGRAM):
            scored = scorer.score(sequence, tokens)
        sequence.commit(work, tokens, accepted)
        seat.landed()
        return SequenceResult(
            work.request_id,
            tuple(tokens),
            num_drafted=depth,
            num_accepted=accepted,
            acceptance=tuple(labels[: min(accepted + 1, depth)]),
            scored=scored,
            match=0 if scorer is None else scorer.match(sequence),
            num_draft_computed=sequence.num_draft_computed,
        )
