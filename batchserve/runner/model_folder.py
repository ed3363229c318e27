"""Finds a model's folder without importing what loading needs (torch's compiler, Numba), which takes seconds."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from batchserve.option_checks import is_model_path
from batchserve.runner.checkpoint import check_filled, check_path


def resolve_model(model: str) -> str:
    """Returns the model's folder: the bundled one for "bundled", the local copy for a hub id.

    Raises ConfigError if there is none, or if Git or a download has left only a pointer to a file.
    """
    if model == "bundled":
        return str(resources.files("batchserve") / "data" / "bundled")
    named = f"model = {model!r}"
    if is_model_path(model):
        folder = os.path.expanduser(model)
        check_path(Path(folder), named)
    else:
        from batchserve.runner.hub import local_snapshot

        folder = local_snapshot(model)
    check_filled(Path(folder), named)
    return folder
