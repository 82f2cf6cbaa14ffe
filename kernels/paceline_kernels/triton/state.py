"""What lives on the device from step to step, and what a step brings along.

The device knows before the host what was accepted, so that the next step can be launched while nobody has looked: its
kernels find positions and tokens in the table of sequences, and the step says only how many of each, at most.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

COLUMNS: Final = 20  # of a sequence's row in `SequenceTable.facts`
MOST_EDITS: Final = 512  # tokens of a request that are biased or forbidden for a while
UNKNOWN_END: Final = -1  # MATCH of a text whose end is not known yet, as of a prompt: the step that samples looks first
FIRST_PASS_ROWS: Final = 2  # of each sequence in the draft model's first pass: see `draft_rows`


class Column(enum.IntEnum):
    """int32 each; TEMPERATURE to TYPICAL_P and REPETITION to PRESENCE hold the bits of a float32."""

    COMPUTED = 0  # leading tokens that have target KV; in a decode all known tokens but the newest
    DRAFT_COMPUTED = 1  # leading tokens that have draft KV
    RULE = 2
    TOP_K = 3  # 0 is off
    SEED_LOW = 4
    SEED_HIGH = 5
    CHOICE = 6
    TEMPERATURE = 7  # > 0; 1 for greedy sequences
    TOP_P = 8
    MIN_P = 9
    TYPICAL_P = 10
    DRAFTED = 11  # drafts of the draft model in the step that is being made, from its first pass on
    MATCH = 12  # tokens that agree with the text's end where its proposals come from; 0 without any, or UNKNOWN_END
    EDITED = 13  # how many tokens have an `Edit`, and 1; 0 if nothing changes its logits, penalties neither
    COUNTED = 14  # 1 if its tokens are counted, for penalties
    REPETITION = 15
    FREQUENCY = 16
    PRESENCE = 17


class Edit(enum.IntEnum):
    """What a request changes of one token's logit, int32 each."""

    TOKEN = 0
    BIAS = 1  # the bits of a float32
    FORBIDDEN_UNTIL = 2  # the text has so many tokens


class Rule(enum.IntEnum):
    """How a sequence's tokens are chosen and its drafts judged."""

    GREEDY = 0
    COUPLED = 1
    TOKEN_WISE = 2
    BLOCK = 3


class Noise(enum.IntEnum):
    """Streams of uniform noise, independent of each other; see `uniform`."""

    DRAFT = 0
    ACCEPT = 1
    SAMPLE = 2


