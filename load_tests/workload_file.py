"""Reads the requests of a load test from JSONL.

A line is {"prompt": TEXT} or {"messages": [{"role": TEXT, "content": TEXT}, ...]}. It may have "max_tokens" (default:
--max-tokens), "weight" (how often it is sent beside the others; default 1), and either "response_format", as in the
OpenAI API, or "json_schema", a schema alone.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchserve.errors import ConfigError
from batchserve.jsonl import read_lines
from load_tests.workloads import BundledWorkload, Item

if TYPE_CHECKING:
    from batchserve.jsonl import Line
    from load_tests.workloads import Workload

KEYS = ("prompt", "messages", "max_tokens", "weight", "response_format", "json_schema")
FORMATS = ("text", "json_object", "json_schema")


class FileWorkload:
    """The requests of a file, each as often as its weight says. Raises ConfigError naming file, line and field."""

    def __init__(self, path: Path) -> None:
        read = [(_item(line), _weight(line)) for line in read_lines(path, "workload")]
        if not read:
            raise ConfigError(f"workload = {str(path)!r}: holds no requests")
        self.items = [item for item, _ in read]
        self._cumulative = [*itertools.accumulate(weight for _, weight in read)]

    def item(self, seed: str) -> Item:
        """Returns one of the requests, the same for the same seed."""
        (found,) = random.Random(seed).choices(self.items, cum_weights=self._cumulative)
        return found


@functools.cache
def load_workload(path: str) -> Workload:
    """Returns the requests of a file, or the bundled model's if there is none. Raises ConfigError."""
    return FileWorkload(Path(path)) if path else BundledWorkload()


def _item(line: Line) -> Item:
    fields = line.fields
    for name in fields:
        if name not in KEYS:
            raise _refused(line, name, f"absent: known are {', '.join(KEYS)}")
    if ("prompt" in fields) == ("messages" in fields):
        raise ConfigError(f"{line.where}: must have one of the fields 'prompt' and 'messages'")
    if "prompt" in fields and not (isinstance(fields["prompt"], str) and fields["prompt"]):
        raise _refused(line, "prompt", "a text that is not empty")
    if "messages" in fields and not _are_messages(fields["messages"]):
        raise _refused(line, "messages", 'a list of {"role": TEXT, "content": TEXT} that is not empty')
    max_tokens = fields.get("max_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise _refused(line, "max_tokens", "an integer of at least 1")
    return Item(fields.get("prompt"), tuple(fields.get("messages", ())), max_tokens, _response_format(line))


def _weight(line: Line) -> float:
    weight = line.fields.get("weight", 1)
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < math.inf:
        raise _refused(line, "weight", "a finite number above 0")
    return float(weight)


def _are_messages(found: object) -> bool:
    return (
        isinstance(found, list)
        and bool(found)
        and all(
            isinstance(message, dict)
            and message.keys() == {"role", "content"}
            and all(isinstance(value, str) for value in message.values())
            for message in found
        )
    )


def _response_format(line: Line) -> dict[str, Any] | None:
    """Returns the form that the answer has to have, as in the OpenAI API."""
    found, schema = (line.fields.get(name) for name in ("response_format", "json_schema"))
    if found is not None and schema is not None:
        raise _refused(line, "json_schema", "absent, as response_format is there")
    if schema is not None:
        if not isinstance(schema, dict):
            raise _refused(line, "json_schema", "an object, the schema")
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if found is None:
        return None
    if not isinstance(found, dict) or found.get("type") not in FORMATS:
        raise _refused(line, "response_format", f'an object whose "type" is one of {", ".join(FORMATS)}')
    has_schema = found["type"] == "json_schema"
    if found.keys() - {"type"} != ({"json_schema"} if has_schema else set()):
        raise _refused(line, "response_format", 'an object with "type", and "json_schema" if that is its type')
    holder = found.get("json_schema")
    if has_schema and not (isinstance(holder, dict) and isinstance(holder.get("schema"), dict)):
        raise _refused(line, "response_format", 'an object whose "json_schema" has an object "schema"')
    return found


def _refused(line: Line, name: str, bound: str) -> ConfigError:
    return ConfigError(f"{line.where}: {name} = {str(line.fields[name])[:80]}: must be {bound}")
