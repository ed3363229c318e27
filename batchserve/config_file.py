"""A file of options: `serve --config FILE.yaml`. Its keys are the flags without their dashes; flags take precedence."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from batchserve.errors import ConfigError, one_line

MAX_BYTES = 1 << 20
NOT_OPTIONS = ("--help", "--config")


def flags_of(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    """Returns the flags that a file's options mean to a parser. Raises ConfigError, which names the option."""
    where = f"config = {str(path)!r}"
    flags: list[str] = []
    for key, value in _read(path, where).items():
        name = f"--{str(key).replace('_', '-')}"
        action = parser._option_string_actions.get(name)
        if not isinstance(key, str) or action is None or name in NOT_OPTIONS or name.startswith("--no-"):
            raise ConfigError(f"{where}: {key}: must be an option of serve, such as max-num-seqs")
        flags.append(_flag(f"{where}: {key} = {value!r}", name, action, value))
        _check(f"{where}: {key} = {value!r}", parser, flags[-1])
    return flags


def _read(path: Path, where: str) -> dict[Any, Any]:
    import yaml

    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ConfigError(f"{where}: must have at most {MAX_BYTES} bytes")
        found = yaml.load(text, _Loader())
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{where}: must be YAML ({one_line(error)})") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: must be options and their values, such as max-num-seqs: 8")
    return found


def _Loader() -> Any:
    """Returns YAML's safe loader, which also refuses a key that is there twice: it would take the last one."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for i, key in enumerate(keys):
                if key in keys[:i]:
                    raise ValueError(f"{key} is there twice")
            return super().construct_mapping(node, deep)

    return Loader


def _flag(where: str, name: str, action: argparse.Action, value: Any) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: must be true or false")
        return name if value else f"--no-{name[2:]}"
    if action.type in (None, str) and action.choices is None and not isinstance(value, str):
        raise ConfigError(f"{where}: must be a text, in quotes if YAML takes it for something else")
    if isinstance(value, bool):  # YAML reads `on` and `off` so
        value = "on" if value else "off"
    if isinstance(value, list):
        value = ",".join(map(str, value))
    if not isinstance(value, str | int | float):
        raise ConfigError(f"{where}: must be a text or a number")
    return f"{name}={value}"


def _check(where: str, parser: argparse.ArgumentParser, flag: str) -> None:
    """Raises ConfigError if the parser refuses a flag: its own message would not tell of the file."""
    said: list[str] = []

    class Refused(Exception):
        pass

    def refuse(message: str) -> None:
        said.append(message)
        raise Refused

    parser.error, own = refuse, parser.error  # type: ignore[method-assign,assignment]
    try:
        parser.parse_args([flag])
    except Refused:
        raise ConfigError(f"{where}: {said[0]}") from None
    finally:
        parser.error = own  # type: ignore[method-assign]
