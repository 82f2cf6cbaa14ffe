"""What the core and the runner say to each other: frozen values, one pair per step.

    schedule(now) -> StepPlan      execute(plan) -> StepResult      update(plan, result, now) -> outputs

The runner keeps a mirror of every admitted request (`core/sequence.py`), so a plan carries what is new and nothing
twice. That is also what lets a plan be made while the step before it still runs: a decode says *how many* rows to
compute, and the runner, which knows by then what was accepted, knows *where*.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Protocol

from paceline.core.method import DRAFT_MODEL, NO_METHOD, Method
from paceline.core.params import SequenceParams
from paceline.errors import PacelineError

LONGEST_NGRAM: Final = 4  # tokens of a text's end that are looked up
LONGEST_MATCH: Final = 16  # tokens; longer ones are told apart no more


class FinishReason(enum.StrEnum):
    EOS = "eos"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"
    MAX_TOKENS = "max_tokens"
    CONTEXT_LENGTH = "context_length"
    DEAD_END = "dead_end"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a completion ended, and what matched if something did; `detail` says in words why a dead end is one."""

    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that enters the batch, or comes back after a preemption.

    Attributes:
        token_ids: the prompt and, after a preemption, everything emitted so far.
        num_prompt_tokens: how many of them are the prompt's.
        block_ids: blocks that the request shares with another completion of its prompt: full, so their target KV is
            never written again. Draft KV that is still missing there, each writes alike.
        num_computed: tokens whose target KV lies in them; nothing else is computed.
        num_draft_computed: tokens whose draft KV does.
    """

    request_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SequenceParams = SequenceParams()
    block_ids: tuple[int, ...] = ()
    num_computed: int = 0
    num_draft_computed: int = 0


# Of these two there is one for every request in every step. Nobody changes them, but freezing them, or leaving the
# constructor to be generated, makes them take three times as long.
@dataclass(init=False, slots=True)
class SequenceWork:
    """One request's part of a step.

    Attributes:
        num_tokens: known tokens to compute, from the first that has no KV on: a prompt chunk, or the 1 token of a
            decode.
        samples: the run reaches the last known token, so the target's next token is sampled.
        num_drafts: depth k_i: draft tokens verified behind it, in the same forward.
        method: who drafts.
        draft_catch_up: known tokens that a draft model may ingest in this step, before it drafts.
        new_block_ids: blocks appended to the request's block table; they cover every row of this step.
        scores_ngram: n-grams are looked up: what they would have proposed is compared with what is emitted, unless that
            is verified, and they tell how long a match the text ends with.
    """

    request_id: int
    num_tokens: int
    samples: bool
    num_drafts: int
    method: Method
    draft_catch_up: int
    new_block_ids: tuple[int, ...]
    scores_ngram: bool

    def __init__(
        self,
        request_id: int,
        num_tokens: int,
        samples: bool,
        num_drafts: int = 0,
        method: Method = NO_METHOD,
        draft_catch_up: int = 0,
        new_block_ids: tuple[int, ...] = (),
        scores_ngram: bool = False,
    ) -> None:
        self.request_id = request_id
        self.num_tokens = num_tokens
        self.samples = samples
        self.num_drafts = num_drafts
        self.method = method
        self.draft_catch_up = draft_catch_up
        self.new_block_ids = new_block_ids
        self.scores_ngram = scores_ngram

    @property
    def num_rows(self) -> int:
        """Rows in the target's forward."""
        return self.num_tokens + self.num_drafts

    def rows_read(self, first_rows: int) -> int:
        """Rows that the draft model reads for this work besides its passes. If it drafts, its first pass reads the last
        `first_rows` tokens of what it has to catch up on.
        """
        if self.num_drafts and self.method is DRAFT_MODEL:
            return max(0, self.draft_catch_up - first_rows)
        return self.draft_catch_up


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The runner applies `released`, then `admitted`, then `work`."""

    step_id: int
    released: tuple[int, ...]
    admitted: tuple[Admission, ...]
    work: tuple[SequenceWork, ...]

    @property
    def num_rows(self) -> int:
        return sum(work.num_rows for work in self.work)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable a token was, and what would have been more so.

    Attributes:
        logprob: natural logarithm of the token's probability.
        rank: 1 for the most probable token: 1 + how many are more probable.
        top_token_ids, top_logprobs: the most probable tokens, best first, ties by id; as many as were asked for.
    """

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(init=False, slots=True)
class SequenceResult:
    """What one request's work brought.

    Attributes:
        token_ids: accepted drafts and the recovered or bonus token after them; empty if the work does not sample. The
            engine shortens it where the completion stops.
        num_drafted: drafts verified, at most the planned depth (an n-gram may have less to propose).
        num_accepted: drafts kept by the verifier.
        acceptance: for each *reached* draft position, the probability that a draft there is accepted: the overlap
            sum(min(p, q)) token-wise, p(x) for one-hot drafts, 0 or 1 for every other rule. Positions behind a
            rejection were not reached.
        num_draft_computed: known tokens that have draft KV now.
        logprobs: one for each of `token_ids`, if the request asked for them.
        prompt_start, prompt_logprobs: those of the prompt tokens from this position on, as far as this step knows them.
        grammar_end: the completion is whole after so many of `token_ids`; None if not, or if an end-of-sequence id
            will say so.
        failure: why nothing can follow `token_ids`, in words: no token is allowed there, or the grammar broke down.
        error: what the request ends with, alone: nothing of the work was done. After `NotFinite` nobody may read the KV
            that it has.
        finish: set by the engine where a stop was found.
        scored: if the work asks for it, how what an n-gram would have proposed compares: 1 for each token that was
            emitted, and 0 for the first that was not; nothing without a proposal.
        match: if the work asks for it, how many of the last tokens, those emitted included, stood before in this order;
            n-grams go on as the text went on there. 0 if the last one is new, and nothing will be proposed; at most
            `LONGEST_MATCH`, which it is where a grammar forces what follows.
        is_forced: its drafts are what its grammar forces; no drafter was asked for them.
    """

    request_id: int
    token_ids: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    acceptance: tuple[float, ...]
    num_draft_computed: int
    logprobs: tuple[TokenLogprobs, ...]
    prompt_start: int
    prompt_logprobs: tuple[TokenLogprobs, ...]
    grammar_end: int | None
    failure: str | None
    finish: Finish | None
    scored: tuple[float, ...]
    match: int
    is_forced: bool
    error: PacelineError | None

    def __init__(
        self,
        request_id: int,
        token_ids: tuple[int, ...] = (),
        num_drafted: int = 0,
        num_accepted: int = 0,
        acceptance: tuple[float, ...] = (),
        num_draft_computed: int = 0,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_start: int = 0,
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
        grammar_end: int | None = None,
        failure: str | None = None,
        finish: Finish | None = None,
        scored: tuple[float, ...] = (),
        match: int = 0,
        is_forced: bool = False,
        error: PacelineError | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids = token_ids
        self.num_drafted = num_drafted
        self.num_accepted = num_accepted
        self.acceptance = acceptance
        self.num_draft_computed = num_draft_computed
        self.logprobs = logprobs
        self.prompt_start = prompt_start
        self.prompt_logprobs = prompt_logprobs
        self.grammar_end = grammar_end
        self.failure = failure
        self.finish = finish
        self.scored = scored
        self.match = match
        self.is_forced = is_forced
        self.error = error


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a step's time went, in seconds. `total` covers the whole of `execute`."""

    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result per work of the plan, in the plan's order."""

    step_id: int
    sequences: tuple[SequenceResult, ...]
    times: StepTimes = StepTimes()


class StepRunner(Protocol):
    """Executes plans in the order in which they were made."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Mutates the runner's mirror and its KV; the plan stays as it is."""
        ...


class Pending(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for it. Any thread may."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """A step that is through, where one that was launched is asked for."""

    step: StepResult

    def result(self) -> StepResult:
        return self.step


class PipelinedRunner(StepRunner, Protocol):
    """A runner whose steps need not be waited for before the next is launched."""

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step, in the order of plans; at most one other has no result yet."""
        ...
