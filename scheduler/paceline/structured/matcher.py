"""Where a completion stands in its grammar: what may follow, also behind drafts, by llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llguidance import LLMatcher

from paceline.core.grammar import Mask
from paceline.structured.vocabulary import Vocabulary, only_token

NOTHING_FOLLOWS = "no token of the vocabulary may follow"
# What llguidance says of a text that can be read in too many ways: whatever lexer it is read with.
TOO_MANY_WAYS = "Parser Error: Current row has"


class Origin(Protocol):
    """What matchers come from: `LLGuidanceGrammar`."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    def parser(self) -> LLMatcher:
        """A parser at the grammar's beginning, with the lexer, and all it has learned, that its siblings have."""
        ...

    def renewed_parser(self) -> LLMatcher:
        """The same with a new lexer, which later siblings share."""
        ...


class LLGuidanceMatcher:
    """Implements `Matcher`, for one thread at a time: also a question moves a parser.

    The parser sees text only. Special tokens never reach it: it is asked whether the end may follow, and which ids
    say so is known here. Where bytes are forced, llguidance allows the one token with which the tokenizer would go on,
    so there is one way to write what leaves no choice.

    No parser goes back. llguidance 1.9.1 keeps its last mask by the row and the lexer's state it was made at, and
    rollback leaves it: behind other tokens the same row is another, and the mask wrong. Grammars with `max_tokens` or
    `stop` it does not roll back at all. So one parser reads what was emitted, and drafts are read by copies of it.

    A parser stops for good where it reaches a limit. That need not be the completion's fault: the lexer, which all
    completions of a grammar share, may be full, or a draft may have led there. So the parser is built anew, with a
    new lexer, and reads again what was emitted; where it then stops once more, the matcher is dead.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._vocabulary = origin.vocabulary
        self._parser = origin.parser()
        self._parser_row = self._vocabulary.parser_row()
        self._parser_row_address = self._parser_row.ctypes.data
        self._emitted: list[int] = []  # text that was emitted: the parser has read it, and nothing else
        self._ahead: LLMatcher | None = None  # a copy that has read drafts, too:
        self._drafts: tuple[int, ...] = ()  # these
        self._too_many_ways = False  # why there was no row, where there was none last
        self._rows: dict[tuple[int, ...], Mask] = {}  # what may follow behind the emitted text and these drafts
        self._closed = False  # an end-of-sequence id was emitted
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def ended(self) -> bool:
        if self._failure is not None or self._closed:
            return self._failure is None
        if self._row(()) is None:  # a full lexer looks like an end: a new one has the last word
            self.masks([])
        return self._failure is None and self._accepting() and not (self._rows[()] & self._vocabulary.text).any()

    def advance(self, token_ids: Sequence[int]) -> bool:
        for position, token_id in enumerate(token_ids):
            if self._failure is None:
                self._emit(token_id, is_last=position == len(token_ids) - 1)
        self._forget_drafts()
        return self._failure is None

    def forced(self, limit: int) -> list[int]:
        token_ids: list[int] = []
        if self._failure is not None or self._closed:
            return token_ids
        while len(token_ids) < limit:
            row = self._row(tuple(token_ids))
            token_id = None if row is None else only_token(row)
            if token_id is None:
                break
            token_ids.append(token_id)
            if token_id in self._vocabulary.end_ids:
                break
        return token_ids

    def masks(self, drafts: Sequence[int]) -> Mask:
        rows = self._vocabulary.everything(len(drafts) + 1)
        if self._failure is not None:
            return rows
        if self._closed:
            rows[0] = self._vocabulary.end
            return rows
        stopped_at = self._fill(rows, drafts)
        while stopped_at is not None:
            if stopped_at and self._too_many_ways:  # nothing may follow there, whatever lexer it is read with
                rows[stopped_at] = 0
                break
            self._renew_parser()
            before, stopped_at = stopped_at, self._fill(rows, drafts, stopped_at)
            if stopped_at == 0:
                self._die_stopped()
                break
            if stopped_at == before:  # also without what the rows before cost: nothing may follow there
                rows[stopped_at] = 0
                break
        return rows

    def mask(self, drafts: Sequence[int]) -> Mask:
        if self._failure is None and not self._closed:
            row = self._row(tuple(drafts))
            if row is not None and row.any():
                return row
        last: Mask = self.masks(drafts)[-1]
        return last

    def _emit(self, token_id: int, is_last: bool) -> None:
        """Move on by an emitted token, or die."""
        if token_id in self._vocabulary.end_ids:
            self._closed = self._closed or self._accepting()
            if not self._closed:
                self._failure = f"the completion ended (token {token_id}) where the grammar does not"
        elif token_id in self._vocabulary.special_ids:
            # The last token may be a stop id, which is no part of the text.
            if not is_last:
                self._failure = f"special token {token_id} is no part of a grammar"
        elif self._closed:
            self._failure = f"token {token_id} stands behind the end"
        elif self._vocabulary.allows(self._vocabulary.text, token_id) and self._read(token_id):
            self._emitted.append(token_id)
        elif self._parser.is_error():
            self._die_stopped()
        else:
            self._failure = f"the grammar does not allow token {token_id} here"

    def _read(self, token_id: int) -> bool:
        """Let the parser read an emitted token. A full lexer refuses like a grammar, so a new one has the last word."""
        if self._parser.try_consume_tokens([token_id]) == 1:
            return True
        if _too_many_ways(self._parser):  # everybody would wait a second for a large grammar
            return False
        self._renew_parser()
        return self._parser.try_consume_tokens([token_id]) == 1

    def _fill(self, rows: Mask, drafts: Sequence[int], begin: int = 0) -> int | None:
        """Write the rows from `begin` up to the first draft that is refused. The row at which the parser stopped, if
        it did.
        """
        for position in range(begin, len(rows)):
            row = self._row(tuple(drafts[:position]))
            if row is None:
                return position
            if row.any():
                rows[position] = row
            elif not (position or self._emitted) or not self._accepting(drafts[:position]):
                rows[position] = row
                if position == 0:
                    self._failure = NOTHING_FOLLOWS
            if position == len(drafts):
                break
            draft = drafts[position]
            if draft in self._vocabulary.end_ids or not self._vocabulary.allows(row, draft):
                break
        return None

    def _row(self, drafts: tuple[int, ...]) -> Mask | None:
        """What may follow behind drafts that the grammar allows; None if the parser stops."""
        row = self._rows.get(drafts)
        if row is None and (parser := self._parser_behind(drafts)) is not None:
            row = self._text_that_follows(parser)
            if parser.is_accepting():
                row |= self._vocabulary.end
            if parser.is_error():
                self._too_many_ways = _too_many_ways(parser)
                return None
            self._rows[drafts] = row
        return row

    def _accepting(self, drafts: Sequence[int] = ()) -> bool:
        parser = self._parser_behind(tuple(drafts))
        return parser is not None and parser.is_accepting()

    def _text_that_follows(self, parser: LLMatcher) -> Mask:
        """What may follow where a parser is, without the end; nothing if it has stopped."""
        parser.unsafe_compute_mask_ptr(self._parser_row_address, self._parser_row.nbytes)
        row: Mask = self._parser_row[: self._vocabulary.num_words] & self._vocabulary.text
        return row

    def _parser_behind(self, drafts: tuple[int, ...]) -> LLMatcher | None:
        """A parser that has read the emitted text and these drafts; None if it cannot read them.

        A copy takes as long as the text is, so drafts that go on where the last ones ended are read by the same.
        """
        if not drafts:
            return self._parser
        known = len(self._drafts)
        if self._ahead is None or drafts[:known] != self._drafts:
            self._ahead, known = self._parser.deep_copy(), 0
        unread = list(drafts[known:])
        if self._ahead.try_consume_tokens(unread) < len(unread):
            self._too_many_ways = _too_many_ways(self._ahead)
            self._ahead = None
            return None
        self._drafts = drafts
        return self._ahead

    def _forget_drafts(self) -> None:
        """Also for the memory: a copy is as large as the parser."""
        self._ahead = None
        self._rows.clear()

    def _renew_parser(self) -> None:
        self._parser = self._origin.renewed_parser()
        self._forget_drafts()
        self._parser.try_consume_tokens(self._emitted)

    def _die_stopped(self) -> None:
        reason = self._parser.get_error().partition("\n")[0]
        nothing = reason.startswith("NoExtension")
        self._failure = NOTHING_FOLLOWS if nothing else f"the grammar is too complex to go on: {reason}"


def _too_many_ways(parser: LLMatcher) -> bool:
    """Why a parser stopped."""
    return bool(parser.get_error().startswith(TOO_MANY_WAYS))
