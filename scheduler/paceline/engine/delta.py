"""What a completion grew by."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.plan import Finish, TokenLogprobs
from paceline.core.request import RequestStats

# One for each token of a prompt; the first has nothing before it that could have predicted it.
PromptLogprobs = tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of one completion. Concatenated, deltas of a choice give the whole of it.

    Text may come later than its tokens: it waits for the rest of a character, or until it can no longer be part of a
    stop string.

    Attributes:
        token_offset: index of `token_ids[0]` in the completion.
        finish, stats: set together, in the last delta and only there.
        logprobs: one for each of `token_ids`, if the request asked for them.
        choice: which of the request's n completions it is.
        prompt_logprobs: in the first delta of the first choice, if the request asked for them.
    """

    text: str
    token_ids: tuple[int, ...]
    token_offset: int
    finish: Finish | None = None
    stats: RequestStats | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice: int = 0
    prompt_logprobs: PromptLogprobs = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(Delta):
    """A delta, and whose it is."""

    request_id: int
