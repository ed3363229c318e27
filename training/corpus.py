"""The raw material: functions and one-line documentation from the standard library (PSF licence)."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path

EXCLUDED_FOLDERS = ("site-packages", "idlelib", "lib2to3", "turtledemo", "bad_coding")
MAX_FUNCTION_CHARS = 520
MAX_EDITED_CHARS = 280  # a model of this size loses its place in longer ones
HELD_OUT_SHARE = 0.08
KEYWORDS = frozenset(
    "def self return for in if not and or is else import from class try except raise with as while pass none "
    "yield lambda None True False elif finally global assert break continue del".split()
)


@dataclass(frozen=True)
class Function:
    """One short function of the standard library."""

    name: str
    source: str
    summary: str  # first line of its docstring, or ""


@dataclass(frozen=True)
class Corpus:
    """Functions, the documented ones among them, and the words that random records are made of."""

    functions: list[Function]
    editable: list[Function]  # the short ones
    completable: list[Function]  # of these, whose last line has no word that the lines before do not have
    documented: list[Function]
    words: list[str]


def read_sources() -> list[str]:
    """Texts of the running interpreter's standard library, in a stable order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        if any(part in EXCLUDED_FOLDERS for part in path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if 300 < len(text) < 400_000:
            texts.append(text)
    random.Random(0).shuffle(texts)
    return texts


def extract_functions(texts: list[str]) -> list[Function]:
    """Every distinct function of 2 to 15 lines that fits MAX_FUNCTION_CHARS."""
    found: dict[str, Function] = {}
    for text in texts:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.split("\n")
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if not (50 < len(source) < MAX_FUNCTION_CHARS) or "\n" not in source:
                continue
            if not source.isascii():
                continue
            summary = (ast.get_docstring(node) or "").split("\n")[0].strip()
            found.setdefault(source, Function(node.name, source, summary))
    return list(found.values())


def build_corpora(texts: list[str]) -> tuple[Corpus, Corpus]:
    """(training, held-out): no function of one is in the other; the words are shared."""
    functions = extract_functions(texts)
    functions.sort(key=lambda function: function.source)
    random.Random(1).shuffle(functions)
    cut = int(len(functions) * HELD_OUT_SHARE)
    words = sorted({w for f in functions for w in re.findall(r"\b[A-Za-z]{3,10}\b", f.source)})
    return _corpus(functions[cut:], words), _corpus(functions[:cut], words)


def _corpus(functions: list[Function], words: list[str]) -> Corpus:
    documented = [f for f in functions if 20 < len(f.summary) < 110]
    editable = [f for f in functions if len(f.source) <= MAX_EDITED_CHARS]
    completable = [f for f in editable if _is_last_line_known(f.source)]
    return Corpus(functions, editable, completable, documented, words)


def _is_last_line_known(source: str) -> bool:
    head, _, last = source.rpartition("\n")
    return set(re.findall(r"\w+", last)) - KEYWORDS <= set(re.findall(r"\w+", head))
