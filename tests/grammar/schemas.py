"""Random JSON schemas of many kinds, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NAMES = [
    "id",
    "name",
    "naïve",
    "名前",
    "a b",
    'quo"te',
    "back\\slash",
    "x",
    "xy",
    "items",
    "emoji😀",
    "long_property_name",
]
TEXTS = ["red", "green", "grün", "日本", 'say "hi"', "a\\b", "", "line\nbreak", "true", "7", "😀"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "hostname", "duration"]
PATTERNS = ["^[a-z]{1,4}$", "^(foo|bar)-[0-9]{2}$", "^[A-Z][a-z]{0,3}( [a-z]{1,3}){0,2}$", "^é+x?$"]


def random_schema(rng: random.Random) -> dict[str, Any]:
    """Returns a schema whose answers are of bounded length; some are recursive through $ref."""
    if rng.random() < 0.2:
        return recursive_schema(rng)
    schema = _any(rng, 3)
    if rng.random() < 0.3:
        where = rng.choice(["$defs", "definitions"])
        target = {where: {"part/of": _any(rng, 1), "other": _any(rng, 1)}}
        names = {"a": {"$ref": f"#/{where}/part~1of"}, "b": {"$ref": f"#/{where}/other"}, "c": schema}
        return {**target, **_object_of(names, rng)}
    return schema


def recursive_schema(rng: random.Random) -> dict[str, Any]:
    node = _object_of({"value": _any(rng, 1), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, rng)
    node["required"] = ["value", "next"]
    return {"$defs": {"node": node}, "$ref": "#/$defs/node", "title": "a list", "$comment": "of nodes"}


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves: list[Callable[[random.Random], dict[str, Any]]] = [_text, _integer, _number, _enum, _const, _plain]
    if depth == 0 or rng.random() < 0.25:
        return rng.choice(leaves)(rng)
    inner: list[Callable[[random.Random, int], dict[str, Any]]] = [_object, _object, _array, _tuple, _any_of, _all_of]
    return rng.choice(inner)(rng, depth - 1)


def _text(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(3)
    if kind == 0:
        least = rng.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}
    return (
        {"type": "string", "pattern": rng.choice(PATTERNS)}
        if kind == 1
        else {
            "type": "string",
            "format": rng.choice(FORMATS),
            "maxLength": 40,
        }
    )


def _integer(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(-2000, 2000)
    most = least + rng.choice([0, 3, 100, 10_000])
    schema: dict[str, Any] = {"type": "integer", "minimum": least, "maximum": most}
    if rng.random() < 0.3:
        schema = {"type": "integer", "exclusiveMinimum": least - 1, "exclusiveMaximum": most + 8, "multipleOf": 3}
    return schema


def _number(rng: random.Random) -> dict[str, Any]:
    least = int(rng.uniform(-50, 50)) + rng.choice([0.25, 0.3, 0.37])  # near whole exclusive bounds would be refused
    most = round(least + rng.choice([0.5, 10.2, 1000.1]), 2)
    names = rng.choice(
        [("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum"), ("minimum", "exclusiveMaximum")]
    )
    return {"type": "number", names[0]: least, names[1]: most}


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample([*TEXTS, 1, -2.5, True, None, {"k": [1, "ü"]}, []], rng.randint(1, 6))}


def _const(rng: random.Random) -> dict[str, Any]:
    return {"const": rng.choice([*TEXTS, 12, {"deep": {"er": [None]}}])}


def _plain(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]]), "description": "an answer"}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    return _object_of({name: _any(rng, depth) for name in names}, rng)


def _object_of(properties: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    names = [*properties]
    required = rng.sample(names, rng.randint(0, len(names)))
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if rng.random() < 0.85:
        schema["additionalProperties"] = False
    elif rng.random() < 0.5:
        schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 3)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [_any(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(1, 3))]}


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(-5, 5)
    return {"allOf": [{"type": "integer", "minimum": least}, {"maximum": least + 40}], "title": "both"}
