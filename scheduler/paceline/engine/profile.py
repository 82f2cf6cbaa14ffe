"""Measures what steps cost on this machine, by taking some of every kind.

Sequences are made up and nothing is computed before them: where their context should lie is whatever the KV memory
holds, which costs as much to read as anything else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from paceline.core.config import SchedulerConfig
from paceline.core.cost_model import ROW_BUCKETS, SEQUENCE_BUCKETS, CostModel, buckets_up_to
from paceline.core.method import Method
from paceline.core.params import SamplingParams, SequenceParams, Verification
from paceline.core.plan import Admission, SequenceWork, StepPlan, StepResult, StepRunner

MIN_ROUNDS, MAX_ROUNDS = 3, 15  # the first measures each shape twice, the others once, or short ones alone
FIRST_BLOCKS = 64  # rows up to which stairs are measured before counts between them; others come last
LONGEST_STEP = 0.06  # of the time for all; what would take longer is extrapolated
SHORT_STEPS = 2.0  # times the shortest: in those, drafts are a large share, and every per cent counts
MOST_DRAFTED_ROWS = 512  # that steps with drafts have, up to which every bucket is measured
SHORT, MEDIUM, LONG = 16, 128, 512  # tokens of context per sequence
USUAL_DEPTH = 3  # of the sequences that rows are spread over
FEW_PASSES, MORE_PASSES = 1, 3  # depths whose difference is the price of a pass
READ_AHEAD = 128  # rows that the draft model reads besides
READ_LITTLE = 8  # the same, where that is a forward of its own
LEAST_PASS = 0.05  # of the first pass, what others cost at least, however small the difference of two measurements is
UNDISTURBED = 0.1  # the quantile of what a shape took in all rounds that counts
GREEDY = SequenceParams(SamplingParams(temperature=0.0), verification=Verification.GREEDY)


def profile(
    runner: StepRunner,
    config: SchedulerConfig,
    *,
    draft: bool,
    first_rows: int = 1,
    seconds: float = 16.0,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float],
) -> CostModel:
    """A cost model of the steps that `runner` executes, which holds no sequence of it afterwards. The KV memory is
    overwritten.

    Args:
        draft: the runner has a draft model.
        first_rows: that each sequence has in its first pass; where they are several, what it reads besides is read in a
            forward of its own.
        seconds: that it may take. Shapes that do not fit in are interpolated, but one of every kind is measured.
        progress: is told after each round how many are done, and of how many at most; all are, in the end.
        clock: now, in seconds.
    """
    tell = progress or (lambda done, rounds: None)
    bench = _Bench(runner, config, clock, seconds, first_rows)
    for shape, needed in _shapes(config, draft, first_rows):
        bench.begin(shape, needed)
    # In rounds: while something else disturbs the machine, it disturbs all shapes alike.
    for done in range(1, MAX_ROUNDS):
        tell(done, MAX_ROUNDS)
        if not bench.measure_again(MAX_ROUNDS - done):
            break
    tell(MAX_ROUNDS, MAX_ROUNDS)
    bench.release()
    return _fit(_undisturbed(bench.samples()), config, first_rows)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A step of `sequences` alike.

    Attributes:
        tokens: known tokens that each computes; the last of them is sampled behind if there is but one.
        drafts: in all, spread evenly.
        context: tokens of each that lie in the KV memory.
        read_ahead: rows that the draft model reads besides those of its first pass.
    """

    sequences: int
    context: int
    tokens: int = 1
    drafts: int = 0
    method: Method = Method.NONE
    read_ahead: int = 0

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens + self.drafts

    @property
    def reads(self) -> int:
        """Tokens whose KV the step reads, its own included, as a served step counts them."""
        return self.sequences * (self.context + self.tokens)

    @property
    def decodes(self) -> bool:
        """One row per sequence, and nothing else."""
        return self.tokens == 1 and not self.drafts

    @property
    def passes(self) -> int:
        """Of the draft model."""
        return self.drafts // self.sequences if self.method is Method.DRAFT_MODEL else 0

    @property
    def kind(self) -> tuple[object, ...]:
        """Shapes that differ in nothing but size have the same."""
        return self.method, self.tokens > 1, self.context, self.read_ahead, self.passes


@dataclass(frozen=True, slots=True)
class _Sample:
    """What a shape took.

    Attributes:
        rows: that there really were: an n-gram may have less to propose.
        target, draft: seconds.
    """

    shape: _Shape
    rows: int
    target: float
    draft: float


# -- what to measure ---------------------------------------------------------------------------------------------------


