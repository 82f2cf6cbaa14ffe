"""From what steps took to a cost model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from paceline.core.config import SchedulerConfig
from paceline.core.cost_model import ROW_BUCKETS, SEQUENCE_BUCKETS, CostModel, buckets_up_to
from paceline.core.method import Method
from paceline.engine.profile_shapes import FEW_PASSES, Shape, short_context

LEAST_PASS = 0.05  # of the first pass, what others cost at least, however small the difference of two measurements is


@dataclass(frozen=True, slots=True)
class Sample:
    """What a shape took.

    Attributes:
        rows: that there really were: an n-gram may have less to propose.
        target, draft: seconds.
    """

    shape: Shape
    rows: int
    target: float
    draft: float


def fit(samples: Sequence[Sample], config: SchedulerConfig, first_rows: int) -> CostModel:
    """Terms one after the other: context, then sequences, then what is left for rows."""
    samples = _undisturbed(samples)
    plain = [sample for sample in samples if sample.shape.method is not Method.DRAFT_MODEL]
    short = [sample for sample in plain if sample.shape.context == short_context(config)]
    per_context = _per_context(plain)
    per_sequence = _per_sequence(short, per_context)
    left: dict[int, list[float]] = {}
    for sample in short:
        rest = sample.target - per_context * sample.shape.reads - per_sequence * sample.shape.sequences
        left.setdefault(sample.rows, []).append(max(0.0, rest))
    rows = buckets_up_to(config.max_num_batched_tokens, ROW_BUCKETS)
    seconds = _at_buckets(rows, {count: sum(rests) / len(rests) for count, rests in left.items()})
    if len(plain) == len(samples):
        return CostModel(rows, seconds, per_context, per_sequence=per_sequence)
    drafting = _Drafting(samples, reads_apart=first_rows > 1)
    per_row, reading = drafting.reading()
    sequences = buckets_up_to(config.max_num_seqs, SEQUENCE_BUCKETS)
    return CostModel(
        rows,
        seconds,
        per_context,
        sequences,
        _at_buckets(sequences, drafting.passes()),
        per_row,
        per_sequence,
        _at_buckets(sequences, drafting.first_passes()),
        first_rows,
        reading,
    )


def _undisturbed(samples: Sequence[Sample]) -> list[Sample]:
    """The samples as if no step had been disturbed. More of the same kind never costs less: what took longer than
    something larger was disturbed, and took at most as long.
    """
    least: dict[tuple[object, ...], Sample] = {}
    cleaned = []
    for sample in sorted(samples, key=lambda sample: sample.rows, reverse=True):
        larger = least.get(sample.shape.kind, sample)
        sample = replace(sample, target=min(sample.target, larger.target), draft=min(sample.draft, larger.draft))
        least[sample.shape.kind] = sample
        cleaned.append(sample)
    return cleaned


def _per_context(samples: Sequence[Sample]) -> float:
    """Seconds per token: by decodes of equally many sequences, of short and of long context. By least squares, so that
    those that differ most count most.
    """
    decodes = [sample for sample in samples if sample.shape.decodes]
    pairs = [
        (far.shape.reads - near.shape.reads, far.target - near.target)
        for near, far in itertools.permutations(decodes, 2)
        if near.rows == far.rows and near.shape.reads < far.shape.reads
    ]
    if not pairs:
        return 0.0
    return max(0.0, sum(reads * seconds for reads, seconds in pairs) / sum(reads**2 for reads, _ in pairs))


def _per_sequence(samples: Sequence[Sample], per_context: float) -> float:
    """Seconds per sequence: by steps of equally many rows, of few and of many sequences."""
    slopes = [
        (many.target - few.target - per_context * (many.shape.reads - few.shape.reads))
        / (many.shape.sequences - few.shape.sequences)
        for few, many in itertools.permutations(samples, 2)
        if few.rows == many.rows and few.shape.sequences < many.shape.sequences
    ]
    return max(0.0, median(slopes)) if slopes else 0.0


class _Drafting:
    """What drafting took, by sequences and depth."""

    def __init__(self, samples: Sequence[Sample], reads_apart: bool) -> None:
        self._reads_apart = reads_apart
        # What a step without drafts spends before its forward is no price of drafting.
        without = {s.shape.sequences: s.draft for s in samples if s.shape.decodes}
        self._by_depth: dict[int, dict[int, float]] = {}
        self._reading: dict[int, float] = {}  # by rows
        for sample in samples:
            shape = sample.shape
            if shape.method is not Method.DRAFT_MODEL:
                continue
            seconds = max(0.0, sample.draft - without.get(shape.sequences, 0.0))
            if shape.read_ahead:
                self._reading[shape.read_ahead] = seconds
            else:
                self._by_depth.setdefault(shape.passes, {})[shape.sequences] = seconds

    def first_passes(self) -> dict[int, float]:
        """Seconds of pass 0 by sequences, with all that drafting takes once."""
        return self._by_depth[FEW_PASSES]

    def passes(self) -> dict[int, float]:
        """Seconds of each pass behind it."""
        few, more = min(self._by_depth), max(self._by_depth)
        if few == more:
            return self._by_depth[few]
        return {
            count: max((taken - first) / (more - few), LEAST_PASS * first)
            for count, taken in self._by_depth[more].items()
            if (first := self._by_depth[few].get(count)) is not None
        }

    def reading(self) -> tuple[float, float]:
        """Seconds of a row that is read besides; and of a forward of such rows, if that is one of its own."""
        taken = {rows: max(0.0, seconds - self._by_depth[FEW_PASSES][1]) for rows, seconds in self._reading.items()}
        if not taken:
            return 0.0, 0.0
        few, many = min(taken), max(taken)
        if few == many:
            return (0.0, taken[many]) if self._reads_apart else (taken[many] / many, 0.0)
        per_row = max(0.0, taken[many] - taken[few]) / (many - few)
        return per_row, max(0.0, taken[few] - few * per_row)


def _at_buckets(buckets: Sequence[int], measured: dict[int, float]) -> list[float]:
    """Seconds at each bucket. Beyond the last that was measured they rise as steeply as any line up to it from half as
    far or less: what looks free by an accident of two measurements would be used without end. From a neighbour a line
    is as steep as a stair between the two, or as chance has it.
    """
    counts = sorted(measured)
    seconds = np.maximum.accumulate([measured[count] for count in counts])
    last = counts[-1]
    lines = [(count, before) for count, before in zip(counts, seconds, strict=True) if 2 * count <= last]
    slopes = [(seconds[-1] - before) / (last - count) for count, before in lines]
    beyond = np.maximum(0, np.array(buckets) - last) * max(slopes, default=0.0)
    return [float(value) for value in np.interp(buckets, counts, seconds) + beyond]
