"""What a step costs on this machine: tables measured at start-up, corrected by every step that is served.

    step = target(rows, context, sequences) + a draft pass per level of depth + what the draft model reads besides

The target's table has buckets of rows, the draft model's have buckets of sequences in a pass; between buckets a table
is linear, beyond the last it goes on as between the last two. A sequence's KV is read once and its result is booked
once however many rows it has, so context and sequences are terms of their own: a draft slot costs less than a request.
The first pass is dearer than those that follow, since whatever drafting needs is prepared there.
"""

from __future__ import annotations

import enum
import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from paceline.core.config import MOST_ROWS
from paceline.core.curve import Curve

# Kernels take some rows at once, and the next one costs more than those behind it: few rows have a bucket each, and so
# has the next one behind the first blocks of 16. Behind 128, steps on a GPU are padded to the next recorded size.
ROW_BUCKETS = (*range(1, 18), 24, 32, 33, 48, 49, 64, 65, 80, 81, 96, 97, 128,
               129, 192, 193, 256, 257, 384, 385, 512, 768, 1024, 1536, 2048)  # fmt: skip
SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

LARGEST_BUCKET = MOST_ROWS  # a table that has more is not ours
LONGEST = 1e6  # seconds; nothing that is longer was measured

GAIN = 0.05  # of a correction, per observed step
# The same of what steps have in common, the first row: memory changes its speed from one moment to the next.
LEVEL_GAIN = 0.25
LARGEST_LEVEL_ERROR = 0.25  # of a step, that one step may teach about it
# What rows cost beyond the first is learned from what two steps differ by, as far as it is in doubt.
STEP_NOISE = 0.05  # of a step: what two of the same rows differ by
# Degrees of freedom of that noise: most steps differ by less, some were disturbed and differ by far more (Student's t).
NOISE_TAIL = 3.0
LARGEST_RISE_ERROR = 0.2  # of a step, that this difference may teach: the machine changes between steps, too
FLAT_ROWS = 16  # a rise learns as if this part of a step came on top, or a row's part if there are more rows
FIRST_DOUBT = 0.3  # of a rise and what comes on top: memory may have been slower when rows were measured
DRIFT = 0.007  # by which doubt grows, per square root of a step
MOST_TRUST = 0.5  # in one lesson: either step may have been disturbed
LARGEST_RATIO = 2.0  # of observed to predicted seconds, up and down, that one step may teach
OUTLIER_RATIO = 3.0  # a step that took so much longer was disturbed: compilation, garbage collection
MOST_OUTLIERS = 8  # in a row; from then on it is the machine that has changed
WINDOW = 256  # steps of each kind whose errors are remembered
MOST_SHAPES = 256  # of each kind whose last duration is remembered


class StepKind(enum.StrEnum):
    """What a step does, as far as errors of prediction are told apart."""

    DECODE = "decode"  # one row per sequence
    VERIFY = "verify"  # with drafts
    MIXED = "mixed"  # with prompt chunks


# Looked up in the class, a member takes as long as a function call; these are for what is done in every step.
DECODE: Final = StepKind.DECODE
VERIFY: Final = StepKind.VERIFY
MIXED: Final = StepKind.MIXED


# Not frozen, and with a constructor of its own, because those that are generated take ten times as long.
@dataclass(init=False, slots=True)
class StepShape:
    """What a step's cost depends on.

    Attributes:
        rows: of the target's forward: prompt chunks, decodes and draft slots.
        context: tokens whose KV is read, summed over sequences, once per sequence whatever its rows.
        draft_passes: sequences in each pass of the draft model, in order.
        draft_rows: rows that the draft model reads besides those of pass 0: prompts, catching up.
        sequences: that have rows in the step; 0 leaves out what they cost besides their rows.
    """

    rows: int
    context: int
    draft_passes: tuple[int, ...]
    draft_rows: int
    kind: StepKind
    sequences: int

    def __init__(
        self,
        rows: int,
        context: int,
        draft_passes: tuple[int, ...] = (),
        draft_rows: int = 0,
        kind: StepKind = StepKind.DECODE,
        sequences: int = 0,
    ) -> None:
        self.rows = rows
        self.context = context
        self.draft_passes = draft_passes
        self.draft_rows = draft_rows
        self.kind = kind
        self.sequences = sequences


