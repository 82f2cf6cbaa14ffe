"""The drafter that looks a text's end up in the text itself."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.core.plan import SequenceWork
from paceline.core.sequence import Sequence
from paceline.runner.drafter import Draft
from paceline.speculation.ngram_index import NgramIndex


class Ngram:
    """Implements `Drafter` and `Scorer`: one-hot drafts, no model, no KV."""

    def __init__(self) -> None:
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, batch: Seq[tuple[Sequence, SequenceWork]]) -> list[Draft]:
        return [
            Draft(self._index(sequence).continuation(sequence.token_ids, work.num_drafts)) for sequence, work in batch
        ]

    def score(self, sequence: Sequence, emitted: Seq[int]) -> tuple[float, ...]:
        return self._index(sequence).score(sequence.token_ids, emitted)

    def match(self, sequence: Sequence) -> int:
        return self._index(sequence).match(sequence.token_ids)

    def _index(self, sequence: Sequence) -> NgramIndex:
        """The index of all that the sequence holds by now."""
        index = self._indexes.get(sequence.request_id)
        if index is None:
            index = self._indexes[sequence.request_id] = NgramIndex()
        index.read(sequence.token_ids)
        return index

    def release(self, request_id: int) -> None:
        self._indexes.pop(request_id, None)
