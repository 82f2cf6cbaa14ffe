"""From a client's text to a grammar that completions can follow."""

from __future__ import annotations

import functools
import json
import math
import re
import threading
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits

from paceline.core.grammar import Grammar, GrammarKind, GrammarSpec, Matcher
from paceline.errors import InvalidArgument, cut_short
from paceline.structured.matcher import LLGuidanceMatcher
from paceline.structured.trials import TrialLimits, Trials
from paceline.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SOURCE_BYTES = 64 * 1024
MAX_REGEX_BYTES = 8 * 1024  # the time to compile one grows with the square
MAX_CHOICES = 1024
# llguidance recurses from rule to rule: a chain of 3000 overflows the stack, one of 2000 does not.
MAX_GRAMMAR_LINES = 1024
MAX_MULTIPLE = 10_000  # takes a tenth of a second
MAX_CACHED = 32
MAX_TRIED = 256  # results of trials that are kept: above all of those that take long and come again

# llguidance's own, but for the lexer's states: each grammar may have so many, and 65536 take some 35 MB.
LIMITS = LLParserLimits(max_lexer_states=1 << 16, verbose_errors=False)
# Fixed text is read without letting go of the interpreter: a fifth of a second of it with this fuel, with llguidance's
# own more than one.
PROBE_LIMITS = LLParserLimits(max_lexer_states=1 << 16, initial_lexer_fuel=400_000, verbose_errors=False)

# Enough for every usual layout, and so little that a model cannot spend its tokens on nothing.
WHITESPACE = r"(\x20|\r?\n[\x20\t]{0,40})"

DEFAULT_LIMITS = TrialLimits()

ALLOWED = {
    GrammarKind.JSON_SCHEMA: "a JSON schema that something matches",
    GrammarKind.REGEX: "a regular expression, without look-around and back-references, that something matches",
    GrammarKind.GRAMMAR: "a grammar in llguidance's dialect of Lark, with a rule `start`, that something matches",
    GrammarKind.CHOICE: f"1 to {MAX_CHOICES} strings, together at most {MAX_SOURCE_BYTES} bytes",
}


class LLGuidanceGrammar:
    """Implements `Grammar`. Its matchers share a lexer, which is what makes them cheap, and may fill it."""

    def __init__(self, vocabulary: Vocabulary, source: str) -> None:
        self.vocabulary = vocabulary
        self._source = source
        self._template = self._build()  # never moved, only copied: safe from any thread

    def refusal(self) -> str | None:
        """Why no completion can follow this grammar, in words; None if one can."""
        if self._template.is_error():
            return self._template.get_error()
        probe = self._parse(PROBE_LIMITS)
        if not probe.is_error() and len(probe.compute_ff_bytes()) > MAX_SOURCE_BYTES:
            return f"it begins with more than {MAX_SOURCE_BYTES} bytes of fixed text"
        matcher = LLGuidanceMatcher(self)
        matcher.masks([])
        return matcher.failure

    def matcher(self) -> Matcher:
        return LLGuidanceMatcher(self)

    def parser(self) -> LLMatcher:
        return self._template.deep_copy()

    def renewed_parser(self) -> LLMatcher:
        self._template = self._build()
        return self._template.deep_copy()

    def _build(self) -> LLMatcher:
        return self._parse(LIMITS)

    def _parse(self, limits: LLParserLimits) -> LLMatcher:
        return LLMatcher(self.vocabulary.tokenizer, self._source, log_level=0, limits=limits)


