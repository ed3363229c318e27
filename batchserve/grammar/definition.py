"""A grammar as a request defines it. Plain data: it goes to the process that checks it, and to the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from batchserve.config import COMPACT_JSON
from batchserve.grammar.ebnf import check_ebnf, is_gbnf
from batchserve.grammar.json_schema import checked_schema

if TYPE_CHECKING:
    from batchserve.sampling_params import SamplingParams

ESCAPES = '"\\bfnrt'  # that a JSON string may have; by those with digits, names could pass for others
ANY_OBJECT = '{"type": "object"}'


class Grammar(NamedTuple):
    """A grammar that an answer must follow. field: the parameter that it comes from. is_compact: JSON has the white
    space of Python's json.dumps, and no other.
    """

    field: str
    text: str
    is_compact: bool = True

    @classmethod
    def of(cls, params: SamplingParams, json_whitespace: str) -> Grammar | None:
        """Returns the grammar of a request that asks for one. Raises InvalidRequestError for what is not supported."""
        is_compact = json_whitespace == COMPACT_JSON
        if params.json_schema is not None:
            return cls("json_schema", checked_schema(str(params.json_schema)), is_compact)
        if params.json_object:
            return cls("json_object", ANY_OBJECT, is_compact)
        if params.regex is not None:
            return cls("regex", params.regex)
        if params.ebnf is not None:
            check_ebnf(params.ebnf)
            return cls("ebnf", params.ebnf)
        return cls("choice", "|".join(map(_literally, params.choice))) if params.choice else None

    def for_library(self) -> str:
        """Returns the grammar in the library's form. Raises an exception of the library's for what it cannot read."""
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import gbnf_to_lark

        if self.field in ("json_schema", "json_object"):
            options: dict[str, Any] = {"whitespace_flexible": True, "json_allowed_escapes": ESCAPES}
            if self.is_compact:
                options |= {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
            return LLMatcher.grammar_from_json_schema(self.text, overrides=options)  # type: ignore[arg-type]
        if self.field == "ebnf":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(self.text) if is_gbnf(self.text) else self.text)
        return LLMatcher.grammar_from_regex(self.text)


def _literally(text: str) -> str:
    """Returns the regular expression that matches a text alone."""
    return "".join(f"\\x{{{ord(each):x}}}" for each in text)