@dataclass(frozen=True, slots=True)
class Error:
    """How well steps of one kind are predicted, over the last `count` of them.

    Attributes:
        median: of |predicted / observed - 1|.
        ratio: median of observed / predicted: above 1 if such steps take longer than predicted.
        repeatability: median relative difference between steps of about equal shape that follow each other: no
            prediction can be much better. 0 if none did.
    """

    median: float
    ratio: float
    repeatability: float
    count: int


class CostModel:
    """Predicts seconds. Mutated by `observe` alone.

    Args:
        rows: ascending buckets of target rows.
        seconds: of a step without drafts at each of them, context and sequences taken off.
        per_context: seconds per token of context.
        sequences: ascending buckets of sequences in a draft pass; empty without a draft model.
        pass_seconds: of one draft pass at each of them.
        per_draft_row: seconds per row that the draft model reads besides.
        per_sequence: seconds per sequence in the step.
        first_seconds: of pass 0, at the buckets of `pass_seconds`; None if it costs no more than others.
        first_rows: that each sequence has in pass 0.
        reading_seconds: of the forward in which the draft model reads, beside its rows; 0 if that is pass 0.

    Attributes:
        first_rows, reading_seconds: as above.

    Raises:
        ValueError: buckets that are not positive and ascending, or seconds that are negative or not finite.
    """

    def __init__(
        self,
        rows: Sequence[int],
        seconds: Sequence[float],
        per_context: float = 0.0,
        sequences: Sequence[int] = (),
        pass_seconds: Sequence[float] = (),
        per_draft_row: float = 0.0,
        per_sequence: float = 0.0,
        first_seconds: Sequence[float] | None = None,
        first_rows: int = 1,
        reading_seconds: float = 0.0,
    ) -> None:
        if not rows:
            raise ValueError("a cost model needs at least one bucket of rows")
        if type(first_rows) is not int or not 1 <= first_rows <= LARGEST_BUCKET:
            raise ValueError(f"first_rows: an integer in 1..{LARGEST_BUCKET} is needed, not {first_rows!r}")
        _check_table("rows", rows, seconds)
        first_seconds = pass_seconds if first_seconds is None else first_seconds
        for values in (pass_seconds, first_seconds):
            _check_table("sequences", sequences, values)
        slopes = ("context", per_context), ("draft row", per_draft_row), ("sequence", per_sequence)
        for name, value in (*slopes, ("reading", reading_seconds)):
            _check_seconds(name, value)
        self._rows = list(rows)
        # Of the first bucket, and what rows beyond it cost: more rows never cost less.
        heights = [float(height) for height in itertools.accumulate(seconds, max)]
        self._first_bucket = heights[0]
        self._more = Curve(rows, [height - self._first_bucket for height in heights])
        # Variances of the relative errors of its rises, as of so many observed steps.
        self._doubts = [FIRST_DOUBT**2] * (len(heights) - 1)
        self._doubts_at = [0] * (len(heights) - 1)
        self._last_target: tuple[StepShape, float] | None = None  # the last step that taught, and its seconds
        self._per_context = float(per_context)
        self._per_sequence = float(per_sequence)
        self._sequences = list(sequences)
        # No sequences cost nothing, which is no bucket to interpolate from: one sequence costs a whole pass.
        self._pass = Curve(sequences, list(itertools.accumulate(pass_seconds, max)), at_zero=0.0)
        self._first_pass = Curve(sequences, list(itertools.accumulate(first_seconds, max)), at_zero=0.0)
        self._per_draft_row = float(per_draft_row)
        self.first_rows = first_rows
        self.reading_seconds = float(reading_seconds)
        self._errors = {kind: _Errors() for kind in StepKind}
        self._target_outliers = _Outliers()
        self._draft_outliers = _Outliers()
        self._num_observed = 0

    @classmethod
    def from_functions(
        cls,
        target: Callable[[int], float],
        draft_pass: Callable[[int], float] | None = None,
        *,
        per_context: float = 0.0,
        per_draft_row: float = 0.0,
        max_rows: int = ROW_BUCKETS[-1],
        max_sequences: int = SEQUENCE_BUCKETS[-1],
    ) -> CostModel:
        """A model of known costs, for a simulator.

        Args:
            target: seconds by rows, sampled at the buckets up to `max_rows` and there.
            draft_pass: seconds by sequences, likewise up to `max_sequences`; None without a draft model.
        """
        rows = buckets_up_to(max_rows, ROW_BUCKETS)
        sequences = [] if draft_pass is None else buckets_up_to(max_sequences, SEQUENCE_BUCKETS)
        passes = [] if draft_pass is None else [draft_pass(count) for count in sequences]
        return cls(rows, [target(count) for count in rows], per_context, sequences, passes, per_draft_row)

    # -- predictions --------------------------------------------------------------------------------------------------

    def target(self, rows: int, context: int, sequences: int = 0) -> float:
        """Seconds of a step without drafts."""
        return self._first_bucket + self._more.at(rows) + self._per_context * context + self._per_sequence * sequences

    def targets(self, rows: int, count: int, context: int, sequences: int = 0) -> list[float]:
        """Seconds of a step with `rows`, `rows + 1`, ... `rows + count` rows, [count + 1]."""
        same = self._first_bucket + self._per_context * context + self._per_sequence * sequences
        return [same + more for more in self._more.span(rows, count)]

    def rises(self, rows: int, count: int, factor: float, each: float, taken: int, more: float) -> list[float]:
        """Seconds by which 0, 1, ... `count` rows more make a step of `rows` longer, times a factor, plus as many times
        `each`, [count + 1]; or fewer: the first that exceeds the one at `taken` by `more` is the last.
        """
        return self._more.rises(rows, count, factor, each, taken, more)

    def draft_passes(self, count: int) -> list[float]:
        """Seconds of one draft pass over 0, 1, ... `count` sequences, [count + 1]; none cost nothing."""
        return self._pass.span(0, count)

    def first_passes(self, count: int) -> list[float]:
        """The same for pass 0, with all that drafting takes once per step."""
        return self._first_pass.span(0, count)

    def draft_pass(self, number: int, count: int) -> float:
        """Seconds of pass `number`, from 0, over `count` sequences."""
        return (self._pass if number else self._first_pass).at(count)

    def passes(self, sequences: Sequence[int]) -> float:
        """Seconds of draft passes by so many sequences each."""
        return sum([self.draft_pass(number, count) for number, count in enumerate(sequences)])

    def draft_rows(self, rows: int) -> float:
        """Seconds for rows that the draft model reads besides those of pass 0."""
        return self.reading_seconds + self._per_draft_row * rows if rows else 0.0

    def step(self, shape: StepShape) -> float:
        """Seconds of a whole step."""
        of_target = self.target(shape.rows, shape.context, shape.sequences)
        return of_target + self.drafting(shape.draft_passes, shape.draft_rows)

    def drafting(self, passes: Sequence[int], rows: int) -> float:
        """Seconds that the draft model takes: passes by so many sequences each, and rows that it reads besides."""
        if not (passes or rows):
            return 0.0
        if not passes and not self.reading_seconds:
            passes = (1,)  # reading alone, for drafts to come, is a pass too
        return self.passes(passes) + self.draft_rows(rows)

    # -- observations -------------------------------------------------------------------------------------------------

    def observe(self, shape: StepShape, draft_seconds: float, total_seconds: float) -> None:
        """Learn from one finished step: its whole duration, and how much of that was drafting."""
        self._errors[shape.kind].record(shape, self.step(shape), total_seconds)
        if shape.draft_passes or shape.draft_rows:
            self._correct_target(shape, total_seconds - draft_seconds)
            self._correct_draft(shape, draft_seconds)
        else:
            self._correct_target(shape, total_seconds)
        self._num_observed += 1

    def errors(self) -> dict[str, Error]:
        """Errors of prediction by kind of step, of those that occurred."""
        return {str(kind): errors.summary() for kind, errors in self._errors.items() if errors.ratios}

    def _correct_target(self, shape: StepShape, observed: float) -> None:
        """Each term answers for its share of the step, as does what rows beyond the first cost (normalized least mean
        squares; Widrow and Hoff, 1960). So memory that has become slower or faster, for which few rows wait together,
        hardly changes what one row more costs. What the first row costs, which is mostly memory, follows within a dozen
        steps; two steps whose difference tells what rows cost are told with the same one.
        """
        predicted = self.target(shape.rows, shape.context, shape.sequences)
        if self._target_outliers.error(observed, predicted) is None:
            return
        now = self._error_of(shape, observed)
        before, self._last_target = self._last_target, (shape, observed)
        if before is not None and before[0].rows != shape.rows:
            fewer, more = sorted([self._error_of(*before), now], key=lambda it: it.rows)
            self._correct_rises(fewer, more)
            now = self._error_of(shape, observed)
        predicted, error = now.predicted, now.error
        of_first, of_rise = self._first_bucket / predicted, self._more.at(shape.rows) / predicted
        of_context = self._per_context * shape.context / predicted
        of_sequences = self._per_sequence * shape.sequences / predicted
        squares = of_first**2 + of_rise**2 + of_context**2 + of_sequences**2
        level_error = min(max(error, -LARGEST_LEVEL_ERROR), LARGEST_LEVEL_ERROR)
        self._first_bucket *= 1.0 + LEVEL_GAIN * level_error * of_first / squares
        step = GAIN * error / squares
        self._more.stretch(1.0 + step * of_rise)
        self._per_context *= 1.0 + step * of_context
        self._per_sequence *= 1.0 + step * of_sequences

    def _error_of(self, shape: StepShape, observed: float) -> _TargetError:
        """At the prices as they are now."""
        predicted = self.target(shape.rows, shape.context, shape.sequences)
        return _TargetError(shape.rows, predicted, _bounded_error(observed, predicted))

    def _correct_rises(self, fewer: _TargetError, more: _TargetError) -> None:
        """Correct what rows cost, by two steps that follow each other and differ in rows.

        Their errors are compared in seconds: what has become slower for both by as many seconds, as memory does, does
        not count as a price of rows. A slower clock does, and what it adds to each row is learned at once.

        How far they teach depends on doubt (a Kalman filter for the relative errors of all rises; Kalman, 1960). The
        more the rises between the two are in doubt, compared with the noise by which any two steps differ, the more
        all of them learn; and each learns in proportion to its own doubt. So a single step of half the rows says a lot
        where there was none before, and many steps of one row more or less say little. A rise that was nothing takes
        little of an error that it shares with a stair behind it, and all of one that it has for itself.
        """
        error = (more.seconds - fewer.seconds) / more.predicted
        error = min(max(error, -LARGEST_RISE_ERROR), LARGEST_RISE_ERROR)
        flat = 1.0 / max(more.rows, FLAT_ROWS)
        rows, count = self._rows, len(self._doubts)
        first = index = max(min(bisect_right(rows, fewer.rows), count) - 1, 0)
        # Of each rise between: its part that is, what is in doubt of it, and what of the step is so by that: variances.
        between: list[tuple[float, float, float]] = []
        in_doubt = 0.0
        while index < count and rows[index] < more.rows:
            end = more.rows if index == count - 1 else min(rows[index + 1], more.rows)  # the last goes on for good
            part = (end - max(rows[index], fewer.rows)) / (rows[index + 1] - rows[index])
            doubt = self._doubt(index)
            variance = (part * (self._more.rise(index) / more.predicted + flat)) ** 2 * doubt
            between.append((part, doubt, variance))
            in_doubt += variance
            index += 1
        # What neither doubt nor usual noise explains was a disturbance (Roth, Ozkan and Gustafsson, 2013).
        unexplained = error**2 / (in_doubt + STEP_NOISE**2)
        noise = STEP_NOISE**2 * (1.0 + unexplained / NOISE_TAIL)
        trust = min(in_doubt / (in_doubt + noise), MOST_TRUST)
        if not trust:
            return
        rises = []
        for index, (part, doubt, variance) in enumerate(between, first):
            share = variance / in_doubt
            self._doubts[index], self._doubts_at[index] = doubt * (1.0 - trust * share), self._num_observed
            rises.append(max(self._more.rise(index) + trust * error * more.predicted * share / part, 0.0))
        self._more.change_rises(first, rises)

    def _doubt(self, index: int) -> float:
        """About a rise, a variance, by now."""
        passed = self._num_observed - self._doubts_at[index]
        return min(self._doubts[index] + passed * DRIFT**2, FIRST_DOUBT**2)

    def _correct_draft(self, shape: StepShape, observed: float) -> None:
        error = self._draft_outliers.error(observed, self.drafting(shape.draft_passes, shape.draft_rows))
        if error is None:
            return
        factor = 1.0 + GAIN * error
        self._pass.stretch(factor)
        self._first_pass.stretch(factor)
        self._per_draft_row *= factor
        self.reading_seconds *= factor

    # -- storage ------------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; corrections are in the tables, errors are left out."""
        return {
            "rows": list(self._rows),
            "seconds": [self._first_bucket + more for more in self._more.heights()],
            "per_context": self._per_context,
            "sequences": list(self._sequences),
            "pass_seconds": self._pass.heights(),
            "per_draft_row": self._per_draft_row,
            "per_sequence": self._per_sequence,
            "first_seconds": self._first_pass.heights(),
            "first_rows": self.first_rows,
            "reading_seconds": self.reading_seconds,
        }

    @classmethod
    def from_dict(cls, data: Any) -> CostModel:
        """The model that `as_dict` described. Raises ValueError if anything in `data` is not as it wrote it."""
        tables = {"rows", "seconds", "sequences", "pass_seconds", "first_seconds"}
        seconds = {"per_context", "per_draft_row", "per_sequence", "reading_seconds"}
        names = tables | seconds | {"first_rows"}
        if not isinstance(data, dict) or data.keys() != names:
            raise ValueError(f"a cost model has the keys {', '.join(sorted(names))}")
        for name in tables:
            if not isinstance(data[name], list):
                raise ValueError(f"{name}: a list is needed, not {data[name]!r}")
        if type(data["first_rows"]) is not int:
            raise ValueError(f"first_rows: an integer is needed, not {data['first_rows']!r}")
        for name in seconds:
            _check_seconds(name, data[name])  # compiled, the constructor would raise TypeError before it looks at them
        return cls(**data)


