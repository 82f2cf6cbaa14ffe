"""Where each running sequence sits in the device's table, and what of it the host knows."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.params import SequenceParams, Verification
from paceline.core.sequence import Sequence
from paceline.runner.positions import LOW_HALF
from paceline.runner.sampler import repetition_of, temperature_of
from paceline_kernels.triton.state import (
    COLUMNS,
    MOST_EDITS,
    UNKNOWN_END,
    Column,
    Edit,
    Rule,
    SequenceTable,
    float_bits,
)

RULES = {
    Verification.GREEDY: Rule.GREEDY,
    Verification.COUPLED: Rule.COUPLED,
    Verification.TOKEN_WISE: Rule.TOKEN_WISE,
    Verification.BLOCK: Rule.BLOCK,
}


def is_plain(params: SequenceParams, vocab: int) -> bool:
    """Its tokens follow from logits, from counts and from edits that the table has room for, and nobody wants to see
    logits.
    """
    sampling, constraints = params.sampling, params.constraints
    asks = sampling.allowed_token_ids or constraints.bad_words or constraints.grammar is not None
    wants_logprobs = params.logprobs.completion is not None or params.logprobs.prompt is not None
    # Where no token may stand, it is for the host to end the request.
    return not (asks or wants_logprobs) and len(_edited(params)) <= min(MOST_EDITS, vocab - 1)


class Seat:
    """A sequence's place in the table.

    Attributes:
        sequence: its mirror, which knows what has been collected.
        stale: the table does not have its facts yet, or no longer.
        blocks_told, tokens_told: block ids that the table has; tokens that it has once all launched steps are through,
            and collected.
        plain: see `is_plain`.
        edits: of single logits, in words, `Edit` by `Edit`.
    """

    __slots__ = ("blocks_told", "constants", "edits", "index", "plain", "sequence", "stale", "tokens_told")

    def __init__(self, index: int, sequence: Sequence, vocab: int) -> None:
        params = sequence.params
        self.index = index
        self.sequence = sequence
        self.stale = True
        self.blocks_told = 0
        self.tokens_told = 0
        self.plain = is_plain(params, vocab)
        self.edits = _edits(sequence) if self.plain else []
        self.constants = _constants(params)


class Seats:
    """Hands out the rows of the table, and tells it what changed."""

    def __init__(self, table: SequenceTable) -> None:
        self.table = table
        self.vocab = table.counts.shape[1]
        self._free = list(range(len(table.facts)))[::-1]
        self._taken: dict[int, Seat] = {}

    def __getitem__(self, request_id: int) -> Seat:
        return self._taken[request_id]

    def take(self, sequence: Sequence) -> None:
        self._taken[sequence.request_id] = Seat(self._free.pop(), sequence, self.vocab)

    def leave(self, request_id: int) -> None:
        self._free.append(self._taken.pop(request_id).index)

    def tell(self, seats: Seq[Seat]) -> Tensor | None:
        """Write to the table what it does not know of these sequences: new blocks; of those stale, for which nothing is
        launched, facts, new tokens, edits and counts.

        Returns:
            The places of those, on the device; None without any.
        """
        table = self.table
        grown = [seat for seat in seats if len(seat.sequence.block_ids) > seat.blocks_told]
        if grown:
            news = [(seat.index, seat.blocks_told, seat.sequence.block_ids[seat.blocks_told :]) for seat in grown]
            _write(table.block_tables, news)
        stale = [seat for seat in seats if seat.stale]
        places = None
        if stale:
            tokens = [(seat.index, seat.tokens_told, seat.sequence.token_ids[seat.tokens_told :]) for seat in stale]
            _write(table.texts, tokens)
            facts = np.stack([_facts(seat) for seat in stale])
            places = _send(np.array([seat.index for seat in stale]), table.facts.device)
            table.facts[places] = _send(facts, table.facts.device)
            if edited := [(seat.index, 0, seat.edits) for seat in stale if seat.edits]:
                _write(table.edits.flatten(1), edited)
            if counted := [seat for seat in stale if seat.plain and seat.sequence.counts is not None]:
                _count(table.counts, counted)
        # Where memory ends meanwhile, all of it is told again.
        for seat in grown:
            seat.blocks_told = len(seat.sequence.block_ids)
        for seat in stale:
            seat.tokens_told, seat.stale = len(seat.sequence), False
        return places

    def propose(self, proposed: Iterable[tuple[Seat, Seq[int]]]) -> None:
        """Write to the table what the host proposes, where proposals of n-grams lie."""
        if drafts := [(seat.index, 0, token_ids) for seat, token_ids in proposed if token_ids]:
            _write(self.table.proposals, drafts)


def _write(table: Tensor, values: Iterable[tuple[int, int, Seq[int]]]) -> None:
    """Into rows of a table on the device, each from a column on: (row, column, values)."""
    _scatter(
        table, [(row, np.arange(first, first + len(some)), np.array(some, np.int64)) for row, first, some in values]
    )


def _count(counts: Tensor, seats: Seq[Seat]) -> None:
    """All tokens of these texts, anew."""
    values = []
    for seat in seats:
        assert seat.sequence.counts is not None
        token_ids, times = seat.sequence.counts.behind(())
        values.append((seat.index, token_ids, 2 * times.astype(np.int64) + 1))
    counts[_send(np.array([seat.index for seat in seats]), counts.device)] = 0
    _scatter(counts, values)


def _scatter(table: Tensor, values: Seq[tuple[int, NDArray[np.int64], NDArray[np.int64]]]) -> None:
    """Into rows of a table on the device, each at some columns: (row, columns, values)."""
    placed = [(np.full(len(some), row), columns, some) for row, columns, some in values]
    there = _send(np.stack([np.concatenate(part) for part in zip(*placed, strict=True)]), table.device)  # [3, n]
    table[there[0], there[1]] = there[2].to(table.dtype)


def _send(array: NDArray[Any], device: torch.device) -> Tensor:
    """To the device, by memory that it can read itself: from other memory it would be waited for."""
    here = torch.from_numpy(array)
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)


def _forbidden(params: SequenceParams) -> set[int]:
    """Tokens that may not stand before the completion has its least length."""
    return set(params.constraints.stop_token_ids) if params.constraints.min_tokens else set()


def _edited(params: SequenceParams) -> set[int]:
    """Tokens whose logits are edited one by one."""
    return _forbidden(params) | {token for token, _ in params.sampling.logit_bias}


def _edits(sequence: Sequence) -> list[int]:
    params = sequence.params
    biases, forbidden = dict(params.sampling.logit_bias), _forbidden(params)
    until = sequence.num_prompt_tokens + params.constraints.min_tokens
    words: list[int] = []
    for token in sorted(_edited(params)):
        edit = [0] * len(Edit)
        edit[Edit.TOKEN] = token
        edit[Edit.BIAS] = float_bits(biases.get(token, 0.0))
        edit[Edit.FORBIDDEN_UNTIL] = until if token in forbidden else 0
        words += edit
    return words


def _constants(params: SequenceParams) -> list[int]:
    """The columns of a row that never change."""
    sampling = params.sampling
    seed = sampling.seed or 0
    row = [0] * COLUMNS
    row[Column.RULE] = RULES[params.verification]
    row[Column.TOP_K] = min(sampling.top_k, np.iinfo(np.int32).max)
    row[Column.SEED_LOW] = _signed(seed & LOW_HALF)
    row[Column.SEED_HIGH] = _signed(seed >> 32)
    row[Column.CHOICE] = params.choice
    row[Column.TEMPERATURE] = float_bits(temperature_of(sampling))
    row[Column.TOP_P] = float_bits(sampling.top_p)
    row[Column.MIN_P] = float_bits(sampling.min_p)
    row[Column.TYPICAL_P] = float_bits(sampling.typical_p)
    row[Column.EDITED] = 1 + len(_edited(params)) if params.edits_logits else 0
    row[Column.COUNTED] = int(sampling.penalised)
    row[Column.REPETITION] = float_bits(repetition_of(sampling))
    row[Column.FREQUENCY] = float_bits(sampling.frequency_penalty)
    row[Column.PRESENCE] = float_bits(sampling.presence_penalty)
    return row


def _facts(seat: Seat) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    row = np.array(seat.constants, dtype=np.int32)
    row[Column.COMPUTED] = seat.sequence.num_computed
    row[Column.DRAFT_COMPUTED] = seat.sequence.num_draft_computed
    row[Column.MATCH] = 0 if seat.sequence.num_computed + 1 == len(seat.sequence) else UNKNOWN_END
    return row


def _signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits."""
    return word - (1 << 32) if word >> 31 else word
