"""Where a completion stops, and the text that may be shown until then."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.params import StopParams
from paceline.core.plan import Finish, FinishReason
from paceline.core.request import Request
from paceline.core.stopping import cut_run
from paceline.engine.stop_matcher import StopMatcher
from paceline.engine.tokenizer import Tokenizer


class StopChecker:
    """The stops of one request. Mutated by `cut`, once per step that emits.

    A run of tokens is looked at one by one, so it makes no difference how tokens were grouped into steps. The
    completion ends with the first token that completes a stop string, is a stop id or reaches a length; the tokens
    behind it are dropped. If several happen at one token, a stop string wins over a length (a stop id has no text).
    If several strings are completed by one token, the one that ends first wins, and of these the longest.

    The token that completes a stop string is kept, so that ids, usage and the KV cache agree, while the text ends
    before the match, or behind it with `include_stop_string`: the end of that token's text may be cut either way, and
    earlier tokens of the match keep their ids and lose their text. A stop id is kept among the ids and has no text.

    A completion's first `min_tokens` tokens complete no stop: a match must end in the text of a later token, though it
    may begin before, and a match that ended earlier stays in the text for good. So a completion has at least
    `min_tokens` tokens and, if it ends with a stop, one more, unless a length ends it before.

    Text that may be the beginning of a stop string is held back: less than the longest stop string, ever. A character
    that is incomplete at the end is shown as U+FFFD and matches nothing.

    Args:
        matcher: of the stop strings, for the completions of a request to share; None makes one.
    """

    def __init__(
        self,
        stop: StopParams,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        eos_token_ids: tuple[int, ...],
        matcher: StopMatcher | None = None,
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._include = stop.include_stop_string
        self._min_tokens = stop.min_tokens
        self._decoder = tokenizer.decoder(prompt_token_ids, special_tokens=stop.include_special_tokens)
        if matcher is None and stop.strings:
            matcher = StopMatcher(stop.strings)
        self._matcher = matcher
        self._state = StopMatcher.START
        self._held = ""

    def cut(
        self, request: Request, token_ids: tuple[int, ...], end_of_run: Finish | None = None
    ) -> tuple[tuple[int, ...], str, Finish | None]:
        """Cut a step's raw tokens, which follow the request's output, behind the one that ends the completion.

        Args:
            end_of_run: why nothing can follow these tokens, if nothing can: the completion ends with them, whatever
                `min_tokens` is, unless a stop or a length among them ends it. A completion that is whole is so at its
                last possible token, too.

        Returns:
            The tokens to emit: the first of the step's, so whatever else comes per token is cut at their number. Text
            that is safe to show now; not always that of these tokens, since text may be held back. If the completion
            ends with these tokens, why.
        """
        kept, finish = cut_run(request, token_ids, self._eos_token_ids)
        whole = end_of_run is not None and end_of_run.reason is FinishReason.EOS and kept == token_ids
        if finish is None or (whole and finish.stop_token_id is None):
            finish = end_of_run
        has_stop_id = finish is not None and finish.stop_token_id is not None
        first_stop = self._min_tokens - len(request.output_token_ids)
        shown = ""
        for index, token_id in enumerate(kept[:-1] if has_stop_id else kept):
            piece = self._decoder.push(token_id)
            if self._matcher is None:
                shown += piece
                continue
            text, match = self._scan(self._matcher, piece, may_match=index >= first_stop)
            shown += text
            if match is not None:
                return kept[: index + 1], shown, Finish(FinishReason.STOP_STRING, stop_string=match)
        if finish is not None:
            shown += self._held + self._decoder.flush()
        return kept, shown, finish

    def end_of_grammar(self, token_ids: tuple[int, ...]) -> Finish:
        """The finish of a completion that is whole with these tokens. An end-of-sequence id that says so has no text,
        even where `ignore_eos` makes it no stop anywhere else.
        """
        last = token_ids[-1]
        return Finish(FinishReason.EOS, stop_token_id=last if last in self._eos_token_ids else None)

    def _scan(self, matcher: StopMatcher, piece: str, may_match: bool) -> tuple[str, str | None]:
        """Text that is decided now that `piece` follows, and the stop string found in it."""
        text = self._held + piece
        for position, char in enumerate(piece, len(self._held) + 1):
            self._state = matcher.step(self._state, char)
            match = matcher.match(self._state)
            if may_match and match is not None:
                return text[: position if self._include else position - len(match)], match
        decided = len(text) - matcher.length(self._state)
        self._held = text[decided:]
        return text[:decided], None
