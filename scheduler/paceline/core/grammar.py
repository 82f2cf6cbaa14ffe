"""What the engine and the runner need of a grammar; `paceline.structured` has the real ones."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

WORD = 32  # tokens in a word of a mask
Mask = NDArray[np.int32]  # [..., ceil(vocab / 32)]: bit v % 32 of word v // 32 is set where token v is allowed


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """The row that allows these ids and no others.  # [ceil(vocab / 32)]"""
    bits = np.zeros(-(-vocab_size // WORD) * WORD, np.uint8)
    bits[list(token_ids)] = 1
    packed: NDArray[np.uint8] = np.packbits(bits, bitorder="little")
    return packed.view(np.int32)


class GrammarKind(enum.StrEnum):
    """Ways to write a constraint; the values are the contract's field names."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint as the client wrote it: `choices` for a choice, `text` for every other kind."""

    kind: GrammarKind
    text: str = ""
    choices: tuple[str, ...] = ()


class Matcher(Protocol):
    """Where one completion stands in its grammar. Only `advance` changes that."""

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Consume emitted tokens. False if the grammar refuses one: then the matcher is dead."""
        ...

    def forced(self, limit: int) -> list[int]:
        """The tokens that must follow from here, at most `limit`; none where there is a choice."""
        ...

    def masks(self, drafts: Sequence[int]) -> Mask:
        """Row j, of len(drafts) + 1, allows what may follow behind drafts[:j].

        Rows behind a draft that the grammar refuses allow everything: that draft is never accepted.
        """
        ...

    def mask(self, drafts: Sequence[int]) -> Mask:
        """The last row of `masks(drafts)` alone, for who asks draft by draft."""
        ...

    @property
    def ended(self) -> bool:
        """Nothing but the end may follow."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the matcher is dead, in words; None while it lives."""
        ...


class Grammar(Protocol):
    """A compiled constraint: immutable, shared by the completions of a request."""

    def matcher(self) -> Matcher:
        """A matcher at the grammar's beginning."""
        ...


class GrammarCompiler(Protocol):
    """Thread-safe; compiling may take a while."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises InvalidArgument, naming the field `structured.<kind>`; Unavailable: it cannot be done now."""
        ...

    def close(self) -> None:
        """Do no more: what is being compiled is Unavailable, as far as it can be ended, and so is all that comes later.
        More calls have no effect.
        """
        ...
