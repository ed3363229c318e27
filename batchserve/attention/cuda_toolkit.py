"""Finds CUDA's compiler and runtime library, for kernels that are compiled at the first start."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def name_toolkit() -> None:
    """Sets CUDA_HOME to the toolkit, unless the caller has named one or none is found.

    FlashInfer would take the folder above nvcc's. If nvcc is a wrapper script, that folder has no library to link with.
    """
    if os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return
    nvcc = shutil.which("nvcc")
    toolkit = None if nvcc is None else find_toolkit(Path(nvcc))
    if toolkit is not None:
        os.environ["CUDA_HOME"] = str(toolkit)


def find_toolkit(nvcc: Path) -> Path | None:
    """Returns the toolkit folder with the runtime library: the one that nvcc reports, or the one that nvcc is in."""
    try:
        said = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, errors="replace", check=False
        ).stderr
    except OSError:
        return None
    tops = [Path(line.split("TOP=", 1)[1].strip()) for line in said.splitlines() if line.startswith("#$ TOP=")]
    for place in (*tops, nvcc.resolve().parent.parent):
        if any((place / lib / "libcudart.so").exists() for lib in ("lib64", "lib")):
            return place.resolve()
    return None
