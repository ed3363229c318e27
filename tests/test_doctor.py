"""`batchserve doctor` says what the machine is, without torch."""

from __future__ import annotations

import re
import subprocess
import sys
import time

from batchserve.doctor import read_speed

WITHOUT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is not wanted here")
sys.meta_path.insert(0, Refuse())
from batchserve.cli import main
sys.exit(main())
"""
SUBJECTS = ["batchserve", "libraries", "processor", "instructions", "cores", "memory", "caches", "GPU", "choices"]


def test_every_subject_has_a_line() -> None:
    command = [sys.executable, "-c", WITHOUT, "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == SUBJECTS
    assert re.search(r"torch \d", lines[1]), "the version is known without importing it"
    assert re.search(r"read \d+ GB/s", lines[5])


def test_memory_is_read_at_a_plausible_speed() -> None:
    began_s = time.perf_counter()
    assert 1e8 < read_speed(2) < 1e13
    assert time.perf_counter() - began_s > 0
