from __future__ import annotations

import signal
import subprocess
import sys

from batchserve.interrupts import interrupts_end_the_process

COMPILES = """
import os, signal
from batchserve.interrupts import interrupts_end_the_process
with interrupts_end_the_process():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # as compilers have it
        pass
print("went on")
"""


def test_an_interrupt_that_python_would_lose_ends_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", COMPILES], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGINT, "")


def test_behind_it_the_handler_is_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts_end_the_process():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before
