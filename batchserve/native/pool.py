"""A process's thread pool for compiled code: steps, drafters and samplers run on it.

The caller and the workers it wants all call the same loop with the same job; the loop has to divide its work. Workers
spin while they wait for the next loop, as the next step follows soon, and go to sleep if none comes. They are not
pinned to cores. Only one caller at a time can use the workers: the engines of a process take turns.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
from typing import Any, NamedTuple

import numpy as np
from numba import carray, types

from batchserve.forks import OwnerProcess
from batchserve.native.addresses import call_loop
from batchserve.native.atomics import (
    add_one,
    call,
    exchange,
    load,
    load_in_order,
    pause,
    store,
    yield_address,
)
from batchserve.native.futex import sleep_function, sleep_while, wake
from batchserve.native.jit import cfunc, njit
from batchserve.native.spin import FIRST, spin_until

# A pool is an int64 array. Fields that are written at different times have separate cache lines. LOCK is held by the
# caller whose turn it is. TURN changes whenever there is work; its lower bits are the number of workers wanted. LOOP
# and JOB are the work. DONE counts the workers that have finished it; WAITING is 1 while the caller sleeps until they
# have, and SPINS is its spin_until's state. YIELD and SLEEP are system function addresses.
LOCK, TURN, LOOP, JOB, SPINS, DONE, WAITING, YIELD, SLEEP = 0, 8, 16, 17, 18, 24, 25, 32, 33
# After these fields, each worker has a cache line of its own: ASLEEP is 1 while it sleeps.
WORKERS, WORKER = 40, 8
ASLEEP = 0
WANTED_BITS = 16
ENDED = -1  # the last TURN, which ends the workers
MAX_WORKERS = 1023
AWAKE_SPINS = 20_000  # about a millisecond, longer than the time between two steps
_LOOP = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_START = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class Team(NamedTuple):
    """Threads for compiled code that starts them itself (addresses.run_loop). start: the address of the function that
    calls a loop on `size` threads of the pool at address `pool`; 0 if there is only one thread.
    """

    start: int
    size: int
    pool: int


ONE_THREAD = Team(0, 1, 0)


@njit(nogil=True, cache=True)
def _next_turn(pool, worker, last):  # type: ignore[no-untyped-def]
    """Waits until TURN differs from `last` and returns it. worker: the address of the worker's cache line."""
    spins = 0
    while True:
        turn = load(pool + TURN * 8)
        if turn != last:
            return turn
        spins += 1
        if spins < AWAKE_SPINS:
            pause()
            continue
        # The caller writes TURN, then reads ASLEEP; the worker writes ASLEEP, then reads TURN. So one sees the other.
        exchange(worker + ASLEEP * 8, 1)
        while load_in_order(pool + TURN * 8) == last:
            sleep_while(worker + ASLEEP * 8, 1, load(pool + SLEEP * 8))
        store(worker + ASLEEP * 8, 0)
        spins = 0


@functools.cache
def _work_loop() -> Any:
    """Returns the compiled function that a worker runs. Its argument is an int64 array: the pool's address, the
    worker's index, and the last TURN before the worker was started.
    """

    @cfunc(types.void(types.CPointer(types.int64)), nopython=True, cache=True)
    def loop(own_address):  # type: ignore[no-untyped-def]
        own = carray(own_address, 3)
        pool, place, turn = own[0], own[1], own[2]
        while True:
            turn = _next_turn(pool, pool + (WORKERS + WORKER * place) * 8, turn)
            if turn == ENDED:
                return
            if place < turn & ((1 << WANTED_BITS) - 1):
                call_loop(load(pool + LOOP * 8), load(pool + JOB * 8))
                # The worker writes DONE, then reads WAITING; the caller the other way round. So one sees the other.
                add_one(pool + DONE * 8)
                if load_in_order(pool + WAITING * 8) != 0:
                    wake(pool + DONE * 8, load(pool + SLEEP * 8))

    return loop


@njit(nogil=True, cache=True)
def _wait_for_turn(pool):  # type: ignore[no-untyped-def]
    """Waits until no other caller has the pool."""
    spins = 0
    while load(pool + LOCK * 8) != 0:
        spins += 1
        if spins < FIRST:
            pause()
        else:
            call(load(pool + YIELD * 8))


@njit(nogil=True, cache=True)
def _wait_for_workers(pool, count):  # type: ignore[no-untyped-def]
    """Waits until `count` workers are done."""
    if spin_until(pool + DONE * 8, count, pool + SPINS * 8):
        return
    exchange(pool + WAITING * 8, 1)
    done = load_in_order(pool + DONE * 8)
    while done != count:
        sleep_while(pool + DONE * 8, done, load(pool + SLEEP * 8))
        done = load_in_order(pool + DONE * 8)
    store(pool + WAITING * 8, 0)


