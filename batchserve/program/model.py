"""Runs a linked program, in buffers of its own."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from batchserve.attention.matrix_code import TILE
from batchserve.attention.span_job import SPAN_JOB
from batchserve.native import pages, pool, spin
from batchserve.native.futex import sleep_function
from batchserve.program import instructions as at
from batchserve.program.interpreter import begin_step, run_loop
from batchserve.program.operations import operation
from batchserve.sampling.argmax_kernel import best_of_parts, best_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from batchserve.attention.base import Spans
    from batchserve.attention.compiled import CompiledAttention
    from batchserve.program.image import Place, ProgramImage
    from batchserve.program.program import Buffer

MIN_CAPACITY = 64  # rows


class Tables(Protocol):
    """Values that depend on positions alone: float32 arrays [positions, columns], as in tables.PositionTables."""

    @property
    def arrays(self) -> Sequence[np.ndarray]: ...

    def grow(self, length: int) -> bool:
        """Makes sure that there are at least `length` positions. Returns True if arrays have been replaced."""

    def limit(self, most: int) -> None:
        """Changes the number of positions that are ever needed."""


class NativeModel:
    """Runs the steps of one model over one K/V memory as a native program."""

    def __init__(self, image: ProgramImage, tables: Tables) -> None:
        self.image, self.tables = image, tables
        self._attention: CompiledAttention | None = None
        self._loops = 0, 0  # the loops that store K and V and that attend
        self._max_threads, self._reserved_threads, self._capacity = 1, 0, 0
        self._pool: ModuleType = pool
        if image.torch_calls:  # on torch's own threads: both sets together would be too many for the cores
            self._pool = importlib.import_module("batchserve.native.openmp")
        self._memory: list[np.ndarray] = []
        self._rows, self._segments = image.rows.copy(), image.segments()
        self._greatest = np.zeros((0, 0), np.float32)
        # For each layer, a job that stores K and V, if that has to come first, and a job that attends.
        self._jobs = np.zeros((len(image.layers), 2), SPAN_JOB)
        self._stores, self._attends = image.attends[::2].copy(), image.attends[1::2].copy()
        self._step = np.zeros(at.STEP_SIZE, np.int64)
        self._step[at.SLEEP] = sleep_function()
        for row in self._rows:
            op = at.Op(int(row[at.OP]))
            if op not in (at.Op.ATTEND, at.Op.TORCH):
                kernel = at.Kernel(int(row[at.KERNEL])) if op == at.Op.PRODUCT else at.Kernel.FLOATS
                row[at.CODE] = operation(op, kernel)
        for place, field, number in image.array_fields.tolist():
            self._rows[place, field] = image.arrays[number].ctypes.data
        for i, (place, layer) in enumerate(zip(image.attends.tolist(), image.layer_order.tolist(), strict=True)):
            self._rows[place, at.JOB] = self._jobs[layer, i % 2 : i % 2 + 1].ctypes.data
        for layer, job in zip(image.layers, self._jobs, strict=True):
            job["num_heads"], job["dim"] = layer.num_heads, layer.dim
            job["group"] = layer.num_heads // layer.num_kv_heads
            job["scale"], job["softcap"], job["window"] = layer.scale, layer.softcap, layer.window
            job["sinks"] = image.arrays[layer.sinks].ctypes.data if layer.sinks >= 0 else 0

    def use_attention(self, attention: CompiledAttention) -> None:
        """Uses another K/V memory from now on."""
        self._attention, self._loops = attention, attention.loops()

    def use_threads(self, wanted: int) -> int:
        """Runs this thread's steps on at most so many threads, or on as many as there can be; returns the number."""
        self._max_threads = self._pool.use_threads(wanted)
        return self._max_threads

    def limit_model_len(self, max_model_len: int) -> None:
        """Limits positions to below max_model_len, which may be less than the model was recorded with."""
        self.tables.limit(max_model_len)

    def run(
        self, spans: Spans, ids: np.ndarray, positions: np.ndarray, kept: np.ndarray, num_threads: int | None = None
    ) -> np.ndarray:
        """Runs a step and returns the logits of its kept rows, float32 [len(kept), vocab_size]. All arrays are int64.

        ids and positions may have more rows than the spans; the extra rows are ignored. num_threads: at most what
        use_threads has returned, which is the default. Raises MemoryError.
        """
        assert self._attention is not None
        num_rows, num_threads = len(spans.parents), num_threads or self._pool.given(self._max_threads)
        self._reserve(num_rows)
        logits = np.empty((len(kept), self.image.vocab_size), np.float32)
        stores = self._attention.begin_jobs(spans, self._jobs, num_threads)
        loops = (0 if stores else self._loops[0], self._loops[1])
        step, rows, places = self._step, self._rows, (self._stores, self._attends)
        longest = begin_step(step, rows, places, loops, num_rows, num_threads, ids, positions, kept)
        rows[self.image.head, at.OUT] = logits.ctypes.data
        if self.tables.grow(longest):
            self._address_tables()
        for segment in self._segments:
            if isinstance(segment, slice):
                self._run(segment, num_threads)
            else:
                segment.run(self._view)
        if not self._jobs["next"][:, 1].all():
            raise MemoryError("attention: there is no memory to work in")
        return logits

    def best_tokens(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Like argmax_kernel.best_tokens, but reads only a part of the logits if they are the last step's own."""
        width = self.image.part_width
        if not width or logits.ctypes.data != self._rows[self.image.head, at.OUT]:
            return best_tokens(logits)
        best, is_finite = np.empty(len(logits), np.int64), np.empty(len(logits), np.bool_)
        best_of_parts(self._greatest, logits.ctypes.data, self.image.vocab_size, width, best, is_finite)
        return best, is_finite

    def _run(self, segment: slice, num_threads: int) -> None:
        """Runs native instructions in one call, without the Python interpreter."""
        rows, step = self._rows[segment], self._step
        step[at.INSTRUCTIONS], step[at.NUM_INSTRUCTIONS] = rows.ctypes.data, len(rows)
        step[at.THREAD], step[at.ARRIVED] = 0, 0
        self._pool.run(cast("int", run_loop().address), step.ctypes.data, num_threads)

    def _view(self, buffer: Buffer) -> np.ndarray:
        """Returns a buffer's rows in this step, float32 [num_rows, width], or uint16 for the bits of bfloat16.

        The buffer must not have a row for each pair.
        """
        num_rows = int(self._step[at.NUM_KEPT] if buffer.is_kept else self._step[at.NUM_ROWS])
        memory, dtype = self._memory[buffer.slot], np.uint16 if buffer.is_bf16 else np.float32
        start = _line(memory.ctypes.data) - memory.ctypes.data
        rows = memory[start : start + num_rows * buffer.by_row].view(dtype)
        return rows.reshape(num_rows, -1)[:, : buffer.width]

    @contextmanager
    def limit_windows(self, length: int) -> Iterator[None]:
        """Limits attention windows to `length`, for a probe whose prompt is shorter than the windows."""
        windows = self._jobs["window"].copy()
        self._jobs["window"] = np.minimum(windows, length)
        try:
            yield
        finally:
            self._jobs["window"] = windows

    def _reserve(self, num_rows: int) -> None:
        """Allocates memory for the rows and all threads, and updates all addresses."""
        if num_rows <= self._capacity and self._max_threads <= self._reserved_threads:
            return
        image, num_threads = self.image, self._max_threads
        if num_rows > self._capacity:
            self._capacity = max(MIN_CAPACITY, 1 << (num_rows - 1).bit_length())
        self._reserved_threads = num_threads
        self._greatest = np.empty((image.num_parts, self._capacity), np.float32)
        head = self._rows[image.head]
        head[at.BEST] = self._greatest.ctypes.data if image.num_parts else 0
        head[at.BY_BEST] = self._greatest.strides[0]
        private, spare = at.FEW_ROWS * num_threads, 2 * TILE  # spare: tiles read rows after an expert's last pair
        self._memory = [
            pages.zeros(
                slot.by_row * (max(self._capacity, private if slot.is_private else 0) * slot.per_row + spare) + 256,
                np.uint8,
            )
            for slot in image.slots
        ]
        by_scratch = image.scratch_bytes + at.LINE
        scratch = pages.zeros(by_scratch * num_threads + at.LINE, np.uint8)
        self._memory.append(scratch)
        start = _line(scratch.ctypes.data)
        self._step[at.SCRATCH], self._step[at.BY_SCRATCH] = start, by_scratch
        for end in range(start - scratch.ctypes.data + by_scratch, by_scratch * num_threads + at.LINE, by_scratch):
            scratch[end - at.LINE : end].view(np.int64)[0] = spin.FIRST
        starts = np.array([_line(memory.ctypes.data) for memory in self._memory], np.int64)
        places, fields, slots, offsets = image.slot_fields.T
        self._rows[places, fields] = starts[slots] + offsets
        for layer, job in zip(image.layers, self._jobs, strict=True):
            job["out"] = self._at(layer.out)
            for name, place in (("query", layer.query), ("key", layer.key), ("value", layer.value)):
                job[name] = self._at(place), place.by_row, layer.dim * (2 if image.is_bf16 else 4)

    def _at(self, place: Place) -> int:
        return _line(self._memory[place.slot].ctypes.data) + place.start

    def _address_tables(self) -> None:
        for place, field, number in self.image.table_fields.tolist():
            table = self.tables.arrays[number]
            self._rows[place, field], self._rows[place, at.BY_TABLE] = table.ctypes.data, table.strides[0]


def _line(address: int) -> int:
    """Rounds an address up to a whole cache line."""
    return -(-address // at.LINE) * at.LINE
