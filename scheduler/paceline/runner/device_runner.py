"""Executes plans on a GPU: launched one ahead, with nobody waiting between drafts, forward and verification.

    launch n      the host lays out the rows of step n; the device finds their tokens and positions itself
    launch n + 1  while step n runs
    result n      what was accepted comes back, and the mirrors of the sequences follow

What a sequence's newest tokens are, the host learns a step late. Steps in which it has to know them before (n-grams,
grammars, penalties, logprobs, a draft model far behind) wait for the step before them.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from paceline.core.method import DRAFT_MODEL, NGRAM, Method
from paceline.core.plan import Pending, SequenceResult, SequenceWork, StepPlan, StepResult, StepTimes
from paceline.models import Model
from paceline.runner import input_batch
from paceline.runner.drafter import Drafter, Scorer
from paceline.runner.graphs import ROW_BUCKETS, SEQUENCE_BUCKETS, Graphs, bucket
from paceline.runner.kv_cache import KVCache
from paceline.runner.model_runner import ModelRunner
from paceline.runner.seats import Seat, Seats, is_plain
from paceline_kernels import PagedBatch
from paceline_kernels.triton.rows import draft_rows, step_rows
from paceline_kernels.triton.state import SequenceTable, StepInput, StepOutput
from paceline_kernels.triton.verification import choose_drafts, judge

logger = logging.getLogger(__name__)

FIRST_PASS_ROWS = 2  # of each sequence in the draft model's first pass
MAX_LAUNCHED = 2
SPARE_SEATS = 8  # for who has finished, but was not released yet when a measured step fills all others
MOST_UNPLANNED = 64  # tokens that a draft model reads beyond what was planned, where a plan did not know how far it is
COMPILED_RUNS = (1, 2, 4, 8, 16, 64, 512)  # rows of the longest run, by which kernels differ
LOW_31 = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class _Done:
    """A step that nobody has to wait for."""

    step: StepResult

    def result(self) -> StepResult:
        return self.step


@dataclass(slots=True)
class _Part:
    """One sequence's part of a launched step.

    Attributes:
        num_drafts: those proposed, which may be fewer than planned.
        read: known tokens that the draft model reads in it, besides those it drafts from.
    """

    seat: Seat
    work: SequenceWork
    num_drafts: int = 0
    read: int = 0


@dataclass(slots=True)
class _Launched:
    """A step on the device."""

    runner: DeviceRunner
    step_id: int
    parts: list[_Part]
    output: Tensor
    num_seqs: int
    marks: _Marks
    step: StepResult | None = field(default=None)

    def result(self) -> StepResult:
        return self.runner.collect(self)


class DeviceRunner(ModelRunner):
    """Implements `StepRunner` for GPUs. Sequences whose logits only the model shapes run on the device alone; a step
    with any other goes the way of every `ModelRunner`.

    Args:
        draft: model and KV of the drafter that `drafters` holds for Method.DRAFT_MODEL, if there is one.
        max_num_seqs, max_num_batched_tokens, max_model_len, max_depth: limits of every plan.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        drafters: Mapping[Method, Drafter],
        seed: int,
        scorer: Scorer | None = None,
        *,
        draft: tuple[Model, KVCache] | None = None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_depth: int,
    ) -> None:
        super().__init__(model, kv_cache, drafters, seed, scorer)
        device, vocab = model.device, model.config.vocab_size
        self._draft_pair = draft
        self._max_depth = max_depth
        max_blocks = -(-max_model_len // kv_cache.block_size) + 1
        table = SequenceTable.allocate(
            max_num_seqs + SPARE_SEATS, max_blocks, max_depth, vocab if draft is not None else 1, device
        )
        self._seats = Seats(table)
        self._graphs = Graphs(device)
        self._pass_index = torch.zeros(1, dtype=torch.int32, device=device)
        most = bucket(max_num_seqs, SEQUENCE_BUCKETS) or max_num_seqs
        self._buckets = [size for size in SEQUENCE_BUCKETS if size <= most]
        self._starts = {n: torch.arange(0, n * most + 1, n, dtype=torch.int32, device=device) for n in (1, 2)}
        self._noise_key = (seed & LOW_31, (seed >> 31) & LOW_31)
        self._stage = _Stage(device, most, max(max_num_batched_tokens, ROW_BUCKETS[-1]))
        self._output = torch.zeros(StepOutput.size(most, max_depth), dtype=torch.int32, device=device)
        self._landings = [_pinned(len(self._output), device) for _ in range(MAX_LAUNCHED)]
        self._launched: deque[_Launched] = deque()
        self._turn = 0  # of the steps that may be under way
        self._lock = threading.RLock()  # launches and results come from different threads

    @torch.inference_mode()
    def record(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Record steps and draft passes of every size ahead of the first that needs it, on a GPU; nothing is served
        meanwhile.

        Args:
            progress: is told how many are recorded, and of how many.
        """
        if self.model.device.type != "cuda":
            return
        for model, cache in filter(None, ((self.model, self.kv_cache), self._draft_pair)):
            self._compile(model, cache)
        sizes, passes = list(self._step_sizes()), list(self._pass_sizes())
        for done, (seqs, rows, most) in enumerate(sizes):
            self._graphs.run(("step", seqs, rows, most), partial(self._verify, self._padding(seqs, rows), most, None))
            if progress is not None:
                progress(done + 1, len(sizes) + len(passes))
        for done, (size, first) in enumerate(passes):
            self._graphs.run(("draft", first, size), self._draft_pass(self._padding(1, 1), size, first=first))
            if progress is not None:
                progress(len(sizes) + done + 1, len(sizes) + len(passes))

    def _compile(self, model: Model, cache: KVCache) -> None:
        """Have kernels compiled for what is not recorded: prompts, and a draft model that catches up."""
        device = model.device
        for seqs, rows in itertools.product(self._buckets, COMPILED_RUNS):
            starts = torch.full((seqs + 1,), rows, dtype=torch.int32, device=device)
            starts[0] = 0
            nowhere = torch.full((seqs,), -1, dtype=torch.int32, device=device)
            zeros = torch.zeros(rows, dtype=torch.int64, device=device)
            batch = PagedBatch(
                query_starts=starts,
                context_lens=torch.zeros_like(nowhere),
                block_tables=self._seats.table.block_tables,
                block_size=cache.block_size,
                table_rows=nowhere,
                max_rows=rows,
                derived={"rows": (zeros, zeros - 1)},
            )
            model.logits(model.forward(zeros, batch, cache))

    def _step_sizes(self) -> Iterator[tuple[int, int, int]]:
        """Sequences, rows, and rows of one sequence at most."""
        for fewer, seqs in itertools.pairwise((0, *self._buckets)):
            for lower, rows in itertools.pairwise((0, *ROW_BUCKETS)):
                if fewer < rows and lower < seqs:
                    yield seqs, rows, 1
                if self._max_depth and fewer + 1 < rows and lower < seqs * (1 + self._max_depth):
                    yield seqs, rows, 1 + self._max_depth

    def _pass_sizes(self) -> Iterator[tuple[int, bool]]:
        if self._draft_pair is not None and self._max_depth:
            yield from itertools.product(self._buckets, (True, False))

    def _padding(self, seqs: int, rows: int) -> StepInput:
        """A step in which nothing happens."""
        view = self._stage.begin(0, seqs, rows)
        view.query_starts.fill(0)
        view.logit_starts.fill(0)
        return self._stage.send(0, seqs, rows)

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
            self._free()
        result = self._step(plan)
        for work in plan.work:
            seat = self._seats[work.request_id]
            seat.look()
            seat.stale = True
        return _Done(result)

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
            if work.request_id in self._exhausted:
                return False
            params = admitted.get(work.request_id)
            if params is None:
                if not self._seats[work.request_id].plain:
                    return False
            elif not is_plain(params):
                return False
        return True

    def _apply_membership(self, plan: StepPlan) -> None:
        for request_id in plan.released:
            self._seats.leave(request_id)
        super()._apply_membership(plan)
        for admission in plan.admitted:
            self._seats.take(self._sequences[admission.request_id])

    # -- launch -------------------------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> _Launched:
        marks = _Marks(self.model.device)
        self._turn = (self._turn + 1) % MAX_LAUNCHED
        parts = [_Part(self._seats[work.request_id], work) for work in plan.work]
        if any(self._must_know(part) for part in parts):
            self._finish_all()
        proposals = self._proposals(parts)
        self._seats.tell(part.seat for part in parts)
        self._tell_drafts(parts, proposals)
        self._catch_up(parts, marks)
        drafting = sorted((p for p in parts if p.num_drafts and p.work.method is DRAFT_MODEL), key=_by_depth)
        recorded = all(part.work.samples and part.work.num_tokens == 1 for part in parts)
        layout = self._lay_out(parts, drafting, plan.step_id, recorded)
        marks.begin()
        step = self._stage.send(self._turn, *layout)
        self._draft_passes(step, drafting)
        marks.drafted()
        self._forward_and_judge(step, parts, recorded)
        landing = self._landings[self._turn]
        size = StepOutput.size(len(step.seats), self._max_depth)
        landing[:size].copy_(self._output[:size], non_blocking=True)
        marks.ended()
        for part in parts:
            self._look_ahead(part)
        launched = _Launched(self, plan.step_id, parts, landing, len(step.seats), marks)
        self._launched.append(launched)
        return launched

    def _must_know(self, part: _Part) -> bool:
        """The host cannot lay out this part before the step that runs is through."""
        seat, work = part.seat, part.work
        if not seat.num_launched:
            return False
        if work.method is NGRAM or not work.num_drafts:
            return bool(work.num_drafts or work.draft_catch_up)
        running = self._launched[-1].parts if self._launched else []
        return not any(
            other.seat is seat and other.num_drafts and other.work.method is DRAFT_MODEL for other in running
        )

    def _proposals(self, parts: list[_Part]) -> dict[int, list[int]]:
        """How many drafts each part has; those that n-grams propose, by seat."""
        proposals: dict[int, list[int]] = {}
        looked_up = [part for part in parts if part.work.num_drafts and part.work.method is NGRAM]
        if looked_up:
            drafts = self.drafters[NGRAM].propose([(part.seat.sequence, part.work) for part in looked_up])
            for part, draft in zip(looked_up, drafts, strict=True):
                part.num_drafts = len(draft.token_ids)
                proposals[part.seat.index] = draft.token_ids
        for part in parts:
            if part.work.num_drafts and part.work.method is DRAFT_MODEL:
                part.num_drafts = part.work.num_drafts
        return proposals

    def _tell_drafts(self, parts: list[_Part], proposals: Mapping[int, list[int]]) -> None:
        known = {index: tokens for index, tokens in proposals.items() if tokens}
        if not known:
            return
        table = self._seats.table
        rows = np.concatenate([np.full(len(tokens), index) for index, tokens in known.items()])
        columns = np.concatenate([np.arange(len(tokens)) for tokens in known.values()])
        values = np.concatenate([np.array(tokens, dtype=np.int32) for tokens in known.values()])
        where = torch.from_numpy(np.stack([rows, columns])).to(table.drafts.device)
        table.drafts[where[0], where[1]] = torch.from_numpy(values).to(table.drafts.device)

    def _catch_up(self, parts: list[_Part], marks: _Marks) -> None:
        """Let the draft model read what it has not: all of it, or all but what its first pass reads anyway."""
        if self._draft_pair is None:
            return
        model, cache = self._draft_pair
        runs: list[input_batch.Run] = []
        for part in parts:
            seat, work = part.seat, part.work
            if work.method is not DRAFT_MODEL or not work.draft_catch_up or seat.num_launched:
                continue
            sequence = seat.sequence
            end = min(seat.computed + work.num_tokens, seat.draft_computed + work.draft_catch_up)
            if part.num_drafts:
                if seat.computed + work.num_tokens - end > MOST_UNPLANNED:
                    part.num_drafts = 0  # it cannot get to where drafts begin
                else:
                    end = seat.computed + work.num_tokens - FIRST_PASS_ROWS
            if end > seat.draft_computed:
                tokens = sequence.token_ids[seat.draft_computed : end]
                runs.append(input_batch.Run(sequence.block_ids, seat.draft_computed, tokens))
                part.read = len(tokens)
        if runs:
            marks.begin()
            model.forward(*input_batch.flatten(runs, cache.block_size, model.device), cache)

    def _lay_out(self, parts: list[_Part], drafting: list[_Part], step_id: int, recorded: bool) -> tuple[int, int]:
        """Lay out what the device has to be told: for how many sequences and rows, padding included. A step to be
        replayed is padded.
        """
        known = np.array([part.work.num_tokens for part in parts], dtype=np.int32)
        drafts = np.array([part.num_drafts for part in parts], dtype=np.int32)
        samples = np.array([part.work.samples for part in parts])
        counts, logit_counts = known + drafts, np.where(samples, drafts + 1, 0)
        num_rows, num_seqs = int(counts.sum()), len(parts)
        seqs, rows = num_seqs, num_rows
        if recorded:
            seqs = bucket(num_seqs, SEQUENCE_BUCKETS) or num_seqs
            rows = bucket(num_rows, ROW_BUCKETS) or num_rows
        stage = self._stage.begin(self._turn, seqs, rows)
        stage.seats[:num_seqs] = [part.seat.index for part in parts]
        stage.num_tokens[:num_seqs] = known
        stage.num_drafts[:num_seqs] = drafts
        stage.one_hot[:num_seqs] = [part.work.method is not DRAFT_MODEL for part in parts]
        for starts, lengths in ((stage.query_starts, counts), (stage.logit_starts, logit_counts)):
            starts[0] = 0
            np.cumsum(lengths, out=starts[1 : num_seqs + 1])
            starts[num_seqs + 1 :] = starts[num_seqs]
        order = np.arange(num_seqs, dtype=np.int32)
        stage.row_sequences[:num_rows] = order.repeat(counts)
        stage.logit_sequences[: int(logit_counts.sum())] = order.repeat(logit_counts)
        if not recorded:
            for i, part in enumerate(parts):
                seat, work = part.seat, part.work
                if seat.num_launched == 0:
                    first = int(stage.query_starts[i])
                    tokens = seat.sequence.token_ids[seat.computed : seat.computed + work.num_tokens]
                    stage.host_tokens[first : first + work.num_tokens] = tokens
        for i, part in enumerate(drafting):
            stage.draft_seats[i], stage.draft_depths[i] = part.seat.index, part.num_drafts
        stage.noise_key[:] = (*self._noise_key, step_id & LOW_31, 0)
        return seqs, rows

    def _draft_passes(self, step: StepInput, drafting: list[_Part]) -> None:
        """All passes of the draft model, each over the sequences whose depth goes beyond it."""
        if not drafting:
            return
        depths = [part.num_drafts for part in drafting]
        for number in range(depths[0]):
            count = sum(depth > number for depth in depths)
            size = bucket(count, SEQUENCE_BUCKETS)
            work = self._draft_pass(step, size or count, first=number == 0)
            if size is None:
                work()
            else:
                self._graphs.run(("draft", number == 0, size), work)

    def _draft_pass(self, step: StepInput, size: int, *, first: bool) -> Callable[[], None]:
        assert self._draft_pair is not None
        model, cache = self._draft_pair
        per_seq = FIRST_PASS_ROWS if first else 1
        seats, depths = step.draft_seats[:size], step.draft_depths[:size]
        starts = self._starts[per_seq][: size + 1]

        def work() -> None:
            if first:
                self._pass_index.zero_()
            else:
                self._pass_index.add_(1)
            table = self._seats.table
            rows = draft_rows(table, seats, depths, self._pass_index, starts, cache.block_size, per_seq)
            hidden = model.forward(*rows, cache)
            choose_drafts(model.logits(hidden[per_seq - 1 :: per_seq]), table, step, self._pass_index)

        return work

    def _forward_and_judge(self, step: StepInput, parts: list[_Part], recorded: bool) -> None:
        longest = max(part.work.num_tokens + part.num_drafts for part in parts)
        if recorded:
            most = 1 if longest == 1 else 1 + self._max_depth
            key = ("step", len(step.seats), len(step.row_sequences), most)
            if len(step.row_sequences) <= ROW_BUCKETS[-1]:
                self._graphs.run(key, lambda: self._verify(step, most, None))
                return
        firsts = np.cumsum([0, *(part.work.num_tokens + part.num_drafts for part in parts)])
        wanted: list[int] = []
        for part, first in zip(parts, firsts.tolist(), strict=False):
            if part.work.samples:
                newest = first + part.work.num_tokens - 1
                wanted.extend(range(newest, newest + part.num_drafts + 1))
        # Somebody has to tell the table how far sequences are, also where there are no logits.
        rows = torch.tensor(wanted or [0]).to(self.model.device, non_blocking=True)
        self._verify(step, longest, rows)

    def _verify(self, step: StepInput, max_rows: int, wanted: Tensor | None) -> None:
        """Forward, logits of the wanted rows or of all, and verdicts."""
        table, block_size = self._seats.table, self.kv_cache.block_size
        token_ids, batch = step_rows(table, step, block_size, max_rows)
        hidden = self.model.forward(token_ids, batch, self.kv_cache)
        logits = self.model.logits(hidden if wanted is None else hidden[wanted])
        output = StepOutput.view(self._output, len(step.seats), self._max_depth)
        judge(logits, token_ids, table, step, output)

    def _look_ahead(self, part: _Part) -> None:
        """Where the sequence will be, as far as the host can tell."""
        seat, work = part.seat, part.work
        seat.draft_computed += part.read
        if work.samples:
            seat.num_launched += 1
        else:
            seat.computed += work.num_tokens

    # -- results ------------------------------------------------------------------------------------------------------

    def _finish_all(self) -> None:
        while self._launched:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        launched = self._launched[0]
        launched.marks.wait()
        output = StepOutput.view(launched.output, launched.num_seqs, self._max_depth)
        accepted, tokens = output.num_accepted.tolist(), output.tokens.tolist()
        labels = output.labels.view(torch.float32).tolist()
        rows = zip(launched.parts, accepted, tokens, labels, strict=False)
        results = tuple(self._committed(part, count, row[: count + 1], some) for part, count, row, some in rows)
        launched.step = StepResult(launched.step_id, results, launched.marks.times())
        self._launched.popleft()

    def _committed(self, part: _Part, accepted: int, tokens: list[int], labels: list[float]) -> SequenceResult:
        """Commit one sequence's part of a step to its mirror."""
        seat, work, sequence = part.seat, part.work, part.seat.sequence
        depth = part.num_drafts
        sequence.num_draft_computed += part.read
        if not work.samples:
            sequence.commit(work, [], 0)
            return SequenceResult(work.request_id, num_draft_computed=sequence.num_draft_computed)
        if depth and work.method is DRAFT_MODEL:
            sequence.num_draft_computed = len(sequence) + depth - 1
        lives = self._sequences.get(work.request_id) is sequence
        scorer = self._scorer if work.scores_ngram and lives else None
        scored: tuple[float, ...] = ()
        if scorer is not None and not (work.num_drafts and work.method is NGRAM):
            scored = scorer.score(sequence, tokens)
        sequence.commit(work, tokens, accepted)
        seat.num_launched -= 1
        if not seat.num_launched:
            seat.look()
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


def _by_depth(part: _Part) -> int:
    return -part.num_drafts


class _Stage:
    """Host memory in which a step's input is laid out, and its place on the device, which recorded steps read.

    Each of the steps that may be under way has host memory of its own.
    """

    def __init__(self, device: torch.device, most_seqs: int, most_rows: int) -> None:
        size = StepInput.size(most_seqs, most_seqs, most_rows)
        self._most_seqs = most_seqs
        self._here = [_pinned(size, device) for _ in range(MAX_LAUNCHED)]
        self._there = torch.zeros(size, dtype=torch.int32, device=device)

    def begin(self, turn: int, num_seqs: int, num_rows: int) -> _StageView:
        """Room for a step, filled with what stands for padding."""
        view = _StageView(StepInput.view(self._here[turn], self._most_seqs, num_seqs, num_rows))
        for array in (view.num_tokens, view.num_drafts, view.one_hot, view.draft_depths):
            array.fill(0)
        for array in (view.seats, view.row_sequences, view.logit_sequences, view.host_tokens, view.draft_seats):
            array.fill(-1)
        return view

    def send(self, turn: int, num_seqs: int, num_rows: int) -> StepInput:
        size = StepInput.size(self._most_seqs, num_seqs, num_rows)
        self._there[:size].copy_(self._here[turn][:size], non_blocking=True)
        return StepInput.view(self._there, self._most_seqs, num_seqs, num_rows)


class _StageView:
    """The parts of a step's input as arrays."""

    def __init__(self, step: StepInput) -> None:
        self.seats = step.seats.numpy()
        self.num_tokens = step.num_tokens.numpy()
        self.num_drafts = step.num_drafts.numpy()
        self.one_hot = step.one_hot.numpy()
        self.query_starts = step.query_starts.numpy()
        self.logit_starts = step.logit_starts.numpy()
        self.row_sequences = step.row_sequences.numpy()
        self.logit_sequences = step.logit_sequences.numpy()
        self.host_tokens = step.host_tokens.numpy()
        self.draft_seats = step.draft_seats.numpy()
        self.draft_depths = step.draft_depths.numpy()
        self.noise_key = step.noise_key.numpy()


class _Marks:
    """When a step began on the device, had its drafts and ended."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._moments: list[float] = []
        self._on_gpu = device.type == "cuda"
        self._begun = False

    def begin(self) -> None:
        """Its work is about to be launched, if none was before: time for which the device waits is not the step's."""
        if not self._begun:
            self._begun = True
            self._mark()

    def drafted(self) -> None:
        self._mark()

    def ended(self) -> None:
        self._mark()

    def _mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._moments.append(time.perf_counter())

    def wait(self) -> None:
        if self._on_gpu:
            self._events[-1].synchronize()

    def times(self) -> StepTimes:
        if self._on_gpu:
            began, drafted, ended = self._events
            draft, verify = began.elapsed_time(drafted) / 1e3, drafted.elapsed_time(ended) / 1e3
        else:
            began_at, drafted_at, ended_at = self._moments
            draft, verify = drafted_at - began_at, ended_at - drafted_at
        return StepTimes(draft, verify, 0.0, draft + verify)


def _pinned(size: int, device: torch.device) -> Tensor:
    """Host memory that the device can read by itself."""
    return torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
