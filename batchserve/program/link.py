"""Makes a program of a model: traces it, lowers the trace to instructions, packs the weights, and links all of it."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchserve.program import instructions as at
from batchserve.program.experts import record_experts
from batchserve.program.graph import Graph
from batchserve.program.image import AttentionLayer, Place, ProgramImage, Slot
from batchserve.program.instructions import Kernel, Op, assemble
from batchserve.program.lower import Lowering
from batchserve.program.packing import PackedWeight, pack
from batchserve.program.patterns import simplify
from batchserve.program.product import BF16_KERNEL, SCRATCH_BYTES, columns_at_once
from batchserve.program.rotary import record_rotary
from batchserve.program.tables import PositionTables
from batchserve.program.tape import UnsuitableModelError, record, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    from batchserve.program.program import Attention, Buffer, Instruction
    from batchserve.program.tape import Call, Forward

PAGE = 4096


class LinkedModel:
    """A model's program, its position tables, and which of the model's weights are packed in it.

    forward: the model's, as `record` takes it. Raises UnsuitableModelError if the model cannot be a program.
    """

    def __init__(
        self, model: PreTrainedModel, forward: Forward, dtype: torch.dtype, vocab_size: int, max_model_len: int
    ) -> None:
        graph = Graph(record(forward, vocab_size, max_model_len, partial(_noted, model)), simplify)
        self._is_bf16 = dtype == torch.bfloat16
        self._program = Lowering(graph, is_bf16=self._is_bf16, has_bf16_product=BF16_KERNEL != Kernel.WIDENED).run()
        self._instructions = self._program.instructions
        self._logits = next(buffer for buffer in self._program.buffers if buffer.is_logits)
        self._vocab_size = vocab_size
        self._arrays: list[np.ndarray] = []
        self._array_fields: list[tuple[int, int, int]] = []
        self._slot_fields: list[tuple[int, int, int, int]] = []
        self._table_fields: list[tuple[int, int, int]] = []
        self._packed: dict[tuple[Any, ...], tuple[PackedWeight, int]] = {}  # with the number of its array
        self.tables = PositionTables(graph, max_model_len)
        for each in self._instructions:  # before embeddings, which use a packed weight if there is one
            if each.op == Op.PRODUCT:
                for weight in each.weights:
                    self._pack(weight)
        self.image = self._link()
        for each in self._instructions:
            each.forget_model()

    def _link(self) -> ProgramImage:
        head = next(place for place, each in enumerate(self._instructions) if each.out is self._logits)
        if self._instructions[head].torch_call is not None:
            raise UnsuitableModelError("its logits are not what a product gives")
        product, part_width = self._instructions[head], 0
        if product.op == Op.PRODUCT:
            part_width = int(columns_at_once(self._pack(product.weights[0])[0].kernel))
        rows = assemble([self._fields(place, each) for place, each in enumerate(self._instructions)])
        attends = [place for place, each in enumerate(self._instructions) if each.op == Op.ATTEND]
        numbers = sorted(self._program.attention)
        widest = 4 * max(buffer.width for buffer in self._program.buffers) + 256
        return ProgramImage(
            rows=rows,
            layers=[self._layer(self._program.attention[number]) for number in numbers],
            arrays=self._arrays,
            array_fields=np.array(self._array_fields, np.int64).reshape(-1, 3),
            slot_fields=np.array(self._slot_fields, np.int64).reshape(-1, 4),
            table_fields=np.array(self._table_fields, np.int64).reshape(-1, 3),
            slots=[Slot(kind.by_row, kind.per_row, kind.is_private) for kind in self._program.slots],
            attends=np.array(attends, np.int64),
            layer_order=np.array([numbers.index(self._instructions[place].layer) for place in attends], np.int64),
            head=head,
            is_bf16=self._is_bf16,
            vocab_size=self._vocab_size,
            part_width=part_width,
            scratch_bytes=-(-max(SCRATCH_BYTES, widest) // PAGE) * PAGE,
            torch_calls={
                place: each.torch_call for place, each in enumerate(self._instructions) if each.torch_call is not None
            },
        )

    def release_weights(self, model: PreTrainedModel) -> None:
        """Frees the model's own copies of the weights packed here. The model itself can no longer run."""
        used = {tensor.data_ptr() for each in self.image.torch_calls.values()
                for tensor in tensors_in([*each.call.arguments, *each.call.options.values()])}  # fmt: skip
        packed = {key[0] for key in self._packed}
        for parameter in model.parameters():
            start = parameter.data_ptr()
            within = range(start, start + parameter.nbytes)
            if any(address in within for address in packed) and not any(address in within for address in used):
                parameter.data = parameter.new_empty(0)

    def _pack(self, weight: torch.Tensor) -> tuple[PackedWeight, int]:
        key = weight.data_ptr(), weight.shape, weight.stride()
        if key not in self._packed:
            packed = pack(weight)
            self._packed[key] = packed, self._add(packed.words)
        return self._packed[key]

    def _add(self, array: np.ndarray) -> int:
        self._arrays.append(array)
        return len(self._arrays) - 1

    def _constant(self, constant: torch.Tensor) -> int:
        """Adds a float32 copy to the arrays and returns its number."""
        return self._add(constant.detach().float().contiguous().clone().numpy())

    def _fields(self, place: int, each: Instruction) -> dict[int, int]:
        """Returns an instruction's numbers, and notes the fields that need an address."""
        fields = dict(each.fields)
        fields[at.NEEDS_BARRIER] = each.needs_barrier
        if each.op == Op.PRODUCT:
            fields |= self._product(place, each)
        elif each.op == Op.EMBED:
            fields |= self._embedding(place, each.weights[0])
        for field, constant in each.constants.items():
            self._array_fields.append((place, field, self._constant(constant)))
        for field, columns in zip((at.TABLE, at.TABLE_2), each.tables, strict=False):
            self._table_fields.append((place, field, self.tables.add(columns)))
        return fields | self._buffers(place, each)

    def _product(self, place: int, each: Instruction) -> dict[int, int]:
        packed = [self._pack(weight) for weight in each.weights]
        for field, (_, number) in zip((at.WEIGHT, at.WEIGHT_2), packed, strict=False):
            self._array_fields.append((place, field, number))
        for field, bias in zip((at.BIAS, at.BIAS_2), each.biases, strict=False):
            if bias is not None:
                self._array_fields.append((place, field, self._constant(bias)))
        first = packed[0][0]
        return {
            at.BY_BLOCK: first.block_bytes,
            at.KERNEL: first.kernel,
            at.NUM_WORDS: first.num_words,
            at.BY_EXPERT: first.expert_bytes,
        }

    def _embedding(self, place: int, weight: torch.Tensor) -> dict[int, int]:
        """Returns the fields for an embedding table, which is the packed weight if a product has packed it."""
        in_word = 4 // weight.element_size()
        packed = self._packed.get((weight.data_ptr(), weight.shape, weight.stride()))
        if packed is not None:
            self._array_fields.append((place, at.WEIGHT, packed[1]))
            return {at.BY_BLOCK: packed[0].block_bytes, at.IN_WORD: in_word}
        table = weight.detach().contiguous()
        bits = table.view(torch.int16 if in_word == 2 else torch.int32).numpy()
        self._array_fields.append((place, at.TABLE, self._add(bits)))
        return {at.BY_TABLE: table.stride(0) * table.element_size(), at.IN_WORD: in_word}

    def _buffers(self, place: int, each: Instruction) -> dict[int, int]:
        fields, out = {}, each.out
        places = {at.OUT: (out, 0)}
        if each.x is not None:
            places[at.X], buffer = each.x, each.x[0]
            fields[at.BY_X] = buffer.by_row
            fields[at.X_PRIVATE] = at.FEW_ROWS * buffer.by_row if buffer.is_private else 0
        if each.y is not None:
            places[at.Y], fields[at.BY_Y] = each.y, each.y[0].by_row
        for field, where in places.items():
            slot, start, _ = _place(where)
            self._slot_fields.append((place, field, slot, start))
        fields[at.OUT_IS_BF16] = int(out.is_bf16)
        fields[at.BY_OUT] = 4 * self._vocab_size if out is self._logits else out.by_row
        fields[at.OUT_PRIVATE] = at.FEW_ROWS * out.by_row if out.is_private else 0
        return fields

    def _layer(self, attention: Attention) -> AttentionLayer:
        params = attention.params
        query, key, value = map(_place, attention.operands)
        return AttentionLayer(
            attention.num_heads,
            attention.num_kv_heads,
            attention.dim,
            params.scaling,
            params.softcap or 0.0,
            params.sliding_window or 0,
            -1 if params.sinks is None else self._constant(params.sinks),
            query,
            key,
            value,
            _place((attention.out, 0)),
        )


def _place(where: tuple[Buffer, int]) -> Place:
    buffer, column = where
    return Place(buffer.slot, column * (2 if buffer.is_bf16 else 4), buffer.by_row)


@contextmanager
def _noted(model: PreTrainedModel, note: Callable[[Call], None]) -> Iterator[None]:
    """Records a model's experts and some rotary modules as single calls on its tape."""
    with record_experts(model, note), record_rotary(model, note):
        yield