class LLGuidanceCompiler:
    """Implements `GrammarCompiler`. Keeps the grammars compiled last.

    Args:
        tokenizer: a fast one of transformers.
        vocab_size: the model's, which pads the tokenizer's.
        eos_token_ids: ids that end a completion; they are allowed where the grammar is matched.
        limits: what a grammar may take, which is tried in another process; None tries nothing, for grammars that come
            from nobody else.

    Takes as long as loading the tokenizer: about a second for 128 k tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        limits: TrialLimits | None = DEFAULT_LIMITS,
    ) -> None:
        backend: Any = getattr(tokenizer, "backend_tokenizer")  # noqa: B009, slow tokenizers do not declare it
        arguments = backend.to_str(), vocab_size, list(eos_token_ids), list(tokenizer.all_special_ids)
        self._vocabulary = Vocabulary(*arguments)
        self._trials = None if limits is None else Trials(arguments, limits)
        self._compiled = functools.lru_cache(MAX_CACHED)(self._compile)
        self._tried = functools.lru_cache(MAX_TRIED)(self._try)
        # One for each grammar, so that requests that come together compile it once, and wait for no other.
        self._locks: WeakValueDictionary[GrammarSpec, threading.Lock] = WeakValueDictionary()
        self._finding = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Grammar:
        with self._finding:
            lock = self._locks.setdefault(spec, threading.Lock())
        with lock:
            return self._compiled(spec)

    def close(self) -> None:
        """End the processes in which grammars are tried. So does the end of this process, however it comes. What has
        been tried, and is compiled here, cannot be ended.
        """
        if self._trials is not None:
            self._trials.close()

    def _compile(self, spec: GrammarSpec) -> LLGuidanceGrammar:
        _check_size(spec)
        reason = self._tried(spec)
        built = reason if reason is not None else build(self._vocabulary, spec)
        if isinstance(built, str):
            raise _refused(spec, built)
        return built

    def _try(self, spec: GrammarSpec) -> str | None:
        return None if self._trials is None else self._trials.refusal(spec)


def build(vocabulary: Vocabulary, spec: GrammarSpec) -> LLGuidanceGrammar | str:
    """The grammar, or why no completion can follow it, in words. May take any time, and any memory."""
    try:
        grammar = LLGuidanceGrammar(vocabulary, _source(spec))
    except (ValueError, RecursionError) as error:  # no schema, or no Unicode
        return str(error)
    refusal = grammar.refusal()
    return grammar if refusal is None else refusal


def _source(spec: GrammarSpec) -> str:
    """The grammar as llguidance takes it. ValueError for what is no JSON."""
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            # The standard library tells better than llguidance where the text is no JSON.
            schema = json.loads(spec.text)
            if not isinstance(schema, dict):
                raise ValueError("a schema is an object")
            _check_multiples(schema)
            # Overridden, since a schema may bring options of llguidance's: it cannot ask to be read less strictly.
            return LLMatcher.grammar_from_json_schema(
                spec.text, overrides={"whitespace_pattern": WHITESPACE, "lenient": False}
            )
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(spec.text)
        case GrammarKind.GRAMMAR:
            if "%json" in spec.text and "multiple" in _unescaped(spec.text):
                raise ValueError("multipleOf only in structured.json_schema, where its size is looked at")
            return LLMatcher.grammar_from_lark(spec.text)
        case GrammarKind.CHOICE:
            # One terminal, so that the choices are one automaton. Lark's strings are JSON's.
            choices = " | ".join(json.dumps(choice) for choice in spec.choices)
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")


def _check_multiples(schema: object) -> None:
    """The automaton that knows multiples grows with their common one, without a limit of llguidance's."""
    common = 1
    for value in _values(schema, "multipleOf"):
        if isinstance(value, int | float) and value > 0:
            digits = int("".join(map(str, Decimal(repr(value)).as_tuple().digits)))
            common = math.lcm(common, digits)
            if common > MAX_MULTIPLE:
                raise ValueError(f"multipleOf: digits with a common multiple of at most {MAX_MULTIPLE}")


def _unescaped(text: str) -> str:
    """JSON with its letters as they are: keys may be written as numbers."""
    return re.sub(r"\\u([0-9a-fA-F]{4})", lambda escape: chr(int(escape[1], 16)), text)


def _values(node: object, key: str) -> Iterator[object]:
    """All that a key has anywhere in a JSON document."""
    todo = [node]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            todo.extend(node.values())
            if key in node:
                yield node[key]
        elif isinstance(node, list):
            todo.extend(node)


def _check_size(spec: GrammarSpec) -> None:
    if spec.kind is GrammarKind.CHOICE:
        num_bytes = sum(len(choice.encode(errors="replace")) for choice in spec.choices)
        if not 1 <= len(spec.choices) <= MAX_CHOICES or num_bytes > MAX_SOURCE_BYTES:
            size = f"{len(spec.choices)} strings of {num_bytes} bytes"
            raise InvalidArgument(_field(spec), size, ALLOWED[spec.kind])
        return
    most = MAX_REGEX_BYTES if spec.kind is GrammarKind.REGEX else MAX_SOURCE_BYTES
    num_bytes = len(spec.text.encode(errors="replace"))
    if not 1 <= num_bytes <= most:
        raise InvalidArgument(_field(spec), f"{num_bytes} bytes", f"1 to {most} bytes")
    num_lines = spec.text.count("\n") + 1
    if spec.kind is GrammarKind.GRAMMAR and num_lines > MAX_GRAMMAR_LINES:
        raise InvalidArgument(_field(spec), f"{num_lines} lines", f"at most {MAX_GRAMMAR_LINES} lines")


def _field(spec: GrammarSpec) -> str:
    return f"structured.{spec.kind}"


def _refused(spec: GrammarSpec, reason: str) -> InvalidArgument:
    reason = cut_short(" ".join(reason.removesuffix("<non-verbose/>").split()))
    given = list(spec.choices) if spec.kind is GrammarKind.CHOICE else spec.text
    return InvalidArgument(_field(spec), given, f"{ALLOWED[spec.kind]} ({reason})")
