"""Which steps are taken to find out what steps cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.core.config import SchedulerConfig
from paceline.core.cost_model import ROW_BUCKETS, SEQUENCE_BUCKETS, buckets_up_to
from paceline.core.method import Method

FIRST_BLOCKS = 64  # rows up to which stairs are measured before counts between them; others come last
MOST_DRAFTED_ROWS = 512  # that steps with drafts have, up to which every bucket is measured
SHORT, MEDIUM, LONG = 16, 128, 512  # tokens of context per sequence
USUAL_DEPTH = 3  # of the sequences that rows are spread over
FEW_PASSES, MORE_PASSES = 1, 3  # depths whose difference is the price of a pass
READ_AHEAD = 128  # rows that the draft model reads besides
READ_LITTLE = 8  # the same, where that is a forward of its own


@dataclass(frozen=True, slots=True)
class Shape:
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
    def length(self) -> int:
        """Positions that each sequence needs slots for."""
        return self.context + self.tokens + -(-self.drafts // self.sequences)

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
        """Passes of the draft model."""
        return self.drafts // self.sequences if self.method is Method.DRAFT_MODEL else 0

    @property
    def kind(self) -> tuple[object, ...]:
        """Shapes that differ in nothing but size have the same."""
        return self.method, self.tokens > 1, self.context, self.read_ahead, self.passes


def shapes_to_measure(config: SchedulerConfig, draft: bool, first_rows: int) -> Iterator[tuple[Shape, bool]]:
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
    short = short_context(config)
    long = min(LONG, config.max_model_len - 1)
    many = max(count for count in sequences if 4 * count <= max(4, config.max_num_seqs))  # with a short context, too
    kinds: list[list[Shape]] = [
        [Shape(count, short) for count in sequences],
        [_rows_shape(count, short, config) for count in rows],
        [Shape(count, long) for count in sorted({1, many})],
    ]
    if draft and config.max_depth > 0:
        # Drafting has no term for context, so it is measured at a usual one.
        medium = min(MEDIUM, config.max_model_len - 2, config.max_draft_len - 2)
        for depth in sorted({FEW_PASSES, min(MORE_PASSES, config.max_depth)}):
            kinds.append([Shape(count, medium, 1, count * depth, Method.DRAFT_MODEL) for count in sequences])
        for read in (READ_AHEAD, READ_LITTLE)[: 1 + (first_rows > 1)]:
            kinds.append([Shape(1, medium + READ_AHEAD, 1, FEW_PASSES, Method.DRAFT_MODEL, read)])
    for turn, shapes in enumerate(itertools.zip_longest(*kinds)):
        for shape in shapes:
            if shape is not None and _fits(shape, config):
                yield shape, turn == 0


def short_context(config: SchedulerConfig) -> int:
    """Context of shapes where it should not matter; there is room for a draft behind it."""
    return min(SHORT, config.max_model_len - 2)


def _rows_shape(rows: int, context: int, config: SchedulerConfig) -> Shape:
    """Few sequences with drafts, as steps with so many rows are; where drafts cannot be so many, prompt chunks."""
    sequences = min(-(-rows // (1 + min(USUAL_DEPTH, config.max_depth))), config.max_num_seqs)
    if rows <= sequences * (1 + config.max_depth):
        return Shape(sequences, context, 1, rows - sequences, Method.NGRAM)
    sequences = -(-rows // (config.max_model_len - context))
    return Shape(sequences, context, rows // sequences)


def _fits(shape: Shape, config: SchedulerConfig) -> bool:
    """Limits are kept, and each sequence has blocks of its own."""
    return (
        shape.sequences <= config.max_num_seqs
        and shape.length <= config.max_model_len
        and (shape.method is not Method.DRAFT_MODEL or shape.length <= config.max_draft_len)
        and shape.sequences * config.blocks_for(shape.length) <= config.num_blocks
        and shape.rows + shape.read_ahead <= config.max_num_batched_tokens
    )


def _coarse_first(values: Sequence[int]) -> list[int]:
    """The first, then every eighth, then those halfway between, and so on."""
    return [values[i] for i in sorted(range(len(values)), key=lambda i: (-min(i & -i or 8, 8), i))]


def _odd_part(count: int) -> int:
    """1 for a power of two, 3 for one and a half."""
    return count // (count & -count)
