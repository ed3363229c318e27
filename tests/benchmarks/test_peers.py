"""batchserve beside peers: whose turn it is, what is compared with what, and the protocol with a real engine."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import __main__ as program
from benchmarks.peers import environments, measure
from benchmarks.peers.contenders import IN_PROCESS, OWN, SERVED, Contender, lineup
from benchmarks.peers.environments import PeerError
from benchmarks.peers.measure import Cell, Plan, order, same_answers, summary
from benchmarks.peers.models import once
from benchmarks.peers.processes import tree
from benchmarks.peers.worker import Answered, Command, Worker

PLAN = Plan(requests=(1, 2), rounds=2, max_tokens=3)
EOS = 1


class Recorder:
    """Stands for the engines' processes: takes a round's time from a list, and notes what it is asked."""

    def __init__(self, name: str, asked: list[tuple[str, bool, list[list[int]]]], seconds: float) -> None:
        self._name, self._asked, self._seconds = name, asked, seconds

    def round(self, prompts: list[list[int]], max_tokens: int, drafts: bool) -> Answered:
        if max_tokens == PLAN.max_tokens:
            self._asked.append((self._name, drafts, prompts))
        return Answered(self._seconds, [[prompt[0]] * max_tokens for prompt in prompts])


def test_everyone_takes_every_place_and_neighbours_change() -> None:
    names = lineup(["openvino"])
    assert [each.name for each in names] == [
        *("batchserve in process, drafts off", "batchserve in process, drafts on"),
        *("openvino in process, drafts off", "openvino in process, drafts on"),
    ]
    orders = [order(names, number) for number in range(2 * len(names))]
    for each in names:
        assert {found.index(each) for found in orders} == set(range(len(names)))
    assert orders[1] == orders[0][::-1]


def test_a_served_peer_is_held_against_the_server() -> None:
    ways = {(each.engine, each.way) for each in lineup(["openvino", "vllm"])}
    assert ways == {(OWN, IN_PROCESS), (OWN, SERVED), ("openvino", IN_PROCESS), ("vllm", SERVED)}
    assert {each.way for each in lineup(["llamacpp"])} == {SERVED}


def _measured(deadline_s: float) -> tuple[list[Cell], list[Contender], list[tuple[str, bool, list[list[int]]]]]:
    contenders = lineup(["openvino"])
    asked: list[tuple[str, bool, list[list[int]]]] = []
    seconds = {"batchserve in process": 1.0, "openvino drafts off": 2.0}  # the other one did not start
    workers: Any = {name: Recorder(name, asked, each) for name, each in seconds.items()}
    prompts = [[number] for number in range(2, 2 + PLAN.num_prompts)]
    cells = measure.measure(contenders, workers, PLAN, prompts, deadline_s, lambda line: None)
    return cells, contenders, asked


def test_rounds_have_prompts_of_their_own_and_the_first_is_not_counted() -> None:
    cells, contenders, asked = _measured(time.monotonic() + 60)
    assert [cell.requests for cell in cells] == [1, 2]
    by_contender: dict[tuple[str, bool], list[list[list[int]]]] = {}
    for name, drafts, prompts in asked:
        by_contender.setdefault((name, drafts), []).append(prompts)
    assert len(by_contender) == 3
    (first, *others) = by_contender.values()
    assert all(other == first for other in others), "the same prompts for all"
    flat = [prompt[0] for prompts in first for prompt in prompts]
    assert len(flat) == len(set(flat)) == PLAN.num_prompts
    found = summary(cells[1], contenders, EOS)
    assert found["contenders"]["batchserve in process, drafts on"]["tokens_per_s"]["runs"] == PLAN.rounds
    assert found["batchserve_over"] == {
        "openvino in process, drafts off": {"median": 2.0, "low": 2.0, "high": 2.0, "pairs": PLAN.rounds}
    }


def test_no_round_begins_when_time_is_up_but_there_is_one() -> None:
    cells, _, _ = _measured(time.monotonic() - 1)
    assert {len(runs) for cell in cells for runs in cell.runs.values()} == {1}


def test_answers_are_compared_up_to_their_end() -> None:
    ours, theirs = [[5, EOS, 7], [5, 6, 7]], [[5, EOS, 8], [5, 6, 8]]
    assert same_answers([Answered(1.0, ours)], [Answered(1.0, theirs)], EOS) == 0.5


def test_the_protocol_with_batchserve() -> None:
    """A real engine in a process of its own: the same answers with and without drafts, and nothing is left."""
    load = {
        "model": "bundled",
        "max_requests": 2,
        "most_batched_tokens": 256,
        "options": {"dtype": "float32", "num_threads": 1, "adaptive": False},
    }
    command = Command("batchserve in process", "worker_batchserve", load)
    prompts = [[0, 2, 40, 50, 60, 70], [0, 2, 90, 80, 70, 60, 50]]
    with Worker(command) as worker:
        off, on = (worker.round(prompts, 6, drafts) for drafts in (False, True))
        assert off.token_ids == on.token_ids
        assert [len(answer) for answer in off.token_ids] == [6, 6]
        assert off.tokens_per_s > 0
        pids = tree(worker._process.pid)
        if Path("/proc/self/smaps_rollup").exists():
            assert (worker.pss_bytes() or 0) > 50e6
        with pytest.raises(PeerError, match="batchserve in process: InvalidRequestError"):
            worker.round([[]], 6, False)
    assert not any(_is_running(pid) for pid in pids)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_peer_that_does_not_start_is_left_out_and_batchserve_is_not() -> None:
    said: list[str] = []
    with ExitStack() as stack:
        later_s, vllm = time.monotonic() + 60, {"vllm": Command("vllm", "nowhere", {})}
        assert measure.start(vllm, stack, later_s, said.append) == {}
        assert "vllm: its process ended" in said[0]
        assert measure.start(vllm, stack, time.monotonic() - 1, said.append) == {}
        assert said[1] == "left out: vllm: starting the others took too long"
        with pytest.raises(PeerError, match="No module named"):
            measure.start({OWN: Command(OWN, "nowhere", {})}, stack, later_s, said.append)


def test_peers_that_are_not_installed_are_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert program.installed(["openvino", "vllm"]) == []
    assert "openvino: is not installed: python -m benchmarks.peers install openvino\n" in capsys.readouterr().out
    stamp = environments.folder_of("vllm") / environments.STAMP
    stamp.parent.mkdir(parents=True)
    stamp.touch()
    assert program.installed(["openvino", "vllm"]) == ["vllm"]


def test_an_export_is_made_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "exports" / "one"

    def fail(out: Path) -> None:
        out.write_text("half")
        raise PeerError("failed")

    with pytest.raises(PeerError):
        once(path, fail)
    assert not path.exists()

    def make(out: Path) -> None:
        out.write_text("whole")

    assert once(path, make).read_text() == "whole"
    assert once(path, fail).read_text() == "whole"


def test_a_peer_that_fails_is_left_out_and_the_others_go_on() -> None:
    class Failing:
        def round(self, prompts: Any, max_tokens: int, drafts: bool) -> Answered:
            raise PeerError("gone")

    class Answering:
        def round(self, prompts: Any, max_tokens: int, drafts: bool) -> Answered:
            return Answered(1.0, [[1] * max_tokens for _ in prompts])

    contenders = lineup(["openvino"])
    workers = {each.worker: Failing() if each.name == "openvino in process, drafts on" else Answering()
               for each in contenders}  # fmt: skip
    said: list[str] = []
    plan = Plan((1, 2), rounds=2, max_tokens=4)
    cells = measure.measure(contenders, workers, plan, [[5]] * plan.num_prompts, time.monotonic() + 60, said.append)
    assert said == ["left out from here on: gone"]
    for cell in cells:
        assert {name: len(runs) for name, runs in cell.runs.items()} == {
            "batchserve in process, drafts off": 2,
            "batchserve in process, drafts on": 2,
            "openvino in process, drafts off": 2,
        }
