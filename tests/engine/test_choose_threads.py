"""The number of compute threads is chosen by trials in turns."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from batchserve.engine import choose_threads as module
from batchserve.engine.choose_threads import choose_threads


@dataclass
class Cores:
    """A runner whose steps take so long by the number of threads; those of these numbers come with a pause."""

    step_s: dict[int, float]
    paused: range = range(0)
    num_threads: int = 0
    num_steps: int = 0

    def bind_thread(self) -> None: ...

    def time_decoding(self, runner: object, max_requests: int, max_context: int) -> float:
        self.num_steps += 1
        return self.step_s[self.num_threads] + 1.0 * (self.num_steps in self.paused)


@pytest.mark.parametrize(
    ("cores", "chosen", "most_steps"),
    [
        (Cores({4: 0.010, 2: 0.015, 1: 0.020}), 4, 27),
        (Cores({4: 0.010, 2: 0.0105, 1: 0.020}), 2, 27),  # the second half gains a twentieth
        (Cores({4: 0.010, 2: 0.0105, 1: 0.0109}), 1, 27),
        (Cores({4: 0.300, 2: 0.015, 1: 0.020}), 2, 27),  # a busy neighbour
        (Cores({4: 0.010, 2: 0.015, 1: 0.020}, range(1, 2)), 4, 28),
        (Cores({4: 0.010, 2: 0.015, 1: 0.020}, range(1, 11)), 4, 40),
        (Cores({4: 0.010, 2: 0.005, 1: 0.004}, range(1, 3)), 1, 29),
        (Cores({4: 0.010, 2: 0.005, 1: 0.004}, range(25, 27)), 1, 29),
        (Cores({4: 0.010, 2: 0.005, 1: 0.004}, range(26, 28)), 1, 29),
        (Cores({4: 0.600, 2: 0.015, 1: 0.020}), 2, 29),
        (Cores({4: 0.600, 2: 1.100, 1: 2.100}), 4, 4),  # so long a step that no more are tried
        (Cores({4: 0.600, 2: 0.300, 1: 0.600}), 2, 10),
        (Cores({4: 2.500, 2: 5.000, 1: 10.000}), 4, 2),
        (Cores({4: 0.400, 2: 0.700, 1: 1.400}), 4, 27),
    ],
)
def test_the_threads_that_are_worth_it_are_chosen(
    monkeypatch: pytest.MonkeyPatch, cores: Cores, chosen: int, most_steps: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(module, "time_decoding", cores.time_decoding)
    assert choose_threads(cores, 16, 512, 1.1) == chosen  # type: ignore[arg-type]
    assert cores.num_steps <= most_steps