@dataclass(frozen=True, slots=True)
class SequenceTable:
    """One row per running sequence; a row's number is the sequence's seat.

    Attributes:
        facts: [seats, COLUMNS] int32, by `Column`.
        texts: known tokens, [seats, longest] int32; what stands behind them is undefined.
        block_tables: [seats, max_blocks] int32.
        proposals: what a text may go on with by its n-grams, [seats, max_depth + 1] int32.
        drafts: of the step that is being made, by the draft model, [seats, max_depth] int32.
        probs: what they were drawn from, where they were drawn, [seats, max_depth, vocab or 1] float32.
        edits: of the logits of some tokens, by `Edit`, [seats, MOST_EDITS, 3] int32. What is behind those that a
            sequence has is undefined.
        counts: of its tokens, if they are counted: twice how often each stands in the completion, and 1 if it stands
            in the text at all, [seats, vocab] int32; else undefined.
    """

    facts: Tensor
    texts: Tensor
    block_tables: Tensor
    proposals: Tensor
    drafts: Tensor
    probs: Tensor
    edits: Tensor
    counts: Tensor

    @classmethod
    def allocate(
        cls,
        seats: int,
        longest: int,
        max_blocks: int,
        max_depth: int,
        vocab: int,
        device: torch.device,
        *,
        draws: bool = True,
    ) -> SequenceTable:
        """
        Args:
            longest: tokens of a text, and of drafts behind it.
            draws: drafts may be drawn.
        """
        depth = max(1, max_depth)
        return cls(
            torch.zeros(seats, COLUMNS, dtype=torch.int32, device=device),
            torch.zeros(seats, longest, dtype=torch.int32, device=device),
            torch.zeros(seats, max_blocks, dtype=torch.int32, device=device),
            torch.zeros(seats, depth + 1, dtype=torch.int32, device=device),
            torch.zeros(seats, depth, dtype=torch.int32, device=device),
            torch.zeros(seats, depth, vocab if draws else 1, device=device),
            torch.zeros(seats, MOST_EDITS, len(Edit), dtype=torch.int32, device=device),
            torch.zeros(seats, vocab, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class StepInput:
    """What the host says of a step; views of one int32 buffer, padded to the step's bucket.

    A sequence contributes a run of rows: `num_tokens` known ones, then its drafts. If it samples, the last known row
    and its drafts have logits.

    Attributes:
        seats: [num_seqs], -1 for padding.
        num_tokens, num_drafts: [num_seqs]; 0 for padding.
        num_read: tokens that the draft model reads at most, besides those it drafts from, [num_seqs].
        one_hot: its drafts are its proposals, and not drawn, [num_seqs]: 0 or 1.
        looks_up: n-grams are looked up behind it, [num_seqs]: 0 or 1.
        is_judged: the device chooses its tokens, [num_seqs]: 0 or 1. Of others there are logits, and nothing moves on.
        query_starts: rows of sequence i are query_starts[i]:query_starts[i + 1], [num_seqs + 1].
        logit_starts: its rows of logits, likewise; none if it does not sample.
        row_sequences: to which sequence each row belongs, [num_rows], -1 for padding.
        logit_sequences: the same for rows of logits, [num_rows].
        draft_seats, draft_depths: the deepest first, [most sequences of any step]; -1 and 0 for padding.
        read_seats: sequences of which the draft model reads, [most sequences of any step]; -1 for padding.
        read_starts: rows of the i-th of them are read_starts[i]:read_starts[i + 1], [most + 1].
        read_until: how far beyond `Column.COMPUTED` the draft model reads it, [most].
        noise_key: [4]: both halves of the engine's seed, the step's number, and nothing.
    """

    draft_seats: Tensor
    draft_depths: Tensor
    read_seats: Tensor
    read_until: Tensor
    read_starts: Tensor
    noise_key: Tensor
    seats: Tensor
    num_tokens: Tensor
    num_drafts: Tensor
    num_read: Tensor
    one_hot: Tensor
    looks_up: Tensor
    is_judged: Tensor
    query_starts: Tensor
    logit_starts: Tensor
    row_sequences: Tensor
    logit_sequences: Tensor

    @classmethod
    def size(cls, most_seqs: int, num_seqs: int, num_rows: int) -> int:
        """The size of the buffer, in int32 words."""
        return sum(map(_aligned, cls._lengths(most_seqs, num_seqs, num_rows)))

    @classmethod
    def view(cls, buffer: Tensor, most_seqs: int, num_seqs: int, num_rows: int) -> StepInput:
        """The parts of a buffer [size] int32, without copying. What drafting needs lies the same in all of them."""
        return cls(*_parts(buffer, cls._lengths(most_seqs, num_seqs, num_rows)))

    @staticmethod
    def _lengths(most_seqs: int, num_seqs: int, num_rows: int) -> list[int]:
        return [*[most_seqs] * 4, most_seqs + 1, 4, *[num_seqs] * 7, *[num_seqs + 1] * 2, *[num_rows] * 2]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the host learns of a step; views of one int32 buffer.

    Attributes:
        num_accepted: [num_seqs]; 0 where nothing was sampled.
        tokens: accepted drafts and the token behind them, [num_seqs, max_depth + 1]; what stands behind is undefined.
        labels: bits of float32, the acceptance of each draft, [num_seqs, max_depth], read up to the first rejection.
        scored: how many of the tokens, from the first on, were what n-grams proposed, [num_seqs]; -1 if they proposed
            nothing or were not looked up.
        match: `Column.MATCH` behind the step, [num_seqs]; 0 if it was not looked up.
        broken: 1 where a token was chosen by logits that are no numbers, [num_seqs]; else 0.
    """

    num_accepted: Tensor
    tokens: Tensor
    labels: Tensor
    scored: Tensor
    match: Tensor
    broken: Tensor

    @classmethod
    def size(cls, num_seqs: int, max_depth: int) -> int:
        """The size of the buffer, in int32 words."""
        return sum(map(_aligned, cls._lengths(num_seqs, max_depth)))

    @classmethod
    def view(cls, buffer: Tensor, num_seqs: int, max_depth: int) -> StepOutput:
        accepted, tokens, labels, scored, match, broken = _parts(buffer, cls._lengths(num_seqs, max_depth))
        tokens, labels = tokens.view(num_seqs, max_depth + 1), labels.view(num_seqs, max_depth)
        return cls(accepted, tokens, labels, scored, match, broken)

    @staticmethod
    def _lengths(num_seqs: int, max_depth: int) -> list[int]:
        return [num_seqs, num_seqs * (max_depth + 1), num_seqs * max_depth, *[num_seqs] * 3]


def _parts(buffer: Tensor, lengths: list[int]) -> list[Tensor]:
    """Views of a buffer, one behind the other. Each begins at 16 bytes: Triton compiles anew for others."""
    begins = itertools.accumulate(map(_aligned, lengths), initial=0)
    return [buffer[begin : begin + length] for begin, length in zip(begins, lengths, strict=False)]


def _aligned(words: int) -> int:
    return -(-words // 4) * 4


def float_bits(value: float) -> int:
    """The int32 whose bits are those of a float32."""
    bits: NDArray[np.int32] = np.array(value, np.float32).view(np.int32)
    return int(bits)
