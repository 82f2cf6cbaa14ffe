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

from paceline.core.bad_words import BadWords
from paceline.core.grammar import Mask
from paceline.core.plan import Admission, SequenceWork
from paceline.core.token_counts import TokenCounts


class Sequence:
    """Mutated only by the runner that owns it, through `extend` and `commit`; a drafter moves `num_draft_computed`, the
    sampler sets `allowed`.

    Attributes:
        token_ids: prompt and emitted tokens.
        block_ids: block table; position i lives in block_ids[i // block_size].
        num_computed: leading tokens that have target KV.
        num_draft_computed: leading tokens that have draft KV.
        allowed: the mask of its allowed tokens, kept here by the sampler, who builds it when it is first needed.
        bad_words: what the completion may not contain, if anything.
        counts: how often each token stands in it, if penalties need to know.
        matcher: where the completion stands in its grammar, if it has one.
    """

    __slots__ = (
        "allowed",
        "bad_words",
        "block_ids",
        "counts",
        "matcher",
        "num_computed",
        "num_draft_computed",
        "num_prompt_tokens",
        "params",
        "request_id",
        "token_ids",
    )

    def __init__(self, admission: Admission) -> None:
        self.request_id = admission.request_id
        self.params = admission.params
        self.token_ids: list[int] = list(admission.token_ids)
        self.num_prompt_tokens = admission.num_prompt_tokens
        self.block_ids: list[int] = list(admission.block_ids)
        self.num_computed = admission.num_computed
        self.num_draft_computed = admission.num_draft_computed
        self.counts = TokenCounts(self.prompt, self.output) if self.params.sampling.penalised else None
        self.allowed: Mask | None = None
        words = self.params.constraints.bad_words
        self.bad_words = BadWords(words) if words else None
        grammar = self.params.constraints.grammar
        self.matcher = None if grammar is None else grammar.matcher()
        if self.matcher is not None and self.output:
            self.matcher.advance(self.output)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prompt(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output(self) -> list[int]:
        """Emitted tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def last_output(self, count: int) -> list[int]:
        """The newest emitted tokens, at most `count`."""
        return self.token_ids[max(self.num_prompt_tokens, len(self.token_ids) - count) :]

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
        """Book the work as done: its tokens are computed, rejected drafts are forgotten by both models.

        The grammar's matcher is advanced by who knows how to take its refusal.
        """
        if not work.samples:
            self.num_computed += work.num_tokens
            return
        known = len(self)
        self.token_ids.extend(emitted)
        if self.counts is not None:
            self.counts.add(emitted)
        self.num_computed = len(self) - 1
        # Of a run that was cut at a dead end, the newest token may be a draft that the draft model has read.
        self.num_draft_computed = min(self.num_draft_computed, known + num_accepted, len(self) - 1)
