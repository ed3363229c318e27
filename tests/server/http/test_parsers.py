"""Calls of tools in an answer's text, which comes in pieces of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchserve.server.http.tools.parsers import (
    PARSERS,
    ArgumentsParser,
    ArrayParser,
    HermesParser,
    Llama3Parser,
    MistralParser,
    PythonicParser,
)
from batchserve.server.http.tools.pieces import CallArguments, CallBegin, Text, ToolParser

Read = tuple[str, list[tuple[str, str]]]
WEATHER = '{"name": "weather", "arguments": {"city": "Oslo", "note": "a } \\" ] <tool_call> b"}}'
CLOCK = '{"name":"clock","arguments":{}}'
PARAMETERS = '{"name": "weather", "parameters": {"city": "Oslo"}}'
CITY = '{"city": "Oslo", "note": "a } \\" ] <tool_call> b"}'


def read(parser: ToolParser, texts: list[str]) -> Read:
    """The text that is no call, and each call's name and arguments."""
    pieces = [piece for text in texts for piece in parser.feed(text)]
    pieces += parser.end()
    plain, calls = "", []
    for piece in pieces:
        if isinstance(piece, Text):
            assert piece.text
            plain += piece.text
        elif isinstance(piece, CallBegin):
            assert piece.call_id.isalnum()
            assert len(piece.call_id) == 9
            calls.append((piece.name, ""))
        else:
            assert isinstance(piece, CallArguments)
            calls[-1] = calls[-1][0], calls[-1][1] + piece.text
    return plain, calls


CASES: list[tuple[Any, str, Read]] = [
    (HermesParser, "no call", ("no call", [])),
    (HermesParser, "a < b <tool b", ("a < b <tool b", [])),
    (HermesParser, f"<tool_call>\n{WEATHER}\n</tool_call>", ("", [("weather", CITY)])),
    (
        HermesParser,
        f"I look.\n<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{CLOCK}\n</tool_call>\n",
        ("I look.\n", [("weather", CITY), ("clock", "{}")]),
    ),
    (HermesParser, f"<tool_call>{CLOCK}</tool_call> and then", (" and then", [("clock", "{}")])),
    (HermesParser, f"<tool_call>{CLOCK}", ("", [("clock", "{}")])),
    (HermesParser, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", [("f", '{"a": 1}')])),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    (HermesParser, '<tool_call>\n{"name": "f", "argu', ('<tool_call>\n{"name": "f", "argu', [])),
    (HermesParser, '<tool_call>\n{"x": 1}</tool_call>', ('<tool_call>\n{"x": 1}</tool_call>', [])),
    (HermesParser, "<tool_call>nothing", ("<tool_call>nothing", [])),
    (HermesParser, '<tool_call>  {"x":1}', ('<tool_call>  {"x":1}', [])),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": [1, ', ("", [("f", '{"a": [1, ')])),
    (Llama3Parser, "no call", ("no call", [])),
    (Llama3Parser, PARAMETERS, ("", [("weather", '{"city": "Oslo"}')])),
    (Llama3Parser, f"<|python_tag|>{PARAMETERS}; {CLOCK}", ("", [("weather", '{"city": "Oslo"}'), ("clock", "{}")])),
    (Llama3Parser, '{"answer": 42}', ('{"answer": 42}', [])),
    (Llama3Parser, ' <|python_tag|> {"answer": 42}', (' <|python_tag|> {"answer": 42}', [])),
    (Llama3Parser, '{"parameters":{},"name":"h"};hi', (";hi", [("h", "{}")])),
    (Llama3Parser, '{"parameters":{},"name":"h"}; ', ("", [("h", "{}")])),
    (Llama3Parser, f"text {PARAMETERS}", (f"text {PARAMETERS}", [])),
    (MistralParser, "no call", ("no call", [])),
    (MistralParser, f"[TOOL_CALLS] [{WEATHER}, {CLOCK}]", ("", [("weather", CITY), ("clock", "{}")])),
    (MistralParser, '[TOOL_CALLS]f[ARGS]{"a": 1}', ("", [("f", '{"a": 1}')])),
    (
        MistralParser,
        'so: [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}',
        ("so: ", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (MistralParser, "[TOOL_CALLS]", ("[TOOL_CALLS]", [])),
    (PythonicParser, "no call", ("no call", [])),
    (PythonicParser, '[f(a=1, b="x]"), g()]', ("", [("f", '{"a": 1, "b": "x]"}'), ("g", "{}")])),
    (PythonicParser, "<|python_start|>[f(a=[True, None])]<|python_end|>", ("", [("f", '{"a": [true, null]}')])),
    (PythonicParser, "[f(1)]", ("[f(1)]", [])),
    (PythonicParser, "[f(**{'a': 1})]", ("[f(**{'a': 1})]", [])),
    (PythonicParser, "[f(a=open('x'))]", ("[f(a=open('x'))]", [])),
    (PythonicParser, "[f(a=1)", ("[f(a=1)", [])),
    (ArrayParser, f"[{WEATHER}, {CLOCK}]", ("", [("weather", CITY), ("clock", "{}")])),
    (ArrayParser, f'[{CLOCK}, {{"name": "wea', ("", [("clock", "{}")])),
    (lambda: ArgumentsParser("f"), '{"a": 1}', ("", [("f", '{"a": 1}')])),
]


@pytest.mark.parametrize(("make", "text", "expected"), CASES, ids=range(len(CASES)))
def test_calls_are_found_however_the_text_is_cut(make: Any, text: str, expected: Read) -> None:
    assert read(make(), [text]) == expected
    assert read(make(), [*text]) == expected
    for size in (2, 3, 5, 7, 11):
        assert read(make(), [text[i : i + size] for i in range(0, len(text), size)]) == expected


@settings(deadline=None)
@given(st.sampled_from(sorted(PARSERS)), st.text('{}[]"\\ab<tool_call>/|;,: ', max_size=60), st.integers(1, 9))
def test_no_text_breaks_a_parser_or_depends_on_how_it_is_cut(name: str, text: str, size: int) -> None:
    whole = read(PARSERS[name](), [text])
    assert read(PARSERS[name](), [text[i : i + size] for i in range(0, len(text), size)]) == whole
    if not whole[1]:  # nothing is lost but white space
        assert "".join(whole[0].split()) == "".join(text.split())


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.recursive(st.text() | st.integers() | st.none(), st.lists), max_size=4))
def test_any_arguments_come_through(arguments: dict[str, Any]) -> None:
    call = json.dumps({"name": "f", "arguments": arguments})
    for parser, text in (
        (HermesParser(), f"<tool_call>{call}</tool_call>"),
        (Llama3Parser(), call),
        (MistralParser(), f"[TOOL_CALLS][{call}]"),
        (ArrayParser(), f"[{call}]"),
    ):
        plain, [(name, found)] = read(parser, [*text])
        assert (plain, name, json.loads(found)) == ("", "f", arguments)
