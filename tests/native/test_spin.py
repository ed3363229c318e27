"""How long a thread spins: as long as has paid lately."""

from __future__ import annotations

import numpy as np
import pytest

from batchserve.native.spin import EVERY, FIRST, LEAST, LIMIT, MOST, STATE, spin_until


@pytest.fixture
def state() -> np.ndarray:
    return np.array([FIRST, 0], np.int64)


def wait(state: np.ndarray, value: int) -> bool:
    assert len(state) == STATE
    number = np.array([value], np.int64)
    return bool(spin_until(number.ctypes.data, 7, state.ctypes.data))


def test_waits_that_end_while_spinning_allow_one_more_pause_each(state: np.ndarray) -> None:
    assert all(wait(state, 7) for _ in range(20))
    assert state[LIMIT] == FIRST + 20
    for _ in range(2 * MOST):
        wait(state, 7)
    assert state[LIMIT] == MOST


def test_waits_that_do_not_end_become_shorter(state: np.ndarray) -> None:
    assert not any(wait(state, 6) for _ in range(20))
    assert state[LIMIT] == LEAST
    assert wait(state, 7)
    assert state[LIMIT] == LEAST + 1


def test_some_waits_are_long_whatever_the_limit_is(state: np.ndarray) -> None:
    state[:] = LEAST, EVERY - 1
    assert not wait(state, 6)  # after MOST pauses
    assert state.tolist() == [LEAST, EVERY]


def test_a_limit_out_of_bounds_is_none(state: np.ndarray) -> None:
    state[:] = 1 << 62, 0
    assert not wait(state, 6)
