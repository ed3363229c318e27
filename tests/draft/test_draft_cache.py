"""The draft cache's file: whole, or as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from batchserve.draft.draft_cache import SavedScope, read_scopes, write_scopes
from batchserve.draft.mixture_kernels import initial_weights
from batchserve.request import DraftScope

FILL = """
import resource, sys
from pathlib import Path
from tests.draft.test_draft_cache import scope, write_scopes
scopes = [scope(10_000), scope(20_000)]
for most in (0, 100, 5_000, 40_500, 60_000, 122_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    try:
        write_scopes(Path(sys.argv[1]), "fingerprint", scopes)
    except OSError as error:
        print("refused")
"""


def scope(num_tokens: int) -> SavedScope:
    weights = initial_weights()
    text = np.arange(num_tokens, dtype=np.int32)
    return SavedScope(DraftScope("tenant", "scope"), text, weights, np.zeros(weights.shape, np.int64))


@pytest.mark.faults
def test_where_the_disk_is_full_the_old_drafts_stay(tmp_path: Path) -> None:
    """A limit of the file's size fails as a full disk does, wherever in the archive that is."""
    path = tmp_path / "drafts"
    write_scopes(path, "fingerprint", [scope(100)])
    command = [sys.executable, "-c", FILL, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 6
    assert done.stderr == ""
    (kept,) = read_scopes(path, "fingerprint", 100, 1 << 20)
    assert kept.text.tolist() == list(range(100))
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"
