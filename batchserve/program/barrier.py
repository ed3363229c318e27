"""A barrier for the threads of a step."""

from __future__ import annotations

from batchserve.native.atomics import SPINS, add_one, call, load, pause, store
from batchserve.native.jit import njit
from batchserve.program.instructions import ARRIVED, GENERATION, NUM_THREADS, YIELD


@njit(nogil=True, cache=True)
def wait_for_all(step):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Returns once all threads of the step have called it. Each thread then sees what the others wrote before."""
    num_threads = step[NUM_THREADS]
    if num_threads == 1:
        return
    at = step.ctypes.data
    generation = load(at + GENERATION * 8)
    if add_one(at + ARRIVED * 8) == num_threads - 1:
        store(at + ARRIVED * 8, 0)
        store(at + GENERATION * 8, generation + 1)
        return
    spins = 0
    while load(at + GENERATION * 8) == generation:
        spins += 1
        if spins < SPINS:
            pause()
        elif step[YIELD] != 0:
            call(step[YIELD])
