"""The files of deploy/ and docs/operations.md as tests read them."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from batchserve.cli import _parser

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OPERATIONS = ROOT / "docs" / "operations.md"
PACKAGE = ROOT / "batchserve"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
METRIC = re.compile(r"\bbatchserve_[a-z][a-z_]*")
FORMATS = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdrgf]")


def text_files() -> list[Path]:
    return sorted(path for path in (*DEPLOY.rglob("*"), OPERATIONS) if path.is_file() and path.suffix != ".key")


def documents(path: Path) -> list[Any]:
    """What a file of YAML holds."""
    return list(yaml.safe_load_all(path.read_text()))


def container(path: Path) -> dict[str, Any]:
    """The server's container in a Deployment, or in a patch of one."""
    (found,) = documents(path)
    return found["spec"]["template"]["spec"]["containers"][0]


def parse(arguments: list[str]) -> argparse.Namespace:
    """What batchserve's own parser makes of arguments. Raises SystemExit."""
    return _parser().parse_args(arguments)


def known_flags() -> set[str]:
    """Every flag of every command of batchserve."""
    return {flag for parser in _parsers(_parser()) for action in parser._actions for flag in action.option_strings}


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _parsers(each)


def command_lines(text: str) -> list[list[str]]:
    """The arguments of each line, or lines joined by a backslash, that runs `batchserve COMMAND`."""
    text = re.sub(r"\\\n[ #]*", "", text)
    found = re.findall(r"^[ #]*(?:sudo -u \w+ )?(?:/\S+/)?batchserve ([a-z][\w-]* .*)$", text, re.MULTILINE)
    return [shlex.split(re.sub(r" [>|&].*$", "", line), comments=True) for line in found]


def texts_of_code() -> list[str]:
    """Every text in the package's sources, with ... where a value is put in."""
    return [text for path in PACKAGE.rglob("*.py") for text in _texts(ast.parse(path.read_text()))]


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield FORMATS.sub("...", node.value)