def _shapes(config: SchedulerConfig, draft: bool, first_rows: int) -> Iterator[tuple[_Shape, bool]]:
    """Shapes of every kind in turn, the most telling first, and whether one cannot be done without."""
    sequences = _coarse_first(buckets_up_to(config.max_num_seqs, SEQUENCE_BUCKETS))
    # Where only prompts reach, rows cost alike, and steps are long: the longest says enough.
    *buckets, largest = buckets_up_to(config.max_num_batched_tokens, ROW_BUCKETS)
    buckets = [count for count in buckets if count <= MOST_DRAFTED_ROWS]
    # Powers of two first, by the 0 before them: decodes have the same, and the two tell rows from sequences. Then what
    # comes behind the first blocks of 16, where the highest stairs may be; the last of the others may not fit in.
    coarse = [count for count in buckets if _odd_part(count) <= 3]
    rows = [count for count in _coarse_first([0, *coarse, largest]) if count > 1]
    others = [count for count in buckets if _odd_part(count) > 3]
    rows += sorted(others, key=lambda count: (count % 16 != 1 or count > FIRST_BLOCKS, count))
    short = _short(config)
    long = min(LONG, config.max_model_len - 1)
    many = max(count for count in sequences if 4 * count <= max(4, config.max_num_seqs))  # with a short context, too
    kinds: list[list[_Shape]] = [
        [_Shape(count, short) for count in sequences],
        [_rows_shape(count, short, config) for count in rows],
        [_Shape(count, long) for count in sorted({1, many})],
    ]
    if draft and config.max_depth > 0:
        # Drafting has no term for context, so it is measured at a usual one.
        medium = min(MEDIUM, config.max_model_len - 2, config.max_draft_len - 2)
        for depth in sorted({FEW_PASSES, min(MORE_PASSES, config.max_depth)}):
            kinds.append([_Shape(count, medium, 1, count * depth, Method.DRAFT_MODEL) for count in sequences])
        for read in (READ_AHEAD, READ_LITTLE)[: 1 + (first_rows > 1)]:
            kinds.append([_Shape(1, medium + READ_AHEAD, 1, FEW_PASSES, Method.DRAFT_MODEL, read)])
    for turn, shapes in enumerate(itertools.zip_longest(*kinds)):
        for shape in shapes:
            if shape is not None and _fits(shape, config):
                yield shape, turn == 0


def _short(config: SchedulerConfig) -> int:
    """Context of shapes where it should not matter; there is room for a draft behind it."""
    return min(SHORT, config.max_model_len - 2)


