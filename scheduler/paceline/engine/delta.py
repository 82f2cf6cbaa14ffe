"""What a completion grew by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from paceline.core.plan import Finish, TokenLogprobs
from paceline.core.request import RequestStats

# One for each token of a prompt; the first has nothing before it that could have predicted it.
PromptLogprobs = tuple[TokenLogprobs | None, ...]


# Not frozen, and with a constructor that is written out: docs/decisions/012.
@dataclass(init=False, slots=True)
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
    finish: Finish | None
    stats: RequestStats | None
    logprobs: tuple[TokenLogprobs, ...]
    choice: int
    prompt_logprobs: PromptLogprobs

    def __init__(
        self,
        text: str,
        token_ids: tuple[int, ...],
        token_offset: int,
        finish: Finish | None = None,
        stats: RequestStats | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        choice: int = 0,
        prompt_logprobs: PromptLogprobs = (),
    ) -> None:
        self.text = text
        self.token_ids = token_ids
        self.token_offset = token_offset
        self.finish = finish
        self.stats = stats
        self.logprobs = logprobs
        self.choice = choice
        self.prompt_logprobs = prompt_logprobs


def join(deltas: Sequence[Delta]) -> Delta:
    """Consecutive deltas of one choice as one."""
    first, last = deltas[0], deltas[-1]
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        token_offset=first.token_offset,
        finish=last.finish,
        stats=last.stats,
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        choice=first.choice,
        prompt_logprobs=first.prompt_logprobs,
    )


@dataclass(init=False, slots=True)
class Output(Delta):
    """A delta, and whose it is.

    Attributes:
        cached_prompt_tokens: of the completion's prompt, those whose KV was there when it started.
    """

    request_id: int
    cached_prompt_tokens: int

    def __init__(
        self,
        request_id: int,
        cached_prompt_tokens: int,
        text: str,
        token_ids: tuple[int, ...],
        token_offset: int,
        finish: Finish | None = None,
        stats: RequestStats | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        choice: int = 0,
        prompt_logprobs: PromptLogprobs = (),
    ) -> None:
        Delta.__init__(self, text, token_ids, token_offset, finish, stats, logprobs, choice, prompt_logprobs)
        self.request_id = request_id
        self.cached_prompt_tokens = cached_prompt_tokens