@njit(nogil=True, cache=True)
def _wake(pool, num_workers):  # type: ignore[no-untyped-def]
    """Wakes the first num_workers workers if they are asleep. Call it after changing TURN."""
    for place in range(num_workers):
        worker = pool + (WORKERS + WORKER * place) * 8
        if load_in_order(worker + ASLEEP * 8) == 1 and exchange(worker + ASLEEP * 8, 0) == 1:
            wake(worker + ASLEEP * 8, load(pool + SLEEP * 8))


@njit(nogil=True, cache=True)
def end_all(pool, num_workers):  # type: ignore[no-untyped-def]
    """Makes all workers return."""
    exchange(pool + TURN * 8, ENDED)
    _wake(pool, num_workers)


@functools.cache
def start_loop() -> Any:
    """Returns the compiled function that calls loop(job) on `size` threads of a pool and waits for all of them."""

    @cfunc(types.void(types.int64, types.int64, types.int64, types.int64), nopython=True, cache=True)
    def start(loop, job, size, pool):  # type: ignore[no-untyped-def]
        while exchange(pool + LOCK * 8, 1) == 1:
            _wait_for_turn(pool)
        store(pool + LOOP * 8, loop)
        store(pool + JOB * 8, job)
        store(pool + DONE * 8, 0)
        number = (load(pool + TURN * 8) >> WANTED_BITS) + 1
        exchange(pool + TURN * 8, number << WANTED_BITS | size - 1)
        _wake(pool, size - 1)
        call_loop(loop, job)
        _wait_for_workers(pool, size - 1)
        store(pool + LOCK * 8, 0)

    return start


def compile_kernels() -> None:
    """Compiles the functions that workers and callers run, or loads them from the cache on disk."""
    _work_loop()
    start_loop()
    unused = np.zeros(WORKERS, np.int64)  # kept alive while end_all writes to it
    end_all(unused.ctypes.data, 0)


class ThreadPool:
    """Worker threads that are started on demand and end with `close`."""

    def __init__(self) -> None:
        self._maker = OwnerProcess("pool of threads")
        self._state = np.zeros(WORKERS + MAX_WORKERS * WORKER + 8, np.int64)
        self._state = self._state[-(self._state.ctypes.data // 8) % 8 :]  # aligned to a cache line
        self._state[YIELD], self._state[SLEEP], self._state[SPINS] = yield_address(), sleep_function(), FIRST
        self._threads: list[threading.Thread] = []
        self._own: list[np.ndarray] = []  # each worker's argument
        self._lock = threading.Lock()
        self._has_ended = False
        self._start = _START(start_loop().address)

    def team(self, size: int) -> Team:
        """Returns a team of `size` threads, including the caller's. Raises ForkedProcessError in a forked process,
        which has none of the threads, and RuntimeError after the pool has ended.
        """
        self._maker.check()
        if self._has_ended:
            raise RuntimeError("the pool of threads has ended: nothing can be computed while the interpreter ends")
        if size <= 1:
            return ONE_THREAD
        if size - 1 > len(self._threads):
            with self._lock:
                while len(self._threads) < size - 1:
                    self._add_worker()
        return Team(start_loop().address, size, self._state.ctypes.data)

    def run(self, loop: int, job: int, size: int) -> None:
        """Calls the compiled loop(job), both addresses, on `size` threads at once."""
        pool = self.team(size).pool
        if pool:
            self._start(loop, job, size, pool)
        else:
            _LOOP(loop)(job)

    def _add_worker(self) -> None:
        place = len(self._threads)
        own = np.array([self._state.ctypes.data, place, self._state[TURN]], np.int64)
        work, address = _LOOP(_work_loop().address), own.ctypes.data
        thread = threading.Thread(target=work, args=(address,), name=f"batchserve-{place + 1}", daemon=True)
        thread.start()
        self._own.append(own)
        self._threads.append(thread)

    def close(self) -> None:
        """Ends all workers before the interpreter ends. Call it when no loop is running."""
        if self._maker.pid != os.getpid():
            return
        self._has_ended = True
        end_all(self._state.ctypes.data, len(self._threads))
        for thread in self._threads:
            thread.join(timeout=1.0)


@functools.cache
def _pool() -> ThreadPool:
    """Returns the pool of this process."""
    pool = ThreadPool()
    atexit.register(pool.close)
    return pool


def given(wanted: int) -> int:
    """Returns the number of threads that a loop gets if it asks for `wanted`: one if the system is not POSIX."""
    return min(wanted, MAX_WORKERS + 1) if os.name == "posix" else 1


use_threads = given  # as openmp.use_threads: this pool keeps nothing for the calling thread


def team(size: int) -> Team:
    """Returns a team of the process's threads, for compiled code that starts them itself."""
    return _pool().team(given(size))


def run(loop: int, job: int, num_threads: int) -> None:
    """Calls the compiled loop(job), both addresses, on num_threads threads at once; the loop has to divide its work."""
    _pool().run(loop, job, given(num_threads))