def _rows_shape(rows: int, context: int, config: SchedulerConfig) -> _Shape:
    """Few sequences with drafts, as steps with so many rows are; where drafts cannot be so many, prompt chunks."""
    sequences = min(-(-rows // (1 + min(USUAL_DEPTH, config.max_depth))), config.max_num_seqs)
    if rows <= sequences * (1 + config.max_depth):
        return _Shape(sequences, context, 1, rows - sequences, Method.NGRAM)
    sequences = -(-rows // (config.max_model_len - context))
    return _Shape(sequences, context, rows // sequences)


def _fits(shape: _Shape, config: SchedulerConfig) -> bool:
    """Limits are kept, and each sequence has blocks of its own."""
    length = _length(shape)
    return (
        shape.sequences <= config.max_num_seqs
        and length <= config.max_model_len
        and (shape.method is not Method.DRAFT_MODEL or length <= config.max_draft_len)
        and shape.sequences * config.blocks_for(length) <= config.num_blocks
        and shape.rows + shape.read_ahead <= config.max_num_batched_tokens
    )


def _length(shape: _Shape) -> int:
    """Positions that a sequence needs slots for."""
    return shape.context + shape.tokens + -(-shape.drafts // shape.sequences)


def _coarse_first(values: Sequence[int]) -> list[int]:
    """The first, then every eighth, then those halfway between, and so on."""
    return [values[i] for i in sorted(range(len(values)), key=lambda i: (-min(i & -i or 8, 8), i))]


def _odd_part(count: int) -> int:
    """1 for a power of two, 3 for one and a half."""
    return count // (count & -count)


# -- measuring ---------------------------------------------------------------------------------------------------------


class _Bench:
    """Executes shapes and keeps what they took."""

    def __init__(
        self, runner: StepRunner, config: SchedulerConfig, clock: Callable[[], float], seconds: float, first_rows: int
    ) -> None:
        self._runner = runner
        self._first_rows = first_rows
        self._config = config
        self._clock = clock
        self._end = clock() + seconds
        self._longest = LONGEST_STEP * seconds
        self._num_steps = 0
        self._admitted: tuple[int, ...] = ()
        self._results: dict[_Shape, list[StepResult]] = {}

    def begin(self, shape: _Shape, needed: bool) -> None:
        """The first round of a shape, unless it is not needed and takes too long or leaves no time for later rounds."""
        expected = self._expected(shape)
        rounds = 2 * expected + (MIN_ROUNDS - 1) * self._seconds([*self._short_shapes(), shape])
        if not needed and (expected > self._longest or self._clock() + rounds > self._end):
            return
        # The first may pay for what is set up once. If it does not, it is as good as any.
        self._results[shape] = [self._execute(shape), self._execute(shape)]

    def measure_again(self, left: int) -> bool:
        """One more round of the `left` that there may be, if there is time for it."""
        time_left = self._end - self._clock()
        shapes = list(self._results)
        if left * self._seconds(shapes) > time_left:
            shapes = self._short_shapes()
            if self._seconds(shapes) > time_left:
                return False
        # By size: a step finds in the caches what a step like it has left there, as in serving.
        for shape in sorted(shapes, key=lambda shape: (shape.method, shape.rows)):
            self._results[shape].append(self._execute(shape))
        return True

    def samples(self) -> list[_Sample]:
        return [
            _Sample(
                shape,
                shape.sequences * shape.tokens + sum(sequence.num_drafted for sequence in results[0].sequences),
                _least([result.times.total - result.times.draft for result in results]),
                _least([result.times.draft for result in results]),
            )
            for shape, results in self._results.items()
        ]

    def release(self) -> None:
        self._runner.execute(StepPlan(self._num_steps, self._admitted, (), ()))

    def _seconds(self, shapes: Sequence[_Shape]) -> float:
        """Of one step of each, at most."""
        return sum(map(self._expected, shapes))

    def _short_shapes(self) -> list[_Shape]:
        expected = {shape: self._expected(shape) for shape in self._results}
        shortest = min(expected.values(), default=0.0)
        return [shape for shape, seconds in expected.items() if seconds <= SHORT_STEPS * shortest]

    def _expected(self, shape: _Shape) -> float:
        """Seconds of one step, at most: as the shortest one that is no smaller, or in proportion to one that is."""
        taken = {known: min(result.times.total for result in results) for known, results in self._results.items()}
        if no_smaller := [
            seconds for known, seconds in taken.items() if known.rows >= shape.rows and known.reads >= shape.reads
        ]:
            return min(no_smaller)
        return min(
            [
                seconds * max(1.0, shape.rows / known.rows, shape.reads / known.reads)
                for known, seconds in taken.items()
            ],
            default=0.0,
        )

    def _execute(self, shape: _Shape) -> StepResult:
        """One step of sequences that begin with it: what they emitted before does not matter, nor how long they are."""
        # No request that is served has such an id.
        ids = tuple(range(-shape.sequences, 0))
        blocks = itertools.count()
        per_sequence = self._config.blocks_for(_length(shape))
        size = shape.context + shape.tokens
        admitted, work = [], []
        for index, request_id in enumerate(ids):
            table = tuple(itertools.islice(blocks, per_sequence))
            drafts = shape.drafts // shape.sequences + (index < shape.drafts % shape.sequences)
            drafted = size - self._first_rows - shape.read_ahead
            admitted.append(Admission(request_id, (0,) * size, size, GREEDY, table, shape.context, drafted))
            work.append(
                SequenceWork(
                    request_id,
                    shape.tokens,
                    samples=True,
                    num_drafts=drafts,
                    method=shape.method if drafts else Method.NONE,
                    draft_catch_up=(self._first_rows + shape.read_ahead) * (shape.method is Method.DRAFT_MODEL),
                )
            )
        plan = StepPlan(self._num_steps, self._admitted, tuple(admitted), tuple(work))
        self._admitted = ids
        self._num_steps += 1
        return self._runner.execute(plan)


# -- from samples to tables --------------------------------------------------------------------------------------------


def _least(seconds: Sequence[float]) -> float:
    """About the least: what disturbs a step only ever adds to it, and on a busy machine most steps are disturbed."""
    return float(np.quantile(seconds, UNDISTURBED, method="lower"))


def _undisturbed(samples: Sequence[_Sample]) -> list[_Sample]:
    """Of the same kind, more never costs less: what took longer than something larger was disturbed, and took at most
    as long.
    """
    least: dict[tuple[object, ...], _Sample] = {}
    cleaned = []
    for sample in sorted(samples, key=lambda sample: sample.rows, reverse=True):
        larger = least.get(sample.shape.kind, sample)
        sample = replace(sample, target=min(sample.target, larger.target), draft=min(sample.draft, larger.draft))
        least[sample.shape.kind] = sample
        cleaned.append(sample)
    return cleaned


def _fit(samples: Sequence[_Sample], config: SchedulerConfig, first_rows: int) -> CostModel:
    """Terms one after the other: context, then sequences, then what is left for rows."""
    plain = [sample for sample in samples if sample.shape.method is not Method.DRAFT_MODEL]
    short = [sample for sample in plain if sample.shape.context == _short(config)]
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


def _per_context(samples: Sequence[_Sample]) -> float:
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


def _per_sequence(samples: Sequence[_Sample], per_context: float) -> float:
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

    def __init__(self, samples: Sequence[_Sample], reads_apart: bool) -> None:
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
    """Seconds at each bucket. Beyond the last that was measured they rise as steeply as any line up to it: what looks
    free by an accident of two measurements would be used without end.
    """
    counts = sorted(measured)
    seconds = np.maximum.accumulate([measured[count] for count in counts])
    last = counts[-1]
    slopes = [(seconds[-1] - before) / (last - count) for count, before in zip(counts[:-1], seconds[:-1], strict=True)]
    beyond = np.maximum(0, np.array(buckets) - last) * max(slopes, default=0.0)
    return [float(value) for value in np.interp(buckets, counts, seconds) + beyond]
