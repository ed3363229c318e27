"""The number of threads of each step: the best one is found, kept, and found again when the machine changes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from batchserve.runner.thread_choice import FEWER_AT_MOST, ThreadChoice

Cost = Callable[[int, int], float]  # seconds of a step by rows and threads


class Machine:
    """Runs steps, whose times vary by some per cent, and now and then by much."""

    def __init__(self, most: int, min_gain: float = 1.0, seed: int = 0) -> None:
        self.choice, self.rng = ThreadChoice(most, min_gain), random.Random(seed)
        self.seconds = 0.0
        self.trials: list[bool] = []

    def run(self, num_steps: int, rows: int, cost: Cost) -> list[int]:
        used = []
        for _ in range(num_steps):
            count = self.choice.pick(rows)
            noise = self.rng.uniform(0.97, 1.05) * (5.0 if self.rng.random() < 0.02 else 1.0)
            seconds = cost(rows, count) * noise
            is_trial = self.choice.note(rows, seconds)
            self.trials.append(is_trial)
            self.seconds += seconds
            used.append(count)
        return used


def share(used: list[int], count: int) -> float:
    return used.count(count) / len(used)


def scaling(rows: int, count: int) -> float:
    """Small steps lose by threads, large ones gain."""
    return 1e-4 * count + 1e-4 * rows / count


def beside_a_neighbour(rows: int, count: int) -> float:
    """Whose core is one of four."""
    return scaling(rows, count) * (4.0 if count == 4 else 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_each_size_of_steps_has_its_own_number(seed: int) -> None:
    machine = Machine(4, seed=seed)
    for _ in range(5):
        small, large = machine.run(200, 1, scaling), machine.run(200, 64, scaling)
    assert share(small, 1) > 0.9
    assert share(large, 4) > 0.9


@pytest.mark.parametrize("seed", range(5))
def test_a_neighbour_is_evaded_and_its_end_noticed_within_two_hundred_steps(seed: int) -> None:
    machine = Machine(4, seed=seed)
    machine.run(2000, 16, scaling)
    assert share(machine.run(200, 16, scaling), 4) > 0.9
    machine.run(100, 16, beside_a_neighbour)
    assert share(machine.run(200, 16, beside_a_neighbour), 4) < 0.1
    machine.run(2000, 16, beside_a_neighbour)
    machine.run(200, 16, scaling)
    assert share(machine.run(200, 16, scaling), 4) > 0.9


@pytest.mark.parametrize("seed", range(3))
def test_looking_for_better_numbers_costs_little(seed: int) -> None:
    machine, best = Machine(2, seed=seed), Machine(2, seed=seed)
    best.choice = ThreadChoice(2, 1.0, is_fixed=True)
    for each in (machine, best):
        each.run(500, 64, scaling)
        each.seconds = 0.0
        each.run(20 * FEWER_AT_MOST, 64, scaling)
    assert best.seconds < machine.seconds < 1.02 * best.seconds


def test_threads_that_gain_too_little_are_left_to_others() -> None:
    for min_gain, expected in ((1.0, 2), (1.3, 1)):
        machine = Machine(2, min_gain)
        machine.run(500, 8, lambda rows, count: 1.2 / count**0.2)  # 1.15 times as fast on two
        assert share(machine.run(300, 8, lambda rows, count: 1.2 / count**0.2), expected) > 0.9


def test_a_fixed_number_stays() -> None:
    choice = ThreadChoice(6, 1.0, is_fixed=True)
    for _ in range(100):
        assert choice.pick(5) == 6
        choice.note(5, 1.0)
    assert ThreadChoice(1, 1.0).pick(1) == 1


def test_numbers_are_halvings() -> None:
    machine = Machine(6)
    used = machine.run(3000, 4, lambda rows, count: float(count))
    assert set(used) == {6, 3, 1}
    assert share(used[-500:], 1) > 0.9


def test_steps_on_another_number_are_said_to_be_trials() -> None:
    machine = Machine(4)
    used = machine.run(500, 64, scaling)
    assert [count for count, is_trial in zip(used, machine.trials, strict=True) if not is_trial] == [
        4
    ] * machine.trials.count(False)
    assert {count for count, is_trial in zip(used, machine.trials, strict=True) if is_trial} == {2}


def test_threads_that_have_to_be_woken_are_found_to_be_worth_it() -> None:
    """The first step on more threads than the one before takes twice as long."""
    machine, before = Machine(2), [1]

    def cost(rows: int, count: int) -> float:
        woken, before[0] = count > before[0], count
        return 2e-4 / count + 1.5e-4 * woken

    machine.run(300, 1, lambda rows, count: 1e-4 * count)  # one thread is better at first
    machine.run(400, 1, cost)
    assert share(machine.run(400, 1, cost), 2) > 0.9
