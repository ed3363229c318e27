"""What is measured of a machine whose every cost is known: its table says what its steps take."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchserve.attention.base import LayerShape
from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, grid
from batchserve.kv.slab import SlabAllocator
from batchserve.runner.ragged_batch import RaggedBatch
from batchserve.startup import measure_steps
from batchserve.startup.measure_steps import measure, measured_table, rows_to_time, time_decoding

FIXED_S, ROW_S, LOGIT_ROW_S, REQUEST_S, CONTEXT_S, PAIR_S = 5e-3, 2e-4, 3e-5, 1e-5, 4e-7, 2e-7
FIRST_TOUCH_S = 0.5
MAX_SECONDS = 4.0  # as in a server; other tests have less


class Machine:
    """A runner whose clock is set forward by what a step takes; a row of a draft is late where its memory is untouched,
    and a context that nobody has written takes no time to read.
    """

    def __init__(self, total_tokens: int = 1 << 16, bucket_sizes: tuple[int, ...] = ()) -> None:
        self.now_s = 0.0
        self.num_steps = 0
        self.bucket_sizes = bucket_sizes
        self.allocator = SlabAllocator([LayerShape(1, 1, 1)], "float32", total_tokens)
        self._touched: set[str] = set()
        allocator = self.allocator
        allocator.touch, allocator.release = self._touch, self._release  # type: ignore[method-assign]

    def seconds(self, load: StepLoad) -> float:
        rows = load.num_rows
        rows = next((size for size in self.bucket_sizes if size >= rows), rows)
        return (
            FIXED_S
            + ROW_S * rows
            + LOGIT_ROW_S * (load.num_logit_rows - load.num_rows)
            + REQUEST_S * (load.num_requests - 1)
            + CONTEXT_S * load.context_tokens
            + PAIR_S * load.attended_tokens
        )

    def launch(self, batch: RaggedBatch) -> Any:
        spans = [(rows.context_len, len(rows.token_ids)) for rows in batch.requests]
        context, attended = sum(c for c, _ in spans), sum(c * n for c, n in spans)
        num_rows = sum(n for _, n in spans)
        num_logits = sum(1 + rows.num_draft_tokens for rows in batch.requests)
        untouched = [rows for rows in batch.requests if rows.request_id not in self._touched]
        context -= sum(rows.context_len for rows in untouched)
        seconds = self.seconds(StepLoad(num_rows, num_logits, len(spans), context, attended))
        seconds += FIRST_TOUCH_S * any(rows.num_pending == 1 for rows in untouched)
        self.num_steps += 1
        return SimpleNamespace(wait=lambda: self._advance(seconds))

    def _touch(self, request_id: str) -> None:
        assert self.allocator.planes(request_id, 0), "nothing is reserved"
        self._touched.add(request_id)

    def _release(self, request_id: str) -> None:
        self._touched.discard(request_id)
        SlabAllocator.release(self.allocator, request_id)

    def _advance(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return timed_by(Machine(), monkeypatch)


def timed_by(made: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(measure_steps.time, "perf_counter", lambda: made.now_s)
    monkeypatch.setattr(measure_steps, "MAX_SECONDS", MAX_SECONDS)
    return made


LOADS = [
    StepLoad(4, 4, 1),
    StepLoad(16, 16, 16, 16 * 900, 16 * 900),
    StepLoad(80, 80, 16, 16 * 300, 80 * 300),
    StepLoad(9, 9, 1, 3000, 9 * 3000),
    StepLoad(40 + 200, 41, 9, 8 * 500 + 1000, 40 * 500 + 200 * 1000),
]


@pytest.mark.parametrize("load", LOADS)
def test_the_table_says_what_steps_take(machine: Machine, load: StepLoad) -> None:
    table = measure(machine, 512, 16, 4096)  # type: ignore[arg-type]
    assert table.rows == tuple(grid(512))
    assert table.per_attended_token == pytest.approx(PAIR_S, rel=0.01)
    assert table.per_context_token == pytest.approx(CONTEXT_S, rel=0.01)
    assert StepTimeModel(table).predict(load) == pytest.approx(machine.seconds(load), rel=0.03)


@pytest.mark.parametrize(("max_rows", "max_requests", "max_context", "total"), [(4, 1, 80, 640), (1, 1, 16, 128)])
def test_where_little_fits_that_is_measured(
    monkeypatch: pytest.MonkeyPatch, max_rows: int, max_requests: int, max_context: int, total: int
) -> None:
    machine = timed_by(Machine(total), monkeypatch)
    table = measure(machine, max_rows, max_requests, max_context)  # type: ignore[arg-type]
    assert table.rows == tuple(grid(max_rows))
    assert StepTimeModel(table).predict(StepLoad(1, 1, 1)) == pytest.approx(machine.seconds(StepLoad(1, 1, 1)), rel=0.2)
    assert time_decoding(machine, max_requests, max_context) < 2 * FIXED_S  # type: ignore[arg-type]


def test_where_next_to_nothing_fits_a_single_row_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows are two requests here, and so two extents."""
    table = measure(timed_by(Machine(64), monkeypatch), 1024, 16, 3)  # type: ignore[arg-type]
    assert table.rows == (1,)
    assert table.seconds[0] == pytest.approx(FIXED_S + ROW_S)


@pytest.mark.parametrize(
    ("max_rows", "max_requests", "max_context", "total"), [(1024, 16, 16, 1024), (4352, 68, 68, 8704)]
)
def test_what_memory_has_no_room_for_is_left_out(
    monkeypatch: pytest.MonkeyPatch, max_rows: int, max_requests: int, max_context: int, total: int
) -> None:
    """Requests of few tokens take whole extents."""
    machine = timed_by(Machine(total), monkeypatch)
    table = measure(machine, max_rows, max_requests, max_context)  # type: ignore[arg-type]
    assert 64 <= table.rows[-1] < max_rows
    machine.allocator.check_integrity(())


