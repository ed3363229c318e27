"""Runs a model as a native program, with packed weights and its own buffers."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from batchserve.attention.matrix_code import TILE
from batchserve.attention.span_job import SPAN_JOB
from batchserve.native import openmp, pages, pool
from batchserve.program import instructions as at
from batchserve.program.experts import record_experts
from batchserve.program.graph import Graph
from batchserve.program.instructions import Kernel, Op, assemble
from batchserve.program.interpreter import begin_step, run_loop
from batchserve.program.lower import Lowering
from batchserve.program.packing import PackedWeight, pack
from batchserve.program.patterns import simplify
from batchserve.program.product import BF16_KERNEL, SCRATCH_BYTES, columns_at_once, kernel_of, num_words
from batchserve.program.rotary import record_rotary
from batchserve.program.tables import PositionTables
from batchserve.program.tape import UnsuitableModelError, record, tensors_in
from batchserve.program.torch_calls import TorchCall
from batchserve.sampling.argmax_kernel import best_of_parts, best_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    from batchserve.attention.base import Spans
    from batchserve.attention.cpu import CpuBackend
    from batchserve.program.program import Attention, Buffer, Instruction, Program
    from batchserve.program.tape import Call, Forward

MIN_CAPACITY = 64  # rows


class NativeModel:
    """Runs the steps of one model over one attention backend as a native program.

    forward: the model's, as `record` takes it. Raises UnsuitableModelError if the model cannot be a program.
    """

    def __init__(
        self, model: PreTrainedModel, forward: Forward, dtype: torch.dtype, vocab_size: int, max_model_len: int
    ) -> None:
        graph = Graph(record(forward, vocab_size, max_model_len, partial(_noted, model)), simplify)
        self._vocab_size = vocab_size
        self.backend: CpuBackend | None = None
        self._loops = 0, 0  # the backend's loops that store and that attend
        self._is_half = dtype == torch.bfloat16
        has_bf16_product = BF16_KERNEL != Kernel.WIDENED
        self._program = Lowering(graph, is_bf16=self._is_half, has_bf16_product=has_bf16_product).run()
        self._tables = PositionTables(graph, max_model_len)
        self._packed: dict[tuple[Any, ...], PackedWeight] = {}
        self._constants: list[torch.Tensor] = []  # kept alive, as instructions have their addresses
        for each in self._program.instructions:
            if each.op == Op.PRODUCT:
                for weight in each.weights:
                    self._pack(weight)
        self._num_threads = 0
        self._capacity = 0
        self._memory: list[np.ndarray] = []
        self._logits_buffer = next(b for b in self._program.buffers if b.is_logits)
        self._logits_by = next(place for place, each in enumerate(self._program.instructions)
                               if each.out is self._logits_buffer)  # fmt: skip
        if self._program.instructions[self._logits_by].torch_call is not None:
            raise UnsuitableModelError("its logits are not what a product gives")
        head = self._program.instructions[self._logits_by]
        self._num_parts = self._part_width = 0  # parts of the vocabulary, which threads take one at a time
        if head.op == Op.PRODUCT:
            self._part_width = columns_at_once(kernel_of(head.weights[0].dtype))
            self._num_parts = -(-vocab_size // self._part_width)
        self._greatest = np.zeros((0, 0), np.float32)
        calls = [each.torch_call for each in self._program.instructions if each.torch_call is not None]
        self.torch_operators = sorted({each.call.name for each in calls})  # operators without an instruction
        self._threads = openmp if self.torch_operators else pool  # torch's own threads if torch runs operators
        self._layers = [self._program.attention[layer] for layer in sorted(self._program.attention)]
        # For each layer, a job that stores K and V, if that has to come first, and a job that attends.
        self._jobs = np.zeros((len(self._layers), 2), SPAN_JOB)
        attends = [place for place, each in enumerate(self._program.instructions) if each.op == Op.ATTEND]
        self._stores, self._attends = np.array(attends[::2], np.int64), np.array(attends[1::2], np.int64)
        self._table_fields: list[tuple[int, int, int]] = []  # instruction, field, table
        self._rows = assemble([self._encode(place, each) for place, each in enumerate(self._program.instructions)])
        for each in self._program.instructions:
            each.forget_model()
        self._segments = segments(self._program)
        self._step = np.zeros(at.STEP_SIZE, np.int64)

    def use_backend(self, backend: CpuBackend) -> None:
        """Uses the backend's K/V cache from now on."""
        self.backend, self._loops = backend, backend.loops()

    def run(self, spans: Spans, ids: np.ndarray, positions: np.ndarray, kept: np.ndarray) -> torch.Tensor:
        """Runs a step and returns the logits of its kept rows, float32 [len(kept), vocab_size]. All arrays are int64.

        ids and positions may have more rows than the spans; the extra rows are ignored. Raises MemoryError.
        """
        assert self.backend is not None
        num_rows, num_threads = len(spans.parents), self._threads.given(torch.get_num_threads())
        self._reserve(num_rows, num_threads)
        logits = torch.empty(len(kept), self._vocab_size)
        stores = self.backend.begin_jobs(spans, self._jobs, num_threads)
        loops = (0 if stores else self._loops[0], self._loops[1])
        step, rows, places = self._step, self._rows, (self._stores, self._attends)
        longest = begin_step(step, rows, places, loops, num_rows, num_threads, ids, positions, kept)
        rows[self._logits_by, at.OUT] = logits.data_ptr()
        if self._tables.grow(longest):
            for place, field, table in self._table_fields:
                rows[place, field] = self._tables.arrays[table].ctypes.data
                rows[place, at.BY_TABLE] = self._tables.arrays[table].strides[0]
        for segment in self._segments:
            if isinstance(segment, TorchCall):
                with torch.inference_mode():
                    segment.run(self._view)
            else:
                self._run(segment)
        if not self._jobs["next"][:, 1].all():
            raise MemoryError("attention: there is no memory to work in")
        return logits

    def best_tokens(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Like argmax_kernel.best_tokens, but reads only a part of the logits if they are the last step's own."""
        if not self._num_parts or logits.data_ptr() != self._rows[self._logits_by, at.OUT]:
            return best_tokens(logits)
        best, is_finite = np.empty(len(logits), np.int64), np.empty(len(logits), np.bool_)
        where = (logits.data_ptr(), self._vocab_size, self._part_width)
        best_of_parts(self._greatest, *where, best, is_finite)
        return best, is_finite

    def _run(self, segment: slice) -> None:
        """Runs native instructions in one call, without the Python interpreter."""
        rows, step = self._rows[segment], self._step
        step[at.INSTRUCTIONS], step[at.NUM_INSTRUCTIONS] = rows.ctypes.data, len(rows)
        step[at.THREAD], step[at.ARRIVED] = 0, 0
        self._threads.run(cast("int", run_loop().address), step.ctypes.data, self._num_threads)

    def _view(self, buffer: Buffer) -> torch.Tensor:
        """Returns a buffer's rows in this step, [num_rows, width]. The buffer must not have a row for each pair."""
        num_rows = int(self._step[at.NUM_KEPT] if buffer.is_kept else self._step[at.NUM_ROWS])
        memory, dtype = self._memory[buffer.slot], torch.bfloat16 if buffer.is_bf16 else torch.float32
        start = self._at((buffer, 0)) - memory.ctypes.data
        rows = torch.from_numpy(memory[start : start + num_rows * buffer.by_row]).view(dtype)
        return rows.view(num_rows, -1)[:, : buffer.width]

    def limit_model_len(self, max_model_len: int) -> None:
        """Limits positions to below max_model_len, which may be less than the model was recorded with."""
        self._tables.limit(max_model_len)

    def release_weights(self, model: PreTrainedModel) -> None:
        """Frees the model's own copies of the weights packed here. The model itself can no longer run."""
        used = {tensor.data_ptr() for each in self._segments if isinstance(each, TorchCall)
                for tensor in tensors_in([*each.call.arguments, *each.call.options.values()])}  # fmt: skip
        packed = {key[0] for key in self._packed}
        for parameter in model.parameters():
            start = parameter.data_ptr()
            within = range(start, start + parameter.nbytes)
            if any(address in within for address in packed) and not any(address in within for address in used):
                parameter.data = parameter.new_empty(0)

    @contextmanager
    def limit_windows(self, length: int) -> Iterator[None]:
        """Limits attention windows to `length`, for a probe whose prompt is shorter than the windows."""
        self._reserve(MIN_CAPACITY, self._threads.given(torch.get_num_threads()))  # writes the windows
        windows = self._jobs["window"].copy()
        self._jobs["window"] = np.minimum(windows, length)
        try:
            yield
        finally:
            self._jobs["window"] = windows

    def _pack(self, weight: torch.Tensor) -> PackedWeight:
        key = weight.data_ptr(), weight.shape, weight.stride()
        if key not in self._packed:
            self._packed[key] = pack(weight)
        return self._packed[key]

    def _encode(self, place: int, each: Instruction) -> dict[int, int]:
        """Returns the fields of an instruction that do not depend on memory."""
        fields = dict(each.fields)
        fields[at.NEEDS_BARRIER] = each.needs_barrier
        if each.op == Op.PRODUCT:
            packed = [self._pack(weight) for weight in each.weights]
            fields[at.WEIGHT], fields[at.BY_BLOCK] = packed[0].words.ctypes.data, packed[0].block_bytes
            fields[at.KERNEL] = kernel = kernel_of(packed[0].dtype)
            fields[at.NUM_WORDS] = num_words(packed[0], kernel)
            fields[at.BY_EXPERT] = packed[0].expert_bytes
            if len(packed) > 1:
                fields[at.WEIGHT_2] = packed[1].words.ctypes.data
            for field, bias in zip((at.BIAS, at.BIAS_2), each.biases, strict=False):
                if bias is not None:
                    fields[field] = self._constant(bias)
        elif each.op == Op.EMBED:
            fields |= self._embedding(each.weights[0])
        elif each.op == Op.ATTEND:
            fields[at.JOB] = self._job(each.layer, int(place in self._attends))
        for field, constant in each.constants.items():
            fields[field] = self._constant(constant)
        for field, columns in zip((at.TABLE, at.TABLE_2), each.tables, strict=False):
            self._table_fields.append((place, field, self._tables.add(columns)))
        return fields

    def _embedding(self, weight: torch.Tensor) -> dict[int, int]:
        """Returns the fields for an embedding table, which is the packed weight if a product has packed it."""
        in_word = 4 // weight.element_size()
        packed = self._packed.get((weight.data_ptr(), weight.shape, weight.stride()))
        if packed is not None:
            return {at.WEIGHT: packed.words.ctypes.data, at.BY_BLOCK: packed.block_bytes, at.IN_WORD: in_word}
        table = weight.detach().contiguous()
        self._constants.append(table)
        return {at.TABLE: table.data_ptr(), at.BY_TABLE: table.stride(0) * table.element_size(), at.IN_WORD: in_word}

    def _constant(self, constant: torch.Tensor) -> int:
        """Returns the address of a float32 copy."""
        self._constants.append(constant.detach().float().contiguous().clone())
        return self._constants[-1].data_ptr()

    def _job(self, layer: int, part: int) -> int:
        place = next(i for i, each in enumerate(self._layers) if each.layer == layer)
        attention, job = self._layers[place], self._jobs[place, part : part + 1]
        params = attention.params
        if params.sinks is not None:
            job["sinks"] = self._constant(params.sinks)
        job["num_heads"], job["dim"] = attention.num_heads, attention.dim
        job["group"] = attention.num_heads // attention.num_kv_heads
        job["scale"], job["softcap"] = params.scaling, params.softcap or 0.0
        return int(job.ctypes.data)

    def _reserve(self, num_rows: int, num_threads: int) -> None:
        """Allocates memory for the rows and threads, and updates all addresses."""
        if num_rows <= self._capacity and num_threads == self._num_threads:
            return
        if num_rows > self._capacity:
            self._capacity = max(MIN_CAPACITY, 1 << (num_rows - 1).bit_length())
        self._num_threads = num_threads
        self._greatest = np.empty((self._num_parts, self._capacity), np.float32)
        head = self._rows[self._logits_by]
        head[at.BEST] = self._greatest.ctypes.data if self._num_parts else 0
        head[at.BY_BEST] = self._greatest.strides[0]
        private, spare = at.FEW_ROWS * num_threads, 2 * TILE  # spare: tiles read rows after an expert's last pair
        self._memory = [
            pages.zeros(
                kind.by_row * (max(self._capacity, private if kind.is_private else 0) * kind.per_row + spare) + 256,
                np.uint8,
            )
            for kind in self._program.slots
        ]
        widest = 4 * max(buffer.width for buffer in self._program.buffers) + 256
        by_scratch = -(-max(SCRATCH_BYTES, widest) // 4096) * 4096
        scratch = pages.zeros(by_scratch * num_threads + 64, np.uint8)
        self._memory.append(scratch)
        self._step[at.SCRATCH], self._step[at.BY_SCRATCH] = _line(scratch.ctypes.data), by_scratch
        for row, each in zip(self._rows, self._program.instructions, strict=True):
            self._address(row, each)
        for attention, jobs in zip(self._layers, self._jobs, strict=True):
            for job in jobs:
                self._address_attention(attention, job)

    def _at(self, place: tuple[Buffer, int]) -> int:
        buffer, column = place
        return _line(self._memory[buffer.slot].ctypes.data) + column * (2 if buffer.is_bf16 else 4)

    def _address(self, row: np.ndarray, each: Instruction) -> None:
        if each.x is not None:
            buffer = each.x[0]
            row[at.X], row[at.BY_X] = self._at(each.x), buffer.by_row
            row[at.X_PRIVATE] = at.FEW_ROWS * buffer.by_row if buffer.is_private else 0
        if each.y is not None:
            row[at.Y], row[at.BY_Y] = self._at(each.y), each.y[0].by_row
        out = each.out
        row[at.OUT], row[at.OUT_IS_BF16] = self._at((out, 0)), int(out.is_bf16)
        row[at.BY_OUT] = 4 * self._vocab_size if out is self._logits_buffer else out.by_row
        row[at.OUT_PRIVATE] = at.FEW_ROWS * out.by_row if out.is_private else 0

    def _address_attention(self, attention: Attention, job: np.ndarray) -> None:
        size = 2 if self._is_half else 4
        job["out"] = self._at((attention.out, 0))
        job["window"] = attention.params.sliding_window or 0
        for field, place in zip(("query", "key", "value"), attention.operands, strict=True):
            job[field] = self._at(place), place[0].by_row, attention.dim * size


@contextmanager
def _noted(model: PreTrainedModel, note: Callable[[Call], None]) -> Iterator[None]:
    """Records a model's experts and some rotary modules as single calls on its tape."""
    with record_experts(model, note), record_rotary(model, note):
        yield


def segments(program: Program) -> list[slice | TorchCall]:
    """Returns runs of native instructions, and the torch calls between them."""
    found: list[slice | TorchCall] = []
    start = 0
    for place, each in enumerate(program.instructions):
        if each.torch_call is not None:
            if place > start:
                found.append(slice(start, place))
            found.append(each.torch_call)
            start = place + 1
    return [*found, slice(start, len(program.instructions))] if start < len(program.instructions) else found


def _line(address: int) -> int:
    """Rounds an address up to a whole cache line."""
    return -(-address // 64) * 64
