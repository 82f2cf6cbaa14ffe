"""CUDA graphs: a step is recorded once for each size and replayed, which spares hundreds of launches."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from paceline_kernels.recording import record

# Sequences and rows of recorded steps; between them, a step is padded. The cost model has buckets there, too, but for
# the last of the sequences.
SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
READ_BUCKETS = (8, 16, 32, 64, 128, 256, 512)  # rows that a draft model reads besides those it drafts from
ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# Of steps with prompts; their sequences, at most, are those of any step, or so many.
MIXED_ROW_BUCKETS = tuple(rows for rows in ROW_BUCKETS if rows >= 32)
MIXED_SEQUENCE_BUCKETS = (4, 32)


def bucket(count: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest that holds so many; None if none does."""
    index = bisect.bisect_left(buckets, count)
    return buckets[index] if index < len(buckets) else None


class Size(NamedTuple):
    """How large the forward of a step is.

    Attributes:
        longest: rows of one sequence, at most.
        num_logits: rows of logits; None if they are those of the forward.
    """

    num_seqs: int
    num_rows: int
    longest: int
    num_logits: int | None


class StepSizes:
    """The sizes at which steps are recorded.

    Attributes:
        most: sequences of any step.
        sequences: of steps that decode.
    """

    def __init__(self, max_num_seqs: int, max_depth: int) -> None:
        self.most = bucket(max_num_seqs, SEQUENCE_BUCKETS) or max_num_seqs
        self._max_depth = max_depth
        self.sequences = (*(size for size in SEQUENCE_BUCKETS if size < self.most), self.most)
        self._mixed_sequences = (*(size for size in MIXED_SEQUENCE_BUCKETS if size < self.most), self.most)

    @property
    def most_logits(self) -> int:
        """Rows of logits of any of them."""
        return max(size.num_logits or size.num_rows for size in self.all())

    def of(self, num_seqs: int, num_rows: int, longest: int, decodes: bool) -> Size | None:
        """The smallest that holds such a step, whose sequences all decode or not; None if none does."""
        seqs = bucket(num_seqs, self.sequences if decodes else self._mixed_sequences)
        rows = bucket(num_rows, ROW_BUCKETS if decodes else MIXED_ROW_BUCKETS)
        if seqs is None or rows is None:
            return None
        return self._decoding(seqs, rows, longest > 1) if decodes else self._mixed(seqs, rows)

    def all(self) -> list[Size]:
        """Each one that `of` tells, the largest first: they share a pool of memory, in which smaller ones find room."""
        sizes = []
        for lower, rows in itertools.pairwise((0, *ROW_BUCKETS)):
            for fewer, seqs in itertools.pairwise((0, *self.sequences)):
                if self._max_depth and fewer + 1 < rows and lower < seqs * (1 + self._max_depth):
                    sizes.append(self._decoding(seqs, rows, True))
                if fewer < rows and lower < seqs:
                    sizes.append(self._decoding(seqs, rows, False))
        for rows in MIXED_ROW_BUCKETS:
            for fewer, seqs in itertools.pairwise((0, *self._mixed_sequences)):
                if fewer < rows:
                    sizes.append(self._mixed(seqs, rows))
        return sorted(sizes, key=lambda size: size.num_rows, reverse=True)

    def _mixed(self, seqs: int, rows: int) -> Size:
        return Size(seqs, rows, rows, min(rows, seqs * (1 + self._max_depth)))

    def _decoding(self, seqs: int, rows: int, with_drafts: bool) -> Size:
        return Size(seqs, rows, 1 + self._max_depth * with_drafts, None)


class Graphs:
    """Runs pieces of work that read and write tensors in fixed places; recorded on a GPU, as they are elsewhere.

    All share one pool of memory: they run one after the other, and what one leaves in passing nobody reads later.
    """

    def __init__(self, device: torch.device) -> None:
        self._records = device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do the work of this key. The first time it is done, then recorded: what is compiled or set up at first use is
        there by then, and recording does nothing.
        """
        if key in self._graphs:
            self._graphs[key].replay()
            return
        work()
        if not self._records:
            return
        self._graphs[key] = graph = record(work, self._pool)
        self._pool = graph.pool()
