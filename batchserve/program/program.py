"""Programs before addresses are known: instructions over buffers, and which buffers share memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from batchserve.program.instructions import Op

if TYPE_CHECKING:
    import torch

    from batchserve.attention.base import AttentionParams
    from batchserve.program.graph import Columns
    from batchserve.program.torch_calls import TorchCall


class Kind(NamedTuple):
    """The kind of memory that a Buffer needs."""

    by_row: int
    row_bytes: int
    is_kept: bool
    is_private: bool
    per_row: int


@dataclass(slots=True, eq=False)
class Buffer:
    """Rows of `width` elements. is_kept: holds only the rows whose logits are needed. is_private: each thread has a
    copy of its own if there are few rows. per_row: pairs per row, if each pair has a row of its own; otherwise 1.
    """

    width: int
    is_bf16: bool = False
    is_kept: bool = False
    is_private: bool = False
    is_logits: bool = False
    is_dense: bool = False  # without padding between rows
    per_row: int = 1
    slot: int = -1

    @property
    def by_row(self) -> int:
        """Bytes from row to row: whole cache lines, unless is_dense."""
        size = self.width * (2 if self.is_bf16 else 4)
        return size if self.is_dense else -(-size // 64) * 64

    @property
    def kind(self) -> Kind:
        """Buffers of the same kind may share memory. The padding after each row is always zero: a product reads it and
        multiplies it by zeros, so it must be finite.
        """
        row_bytes = self.width * (2 if self.is_bf16 else 4)
        return Kind(self.by_row, row_bytes, self.is_kept, self.is_private, self.per_row)


@dataclass(slots=True)
class Instruction:
    """One instruction before addresses are known. A place is (buffer, first column)."""

    op: Op
    out: Buffer
    x: tuple[Buffer, int] | None = None
    y: tuple[Buffer, int] | None = None
    # Tensors of the model, kept until weights are packed, constants are copied and tables are made:
    weights: tuple[torch.Tensor, ...] = ()
    biases: tuple[torch.Tensor | None, ...] = ()
    constants: dict[int, torch.Tensor] = field(default_factory=dict)  # float32 arrays, by the field for their address
    tables: tuple[Columns, ...] = ()  # of values that depend on positions alone
    fields: dict[int, int] = field(default_factory=dict)
    layer: int = -1
    torch_call: TorchCall | None = None
    needs_barrier: int = 0  # bits: 1 for few rows, 2 for many

    def reads(self) -> list[Buffer]:
        """Returns the buffers of X and Y, or those that torch reads. Attention's operands are in Program.attention."""
        if self.torch_call is not None:
            operands = self.torch_call.operands.values()
            return [buffer for operand in operands for buffer, _, _ in operand.pieces]
        return [place[0] for place in (self.x, self.y) if place is not None]

    def forget_model(self) -> None:
        """Drops the model's tensors: even a view would keep a whole weight in memory."""
        self.weights, self.biases, self.constants, self.tables = (), (), {}, ()


@dataclass(slots=True)
class Attention:
    """One layer's attention. operands: the places of q, k and v; a place is (buffer, first column)."""

    layer: int
    params: AttentionParams
    operands: tuple[tuple[Buffer, int], ...]
    out: Buffer
    num_heads: int
    num_kv_heads: int
    dim: int


@dataclass(slots=True)
class Program:
    """Instructions in order, and the attention of each layer, which instructions refer to by `layer`."""

    instructions: list[Instruction]
    attention: dict[int, Attention]
    buffers: list[Buffer]
    slots: list[Kind] = field(default_factory=list)  # the kind of each slot's buffers

    def touched(self, instruction: Instruction) -> list[Buffer]:
        """Returns the buffers that an instruction reads and writes."""
        operands = self.attention[instruction.layer].operands if instruction.op == Op.ATTEND else ()
        return [*instruction.reads(), *(buffer for buffer, _ in operands), instruction.out]


def assign_slots(program: Program) -> None:
    """Assigns a memory slot to each buffer. Buffers of the same kind that are never needed together share a slot."""
    last: dict[int, int] = {}
    for place, instruction in enumerate(program.instructions):
        for buffer in program.touched(instruction):
            last[id(buffer)] = place
    free: dict[Kind, list[int]] = defaultdict(list)
    ending: dict[int, list[Buffer]] = defaultdict(list)
    for buffer in program.buffers:
        if id(buffer) in last:
            ending[last[id(buffer)]].append(buffer)
    for place, instruction in enumerate(program.instructions):
        for buffer in program.touched(instruction):
            if buffer.slot < 0:
                fitting = free[buffer.kind]
                if fitting and not buffer.is_logits:
                    buffer.slot = fitting.pop()
                else:
                    buffer.slot = len(program.slots)
                    program.slots.append(buffer.kind)
        for buffer in ending[place]:
            free[buffer.kind].append(buffer.slot)


def place_barriers(program: Program) -> None:
    """Makes threads meet before they read what another may still write, or write what another may still read.

    With few rows, each thread has its own copy of a private norm.
    """
    for bit, is_few in ((1, True), (2, False)):
        written: set[int] = set()
        read: set[int] = set()
        for instruction in program.instructions:
            out = instruction.out.slot
            if instruction.op == Op.ATTEND:
                reads = {buffer.slot for buffer, _ in program.attention[instruction.layer].operands}
            else:
                reads = {buffer.slot for buffer in instruction.reads()}
            if reads & written or out in read | written:
                instruction.needs_barrier |= bit
                written.clear()
                read.clear()
            is_own = is_few and instruction.out.is_private
            read |= {slot for slot in reads if not (is_few and program.slots[slot].is_private)}
            if not is_own:
                written.add(out)
