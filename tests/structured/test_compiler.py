"""What is refused, and under which name; what is compiled once."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from llguidance import LLMatcher

from paceline.core.grammar import GrammarKind, GrammarSpec
from paceline.errors import InvalidArgument
from paceline.structured import LLGuidanceCompiler
from paceline.structured.compiler import (
    MAX_CACHED,
    MAX_CHOICES,
    MAX_GRAMMAR_LINES,
    MAX_REGEX_BYTES,
    MAX_SOURCE_BYTES,
    LLGuidanceGrammar,
)
from structured.vocabularies import choice, follows, json_schema, lark, regex

REFUSED = {
    "no JSON": (json_schema('{"type"'), "Expecting ':'"),
    "no text": (json_schema(""), "1 to"),
    "no object": (json_schema("[]"), "a schema is an object"),
    "nothing but brackets": (json_schema("[" * 60_000), "recursion"),
    "half a character": (json_schema(r'{"const": "\ud800"}'), ""),
    "unknown type": (json_schema('{"type": "text"}'), "Invalid type"),
    "a reference to nothing": (json_schema('{"$ref": "#/$defs/a"}'), "does not exist"),
    "a reference to elsewhere": (json_schema('{"$ref": "https://example.com/schema"}'), "example.com"),
    "a reference to itself": (json_schema('{"$ref": "#"}'), "no token of the vocabulary may follow"),
    "unsatisfiable": (json_schema('{"type": "integer", "minimum": 2, "maximum": 1}'), "minimum"),
    "unsatisfiable within": (json_schema('{"type":"object","properties":{"a":false},"required":["a"]}'), "'a'"),
    "unsupported": (json_schema('{"not": {}}'), "not"),
    "unsupported, told to ignore it": (json_schema('{"not": {}, "x-guidance": {"lenient": true}}'), "not"),
    "an endless lexeme": (json_schema('{"type": "string", "pattern": "(?=a)b"}'), "look-ahead"),
    "too large": (json_schema(json.dumps({"const": "x" * MAX_SOURCE_BYTES})), f"1 to {MAX_SOURCE_BYTES} bytes"),
    "a large multiple": (json_schema('{"type": "integer", "multipleOf": 1000003}'), "multipleOf"),
    "a large common multiple": (
        json_schema('{"allOf": [{"type": "integer", "multipleOf": 1009}, {"type": "integer", "multipleOf": 1013}]}'),
        "multipleOf",
    ),
    "a multiple in a grammar": (lark('start: %json {"type": "integer", "multipleOf": 1000003}'), "multipleOf"),
    "a multiple that is spelt by numbers": (
        lark(r'start: %json {"type": "integer", "mu\u006CtipleOf": 1000003}'),
        "multipleOf",
    ),
    "an unclosed class": (regex("[a-z"), "unclosed"),
    "look-around": (regex(r"a(?!b)"), "look-around"),
    "a back-reference": (regex(r"(a)\1"), "backreferences"),
    "a class without members": (regex(r"[^\x00-\U0010ffff]"), "no token of the vocabulary may follow"),
    "no regex": (regex(""), "1 to"),
    "a long regex": (regex("a" * (MAX_REGEX_BYTES + 1)), f"1 to {MAX_REGEX_BYTES} bytes"),
    "a complex regex": (regex("a?" * 1000), "lexer"),
    "a regex of much fixed text": (regex("(a{300}){300}"), "fixed text"),
    "no Unicode": (regex("\ud800"), "surrogates"),
    "an unknown rule": (lark("start: foo"), "foo"),
    "no start": (lark('begin: "a"'), "start"),
    "a rule that never ends": (lark("start: start"), "no token of the vocabulary may follow"),
    "a long chain of rules": (
        lark("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"'),
        f"at most {MAX_GRAMMAR_LINES} lines",
    ),
    "deep brackets": (lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000), "nested"),
    "a special token": (lark("start: <|endoftext|>"), "unknown special token"),
    "a special token's number": (lark('start: <[0]> "a"'), "no token of the vocabulary may follow"),
    "no choices": (choice(), "1 to"),
    "many choices": (choice(*map(str, range(MAX_CHOICES + 1))), "1 to"),
    "long choices": (choice("a" * MAX_SOURCE_BYTES, "b"), "together at most"),
    "a choice that is no Unicode": (choice("a", "\ud800"), ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_by_name(compiler: LLGuidanceCompiler, name: str) -> None:
    spec, reason = REFUSED[name]
    with pytest.raises(InvalidArgument) as error:
        compiler.compile(spec)
    assert error.value.field == f"structured.{spec.kind.value}"
    assert reason in error.value.allowed
    assert len(str(error.value)) < 600
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "spec",
    [
        lark("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(MAX_GRAMMAR_LINES - 2)) + 'r1022: "a"'),
        choice(*(f"choice {i}" for i in range(MAX_CHOICES))),
        json_schema(json.dumps({"enum": [f"value {i}" for i in range(2000)]})),
        json_schema(json.dumps({"const": "x" * (MAX_SOURCE_BYTES - 20)})),
        json_schema("{}"),
    ],
    ids=["rules", "choices", "enum", "const", "anything"],
)
def test_large_input_is_taken(compiler: LLGuidanceCompiler, spec: GrammarSpec) -> None:
    matcher = compiler.compile(spec).matcher()
    assert follows(matcher)
    assert matcher.failure is None


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[LLMatcher]:
    builds: list[LLMatcher] = []
    build = LLGuidanceGrammar._build

    def counted(grammar: LLGuidanceGrammar) -> LLMatcher:
        builds.append(build(grammar))
        return builds[-1]

    monkeypatch.setattr(LLGuidanceGrammar, "_build", counted)
    return builds


def test_one_spec_is_compiled_once(compiler: LLGuidanceCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = count_builds(monkeypatch)
    first = compiler.compile(regex("once[0-9]"))
    assert compiler.compile(GrammarSpec(GrammarKind.REGEX, "once[0-9]")) is first
    for _ in range(5):
        follows(first.matcher())
    assert len(builds) == 1
    # The same text, read otherwise, is another grammar.
    assert compiler.compile(choice("once[0-9]")) is not first


def test_a_slow_one_keeps_no_other_waiting(compiler: LLGuidanceCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    build, go_on = LLGuidanceGrammar._build, threading.Event()

    def slow(grammar: LLGuidanceGrammar) -> LLMatcher:
        if "slow" in grammar._source:
            assert go_on.wait(30)
        return build(grammar)

    monkeypatch.setattr(LLGuidanceGrammar, "_build", slow)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(compiler.compile, regex("slow"))
        other = pool.submit(compiler.compile, regex("quick"))
        try:
            assert other.result(timeout=10)
        finally:
            go_on.set()
        assert waiting.result()


def test_old_grammars_are_forgotten(compiler: LLGuidanceCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.compile(regex("old[0-9]"))
    for number in range(MAX_CACHED):
        compiler.compile(choice(f"new {number}"))
    builds = count_builds(monkeypatch)
    assert compiler.compile(regex("old[0-9]")) is not first
    assert len(builds) == 1


def test_threads_may_compile_and_match_at_once(compiler: LLGuidanceCompiler) -> None:
    def use(number: int) -> list[int]:
        return follows(compiler.compile(regex(f"thread{number % 3}[a-z]")).matcher())

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(use, range(60)))
    assert found == [use(number) for number in range(60)]
