"""Where each running sequence sits in the device's table, and what of it the host knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from paceline.core.params import SequenceParams, Verification
from paceline.core.plan import SequenceWork
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

    def look_ahead(self, work: SequenceWork, draft_read: int) -> None:
        """A step is launched: where the sequence will be, as far as the host can tell.

        Args:
            draft_read: known tokens that the draft model reads in it, besides those it drafts from.
        """
        self.draft_computed += draft_read
        if work.samples:
            self.num_launched += 1
        else:
            self.computed += work.num_tokens

    def landed(self) -> None:
        """The mirror has advanced by a launched step that samples."""
        self.num_launched -= 1
        if not self.num_launched:
            self._look()

    def moved(self) -> None:
        """The mirror has advanced by a step that was not launched, and of which the table knows nothing."""
        self._look()
        self.stale = True
        self.blocks_told = 0  # telling may have failed

    def _look(self) -> None:
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

    def tell_drafts(self, proposals: Mapping[int, list[int]]) -> None:
        """Write drafts that the host has found, by seat, to where the device looks for its own."""
        found = {index: tokens for index, tokens in proposals.items() if tokens}
        if not found:
            return
        drafts, device = self.table.drafts, self.table.drafts.device
        rows = np.concatenate([np.full(len(tokens), index) for index, tokens in found.items()])
        columns = np.concatenate([np.arange(len(tokens)) for tokens in found.values()])
        values = np.concatenate([np.array(tokens, dtype=np.int32) for tokens in found.values()])
        where = torch.from_numpy(np.stack([rows, columns])).to(device)
        drafts[where[0], where[1]] = torch.from_numpy(values).to(device)


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
