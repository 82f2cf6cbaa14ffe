"""The models on a GPU: draft passes, and a forward with its verdicts; recorded once for each size, then replayed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from paceline.core.plan import LONGEST_MATCH, LONGEST_NGRAM
from paceline.models import Model
from paceline.runner.device_step import DeviceStep
from paceline.runner.graphs import READ_BUCKETS, ROW_BUCKETS, Graphs, Size, StepSizes, bucket
from paceline.runner.kv_cache import KVCache
from paceline.runner.stage import Stage
from paceline_kernels import PagedBatch
from paceline_kernels.triton.ngrams import look_up, score_and_look_up
from paceline_kernels.triton.rows import draft_rows, logit_rows, read_rows, step_rows
from paceline_kernels.triton.state import FIRST_PASS_ROWS, SequenceTable, StepInput, StepOutput
from paceline_kernels.triton.verification import choose_drafts, judge

COMPILED_RUNS: Final = (1, 2, 4, 8, 16, 24, 40, 64, 512)  # rows of the longest run, by which kernels differ


class ModelAndKV(NamedTuple):
    """A model, and the KV of what it has read."""

    model: Model
    kv_cache: KVCache


class DevicePasses:
    """Launches what a step computes, and waits for the device only where a size is recorded.

    Args:
        table: of the sequences; the device changes it, and whoever tells it of new ones.
        looks_up: n-grams may draft.
        max_num_seqs, max_num_batched_tokens, max_depth: of any step.

    Attributes:
        stage: in which steps are laid out.
        sizes: of the steps that are recorded.
    """

    def __init__(
        self,
        target: ModelAndKV,
        draft: ModelAndKV | None,
        table: SequenceTable,
        *,
        looks_up: bool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_depth: int,
    ) -> None:
        device = target.model.device
        self._target, self._draft, self._table, self._looks_up = target, draft, table, looks_up
        self._max_depth = max_depth
        self._graphs = Graphs(device)
        self.sizes = StepSizes(max_num_seqs, max_depth)
        most = self.sizes.most
        self._starts = {
            rows: torch.arange(0, rows * most + 1, rows, dtype=torch.int32, device=device)
            for rows in (1, FIRST_PASS_ROWS)
        }
        self.stage = Stage(device, most, max(max_num_batched_tokens, ROW_BUCKETS[-1]))
        self._output = torch.zeros(StepOutput.size(most, max_depth), dtype=torch.int32, device=device)
        # Of the last step, if it has no more rows, for who chooses tokens otherwise.  # [most rows, vocab]
        self._logits = torch.zeros(self.sizes.most_logits, target.model.config.vocab_size, device=device)

    @property
    def output_words(self) -> int:
        """Room that the output of any step takes, in int32."""
        return len(self._output)

    # -- steps --------------------------------------------------------------------------------------------------------

    def look_up(self, seats: Tensor | None) -> None:
        """What n-grams propose for sequences of which the table was just told, [num_seqs] int64, if there are any."""
        if seats is not None and self._looks_up:
            look_up(self._table, seats, LONGEST_NGRAM, LONGEST_MATCH)

    def catch_up(self, sent: StepInput, num_read: int) -> None:
        """Let the draft model read what it has not, in that many rows; there may be none."""
        if not num_read:
            return
        work = self._reading(sent, num_read)
        if num_read in READ_BUCKETS:
            self._graphs.run(("catch up", num_read), work)
        else:
            work()

    def draft(self, sent: StepInput, depths: Sequence[int]) -> None:
        """All passes of the draft model, each over the sequences whose depth goes beyond it.

        Args:
            depths: of `sent.draft_seats`, the deepest first; may be empty.
        """
        for number in range(depths[0] if depths else 0):
            count = sum(depth > number for depth in depths)
            size = bucket(count, self.sizes.sequences)
            work = self._draft_pass(sent, size or count, first=number == 0)
            if size is None:
                work()
            else:
                self._graphs.run(("draft", number == 0, size), work)

    def verify(self, sent: StepInput, step: DeviceStep) -> None:
        """The forward of the target, and what its logits say of every sequence."""
        if step.replayed:
            self._graphs.run(step.size, lambda: self._forward_and_judge(sent, step.size))
        else:
            self._forward_and_judge(sent, step.size)

    @property
    def most_logits(self) -> int:
        """Rows of logits of a step that `logits` can tell of, at most."""
        return len(self._logits)

    def logits(self, first: int, end: int) -> Tensor:
        """Rows of the last step, as the model computed them where nobody was judged, [end - first, vocab] float32; the
        caller's until the next step.
        """
        return self._logits[first:end]

    def bring_back(self, landing: Tensor, num_seqs: int) -> None:
        """Copy the output of the last step to the host, as soon as it is there."""
        size = StepOutput.size(num_seqs, self._max_depth)
        landing[:size].copy_(self._output[:size], non_blocking=True)

    def read(self, landing: Tensor, num_seqs: int) -> StepOutput:
        """What was brought back, once it is there."""
        return StepOutput.view(landing, num_seqs, self._max_depth)

    def _reading(self, sent: StepInput, num_read: int) -> Callable[[], None]:
        assert self._draft is not None
        model, cache = self._draft

        def work() -> None:
            model.forward(*read_rows(self._table, sent, num_read, cache.block_size, num_read), cache)

        return work

    def _draft_pass(self, sent: StepInput, size: int, *, first: bool) -> Callable[[], None]:
        assert self._draft is not None
        model, cache = self._draft
        per_seq = FIRST_PASS_ROWS if first else 1
        seats, depths = sent.draft_seats[:size], sent.draft_depths[:size]
        starts = self._starts[per_seq][: size + 1]

        def work() -> None:
            rows = draft_rows(self._table, seats, depths, starts, cache.block_size, first=first)
            hidden = model.forward(*rows, cache)
            choose_drafts(model.logits(hidden[per_seq - 1 :: per_seq]), self._table, sent, first=first)

        return work

    def _forward_and_judge(self, sent: StepInput, size: Size) -> None:
        """Forward, logits and verdicts, and what n-grams propose behind them. Somebody has to tell the table how far
        sequences are, so there are logits even where nobody samples.
        """
        model, cache = self._target
        token_ids, batch = step_rows(self._table, sent, cache.block_size, size.longest)
        hidden = model.forward(token_ids, batch, cache)
        if size.num_logits is not None:
            hidden = hidden[logit_rows(sent, size.num_logits)]
        output = self.read(self._output, len(sent.seats))
        kept = self._logits[: len(hidden)] if len(hidden) <= len(self._logits) else None
        judge(model.logits(hidden, kept), token_ids, self._table, sent, output)
        if self._looks_up:
            score_and_look_up(self._table, sent, output, LONGEST_NGRAM, LONGEST_MATCH)

    # -- ahead of the first -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def record(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Record steps and draft passes of every size, on a GPU; nothing is served meanwhile.

        Args:
            progress: is told how many are recorded, and of how many.
        """
        if self._target.model.device.type != "cuda":
            return
        for pair in filter(None, (self._target, self._draft)):
            self._compile(*pair)
        jobs = [*map(self._step_job, self.sizes.all()), *self._pass_jobs()]
        for done, job in enumerate(jobs, 1):
            job()
            if progress is not None:
                progress(done, len(jobs))

    def _compile(self, model: Model, cache: KVCache) -> None:
        """Have kernels compiled for what is not recorded: prompts, which a draft model reads, too."""
        device = model.device
        for seqs, rows in itertools.product(self.sizes.sequences, COMPILED_RUNS):
            starts = torch.full((seqs + 1,), rows, dtype=torch.int32, device=device)
            starts[0] = 0
            nowhere = torch.full((seqs,), -1, dtype=torch.int32, device=device)
            zeros = torch.zeros(rows, dtype=torch.int64, device=device)
            batch = PagedBatch(
                query_starts=starts,
                context_lens=torch.zeros_like(nowhere),
                block_tables=self._table.block_tables,
                block_size=cache.block_size,
                table_rows=nowhere,
                max_rows=rows,
                derived={"rows": (zeros, zeros - 1)},
            )
            model.logits(model.forward(zeros, batch, cache))

    def _step_job(self, size: Size) -> Callable[[], None]:
        def job() -> None:
            sent = self._padding(size.num_seqs, size.num_rows)  # before anything is recorded
            self._graphs.run(size, lambda: self._forward_and_judge(sent, size))

        return job

    def _pass_jobs(self) -> Iterator[Callable[[], None]]:
        """One for each pass that `catch_up` and `draft` replay."""
        if self._draft is not None and self._max_depth:
            for rows in reversed(READ_BUCKETS):
                yield self._reading_job(rows)
            for size, first in itertools.product(reversed(self.sizes.sequences), (True, False)):
                yield self._pass_job(size, first)

    def _reading_job(self, rows: int) -> Callable[[], None]:
        return lambda: self.catch_up(self._padding(1, 1), rows)

    def _pass_job(self, size: int, first: bool) -> Callable[[], None]:
        def job() -> None:
            sent = self._padding(1, 1)
            self._graphs.run(("draft", first, size), self._draft_pass(sent, size, first=first))

        return job

    def _padding(self, seqs: int, rows: int) -> StepInput:
        """A step in which nothing happens."""
        self.stage.begin(0, seqs, rows)
        return self.stage.send(0, seqs, rows)
