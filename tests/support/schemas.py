"""JSON schemas out of a seed: varied, satisfiable, and bounded, so that every document that matches has an end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

NAMES = ("id", "name", "kind", "age", "tags", "child", "x", "is_ok", "größe", "a b", "price-eur", "_")
TEXTS = ("red", "green", "a longer text", "", 'quo"ted', "back\\slash", "naïve ☕", "1")
PATTERNS = ("^[a-z]{1,5}$", "^[A-Z]{2}-[0-9]{2,4}$", "^(yes|no|maybe)$", "^#[0-9a-f]{6}$")
FORMATS = ("date", "time", "uuid", "ipv4")
DEEPEST = 3


def schema(seed: int) -> Schema:
    """A schema of draft 2020-12, with an object, an array or an anyOf at its root."""
    rng = random.Random(seed)
    definitions = {"leaf": _leaf(rng), "pair": _object(rng, DEEPEST - 1)}
    root = rng.choice([_object, _object, _array, _any_of])(rng, 0)
    return {"$defs": definitions, **root}


def _node(rng: random.Random, depth: int) -> Schema:
    if depth >= DEEPEST or rng.random() < 0.5:
        return _leaf(rng)
    inner: list[Callable[[random.Random, int], Schema]] = [_object, _array, _any_of, _reference]
    return rng.choice(inner)(rng, depth)


def _leaf(rng: random.Random) -> Schema:
    return rng.choice([_string, _pattern, _integer, _number, _boolean, _null, _enum, _const])(rng)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _node(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    if rng.random() < 0.2:
        items = [_leaf(rng) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    return {"type": "array", "items": _node(rng, depth + 1), "minItems": least, "maxItems": least + rng.randint(0, 3)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_node(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _reference(rng: random.Random, depth: int) -> Schema:
    return {"$ref": "#/$defs/" + ("leaf" if depth > 1 or rng.random() < 0.5 else "pair")}


def _string(rng: random.Random) -> Schema:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}


def _pattern(rng: random.Random) -> Schema:
    if rng.random() < 0.3:
        return {"type": "string", "format": rng.choice(FORMATS)}
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _integer(rng: random.Random) -> Schema:
    least = rng.randint(-1000, 1000)
    bounds = {"minimum": least, "maximum": least + rng.choice([0, 1, 7, 12345])}
    if rng.random() < 0.2:
        return {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": least + 10}
    return {"type": "integer", **bounds}


def _number(rng: random.Random) -> Schema:
    least = rng.choice([-2.5, -1, 0, 0.125, 10])
    return {"type": "number", "minimum": least, "maximum": least + rng.choice([0.5, 3, 100])}


def _boolean(rng: random.Random) -> Schema:
    return {"type": rng.choice(["boolean", ["boolean", "null"]])}


def _null(rng: random.Random) -> Schema:
    return {"type": "null"}


def _enum(rng: random.Random) -> Schema:
    values = [*rng.sample(TEXTS, rng.randint(1, 4)), rng.choice([None, True, 3, 1.5, [1, 2], {"k": "v"}])]
    return {"enum": values}


def _const(rng: random.Random) -> Schema:
    return {"const": rng.choice([*TEXTS, 42, -0.5, False, None, ["a", 1], {"fixed": {"deep": [True]}}])}
