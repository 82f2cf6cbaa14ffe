"""A request as the runner knows it: the mirror that plans and results keep in step with the core.

Over a draft depth of 3, with 5 known tokens, of which 2 drafts are accepted:

    known      t0 t1 t2 t3 t4
    verified               t4 d1 d2 d3        rows of the target's forward
    emitted                   d1 d2 r         r: the token recovered at d3
    computed   t0 t1 t2 t3 t4 d1 d2           all known tokens but the newest

The draft model ingests t4, d1, d2 to propose d1, d2, d3. It never sees d3, so after a full acceptance it is two tokens
behind (d3 and the bonus), else one.
"""

from __future__ import annotations

from paceline.core.params import SamplingParams
from paceline.core.plan import Admission, SequenceWork


class Sequence:
    """Mutated only by the runner that owns it, through `extend` and `commit`; a drafter moves `num_draft_computed`.

    Attributes:
        token_ids: prompt and emitted tokens.
        block_ids: block table; position i lives in block_ids[i // block_size].
        num_computed: leading tokens that have target KV.
        num_draft_computed: leading tokens that have draft KV.
    """

    __slots__ = ("block_ids", "num_computed", "num_draft_computed", "request_id", "sampling", "token_ids")

    def __init__(self, admission: Admission) -> None:
        self.request_id = admission.request_id
        self.sampling: SamplingParams = admission.sampling
        self.token_ids: list[int] = list(admission.token_ids)
        self.block_ids: list[int] = []
        self.num_computed = 0
        self.num_draft_computed = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, work: SequenceWork) -> None:
        """Take over the blocks that come with the work."""
        self.block_ids.extend(work.new_block_ids)

    def rows(self, work: SequenceWork) -> list[int]:
        """The known tokens that this work computes, without drafts."""
        rows = self.token_ids[self.num_computed : self.num_computed + work.num_tokens]
        assert len(rows) == work.num_tokens, (self.request_id, self.num_computed, len(self), work)
        assert work.samples == (self.num_computed + work.num_tokens == len(self)), (self.request_id, work)
        return rows

    def draft_gap(self, work: SequenceWork) -> list[int]:
        """Known tokens that a draft model ingests in this step: up to where the target will be, as far as planned."""
        end = min(self.num_computed + work.num_tokens, self.num_draft_computed + work.draft_catch_up)
        return self.token_ids[self.num_draft_computed : end]

    def commit(self, work: SequenceWork, emitted: list[int], num_accepted: int) -> None:
        """Book the work as done: its tokens are computed, rejected drafts are forgotten by both models."""
        if not work.samples:
            self.num_computed += work.num_tokens
            return
        known = len(self)
        self.token_ids.extend(emitted)
        self.num_computed = len(self) - 1
        self.num_draft_computed = min(self.num_draft_computed, known + num_accepted)
