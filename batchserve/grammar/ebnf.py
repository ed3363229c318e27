"""Which EBNF grammars are taken: llama.cpp's GBNF, and llguidance's Lark without what goes beyond text."""

from __future__ import annotations

import re

from batchserve.errors import InvalidRequestError

_GBNF = re.compile(r"(\s|#[^\n]*\n|//[^\n]*\n)*[\w-]+\s*::=")
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"i?|/(?!/)(?:\\.|[^/\\\n])+/[a-z]*|//[^\n]*|#[^\n]*')
# Tokens by name or number: an end token would end the answer, and forced numbers leave the library's matchers in a
# wrong state. Other directives than these two bring in schemas, whose keywords nobody has looked at. Attributes count
# tokens.
_BEYOND_TEXT = re.compile(r"<[^>\n]*>?|%(?!ignore\b|import\b)\w*|@\w*|^\s*[?!]*[A-Za-z_]\w*\s*\[[^\]\n]*\]\s*:", re.M)


def is_gbnf(text: str) -> bool:
    """Returns whether a grammar is GBNF, whose rules have `::=`, and not Lark."""
    return _GBNF.match(text) is not None


def check_ebnf(text: str) -> None:
    """Raises InvalidRequestError for a grammar in Lark that is not about text alone."""
    if is_gbnf(text):
        return
    found = _BEYOND_TEXT.search(_LITERAL.sub(" ", text))
    if found is not None:
        bound = "without tokens in <...>, directives but for %ignore and %import, references with @, and attributes"
        raise InvalidRequestError("UNSUPPORTED_GRAMMAR", "ebnf", found[0].strip(), bound)
