"""Trees that several threads grow side by side are those that one would have grown."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest

from batchserve.draft import mixture
from batchserve.draft.base import Drafter, DraftRequest
from batchserve.draft.forest import DraftForest, DraftQueries
from batchserve.draft.kernels import KernelLoader
from batchserve.draft.mixture import MAX_THREADS, MixtureDrafter
from batchserve.draft.router import RoutingDrafter
from batchserve.native import pool
from batchserve.native.pool import ONE_THREAD
from batchserve.request import DraftScope

SCOPES = [DraftScope("default", "a"), DraftScope("default", "b"), None]
VOCAB_SIZE, NUM_REQUESTS, NUM_STEPS = 40, 11, 30
START = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class CountedTeam:
    """A team of the pool's threads that writes down how many were started."""

    def __init__(self, size: int) -> None:
        self.started: list[int] = []
        own = pool.team(size)
        start = START(own.start)

        def count(loop: int, job: int, num_threads: int, at: int) -> None:
            self.started.append(num_threads)
            start(loop, job, num_threads, at)

        self._count = START(count)  # owned here: compiled code knows its address only
        address = ctypes.cast(self._count, ctypes.c_void_p).value
        assert address is not None
        self.team = own._replace(start=address)


def start_all(drafter: Drafter, rng: random.Random) -> list[str]:
    names = [f"r{i}" for i in range(NUM_REQUESTS)]
    for i, name in enumerate(names):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 30, 400]))]
        temperature = rng.choice([0.0, 0.8])
        drafter.start(DraftRequest(name, prompt, scope=SCOPES[i % 3], temperature=temperature, seed=i))
    return names


def run(drafter: Drafter, seed: int) -> list[DraftForest]:
    """The drafts of some steps, with texts that repeat themselves and queries of all sizes."""
    rng = random.Random(seed)
    names = start_all(drafter, rng)
    phrases = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(3, 9))] for _ in range(6)]
    forests = []
    for step in range(NUM_STEPS):
        asked = rng.sample(names, rng.randrange(1, len(names) + 1))
        most = 8 if step < NUM_STEPS // 2 else 64  # work memory grows on the way
        bounds = [(rng.choice([0, 1, most]), rng.choice([0, 2, 30]), 30) for _ in asked]
        least = np.array([rng.choice([0.0, 0.05]) for _ in asked])
        forests.append(drafter.propose_all(DraftQueries(asked, np.array(bounds, np.int64), least)))
        given = {name: [*rng.choice(phrases), rng.randrange(VOCAB_SIZE)] for name in asked}
        drafter.accept_all(given)
        for name, token_ids in given.items():
            drafter.share(name, token_ids)
    return forests


@pytest.mark.parametrize("size", [2, 3, MAX_THREADS + 5])
def test_threads_change_no_draft(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(mixture, "SHARED_NODES", 0)
    counted, num_nodes = CountedTeam(size), 0
    for seed in range(6):
        together, alone = MixtureDrafter(), MixtureDrafter()
        together.use_threads(counted.team)
        for ours, theirs in zip(run(together, seed), run(alone, seed), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
            num_nodes += len(ours.token_ids)
    assert num_nodes > 2000
    assert counted.started == [size] * (6 * NUM_STEPS)


def test_threads_are_started_for_many_nodes_only() -> None:
    counted, drafter = CountedTeam(2), MixtureDrafter()
    drafter.use_threads(counted.team)
    names = start_all(drafter, random.Random(0))
    for most, times in ((1, 0), (mixture.SHARED_NODES // len(names), 0), (mixture.SHARED_NODES, 1)):
        bounds = np.full((len(names), 3), most, np.int64)
        drafter.propose_all(DraftQueries(names, bounds, np.zeros(len(names))))
        assert len(counted.started) == times


def test_a_router_hands_its_threads_to_all_drafters() -> None:
    counted, mine = CountedTeam(2), MixtureDrafter()
    router = RoutingDrafter("mixture", {"mixture": mine}, KernelLoader(in_background=False))
    router.use_threads(counted.team)
    names = start_all(router, random.Random(1))
    bounds = np.full((len(names), 3), 64, np.int64)
    router.propose_all(DraftQueries(names, bounds, np.zeros(len(names))))
    assert counted.started == [2]


def test_one_thread_is_no_team() -> None:
    assert pool.team(1) == ONE_THREAD
    assert pool.team(2).size == 2
    assert pool.team(2).start != 0
