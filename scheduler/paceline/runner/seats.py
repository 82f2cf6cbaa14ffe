"""Where each running sequence sits in the device's table, and what of it the host knows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from paceline.core.params import SequenceParams, Verification
from paceline.core.sequence import Sequence
from paceline.runner.positions import LOW_HALF
from paceline.runner.sampler import temperature_of
from paceline_kernels.triton.state import COLUMNS, Column, Rule, SequenceTable, float_bits

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
        num_launched: steps that sample for it, launched and not collected: while there are any, only the device knows
            where it stands.
        computed, draft_computed: leading tokens that have target and draft KV once all launched steps are through, as
            long as none of them samples.
        stale: the table does not have its row yet, or no longer.
        blocks_told: block ids that the table has.
        plain: see `is_plain`.
    """

    __slots__ = (
        "blocks_told",
        "computed",
        "constants",
        "draft_computed",
        "index",
        "num_launched",
        "plain",
        "sequence",
        "stale",
    )

    def __init__(self, index: int, sequence: Sequence) -> None:
        params = sequence.params
        self.index = index
        self.sequence = sequence
        self.num_launched = 0
        self.computed = sequence.num_computed
        self.draft_computed = sequence.num_draft_computed
        self.stale = True
        self.blocks_told = 0
        self.plain = is_plain(params)
        self.constants = _constants(params)

    def look(self) -> None:
        """Take over where the mirror stands; nothing is launched."""
        self.computed = self.sequence.num_computed
        self.draft_computed = self.sequence.num_draft_computed


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

    def tell(self, seats: Iterable[Seat]) -> None:
        """Write to the table what it does not know of these sequences: new blocks, and the facts of those stale."""
        table, device = self.table, self.table.facts.device
        stale: list[Seat] = []
        blocks: list[tuple[int, int, int]] = []
        for seat in seats:
            ids = seat.sequence.block_ids
            if len(ids) > seat.blocks_told:
                index = seat.index
                blocks.extend((index, i, ids[i]) for i in range(seat.blocks_told, len(ids)))
                seat.blocks_told = len(ids)
            if seat.stale:
                stale.append(seat)
                seat.stale = False
        if blocks:
            rows, columns, values = torch.tensor(blocks, dtype=torch.int32).to(device, non_blocking=True).unbind(1)
            table.block_tables[rows.long(), columns.long()] = values
        if stale:
            facts = np.stack([_facts(seat) for seat in stale])
            rows = torch.tensor([seat.index for seat in stale]).to(device, non_blocking=True)
            table.facts[rows] = torch.from_numpy(facts).to(device, non_blocking=True)


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
    tokens = seat.sequence.token_ids
    row = np.array(seat.constants, dtype=np.int32)
    row[Column.COMPUTED] = seat.computed
    row[Column.NEWEST] = tokens[-1]
    row[Column.PREVIOUS] = tokens[-2] if len(tokens) > 1 else 0
    return row


def _signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits."""
    return word - (1 << 32) if word >> 31 else word
