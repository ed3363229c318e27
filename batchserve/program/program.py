"""A program before addresses are known: instructions over buffers, and which buffers share memory."""

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
    """Rows of `width` elements. is_kept: only of the rows whose logits are asked for; is_private: with a copy for each
    thread where there are few rows. per_row: pairs of each row with experts, where these have a row each.
    """

    width: int
    is_half: bool = False
    is_kept: bool = False
    is_private: bool = False
    is_logits: bool = False
    is_dense: bool = False  # without anything between rows
    per_row: int = 1
    slot: int = -1

    @property
    def by_row(self) -> int:
        """Bytes from row to row, whole cache lines."""
        size = self.width * (2 if self.is_half else 4)
        return size if self.is_dense else -(-size // 64) * 64

    @property
    def kind(self) -> Kind:
        """Buffers of the same kind may share memory. The gap after each row always holds zeros: a product reads them
        and multiplies them by zeros, so they must be finite.
        """
        row_bytes = self.width * (2 if self.is_half else 4)
        return Kind(self.by_row, row_bytes, self.is_kept, self.is_private, self.per_row)


@dataclass(slots=True)
class Instruction:
    """One instruction before addresses are known. A place is (buffer, first column)."""

    op: Op
    out: Buffer
    x: tuple[Buffer, int] | None = None
    y: tuple[Buffer, int] | None = None
    # Of the model, until weights are packed, constants copied and tables made of them:
    weights: tuple[torch.Tensor, ...] = ()
    biases: tuple[torch.Tensor | None, ...] = ()
    constants: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # float32 arrays, by the field that has the address
    tables: tuple[Columns, ...] = ()  # of what follows from positions
    fields: dict[int, int] = field(default_factory=dict)
    layer: int = -1
    torch_call: TorchCall | None = None
    meets: int = 0  # bits: 1 with few rows, 2 with many

    def reads(self) -> list[Buffer]:
        """Buffers of X and Y, or what torch reads; attention's operands are its layer's."""
        if self.torch_call is not None:
            operands = self.torch_call.operands.values()
            return [buffer for operand in operands for buffer, _, _ in operand.pieces]
        return [place[0] for place in (self.x, self.y) if place is not None]

    def forget_model(self) -> None:
        """Let go of the model's tensors, a view of which would keep all of a weight in memory."""
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
    """Instructions in order, and the attention of each layer, whose instructions name it by `layer`."""

    instructions: list[Instruction]
    attention: dict[int, Attention]
    buffers: list[Buffer]
    slots: list[Kind] = field(default_factory=list)  # a Buffer's kind each

    def touched(self, instruction: Instruction) -> list[Buffer]:
        """The buffers that an instruction reads and writes."""
        operands = self.attention[instruction.layer].operands if instruction.op == Op.ATTEND else ()
        return [*instruction.reads(), *(buffer for buffer, _ in operands), instruction.out]


def assign_slots(program: Program) -> None:
    """Buffers that are never needed at the same time share memory: a slot for rows of the same length and kind."""
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


def find_meetings(program: Program) -> None:
    """Threads meet before what another one may still be writing is read, or what it still reads is written.

    Of few rows a private norm is every thread's own.
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
                instruction.meets |= bit
                written.clear()
                read.clear()
            is_own = is_few and instruction.out.is_private
            read |= {slot for slot in reads if not (is_few and program.slots[slot].is_private)}
            if not is_own:
                written.add(out)
