"""Where a completion stops, and the text that may be shown until then."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.params import StopParams
from paceline.core.plan import Finish, FinishReason
from paceline.core.request import Request
from paceline.core.stopping import cut_run
from paceline.engine.detokenizer import Detokenizer
from paceline.engine.stop_matcher import StopMatcher
from paceline.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Cut:
    """What is left of a step's tokens.

    Attributes:
        token_ids: the tokens to emit.
        text: text that is safe to show now; not always that of `token_ids`, since text may be held back.
        finish: set if the completion ends with these tokens.
    """

    token_ids: tuple[int, ...]
    text: str
    finish: Finish | None


class StopChecker:
    """The stops of one request. Mutated by `cut`, once per step that emits.

    A run of tokens is looked at one by one, so it makes no difference how tokens were grouped into steps. The
    completion ends with the first token that completes a stop string, is a stop id or reaches a length; the tokens
    behind it are dropped. If several happen at one token, a stop string wins over a length (a stop id has no text).
    If several strings are completed by one token, the one that ends first wins, and of these the longest.

    The token that completes a stop string is kept, so that ids, usage and the KV cache agree, while the text ends
    before the match, or behind it with `include_stop_string`: the end of that token's text may be cut either way, and
    earlier tokens of the match keep their ids and lose their text. A stop id is kept among the ids and has no text.

    Text that may be the beginning of a stop string is held back: less than the longest stop string, ever. A character
    that is incomplete at the end is shown as U+FFFD and matches nothing.
    """

    def __init__(self, stop: StopParams, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self._include = stop.include_stop_string
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stop.strings) if stop.strings else None
        self._state = StopMatcher.START
        self._held = ""

    def cut(self, request: Request, token_ids: tuple[int, ...]) -> Cut:
        """Cut a step's raw tokens, which follow the request's output, behind the one that ends the completion."""
        kept, finish = cut_run(request, token_ids, self._eos_token_ids)
        has_stop_id = finish is not None and finish.stop_token_id is not None
        shown: list[str] = []
        for index, token_id in enumerate(kept[:-1] if has_stop_id else kept):
            piece = self._detokenizer.push(token_id)
            if self._matcher is None:
                shown.append(piece)
                continue
            text, match = self._scan(self._matcher, piece)
            shown.append(text)
            if match is not None:
                return Cut(kept[: index + 1], "".join(shown), Finish(FinishReason.STOP_STRING, stop_string=match))
        if finish is not None:
            shown.append(self._held + self._detokenizer.flush())
        return Cut(kept, "".join(shown), finish)

    def _scan(self, matcher: StopMatcher, piece: str) -> tuple[str, str | None]:
        """Text that is decided now that `piece` follows, and the stop string found in it."""
        text = self._held + piece
        for position, char in enumerate(piece, len(self._held) + 1):
            self._state = matcher.step(self._state, char)
            match = matcher.match(self._state)
            if match is not None:
                return text[: position if self._include else position - len(match)], match
        decided = len(text) - matcher.length(self._state)
        self._held = text[decided:]
        return text[:decided], None
