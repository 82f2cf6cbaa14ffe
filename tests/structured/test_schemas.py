"""Whatever is written under the masks matches the schema, and wherever it is cut it is the beginning of what does."""

from __future__ import annotations

import json
import random

import pytest
from jsonschema import Draft202012Validator
from transformers import PreTrainedTokenizerBase

from paceline.structured import LLGuidanceCompiler
from structured.conftest import EOS
from structured.vocabularies import follows, json_schema, token_bytes
from support import schemas

NUM_SCHEMAS = 200
ENOUGH, TOO_MANY = 60, 3000


def test_random_texts_match_their_schema(compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = token_bytes(tokenizer)
    closers = {token_id for token_id, token in enumerate(texts) if token in (b'"', b"}", b"]")}
    lengths = []
    for seed in range(NUM_SCHEMAS):
        schema = schemas.schema(seed)
        Draft202012Validator.check_schema(schema)
        grammar = compiler.compile(json_schema(json.dumps(schema)))
        matcher = grammar.matcher()
        rng = random.Random(seed)
        emitted: list[int] = []
        while EOS not in emitted:
            choices = follows(matcher)
            if len(emitted) > ENOUGH:
                choices = [EOS] if EOS in choices else sorted(closers & set(choices)) or choices
            emitted.append(rng.choice(choices))
            assert matcher.advance(emitted[-1:]), (seed, matcher.failure)
            assert len(emitted) < TOO_MANY, seed
        text = b"".join(texts[token_id] for token_id in emitted[:-1]).decode()
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))
        cut = rng.randrange(len(emitted))
        assert grammar.matcher().advance(emitted[:cut])
        lengths.append(len(emitted))
    assert max(lengths) > ENOUGH > min(lengths)


@pytest.mark.parametrize(
    ("schema", "document", "valid"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"b": 1, "a": 2}', None),
        ({"type": "integer", "minimum": -3, "maximum": 12}, "13", False),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2}, "[null]", False),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2}, "[null, null]", True),
        ({"anyOf": [{"type": "string"}, {"const": 3}]}, "3", True),
        ({"type": "object", "required": ["a"]}, "{}", False),
        ({"$defs": {"d": {"type": "boolean"}}, "items": {"$ref": "#/$defs/d"}, "type": "array"}, "[true]", True),
        ({}, '{"anything": [1, "x", null]}', True),
    ],
)
def test_documents(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase, schema: object, document: str, valid: bool | None
) -> None:
    matcher = compiler.compile(json_schema(json.dumps(schema))).matcher()
    token_ids = tokenizer.encode(document, add_special_tokens=False)
    accepted = matcher.advance([*token_ids, EOS])
    if valid is not None:
        assert accepted == valid


@pytest.mark.parametrize("pretty", [None, 2, 4])
def test_documents_may_be_indented(
    compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase, pretty: int | None
) -> None:
    document = {"a": [{"b": {"c": [1, 2, {"d": None}]}}], "e": {}}
    matcher = compiler.compile(json_schema("{}")).matcher()
    assert matcher.advance(tokenizer.encode(json.dumps(document, indent=pretty), add_special_tokens=False))
    assert EOS in follows(matcher)


def test_white_space_has_an_end(compiler: LLGuidanceCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    """A model that likes white space too well would otherwise write nothing else until its tokens are used up."""
    matcher = compiler.compile(json_schema("{}")).matcher()
    (newline,) = tokenizer.encode("\n", add_special_tokens=False)
    (blank,) = tokenizer.encode(" ", add_special_tokens=False)
    assert matcher.advance(tokenizer.encode("[", add_special_tokens=False))
    assert newline in follows(matcher)
    assert matcher.advance([newline])
    written = 0
    while blank in follows(matcher):
        assert newline not in follows(matcher)
        assert matcher.advance([blank])
        written += 1
    assert written == 40
    assert matcher.advance(tokenizer.encode("1]", add_special_tokens=False))
