"""The number of compute threads is chosen by trials in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from batchserve.startup import build as build_module
from batchserve.startup import choose_threads as module
from batchserve.startup.choose_threads import LOOK_AGAIN_S, PATIENCE_S, SELDOM_S, ThreadWatch, choose_threads
from batchserve.types import SamplingParams, SpeculationParams
from tests.equivalence.harness import build


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
    ("cores", "chosen", "max_steps"),
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
    monkeypatch: pytest.MonkeyPatch, cores: Cores, chosen: int, max_steps: int
) -> None:
    cores.num_threads = 4
    monkeypatch.setattr(module, "time_decoding", cores.time_decoding)
    assert choose_threads(cores, 16, 512, 1.1) == chosen  # type: ignore[arg-type]
    assert cores.num_steps <= max_steps


@dataclass
class Watched:
    """A watch over a runner with a clock of its own."""

    cores: Cores
    now_s: float = 0.0
    ratios: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        time_step: Callable[[], float] = lambda: self.cores.time_decoding(None, 0, 0)  # noqa: E731
        clock: Callable[[], float] = lambda: self.now_s  # noqa: E731
        self.watch = ThreadWatch(self.cores, 4, 1.3, time_step, self.ratios.append, clock)  # type: ignore[arg-type]

    def go(self, seconds: float, *, is_idle: bool = True) -> int:
        """Let so much time pass, second by second; returns how many threads steps then run on."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.watch.look(is_idle=is_idle)
        return self.cores.num_threads


@pytest.mark.faults
def test_a_number_of_threads_that_was_chosen_beside_a_busy_neighbour_is_chosen_again() -> None:
    watched = Watched(Cores({4: 0.500, 2: 0.200, 1: 0.020}, num_threads=1))
    assert watched.go(600) == 1
    watched.cores.step_s = {4: 0.006, 2: 0.011, 1: 0.020}
    assert watched.go(SELDOM_S + LOOK_AGAIN_S + 1) == 4, "soon again after a change"
    assert watched.ratios == pytest.approx([0.55, 0.006 / 0.011])
    watched.cores.step_s = {4: 0.500, 2: 0.200, 1: 0.020}
    assert watched.go(3 * SELDOM_S) == 1
    assert watched.cores.num_steps < 150


@pytest.mark.faults
def test_threads_that_gain_little_are_left_as_they_are() -> None:
    watched = Watched(Cores({4: 0.010, 2: 0.012, 1: 0.014}, num_threads=2))
    assert watched.go(1000) == 2
    assert not watched.ratios
    assert watched.cores.num_steps <= 3 * 7


@pytest.mark.faults
def test_steps_are_tried_between_those_of_requests_only_where_there_was_no_lull() -> None:
    watched = Watched(Cores({4: 0.005, 2: 0.010, 1: 0.020}, num_threads=2))
    watched.go(LOOK_AGAIN_S + PATIENCE_S - 1, is_idle=False)
    assert watched.cores.num_steps == 0
    assert watched.go(1, is_idle=False) == 4
    assert watched.watch.idle_s() == LOOK_AGAIN_S


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.faults
@pytest.mark.usefixtures("two_threads")
def test_an_engine_goes_on_with_the_threads_that_are_chosen_again(
    tiny_model: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(build_module, "choose_threads", lambda *given: 1)  # as on a busy machine
    options = {"adaptive": True, "decoding_length": None, "custom_kernels": False}  # modules, on one number of threads
    built = build(tiny_model["llama"], clock=lambda: now_s, **options)
    core, runner = built.core, built.core.executor
    monkeypatch.setattr(build_module, "time_decoding", lambda *given: 0.02 / runner.num_threads)

    def answer(name: str) -> list[int]:
        tokens: list[int] = []
        core.emit = lambda events: [tokens.extend(event.token_ids) for _, event in events]  # type: ignore
        params = SamplingParams(0.0, max_tokens=20, ignore_eos=True)
        core.add(built.processor.make_request(name, [*range(3, 60)], params, SpeculationParams(), now_s))
        while core.has_work:
            core.step()
        return tokens

    before = answer("before")
    assert runner.num_threads == 1
    factor = core.scheduler._step_time.factor  # type: ignore[union-attr]
    now_s = LOOK_AGAIN_S
    assert core.idle() == LOOK_AGAIN_S
    assert runner.num_threads == 2
    assert core.scheduler._step_time.factor == pytest.approx(factor / 2)  # type: ignore[union-attr]
    assert answer("after") == before
    core.check_integrity()
