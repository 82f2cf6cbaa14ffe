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
from paceline.runner.sampler import temperature_of
from paceline_kernels.triton.state import COLUMNS, UNKNOWN_END, Column, Rule, SequenceTable, float_bits

RULES = {
    Verification.GREEDY: Rule.GREEDY,
    Verification.COUPLED: Rule.COUPLED,
    Verification.TOKEN_WISE: Rule.TOKEN_WISE,
    Verification.BLOCK: Rule.BLOCK,
}


def is_plain(params: SequenceParams) -> bool:
    """Nothing but the model has to be asked for its logits, and nobody wants to see them."""
    wants_logprobs = params.logprobs.completion is not None or params.logprobs.prompt is not None
    return not (params.edits_logits or wants_logprobs)


class Seat:
    """A sequence's place in the table.

    Attributes:
        sequence: its mirror, which knows what has been collected.
        stale: the table does not have its facts yet, or no longer.
        blocks_told, tokens_told: block ids that the table has; tokens that it has once all launched steps are through,
            and collected.
        plain: see `is_plain`.
    """

    __slots__ = ("blocks_told", "constants", "index", "plain", "sequence", "stale", "tokens_told")

    def __init__(self, index: int, sequence: Sequence) -> None:
        params = sequence.params
        self.index = index
        self.sequence = sequence
        self.stale = True
        self.blocks_told = 0
        self.tokens_told = 0
        self.plain = is_plain(params)
        self.constants = _constants(params)


class Seats:
    """Hands out the rows of the table, and tells it what changed."""

    def __init__(self, table: SequenceTable) -> None:
        self.table = table
        self._free = list(range(len(table.facts)))[::-1]
        self._taken: dict[int, Seat] = {}

    def __getitem__(self, request_id: int) -> Seat:
        return self._taken[request_id]

    def take(self, sequence: Sequence) -> None:
        self._taken[sequence.request_id] = Seat(self._free.pop(), sequence)

    def leave(self, request_id: int) -> None:
        self._free.append(self._taken.pop(request_id).index)

    def tell(self, seats: Seq[Seat]) -> Tensor | None:
        """Write to the table what it does not know of these sequences: new blocks; of those stale, for which nothing is
        launched, facts and new tokens.

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
        # Where memory ends meanwhile, all of it is told again.
        for seat in grown:
            seat.blocks_told = len(seat.sequence.block_ids)
        for seat in stale:
            seat.tokens_told, seat.stale = len(seat.sequence), False
        return places


def _write(table: Tensor, values: Iterable[tuple[int, int, list[int]]]) -> None:
    """Into rows of a table on the device, each from a column on: (row, column, values)."""
    rows, columns, flat = [], [], []
    for row, first, some in values:
        rows.append(np.full(len(some), row))
        columns.append(np.arange(first, first + len(some)))
        flat.append(np.array(some, dtype=np.int64))
    there = _send(np.stack([np.concatenate(part) for part in (rows, columns, flat)]), table.device)  # [3, num_values]
    table[there[0], there[1]] = there[2].to(table.dtype)


def _send(array: NDArray[Any], device: torch.device) -> Tensor:
    """To the device, by memory that it can read itself: from other memory it would be waited for."""
    here = torch.from_numpy(array)
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)


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