def test_a_step_that_would_take_long_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows and requests are allowed, a start takes some seconds."""
    machine = timed_by(Machine(1 << 21), monkeypatch)
    table = measure(machine, 1 << 31, 1 << 30, 4096)  # type: ignore[arg-type]
    assert table.rows == tuple(grid(2000)[:-1])
    assert machine.now_s < 20
    for rows in (2000, 1 << 19):
        load = StepLoad(rows, 1, 1)
        assert StepTimeModel(table).predict(load) == pytest.approx(machine.seconds(load), rel=0.05), rows


def test_what_the_first_step_of_a_size_compiles_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager steps behind the graphs: the second as long as they are."""
    machine, compiled = timed_by(Machine(bucket_sizes=(1, 8, 64)), monkeypatch), set()
    seconds = machine.seconds

    def compiling(load: StepLoad) -> float:
        is_first = load.num_rows > 64 and load.num_rows not in compiled
        compiled.add(load.num_rows)
        return seconds(load) + (2.0 if is_first else 0.0)

    monkeypatch.setattr(machine, "seconds", compiling)
    table = measure(machine, 1024, 16, 2048)  # type: ignore[arg-type]
    assert table.rows[-1] == 1024
    assert max(table.seconds) < 1.0


def test_buckets_are_flat_inside_and_rise_at_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = timed_by(Machine(bucket_sizes=(1, 2, 4, 8, 24, 40, 64)), monkeypatch)
    model = StepTimeModel(measure(machine, 64, 16, 1024))  # type: ignore[arg-type]
    for rows in range(4, 65):
        load = StepLoad(rows, rows, 1)
        assert model.predict(load) == pytest.approx(machine.seconds(load), rel=0.001), rows
    assert rows_to_time(6, (1, 2, 4, 8)) == [1, 2, 3, 4, 5, 6]


def test_what_was_measured_is_read_again_for_the_same_key_only(machine: Machine, tmp_path: Path) -> None:
    first = measured_table(machine, 16, 4, 512, tmp_path, ["a"])  # type: ignore[arg-type]
    steps = machine.num_steps
    assert measured_table(machine, 16, 4, 512, tmp_path, ["a"]) == first  # type: ignore[arg-type]
    assert machine.num_steps == steps
    for rows, requests, context, name in ((16, 4, 512, "b"), (12, 4, 512, "a"), (16, 2, 512, "a"), (16, 4, 80, "a")):
        steps = machine.num_steps
        measured_table(machine, rows, requests, context, tmp_path, [name])  # type: ignore[arg-type]
        assert machine.num_steps > steps


def test_what_a_busy_machine_took_is_measured_again_once_it_is_quieter(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    for cores in (1.5, 1.2, 0.1, 0.0, 1.5):
        monkeypatch.setattr(measure_steps.Neighbours, "cores", lambda neighbours, cores=cores: cores)
        steps = machine.num_steps
        measured_table(machine, 16, 4, 512, tmp_path, ["a"])  # type: ignore[arg-type]
        found.append(machine.num_steps > steps)
    assert found == [True, False, True, False, False]


def flipped(content: bytes, place: float) -> bytes:
    index = int(place * len(content))
    return content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :]


@pytest.mark.faults
@pytest.mark.parametrize(
    "damage", [*(partial(flipped, place=i / 12) for i in range(12)), lambda _: b"", lambda _: b"{}"]
)
def test_a_damaged_file_is_measured_again_with_a_note(
    machine: Machine, tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    first = measured_table(machine, 16, 4, 512, tmp_path, ["a"])  # type: ignore[arg-type]
    (path,) = [each for each in tmp_path.rglob("*") if each.is_file()]
    path.write_bytes(damage(path.read_bytes()))
    again = measured_table(machine, 16, 4, 512, tmp_path, ["a"])  # type: ignore[arg-type]
    assert [record.getMessage() for record in caplog.records] == [
        f"step times are measured again: {path} is damaged (its digest is wrong)"
    ]
    assert again.rows == first.rows
    assert again.seconds == pytest.approx(first.seconds)
    steps = machine.num_steps
    assert measured_table(machine, 16, 4, 512, tmp_path, ["a"]) == again  # type: ignore[arg-type]
    assert machine.num_steps == steps, "and kept"


@pytest.mark.faults
def test_step_times_that_cannot_be_kept_are_a_note(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step_time").write_text("a file in the folder's place")
    measured_table(machine, 16, 4, 512, tmp_path, ["a"])  # type: ignore[arg-type]
    assert "step times are not kept for the next start" in caplog.records[-1].getMessage()


def test_where_nothing_can_be_kept_nothing_is_left(machine: Machine, tmp_path: Path) -> None:
    measured_table(machine, 16, 4, 512, tmp_path, ["a"])  # type: ignore[arg-type]
    (path,) = [each for each in tmp_path.rglob("*") if each.is_file()]
    path.unlink()
    path.mkdir()
    measured_table(machine, 16, 4, 512, tmp_path, ["a"])  # type: ignore[arg-type]
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


def test_what_is_no_file_is_not_waited_for(machine: Machine, tmp_path: Path) -> None:
    measured_table(machine, 16, 4, 512, tmp_path, ["a"])  # type: ignore[arg-type]
    (path,) = [each for each in tmp_path.rglob("*") if each.is_file()]
    path.unlink()
    os.mkfifo(path)
    steps = machine.num_steps
    measured_table(machine, 16, 4, 512, tmp_path, ["a"])  # type: ignore[arg-type]
    assert machine.num_steps > steps
