"""One step as the device is told of it: how many rows each sequence has, and what it cannot know by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.method import DRAFT_MODEL
from paceline.core.plan import SequenceWork
from paceline.runner.graphs import ROW_BUCKETS, SEQUENCE_BUCKETS, bucket
from paceline.runner.input_batch import logit_rows
from paceline.runner.seats import Seat
from paceline.runner.stage import StepArrays


@dataclass(slots=True)
class Part:
    """One sequence's part of a step.

    Attributes:
        num_drafts: those proposed, which may be fewer than planned.
        read: known tokens that the draft model reads in it, besides those it drafts from.
    """

    seat: Seat
    work: SequenceWork
    num_drafts: int = 0
    read: int = 0

    @property
    def num_rows(self) -> int:
        return self.work.num_tokens + self.num_drafts

    @property
    def drafts_by_model(self) -> bool:
        return self.num_drafts > 0 and self.work.method is DRAFT_MODEL


class DeviceStep:
    """Which rows a step has, once it is settled who drafts how deep.

    Attributes:
        parts: in the order of the plan.
        drafting: those of them that the draft model drafts for, the deepest first.
        longest: rows of one sequence, at most.
        replayed: it is of a recorded size, once it is padded: every sequence decodes, and there are not too many rows.
        num_seqs, num_rows: of the forward, padding included.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.drafting = sorted((part for part in parts if part.drafts_by_model), key=_by_depth)
        self.longest = max(part.num_rows for part in parts)
        self.num_seqs, self.num_rows = len(parts), sum(part.num_rows for part in parts)
        seqs, rows = bucket(self.num_seqs, SEQUENCE_BUCKETS), bucket(self.num_rows, ROW_BUCKETS)
        self.replayed = False
        if seqs is not None and rows is not None and all(p.work.samples and p.work.num_tokens == 1 for p in parts):
            self.replayed = True
            self.num_seqs, self.num_rows = seqs, rows

    @property
    def depths(self) -> list[int]:
        """Of those that draft by the draft model, in their order."""
        return [part.num_drafts for part in self.drafting]

    def logit_rows(self) -> list[int]:
        """The rows whose logits are wanted; as they stand, without padding."""
        return logit_rows((part.work.num_tokens, part.num_drafts, part.work.samples) for part in self.parts)

    def lay_out(self, arrays: StepArrays, noise_key: Sequence[int]) -> None:
        """Fill in what the device has to be told, in front of the padding."""
        parts, count = self.parts, len(self.parts)
        known = np.array([part.work.num_tokens for part in parts], dtype=np.int32)
        drafts = np.array([part.num_drafts for part in parts], dtype=np.int32)
        samples = np.array([part.work.samples for part in parts])
        rows, logits = known + drafts, np.where(samples, drafts + 1, 0)
        arrays.seats[:count] = [part.seat.index for part in parts]
        arrays.num_tokens[:count] = known
        arrays.num_drafts[:count] = drafts
        arrays.one_hot[:count] = [part.work.method is not DRAFT_MODEL for part in parts]
        for starts, lengths in ((arrays.query_starts, rows), (arrays.logit_starts, logits)):
            np.cumsum(lengths, out=starts[1 : count + 1])
            starts[count + 1 :] = starts[count]
        order = np.arange(count, dtype=np.int32)
        arrays.row_sequences[: int(rows.sum())] = order.repeat(rows)
        arrays.logit_sequences[: int(logits.sum())] = order.repeat(logits)
        if not self.replayed:
            self._tell_tokens(arrays)
        for index, part in enumerate(self.drafting):
            arrays.draft_seats[index], arrays.draft_depths[index] = part.seat.index, part.num_drafts
        arrays.noise_key[:] = noise_key

    def _tell_tokens(self, arrays: StepArrays) -> None:
        """Of sequences of which the host knows where they stand."""
        for part, first in zip(self.parts, arrays.query_starts.tolist(), strict=False):
            seat, count = part.seat, part.work.num_tokens
            if seat.num_launched == 0:
                tokens = seat.sequence.token_ids[seat.computed : seat.computed + count]
                arrays.host_tokens[first : first + count] = tokens


def _by_depth(part: Part) -> int:
    return -part.num_drafts
