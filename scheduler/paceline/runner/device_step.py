"""One step as the device is told of it: how many rows each sequence has, and who drafts how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.method import DRAFT_MODEL
from paceline.core.plan import SequenceWork
from paceline.runner.graphs import READ_BUCKETS, Size, StepSizes, bucket
from paceline.runner.seats import Seat
from paceline.runner.stage import StepArrays
from paceline_kernels.triton.state import FIRST_PASS_ROWS


@dataclass(slots=True)
class Part:
    """One sequence's part of a step.

    Attributes:
        proposed: its drafts, where the host has them; else the device knows.
    """

    seat: Seat
    work: SequenceWork
    proposed: Sequence[int] = ()

    @property
    def drafts_by_model(self) -> bool:
        return self.work.num_drafts > 0 and self.work.method is DRAFT_MODEL

    @property
    def num_logits(self) -> int:
        """Rows of logits."""
        return self.work.num_drafts + 1 if self.work.samples else 0

    @property
    def num_read(self) -> int:
        """Known tokens that the draft model reads at most, besides those it drafts from."""
        return self.work.rows_read(FIRST_PASS_ROWS)

    @property
    def read_until(self) -> int:
        """How far beyond what the target has computed so far the draft model reads."""
        return self.work.num_tokens - (FIRST_PASS_ROWS if self.drafts_by_model else 0)


class DeviceStep:
    """Which rows a step has, once it is settled who drafts how deep.

    Attributes:
        parts: in the order of the plan.
        drafting: those of them that the draft model drafts for, the deepest first.
        reading: those that it reads more of than it drafts from.
        num_read: rows of those, room that no run needs included.
        size: of the forward, padding included.
        replayed: that is a recorded size.
    """

    def __init__(self, parts: Sequence[Part], sizes: StepSizes) -> None:
        self.parts = parts
        self.drafting = sorted((part for part in parts if part.drafts_by_model), key=_by_depth)
        self.reading = [part for part in parts if part.num_read]
        read = sum(part.num_read for part in self.reading)
        self.num_read = (bucket(read, READ_BUCKETS) or read) if read else 0
        works = [part.work for part in parts]
        num_rows, longest = sum(work.num_rows for work in works), max(work.num_rows for work in works)
        decodes = all(work.samples and work.num_tokens == 1 for work in works)
        recorded = sizes.of(len(works), num_rows, longest, decodes)
        self.replayed = recorded is not None
        logits = None if decodes else max(1, sum(part.num_logits for part in parts))
        self.size = recorded or Size(len(works), num_rows, longest, logits)

    @property
    def depths(self) -> list[int]:
        """Drafts of each sequence that drafts by the draft model, in their order."""
        return [part.work.num_drafts for part in self.drafting]

    def lay_out(self, arrays: StepArrays, noise_key: Sequence[int], num_judged: int) -> None:
        """Fill in what the device has to be told, in front of the padding.

        Args:
            num_judged: parts that are, from the first on.
        """
        parts, count = self.parts, len(self.parts)
        known = np.array([part.work.num_tokens for part in parts], dtype=np.int32)
        drafts = np.array([part.work.num_drafts for part in parts], dtype=np.int32)
        samples = np.array([part.work.samples for part in parts])
        rows, logits = known + drafts, np.where(samples, drafts + 1, 0)
        arrays.seats[:count] = [part.seat.index for part in parts]
        arrays.num_tokens[:count] = known
        arrays.num_drafts[:count] = drafts
        arrays.num_read[:count] = [part.num_read for part in parts]
        arrays.one_hot[:count] = [part.work.method is not DRAFT_MODEL for part in parts]
        arrays.looks_up[:count] = [part.work.scores_ngram for part in parts]
        arrays.is_judged[:num_judged] = 1
        for starts, lengths in ((arrays.query_starts, rows), (arrays.logit_starts, logits)):
            np.cumsum(lengths, out=starts[1 : count + 1])
            starts[count + 1 :] = starts[count]
        order = np.arange(count, dtype=np.int32)
        arrays.row_sequences[: int(rows.sum())] = order.repeat(rows)
        arrays.logit_sequences[: int(logits.sum())] = order.repeat(logits)
        for index, part in enumerate(self.drafting):
            arrays.draft_seats[index], arrays.draft_depths[index] = part.seat.index, part.work.num_drafts
        for index, part in enumerate(self.reading):
            arrays.read_seats[index], arrays.read_until[index] = part.seat.index, part.read_until
            arrays.read_starts[index + 1] = arrays.read_starts[index] + part.num_read
        arrays.read_starts[len(self.reading) + 1 :] = arrays.read_starts[len(self.reading)]
        arrays.noise_key[:] = noise_key


def _by_depth(part: Part) -> int:
    return -part.work.num_drafts
