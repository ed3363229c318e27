"""The process's threads for compiled code: whoever is wanted comes, once for each loop, awake or asleep."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numba import carray, types

from batchserve.errors import ForkedProcessError
from batchserve.native import pool
from batchserve.native.addresses import claim
from batchserve.native.atomics import add_one, load, pause
from batchserve.native.jit import cfunc
from batchserve.native.pool import ThreadPool

CALLS, NEXT, NUM_PIECES, TOGETHER, PIECES = range(5)  # of a job; then how often each piece was taken


@pytest.fixture(scope="module")
def loop() -> int:
    """Threads count themselves, wait until TOGETHER of them are there, and share NUM_PIECES."""

    @cfunc(types.void(types.CPointer(types.int64)), nopython=True)
    def count(address):  # type: ignore[no-untyped-def]
        job = carray(address, 4)
        pieces = carray(address, PIECES + job[NUM_PIECES])
        at = pieces.ctypes.data
        add_one(at + CALLS * 8)
        while load(at + CALLS * 8) < job[TOGETHER]:
            pause()
        while True:
            piece = claim(at + NEXT * 8)
            if piece >= job[NUM_PIECES]:
                return
            pieces[PIECES + piece] += 1

    return int(count.address)


@pytest.fixture
def own() -> Iterator[ThreadPool]:
    made = ThreadPool()
    yield made
    made.close()
    assert not any(thread.is_alive() for thread in made._threads)


def run(threads: ThreadPool, loop: int, size: int, num_pieces: int = 40, together: int = 0) -> int:
    """How many threads came; each piece is taken once."""
    job = np.zeros(PIECES + num_pieces, np.int64)
    job[NUM_PIECES], job[TOGETHER] = num_pieces, together
    threads.run(loop, job.ctypes.data, size)
    assert (job[PIECES:] == 1).all()
    return int(job[CALLS])


@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_so_many_threads_share_a_loop(own: ThreadPool, loop: int, size: int):
    assert {run(own, loop, size, together=size) for _ in range(20)} == {size}
    assert len(own._threads) == size - 1


def test_teams_of_any_size_follow_each_other(own: ThreadPool, loop: int):
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 1000).tolist()
    assert [run(own, loop, size) for size in sizes] == sizes
    assert len(own._threads) == 7


def test_workers_that_sleep_are_woken(own: ThreadPool, loop: int):
    run(own, loop, 3)
    for pause_s in (0.0, 0.3, 0.001, 0.3, 0.0):
        time.sleep(pause_s)
        if pause_s == 0.3:
            began_s, used_s = time.perf_counter(), time.process_time()
            time.sleep(0.2)
            awake = (time.process_time() - used_s) / (time.perf_counter() - began_s)
            assert awake < 0.5, "workers without work are to sleep"
        assert run(own, loop, 3, together=3) == 3


def test_workers_fall_asleep_while_they_are_called(own: ThreadPool, loop: int):
    """Pauses of about the time that they stay awake: a call that a worker misses would never return."""
    rng = np.random.default_rng(1)
    for _ in range(400):
        assert run(own, loop, 2, together=2) == 2
        until_s = time.perf_counter() + float(rng.uniform(0.0, 0.003))
        while time.perf_counter() < until_s:
            pass


def test_callers_take_turns(own: ThreadPool, loop: int):
    def call(size: int) -> set[int]:
        return {run(own, loop, size) for _ in range(200)}

    with ThreadPoolExecutor(3) as callers:
        found = [callers.submit(call, size) for size in (2, 3, 4)]
        assert [each.result() for each in found] == [{2}, {3}, {4}]


def test_the_process_has_one_pool():
    assert pool.team(3).pool == pool.team(2).pool
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("batchserve-")]
    assert len(names) == len(set(names)) >= 2


@pytest.mark.faults
def test_a_fork_is_refused(own: ThreadPool, monkeypatch: pytest.MonkeyPatch):
    own.team(2)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(ForkedProcessError, match="pool of threads"):
        own.team(2)
    own.close()  # the parent's workers stay
    monkeypatch.undo()
    assert own._threads[0].is_alive()


def test_nothing_is_computed_once_they_have_ended(own: ThreadPool, loop: int):
    run(own, loop, 2)
    own.close()
    with pytest.raises(RuntimeError, match="has ended"):
        run(own, loop, 2)


ENDS: dict[str, str] = {
    "at the end": "",
    "by an error": "raise RuntimeError('here')",
    "by exit": "raise SystemExit(3)",
}


@pytest.mark.faults
@pytest.mark.parametrize("how", ENDS)
def test_workers_end_before_the_interpreter(how: str):
    code = f"from batchserve.native import pool; pool.team(9); {ENDS[how]}"
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == {"at the end": 0, "by an error": 1, "by exit": 3}[how]
    assert "Fatal" not in done.stderr
