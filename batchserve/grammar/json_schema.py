"""Which JSON schemas are taken: those all of whose keywords the grammar library enforces.

The library (llguidance 1.9.1) refuses most keywords that it does not know, but ignores some without a word, and from
`patternProperties` it makes grammars that lead nowhere (llguidance#265). So keywords are held against a list here.
"""

from __future__ import annotations

import json
from typing import Any

from batchserve.errors import InvalidRequestError, shortened

# Keywords whose values are no schemas. The second line says nothing of what is valid.
_PLAIN = frozenset(
    ["type", "enum", "const", "pattern", "format", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
     "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "required", "minProperties", "maxProperties", "$ref",
     "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id"]
)  # fmt: skip
_ONE = frozenset(["items", "additionalItems", "additionalProperties"])  # a schema, True or False; or a list of these
_LISTS = frozenset(["items", "prefixItems", "anyOf", "oneOf", "allOf"])
_MAPS = frozenset(["properties", "$defs", "definitions"])  # of names to schemas
KEYWORDS = _PLAIN | _ONE | _LISTS | _MAPS
MAX_DEPTH = 100  # of schemas in each other
# The library's own patterns of these formats allow February 29 in every year, and leap seconds at any time.
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = f"([0-9]{{4}}-(0[13-9]|1[0-2]|02-([01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5][0-9]"
_NARROWED = {"date": f"^{_DATE}", "time": f"^{_TIME}", "date-time": f"^{_DATE}[0-9-]*[Tt]{_TIME}"}


def parsed_schema(text: str) -> dict[str, Any]:
    """Returns the schema that a text is. Raises InvalidRequestError."""
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("INVALID_JSON_SCHEMA", "json_schema", text, f"JSON ({error})") from None
    if not isinstance(schema, dict):
        raise InvalidRequestError("INVALID_JSON_SCHEMA", "json_schema", text, "a JSON object")
    return schema


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def checked_schema(text: str) -> str:
    """Returns a schema as the library is given it. Raises InvalidRequestError that names the keyword it refuses."""
    schema = parsed_schema(text)
    open_schemas: list[tuple[str, Any, int]] = [("#", schema, 1)]
    while open_schemas:
        path, each, depth = open_schemas.pop()
        if depth > MAX_DEPTH:
            bound = f"a schema of at most {MAX_DEPTH} levels"
            raise InvalidRequestError("INVALID_JSON_SCHEMA", "json_schema", path, bound)
        if not isinstance(each, dict):  # True and False are schemas, too; the library refuses all else
            continue
        _check_keywords(path, each)
        open_schemas += [(f"{path}/{name}", part, depth + 1) for name, part in _parts(each)]
        _narrow(each)
    return json.dumps(schema, ensure_ascii=False)


def _check_keywords(path: str, schema: dict[str, Any]) -> None:
    for name, value in schema.items():
        where = f"json_schema[{shortened(f'{path}/{name}')}]"
        if name not in KEYWORDS:
            bound = f"absent: {name} is not supported; supported are {', '.join(sorted(KEYWORDS))}"
            raise InvalidRequestError("UNSUPPORTED_KEYWORD", where, value, bound)
        # The library takes the first of these, which are of older drafts of the standard, for numbers that are absent.
        if name in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            raise InvalidRequestError("UNSUPPORTED_KEYWORD", where, value, "a number")


def _parts(schema: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the schemas directly inside a schema, by their paths in it."""
    parts: list[tuple[str, Any]] = []
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            parts += [(f"{name}/{key}", part) for key, part in value.items()]
        elif name in _LISTS and isinstance(value, list):
            parts += [(f"{name}/{i}", part) for i, part in enumerate(value)]
        elif name in _ONE:
            parts.append((name, value))
    return parts


def _narrow(schema: dict[str, Any]) -> None:
    """Adds the pattern of a format for which the library's is too wide."""
    form = schema.get("format")
    pattern = _NARROWED.get(form) if isinstance(form, str) else None
    if pattern is None:
        return
    others = schema.get("allOf", [])
    if "pattern" not in schema:
        schema["pattern"] = pattern
    elif isinstance(others, list):
        schema["allOf"] = [*others, {"type": "string", "pattern": pattern}]
