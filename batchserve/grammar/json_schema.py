"""Which JSON schemas are taken: those whose every keyword the grammar library enforces.

The library (llguidance 1.9.1) refuses most keywords that it does not know, but ignores some without a word, and makes
grammars of others that lead nowhere or allow too much. So schemas are held against a list of what it is known to do.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn
from urllib.parse import unquote

from batchserve.errors import InvalidRequestError, shortened

# Keywords whose values are no schemas. The last two lines say nothing of what is valid.
_PLAIN = frozenset(
    ["type", "enum", "const", "pattern", "format", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
     "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "required", "minProperties", "maxProperties", "$ref",
     "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema",
     "$id"]
)  # fmt: skip
_ONE = frozenset(["items", "additionalItems", "additionalProperties"])  # a schema, True or False; or a list of these
_LISTS = frozenset(["items", "prefixItems", "anyOf", "oneOf", "allOf"])
_MAPS = frozenset(["properties", "$defs", "definitions"])  # of names to schemas
KEYWORDS = _PLAIN | _ONE | _LISTS | _MAPS  # patternProperties, too, are refused: llguidance#265
MAX_DEPTH = 100  # names on the way to a schema
MAX_WHOLE = 2**53  # beyond which the library rounds numbers
ESCAPED = "\b\t\n\f\r"  # control characters that have an escape of two characters: no other escapes are given
# The library's own patterns of these formats allow February 29 in every year, leap seconds at any time, and host names
# with two hyphens together.
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = f"([0-9]{{4}}-(0[13-9]|1[0-2]|02-([01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5][0-9]"
_LABEL = "[A-Za-z0-9]+(-[A-Za-z0-9]+)*"
_NARROWED = {
    "date": f"^{_DATE}",
    "time": f"^{_TIME}",
    "date-time": f"^{_DATE}[0-9-]*[Tt]{_TIME}",
    "hostname": rf"^{_LABEL}(\.{_LABEL})*$",
}
MAX_HOSTNAME = 253
_Path = tuple[str, ...]


def parsed_schema(text: str) -> dict[str, Any]:
    """Returns the schema that a text is. Raises InvalidRequestError."""
    try:
        schema = json.loads(
            text, parse_constant=_refuse, parse_int=_whole, parse_float=_number, object_pairs_hook=_without_doubles
        )
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("INVALID_JSON_SCHEMA", "json_schema", text, f"JSON ({error})") from None
    if not isinstance(schema, dict):
        raise InvalidRequestError("INVALID_JSON_SCHEMA", "json_schema", text, "a JSON object")
    return schema


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _whole(digits: str) -> int:
    if abs(int(digits)) > MAX_WHOLE:
        raise ValueError(f"{shortened(digits)} is beyond 2^53, where numbers are rounded")
    return int(digits)


def _number(text: str) -> float:
    if abs(float(text)) > MAX_WHOLE:
        raise ValueError(f"{shortened(text)} is beyond 2^53, where numbers are rounded")
    return float(text) + 0.0  # a negative zero has a sign that bounds do not have


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} comes twice in an object")
        found[name] = value
    return found


def checked_schema(text: str) -> str:
    """Returns a schema as the library is given it. Raises InvalidRequestError that names the keyword it refuses."""
    schema = parsed_schema(text)
    _check_texts(schema)
    open_schemas: list[tuple[_Path, Any]] = [((), schema)]
    places, references = set[_Path](), dict[_Path, object]()
    while open_schemas:
        path, each = open_schemas.pop()
        if len(path) > MAX_DEPTH:
            raise _unsupported(path, "", "<schema>", f"at most {MAX_DEPTH} names deep")
        places.add(path)
        if not isinstance(each, dict):  # True and False are schemas, too; the library refuses all else
            continue
        _check_keywords(path, each)
        _check_numbers(path, each)
        if "$ref" in each:
            references[path] = each["$ref"]
        open_schemas += [((*path, *names), part) for names, part in _parts(each)]
        _narrow(each)
    for path, reference in references.items():
        if _path_of(reference) not in places:
            raise _unsupported(path, "$ref", reference, "'#', or '#/' and the path of one of the schema's own parts")
    return json.dumps(schema, ensure_ascii=False)


def _unsupported(path: _Path, name: str, value: object, bound: str) -> InvalidRequestError:
    where = "/".join(("#", *path, *([name] if name else ())))
    where = where if len(where) <= 80 else f"{where[:40]}...{where[-30:]}"
    return InvalidRequestError("UNSUPPORTED_KEYWORD", f"json_schema[{where}]", value, bound)


def _path_of(reference: object) -> _Path | None:
    """Returns the path that a reference inside the schema names."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    return tuple(unquote(part).replace("~1", "/").replace("~0", "~") for part in reference.split("/")[1:])


def _check_texts(schema: dict[str, Any]) -> None:
    """Refuses control characters: only \\u escapes would give those, by which names could pass for others."""
    values: list[Any] = [schema]
    while values:
        each = values.pop()
        if isinstance(each, str):
            for character in each:
                if character < " " and character not in ESCAPED:
                    bound = "without control characters, but for those of \\b, \\f, \\n, \\r and \\t"
                    raise InvalidRequestError("INVALID_JSON_SCHEMA", "json_schema", each, bound)
        elif isinstance(each, dict):
            values += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            values += each


def _check_keywords(path: _Path, schema: dict[str, Any]) -> None:
    for name, value in schema.items():
        if name not in KEYWORDS:
            bound = f"absent: {name} is not supported; supported are {', '.join(sorted(KEYWORDS))}"
            raise _unsupported(path, name, value, bound)
        # The library takes the first of these, which are of older drafts of the standard, for numbers that are absent.
        if name in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            raise _unsupported(path, name, value, "a number")


def _check_numbers(path: _Path, schema: dict[str, Any]) -> None:
    """Refuses what the library does not keep to: some bounds, and numbers of properties whose names it may repeat."""
    least, most = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    for name, bound, others, sign in (
        ("exclusiveMinimum", least, (schema.get("maximum"), most), 1),
        ("exclusiveMaximum", most, (schema.get("minimum"), least), -1),
    ):
        if schema.get("type") == "integer" or not isinstance(bound, int | float) or bound != int(bound):
            continue
        if any(isinstance(other, int | float) and sign * (other - bound) < 1 for other in others):
            raise _unsupported(path, name, bound, "1 or more from the other bound, or no whole number")
    count = schema.get("minProperties")
    if isinstance(count, int) and count > 1 and schema.get("additionalProperties", True) is not False:
        raise _unsupported(path, "minProperties", count, "at most 1 where additionalProperties is not false")


def _parts(schema: dict[str, Any]) -> list[tuple[_Path, Any]]:
    """Returns the schemas directly inside a schema, with their paths in it."""
    parts: list[tuple[_Path, Any]] = []
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            parts += [((name, key), part) for key, part in value.items()]
        elif name in _LISTS and isinstance(value, list):
            parts += [((name, str(i)), part) for i, part in enumerate(value)]
        elif name in _ONE:
            parts.append(((name,), value))
    return parts


def _narrow(schema: dict[str, Any]) -> None:
    """Adds what keeps a format to what validators take for it, where the library's own pattern is too wide."""
    form = schema.get("format")
    pattern = _NARROWED.get(form) if isinstance(form, str) else None
    if pattern is None:
        return
    others = schema.get("allOf", [])
    if "pattern" not in schema:
        schema["pattern"] = pattern
    elif isinstance(others, list):
        schema["allOf"] = [*others, {"pattern": pattern}]
    if form == "hostname":
        schema.setdefault("maxLength", MAX_HOSTNAME)
