"""Checks of single options. All raise ConfigError, which names the option, its value and the bound."""

from __future__ import annotations

import os
import sys

from batchserve.errors import ConfigError, shortened

MAX_TOKENS, MAX_BYTES = (1 << 31) - 1, 1 << 60  # of anything counted: compiled code adds up in 64 bits


def is_model_path(model: str) -> bool:
    """True if the value means a folder: it is written as a path, or exists as one."""
    return os.path.isabs(model) or model.startswith((".", "~")) or os.path.exists(model)


def expanded_path(name: str, value: object) -> str:
    """Returns the text of a path with `~` expanded, as no shell does it in `--option=~/x`. Raises ConfigError."""
    return os.path.expanduser(path_text(name, value))


def path_text(name: str, value: object) -> str:
    """Returns the text of a path or a name. Raises ConfigError."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ConfigError(f"{name} = {value!r}: must be text or a path")
    if not text:
        raise ConfigError(f"{name} = '': must not be empty")
    if "\0" in text:
        raise ConfigError(f"{name} = {text!r}: must not hold a NUL")
    return text


def at_least(name: str, value: object, bound: int, most: int = MAX_TOKENS) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} = {value!r}: must be an integer")
    if value < bound:
        raise ConfigError(f"{name} = {value}: must be at least {bound}")
    if value > most:
        raise ConfigError(f"{name} = {shortened(value)}: must be at most {most}")


def number(name: str, value: object, bound: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} = {value!r}: must be a number")
    if not bound <= value <= sys.float_info.max:
        raise ConfigError(f"{name} = {value}: must be finite and at least {bound:g}")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} = {value!r}: must be one of {', '.join(allowed)}")


def check_tls(holder: object, *names: str) -> None:
    """Expands paths. Of the last two, a certificate and its key, both must be there or none."""
    for name in names:
        if getattr(holder, name) is not None:
            object.__setattr__(holder, name, expanded_path(name, getattr(holder, name)))
    certificate, key = names[-2:]
    if (getattr(holder, certificate) is None) != (getattr(holder, key) is None):
        raise ConfigError(f"{certificate}, {key}: must be given together")
