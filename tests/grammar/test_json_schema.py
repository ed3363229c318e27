"""Which schemas are taken: all whose keywords are enforced. Others are refused by keyword and place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchserve.errors import InvalidRequestError
from batchserve.grammar.json_schema import KEYWORDS, MAX_DEPTH, checked_schema

NOT_ENFORCED = {
    "patternProperties": {"^score$": {"type": "integer"}},  # llguidance#265
    "propertyNames": {"pattern": "^a"},
    "uniqueItems": True,
    "contains": {"type": "integer"},
    "not": {"type": "null"},
    "if": {"type": "null"},
    "dependentRequired": {"a": ["b"]},
    "unevaluatedProperties": False,
    "contentEncoding": "base64",
    "nullable": True,
    "discriminator": {"propertyName": "x"},
    "x-guidance": {"lenient": True},
    "$dynamicRef": "#x",
    "foo": 1,
}
PLACES: list[tuple[str, Any]] = [
    ("#", lambda bad: bad),
    ("#/properties/a", lambda bad: {"properties": {"a": bad}}),
    ("#/items", lambda bad: {"items": bad}),
    ("#/items/1", lambda bad: {"items": [{}, bad]}),
    ("#/prefixItems/0", lambda bad: {"prefixItems": [bad]}),
    ("#/additionalProperties", lambda bad: {"additionalProperties": bad}),
    ("#/anyOf/0/oneOf/1/allOf/0", lambda bad: {"anyOf": [{"oneOf": [{}, {"allOf": [bad]}]}]}),
    ("#/$defs/x", lambda bad: {"$defs": {"x": bad}}),
    ("#/definitions/x", lambda bad: {"definitions": {"x": bad}}),
]


@pytest.mark.parametrize("keyword", NOT_ENFORCED)
@pytest.mark.parametrize(("path", "around"), PLACES)
def test_a_keyword_that_is_not_enforced_is_refused_by_name(keyword: str, path: str, around: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"absent: {keyword.replace('$', '.')} is not supported") as caught:
        checked_schema(json.dumps(around({keyword: NOT_ENFORCED[keyword]})))
    assert caught.value.field == f"json_schema[{path}/{keyword}]"
    assert caught.value.reason == "UNSUPPORTED_KEYWORD"


def test_names_of_properties_and_values_are_no_keywords() -> None:
    schema = {"properties": {"patternProperties": {"enum": [{"not": 1}]}, "foo": {"const": {"if": {"then": 1}}}}}
    assert json.loads(checked_schema(json.dumps(schema))) == schema
    assert "patternProperties" not in KEYWORDS


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("{", "must be JSON"),
        ("[1]", "a JSON object"),
        ("true", "a JSON object"),
        ('{"minimum": NaN}', "NaN is no JSON number"),
        ('{"exclusiveMinimum": true, "minimum": 3}', "must be a number"),
        ('{"items": ' * (MAX_DEPTH + 1) + "{}" + "}" * (MAX_DEPTH + 1), f"at most {MAX_DEPTH} names deep"),
        ('{"const": 9007199254740993}', r"beyond 2\^53"),
        ('{"enum": [1e22]}', r"beyond 2\^53"),
        ('{"type": "null", "type": "string"}', "the name 'type' comes twice"),
        ('{"const": ["\\u0001"]}', "without control characters"),
        ('{"properties": {"a\\u0000": {}}}', "without control characters"),
        ('{"exclusiveMinimum": 0, "maximum": 0.5}', r"exclusiveMinimum\] = 0: must be 1 or more from the other bound"),
        ('{"type": "number", "exclusiveMaximum": 3, "minimum": 2.5}', r"exclusiveMaximum\] = 3: must be 1 or more"),
        ('{"minProperties": 2}', r"minProperties\] = 2: must be at most 1 where"),
        ('{"$ref": "#/examples/0", "examples": [{}]}', r"\$ref\] = '#/examples/0': must be '#', or"),
        ('{"$ref": "other.json#/a"}', r"\$ref\] = .*must be '#', or"),
        ('{"items": {"$ref": 5}}', r"#/items/\$ref\] = 5"),
        ('{"items": ' * 30_000 + "{}" + "}" * 30_000, "must be JSON"),
    ],
)
def test_what_is_no_schema(text: str, bound: str) -> None:
    with pytest.raises(InvalidRequestError, match=bound):
        checked_schema(text)


@pytest.mark.parametrize(
    "schema",
    [
        {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0},
        {"exclusiveMinimum": 0.5, "maximum": 0.75},
        {"minProperties": 2, "additionalProperties": False},
        {"$defs": {"a/b~c d": {"items": [{}, {"$ref": "#"}]}}, "$ref": "#/$defs/a~1b~0c%20d/items/1"},
        {"const": "tab\t and line\n"},
        {"maximum": 2**53},
    ],
    ids=str,
)
def test_what_is_near_that_is_taken(schema: dict[str, Any]) -> None:
    assert json.loads(checked_schema(json.dumps(schema))) == schema


def test_bounds_have_no_negative_zero() -> None:
    assert checked_schema('{"exclusiveMinimum": -0.0}') == '{"exclusiveMinimum": 0.0}'


def test_a_narrowed_format_says_nothing_of_other_types() -> None:
    found = json.loads(checked_schema('{"type": ["string", "null"], "format": "date", "pattern": "^20"}'))
    assert [*found["allOf"][0]] == ["pattern"]
