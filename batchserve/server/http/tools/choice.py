"""What a request says of tools: which there are, and whether the answer may or has to call them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchserve.conversation import MAX_TOOLS
from batchserve.errors import InvalidRequestError
from batchserve.server.http.fields import Fields
from batchserve.server.http.tools.parsers import MARKERS, PARSERS, ArgumentsParser, ArrayParser

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchserve.engine.chat_facts import ChatFacts
    from batchserve.server.http.tools.pieces import ToolParser

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_CALLS = 16  # in one answer that has to call tools: a weak model would go on for ever
# What a model without a format of its own is told. The format is that of Hermes, which many models have seen.
INSTRUCTIONS = """You may call functions. They are described here, in JSON:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON between tags, for each call:
<tool_call>
{{"name": "<name>", "arguments": {{<arguments>}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """tools: what the chat template gets. mode: "auto", "none", "required", or "named" with a name."""

    tools: tuple[dict[str, Any], ...] = ()
    mode: str = "none"
    name: str = ""
    is_parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of an answer that has to call tools. Raises InvalidRequestError."""
        if self.mode == "named":
            names = [tool["function"]["name"] for tool in self.tools]
            return _parameters(self.tools, names.index(self.name))
        calls, definitions = [], {}
        for i, tool in enumerate(self.tools):
            try:
                definitions[f"tool{i}"] = _moved(_parameters(self.tools, i), f"#/$defs/tool{i}")
            except RecursionError:
                path = f"tools[{i}].function.parameters"
                raise InvalidRequestError("INVALID_TOOLS", path, "<schema>", "nested less deep") from None
            name = {"type": "string", "enum": [tool["function"]["name"]]}
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": name, "arguments": {"$ref": f"#/$defs/tool{i}"}},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
        items = calls[0] if len(calls) == 1 else {"anyOf": calls}
        most = MAX_CALLS if self.is_parallel else 1
        return {"type": "array", "items": items, "minItems": 1, "maxItems": most, "$defs": definitions}

    def parser_of(self, facts: ChatFacts, wanted: str) -> Callable[[], ToolParser] | None:
        """Returns what makes a parser for each answer; None if there are no calls to find. Raises InvalidRequestError.

        wanted: the server's option, "auto" for the model's own format.
        """
        if self.mode == "none":
            return None
        if self.mode == "named":
            return lambda: ArgumentsParser(self.name)
        return ArrayParser if self.mode == "required" else PARSERS[format_of(facts, wanted)]

    def shows_marker(self, facts: ChatFacts, wanted: str) -> bool:
        """Returns whether special tokens must be part of the text, as a call begins with one."""
        return self.mode == "auto" and MARKERS.get(format_of(facts, wanted)) in facts.special_tokens


def format_of(facts: ChatFacts, wanted: str) -> str:
    """Returns the format of a model's calls: as the server is told, or as the template shows, or as we instruct it."""
    return wanted if wanted != "auto" else facts.tool_format or "hermes"


def with_instructions(messages: list[Any], tools: tuple[dict[str, Any], ...], facts: ChatFacts) -> list[Any]:
    """Returns messages that describe the tools, for a chat template that does not: in the system's message, or in the
    first one where the template takes none of the system.
    """
    text = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    is_systems = first.get("role") in ("system", "developer")
    if (is_systems or not facts.takes_system) and isinstance(first.get("content"), str):
        both = (first["content"], text) if is_systems else (text, first["content"])
        return [{**first, "content": "\n\n".join(both)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def read_tools(fields: Fields, *, is_flat: bool = False) -> ToolChoice:
    """Reads tools, tool_choice and parallel_tool_calls. Raises InvalidRequestError.

    is_flat: a function's fields are beside its type, as in the Responses API, not in an object of their own.
    """
    given = fields.items("tools") or []
    if len(given) > MAX_TOOLS:
        raise InvalidRequestError("TOO_MANY_TOOLS", fields.path("tools"), len(given), f"at most {MAX_TOOLS}")
    tools = tuple(_tool(fields.path(f"tools[{i}]"), tool, is_flat) for i, tool in enumerate(given))
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise fields.refused("tools", names, "functions with different names")
    mode, name = _mode(fields, fields.raw("tool_choice"), bool(tools), is_flat)
    if name and name not in names:
        raise fields.refused(
            "tool_choice", name, f"the name of one of the tools: {', '.join(names) or 'there are none'}"
        )
    return ToolChoice(tools, mode, name, fields.flag("parallel_tool_calls", default=True))


def _mode(fields: Fields, choice: Any, has_tools: bool, is_flat: bool) -> tuple[str, str]:
    if choice is None:
        return ("auto" if has_tools else "none"), ""
    if isinstance(choice, dict):
        named = Fields(choice, f"{fields.path('tool_choice')}.")
        named.one_of("type", ("function",))
        holder = named if is_flat else named.nested("function")
        name = holder.text("name") if holder is not None else None
        if not name:
            raise named.refused("name" if is_flat else "function", choice, "the name of a function")
        for each in {named, holder}:
            if each is not None:
                each.end()
        return "named", name
    if choice not in ("auto", "none", "required"):
        raise fields.refused("tool_choice", choice, "one of auto, none, required, or an object that names a function")
    if choice == "required" and not has_tools:
        raise fields.refused("tool_choice", choice, "auto or none, as there are no tools")
    return (choice if has_tools else "none"), ""


def _tool(path: str, given: Any, is_flat: bool) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise InvalidRequestError("INVALID_TOOLS", path, given, "an object")
    tool = Fields(given, f"{path}.")
    if tool.one_of("type", ("function",)) is None:
        raise tool.refused("type", None, "'function'")
    function = tool if is_flat else tool.nested("function")
    if function is None:
        raise tool.refused("function", None, "an object with a name")
    name, description = function.text("name"), function.text("description")
    if name is None or not NAME.fullmatch(name):
        raise function.refused("name", name, "1 to 64 letters, digits, dots, dashes and underscores")
    function.flag("strict")  # calls that are chosen freely follow no grammar
    parameters = function.mapping("parameters")
    try:
        json.dumps(parameters)  # as templates and grammars do
    except RecursionError:
        raise function.refused("parameters", "<schema>", "nested less deep") from None
    for each in {tool, function}:
        each.end()
    found = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in found.items() if value is not None}}


def _parameters(tools: Sequence[Mapping[str, Any]], i: int) -> dict[str, Any]:
    """Returns the schema of a tool's arguments, which are an object also where the schema does not say so."""
    found: dict[str, Any] = tools[i]["function"].get("parameters") or {}
    for name in ("type", "const", "enum", "$ref"):
        if name in found and (name != "type" or found[name] != "object"):
            path = f"tools[{i}].function.parameters.{name}"
            bound = "'object'" if name == "type" else "absent: arguments are an object, and their schema says so itself"
            raise InvalidRequestError("INVALID_TOOLS", path, found[name], bound)
    return {"properties": {}, **found, "type": "object"}


def _moved(schema: Any, path: str) -> Any:
    """Returns a schema whose references to itself hold where it is part of another one, at this path."""
    if isinstance(schema, list):
        return [_moved(each, path) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: path + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, path)
        for key, value in schema.items()
    }