class _TargetError:
    """How a step went.

    Attributes:
        predicted: seconds.
        error: bounded observed / predicted - 1.
    """

    __slots__ = ("error", "predicted", "rows")

    def __init__(self, rows: int, predicted: float, error: float) -> None:
        self.rows = rows
        self.predicted = predicted
        self.error = error

    @property
    def seconds(self) -> float:
        """Observed less predicted, bounded."""
        return self.error * self.predicted


@dataclass(slots=True)
class _Outliers:
    """Tells steps that were disturbed from those to learn from."""

    in_a_row: int = 0

    def error(self, observed: float, predicted: float) -> float | None:
        """Bounded observed / predicted - 1; None if there is nothing to learn."""
        if predicted <= 0.0 or observed <= 0.0:
            return None
        ratio = observed / predicted
        self.in_a_row = self.in_a_row + 1 if ratio > OUTLIER_RATIO else 0
        if 0 < self.in_a_row <= MOST_OUTLIERS:
            return None
        return _bounded_error(observed, predicted)


@dataclass(slots=True)
class _Errors:
    """The last steps of one kind."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # predicted / observed
    differences: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    last: dict[tuple[object, ...], float] = field(default_factory=dict)  # seconds by rounded shape

    def record(self, shape: StepShape, predicted: float, observed: float) -> None:
        if observed <= 0.0:
            return
        self.ratios.append(predicted / observed)
        key = (shape.rows, shape.draft_passes, shape.draft_rows, shape.sequences, _rounded(shape.context))
        before = self.last.pop(key, None)
        if before is not None:
            self.differences.append(abs(before / observed - 1.0))
        elif len(self.last) >= MOST_SHAPES:
            self.last.pop(next(iter(self.last)))
        self.last[key] = observed

    def summary(self) -> Error:
        return Error(
            median=median(abs(ratio - 1.0) for ratio in self.ratios),
            ratio=1.0 / median(self.ratios) if all(self.ratios) else math.inf,
            repeatability=median(self.differences) if self.differences else 0.0,
            count=len(self.ratios),
        )


def _bounded_error(observed: float, predicted: float) -> float:
    return min(max(observed / predicted, 1.0 / LARGEST_RATIO), LARGEST_RATIO) - 1.0


def buckets_up_to(largest: int, buckets: Sequence[int]) -> list[int]:
    """Those below `largest`, and `largest` itself."""
    return [bucket for bucket in buckets if bucket < largest] + [largest]


def _rounded(count: int) -> int:
    """To three binary digits: shapes whose context differs by less than an eighth are about equal."""
    drop = max(0, count.bit_length() - 3)
    return count >> drop << drop


def _check_table(name: str, buckets: Sequence[Any], seconds: Sequence[Any]) -> None:
    if len(buckets) != len(seconds):
        raise ValueError(f"{name}: {len(buckets)} buckets, {len(seconds)} values")
    if any(type(bucket) is not int or not 1 <= bucket <= LARGEST_BUCKET for bucket in buckets):
        raise ValueError(f"{name}: buckets are integers in 1..{LARGEST_BUCKET}, not {list(buckets)}")
    if any(after <= before for before, after in itertools.pairwise(buckets)):
        raise ValueError(f"{name}: buckets are ascending, not {list(buckets)}")
    for value in seconds:
        _check_seconds(name, value)


def _check_seconds(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # So written, the comparison refuses what is not a number, too.
    if not number or not 0 <= value <= LONGEST:
        raise ValueError(f"{name}: seconds are finite and >= 0, not {value!r}")
