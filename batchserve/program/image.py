"""A linked program: all that running it takes, as numbers and arrays, without the model that it was made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from batchserve.program.torch_calls import TorchCall


class Place(NamedTuple):
    """Where a buffer's rows are in this step: in a memory slot, from a byte on, so many bytes from row to row."""

    slot: int
    start: int
    by_row: int


class Slot(NamedTuple):
    """Memory for buffers that are never needed together. by_row: bytes; per_row: pairs per row of the step, usually 1.

    is_private: each thread has a copy of its own if there are few rows.
    """

    by_row: int
    per_row: int
    is_private: bool


class AttentionLayer(NamedTuple):
    """One layer's attention. sinks: the number of an array float32 [num_heads], or -1. softcap, window: 0 is none."""

    num_heads: int
    num_kv_heads: int
    dim: int
    scale: float
    softcap: float
    window: int
    sinks: int
    query: Place
    key: Place
    value: Place
    out: Place


@dataclass(frozen=True, slots=True, eq=False)
class ProgramImage:
    """Instructions whose addresses are still 0, and what these will be the addresses of.

    rows: int64 [num_instructions, instructions.SIZE]. The following are int64 [any, ...], and their rows begin with an
    instruction and a field. array_fields [3]: the number of the array. slot_fields [4]: a memory slot and a byte in it.
    table_fields [3]: the number of the table. arrays: packed weights, embeddings and constants. layers: by the place of
    the layer; their instructions come in pairs, one that stores K and V and one that attends, at the places `attends`.
    head: the instruction that gives the logits. is_bf16: K and V are bfloat16. part_width: columns of the vocabulary
    that a thread takes at once if the head notes the greatest logit of each such part; otherwise 0. torch_calls: by
    instruction.
    """

    rows: np.ndarray
    arrays: list[np.ndarray]
    array_fields: np.ndarray
    slot_fields: np.ndarray
    table_fields: np.ndarray
    slots: list[Slot]
    layers: list[AttentionLayer]
    attends: np.ndarray  # int64 [2 * num_layers]
    layer_order: np.ndarray  # int64 [2 * num_layers]: the place in `layers` of each of them
    head: int
    is_bf16: bool
    vocab_size: int
    part_width: int
    scratch_bytes: int  # for each thread
    torch_calls: dict[int, TorchCall] = field(default_factory=dict)

    @property
    def torch_operators(self) -> list[str]:
        """The names of operators that have no instruction and are computed by torch."""
        return sorted({each.call.name for each in self.torch_calls.values()})

    @property
    def num_parts(self) -> int:
        return -(-self.vocab_size // self.part_width) if self.part_width else 0

    def segments(self) -> list[slice | TorchCall]:
        """Returns runs of native instructions, and the torch calls between them."""
        found: list[slice | TorchCall] = []
        start = 0
        for place, call in sorted(self.torch_calls.items()):
            if place > start:
                found.append(slice(start, place))
            found.append(call)
            start = place + 1
        return [*found, slice(start, len(self.rows))] if start < len(self.rows) else found
