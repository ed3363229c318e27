"""Turns a linked program into plain data and arrays, as a file holds them, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchserve.program.image import AttentionLayer, Place, ProgramImage, Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from batchserve.program.model import Tables

NUMBERS = ("head", "is_bf16", "vocab_size", "part_width", "scratch_bytes")
ARRAYS = ("rows", "array_fields", "slot_fields", "table_fields", "attends", "layer_order")


class WrongLengthError(Exception):
    """A kept program's position tables are not those of the length that is served."""


class KeptTables:
    """Position tables that are complete. is_own_length: their values hold for this number of positions alone."""

    def __init__(self, arrays: Sequence[np.ndarray], length: int, *, is_own_length: bool) -> None:
        self.arrays, self.length, self.is_own_length = arrays, length, is_own_length
        self._is_new = True

    def grow(self, length: int) -> bool:
        is_new, self._is_new = self._is_new, False
        return is_new

    def limit(self, most: int) -> None:
        """Raises WrongLengthError."""
        if most > self.length or (self.is_own_length and most != self.length):
            raise WrongLengthError(f"{most} positions instead of {self.length}")


def parts_of(image: ProgramImage, tables: KeptTables) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Returns the program's numbers and arrays."""
    assert not image.torch_calls, "torch's operators cannot be kept"
    parts = {
        **{name: int(getattr(image, name)) for name in NUMBERS},
        "slots": [list(slot) for slot in image.slots],
        "layers": [[*layer[:7], *map(list, layer[7:])] for layer in image.layers],
        "num_tables": len(tables.arrays),
        "table_length": tables.length,
        "is_own_length": tables.is_own_length,
    }
    return parts, [*(getattr(image, name) for name in ARRAYS), *tables.arrays, *image.arrays]


def program_of(parts: dict[str, Any], arrays: Sequence[np.ndarray]) -> tuple[ProgramImage, KeptTables]:
    """Returns what parts_of was given."""
    first = len(ARRAYS) + int(parts["num_tables"])
    named: dict[str, Any] = {name: parts[name] for name in NUMBERS} | dict(zip(ARRAYS, arrays, strict=False))
    image = ProgramImage(
        **named,
        arrays=list(arrays[first:]),
        slots=[Slot(*slot) for slot in parts["slots"]],
        layers=[AttentionLayer(*layer[:7], *(Place(*place) for place in layer[7:])) for layer in parts["layers"]],
    )
    tables = arrays[len(ARRAYS) : first]
    return image, KeptTables(tables, int(parts["table_length"]), is_own_length=bool(parts["is_own_length"]))


def complete_tables(tables: Tables, limit: Callable[[int], None], length: int, *, is_own_length: bool) -> KeptTables:
    """Returns a copy of the tables for `length` positions.

    limit: changes the number of positions of the tables and of the model. is_own_length: see KeptTables.
    """
    limit(length)
    tables.grow(length)
    found = [array[:length].copy() for array in tables.arrays]
    return KeptTables(found, length, is_own_length=is_own_length)
