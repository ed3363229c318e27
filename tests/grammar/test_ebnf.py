"""Which EBNF grammars are taken, and which of the two forms they are."""

from __future__ import annotations

import pytest

from batchserve.errors import InvalidRequestError
from batchserve.grammar.ebnf import check_ebnf, is_gbnf


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('start: "a" <[5]> "b"', "<[5]>"),
        ('start: "a" </s>', "</s>"),
        ('start: "a" <|end|>', "<|end|>"),
        ('start: %json {"type": "object"}', "%json"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "%llguidance"),
        ("start: @sub", "@sub"),
        ('start: body\nbody[max_tokens=3]: "a"', "body[max_tokens=3]:"),
        ("start: <", "<"),
    ],
)
def test_lark_beyond_text_is_refused(text: str, found: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_ebnf(text)
    assert (caught.value.field, caught.value.value) == ("ebnf", found)


@pytest.mark.parametrize(
    "text",
    [
        'start: "<[5]>" /<s>|%json @/ // <a>\n  | "a" # %json\n',
        'start: ["a"] x*\nx: "b" ["c"]',
        '%import common.WORD\n%ignore " "\nstart: WORD',
        'root ::= "<s>" [<%@] "a"',
    ],
)
def test_what_only_looks_like_it_is_taken(text: str) -> None:
    check_ebnf(text)


@pytest.mark.parametrize(
    ("text", "is_it"),
    [
        ('root ::= "a"', True),
        ('# a comment ::= \n// and one\n\n root-rule ::= "a"', True),
        ('start: "a ::= b"', False),
        ('// x ::= y\nstart: "a"', False),
        ("", False),
    ],
)
def test_rules_tell_the_forms_apart(text: str, *, is_it: bool) -> None:
    assert is_gbnf(text) == is_it
