"""A barrier for the threads of a step."""

from __future__ import annotations

from batchserve.native.atomics import add_one, exchange, load, load_in_order, store, take_one
from batchserve.native.futex import sleep_while, wake
from batchserve.native.jit import njit
from batchserve.native.spin import spin_until
from batchserve.program.instructions import ARRIVED, GENERATION, NUM_THREADS, SLEEP, SLEEPERS


@njit(nogil=True, cache=True)
def wait_for_all(step, spins):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Returns once all threads of the step have called it. Each thread then sees what the others wrote before.

    spins: the state of spin_until.
    """
    num_threads = step[NUM_THREADS]
    if num_threads == 1:
        return
    at = step.ctypes.data
    generation = load(at + GENERATION * 8)
    if add_one(at + ARRIVED * 8) == num_threads - 1:
        store(at + ARRIVED * 8, 0)
        # GENERATION is written before SLEEPERS is read here, and the other way round below: so one sees the other.
        exchange(at + GENERATION * 8, generation + 1)
        if load_in_order(at + SLEEPERS * 8) != 0:
            wake(at + GENERATION * 8, step[SLEEP])
        return
    if spin_until(at + GENERATION * 8, generation + 1, spins):
        return
    add_one(at + SLEEPERS * 8)
    while load_in_order(at + GENERATION * 8) == generation:
        sleep_while(at + GENERATION * 8, generation, step[SLEEP])
    take_one(at + SLEEPERS * 8)
