"""Where a model is: known without torch's compiler, Numba and all else that loading it takes seconds to import."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from batchserve.option_checks import is_model_path
from batchserve.runner.checkpoint import check_filled, check_path
from batchserve.runner.hub import local_snapshot


def resolve_model(model: str) -> str:
    """The folder that a model is in: the bundled one for "bundled", for a hub id that of its local copy.

    Raises ConfigError where there is none, or where Git or a download has left it unfilled.
    """
    if model == "bundled":
        return str(resources.files("batchserve") / "data" / "bundled")
    named = f"model = {model!r}"
    if is_model_path(model):
        folder = os.path.expanduser(model)
        check_path(Path(folder), named)
    else:
        folder = local_snapshot(model)
    check_filled(Path(folder), named)
    return folder
