"""Bounded waiting for another thread, for as long as has paid lately."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

from batchserve.native.atomics import load, pause, store
from batchserve.native.jit import njit

# Pauses of tens of nanoseconds. Threads that compute together meet within microseconds. One that is waited for longer
# has lost its core to another process, and may need that of the thread that waits, which should therefore sleep. Where
# this happens often, ever fewer pauses are made before; each wait without it allows one more. One wait in EVERY makes
# the most pauses, and shows how many would have been enough.
FIRST, LEAST, MOST = 500, 50, 4000
EVERY = 32
LIMIT, NUMBER, STATE = 0, 1, 2  # a thread's numbers: how many pauses it makes, and which wait this is


@njit(nogil=True, cache=True)
def spin_until(address, wanted, state):  # type: ignore[no-untyped-def]
    """Returns whether the number at an address has become the wanted one. state: the address of int64 [STATE], which
    only this thread changes.
    """
    limit, number = min(MOST, load(state + LIMIT * 8)), load(state + NUMBER * 8) + 1
    store(state + NUMBER * 8, number)
    for used in range(MOST if number % EVERY == 0 else limit):
        if load(address) == wanted:
            store(state + LIMIT * 8, min(MOST, max(limit + 1, 2 * used)))
            return True
        pause()
    store(state + LIMIT * 8, max(LEAST, limit - limit // 4))
    return load(address) == wanted
