"""Resolves hub ids with one lookup, limited to a few seconds. Everything after that reads a local folder."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from huggingface_hub import HfApi, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from batchserve.config import EngineConfig
from batchserve.errors import ConfigError

logger = logging.getLogger(__name__)
LOOKUP_S = 5.0
CACHED_LOOKUP_S = 2.0  # to check for a newer revision if there is a cached copy
# The files that transformers reads, without the same weights in other formats.
FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")
OTHER_FORMATS = ("*/*.safetensors", "consolidated*.safetensors")

T = TypeVar("T")


def with_local_model(config: EngineConfig) -> EngineConfig:
    """Returns the configuration with the local folder in place of a hub id, which is not looked up again.

    Raises ConfigError.
    """
    name = config.served_model_name or config.model
    return dataclasses.replace(config, model=local_snapshot(config.model), served_model_name=name)


@functools.cache
def local_snapshot(model: str) -> str:
    """Returns the local folder of a hub model, downloaded if needed, or the cached copy if the hub cannot be reached.

    Raises ConfigError if there is neither.
    """
    named = f"model = {model!r}"
    try:
        cached = _cached(model)
    except HFValidationError:
        raise ConfigError(f"{named}: must be a folder that exists, a hub id or 'bundled'") from None
    try:
        if is_offline_mode():
            raise ConfigError("HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set")
        _within(CACHED_LOOKUP_S if cached else LOOKUP_S, lambda timeout_s: HfApi().model_info(model, timeout=timeout_s))
    except Exception as error:  # proxies and mirrors may answer with anything
        reason = _reason(error)
        if cached is None:
            raise ConfigError(
                f"{named}: is not a local folder, nor in the cache of the hub's models; {reason}"
            ) from error
        logger.warning("%s: the copy in the cache is used; %s", named, reason)
        return cached
    try:
        return snapshot_download(model, allow_patterns=[*FILES], ignore_patterns=[*OTHER_FORMATS])
    except Exception as error:
        raise ConfigError(f"{named}: cannot be downloaded: {_reason(error)}") from error


def _cached(model: str) -> str | None:
    """Returns the folder of a cached copy, or None. Loading reports missing files. Raises HFValidationError."""
    try:
        folder: str | None = snapshot_download(model, local_files_only=True)
    except LocalEntryNotFoundError as error:
        folder = getattr(error, "snapshot_path", None)
    except (OSError, UnicodeError):  # a damaged cache counts as none
        return None
    return folder if folder is not None and os.path.isfile(os.path.join(folder, "config.json")) else None


def _within(timeout_s: float, call: Callable[[float], T]) -> T:
    """Returns or raises what the call does, or TimeoutError. The call's own timeout may restart at every byte."""
    done: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(call(timeout_s))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="hub", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return done[0]


def _reason(error: Exception) -> str:
    """Describes the error in one line."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, ConfigError):
        return first
    if isinstance(error, GatedRepoError):
        return "the hub wants its terms accepted: do so on the model's page, then set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such model, or shows it only to who may see it (set HF_TOKEN)"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return f"the hub answers with HTTP status {status}{'; is HF_TOKEN right?' if status in (401, 403) else ''}"
    return f"the hub cannot be reached ({first})"
