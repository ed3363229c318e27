"""Grammars are checked in another process, which is killed if one takes too long or too much memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from batchserve.errors import EngineFaultError
from batchserve.grammar import checker as checker_module
from batchserve.grammar.checker import GrammarChecker
from batchserve.grammar.compiler import Vocabulary
from batchserve.grammar.definition import Grammar
from batchserve.runner.model_folder import resolve_model

GOOD, BAD = Grammar("regex", "[a-z]+"), Grammar("regex", "(a")
SLOW = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}')  # some six seconds, and 400 MB in all


def vocabulary(definition: str = "") -> Vocabulary:
    folder = Path(resolve_model("bundled"))
    return Vocabulary(definition or Tokenizer.from_file(str(folder / "tokenizer.json")).to_str(), 4096, (0,))


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(vocabulary)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (BAD, "unclosed group"),
        (Grammar("regex", r"\bfoo"), "lookarounds not supported"),
        (Grammar("regex", r"(a)\1"), "backreference"),
        (Grammar("ebnf", "root ::= other"), "Rule 'other' not found"),
        (Grammar("ebnf", "no grammar"), "Expected token"),
        (Grammar("ebnf", "start: start"), "no text follows it"),
        (Grammar("json_schema", '{"$ref": "#"}'), "no text follows it"),
        (Grammar("json_schema", '{"$ref": "#/$defs/missing"}'), "does not exist"),
        (Grammar("json_schema", '{"const": 5, "minimum": 6}'), "Unsatisfiable schema"),
        (Grammar("json_schema", '{"type": "text"}'), "Invalid type"),
        (Grammar("json_schema", '{"type": "string", "format": "color"}'), "Unknown format: color"),
        (Grammar("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'), "oneOf"),
        (Grammar("regex", "a*b*|"), ""),
        (GOOD, ""),
    ],
    ids=str,
)
def test_reasons_are_the_librarys(grammar: Grammar, reason: str, checker: GrammarChecker) -> None:
    found = checker.refusal(grammar)
    assert reason in found
    assert bool(found) == bool(reason)
    assert "\n" not in found


def test_what_takes_too_long_is_refused_and_the_next_one_is_checked(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "MAX_SECONDS", 1.0)
    monkeypatch.setattr(checker_module, "MAX_GROWTH_BYTES", 8 << 30)
    assert checker.refusal(SLOW) == "it takes more than 1 s to compile"
    assert checker.is_known(SLOW)
    assert checker._process is None
    assert checker.refusal(SLOW) == "it takes more than 1 s to compile"  # remembered
    assert checker._process is None
    assert checker.refusal(GOOD) == ""


def test_what_takes_too_much_memory_is_refused(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "MAX_GROWTH_BYTES", 64 << 20)
    monkeypatch.setattr(checker_module, "MAX_SECONDS", 60.0)
    assert checker.refusal(SLOW) == "it takes more than 64 MiB to compile"
    assert checker.refusal(GOOD) == ""


def test_a_process_that_others_have_ended_is_started_again(checker: GrammarChecker) -> None:
    assert checker.refusal(GOOD) == ""
    assert checker._process is not None
    checker._process.kill()
    assert checker.refusal(Grammar("choice", "a|b")) == ""


def test_it_can_be_closed_while_it_compiles(checker: GrammarChecker) -> None:
    assert checker.refusal(GOOD) == ""
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(checker.refusal, SLOW)
        time.sleep(0.2)
        checker.close()
        with pytest.raises(EngineFaultError):
            asked.result()
    assert checker._process is None


def test_models_without_a_tokenizer_that_can_be_read() -> None:
    assert "no tokenizer" in GrammarChecker(lambda: None).refusal(GOOD)
    unreadable = GrammarChecker(lambda: vocabulary('{"a": 1}'))
    assert "the model's tokenizer cannot be used with grammars" in unreadable.refusal(GOOD)


@pytest.mark.faults
def test_no_process_is_a_fault_that_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker(vocabulary)
    with monkeypatch.context() as patch:
        patch.setattr(checker_module, "CHILD", "import sys; sys.exit(3)")
        with pytest.raises(EngineFaultError, match="the process that checks grammars cannot be started"):
            checker.refusal(GOOD)
    assert checker.refusal(GOOD) == ""
    checker.close()
