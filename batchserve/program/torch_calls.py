"""Operators that a program has no instruction for. Torch computes them between native segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchserve.program.graph import row_dim
from batchserve.program.tape import UnsuitableModelError, mapped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchserve.program.program import Buffer
    from batchserve.program.tape import Call

    View = Callable[[Buffer], np.ndarray]

SAMPLE = range(5, 12)  # rows that an operator is also tried on alone


@dataclass(frozen=True, slots=True)
class Operand:
    """A value assembled from buffers' columns. pieces: (buffer, its columns, their places in the value) each."""

    pieces: tuple[tuple[Buffer, np.ndarray, np.ndarray], ...]
    shape: tuple[int, ...]  # of a row
    row_dim: int
    dtype: torch.dtype

    def value(self, view: View) -> torch.Tensor:
        """Returns the value in its own shape and type."""
        views = [_tensor(view(buffer)) for buffer, _, _ in self.pieces]
        rows = torch.empty(len(views[0]), int(np.prod(self.shape)))
        for values, (_, columns, places) in zip(views, self.pieces, strict=True):
            rows[:, torch.from_numpy(places)] = values[:, torch.from_numpy(columns)].float()
        return rows.reshape(len(rows), *self.shape).movedim(0, self.row_dim).to(self.dtype)


@dataclass(frozen=True, slots=True)
class TorchCall:
    """One operator's call. operands: by the id of the recorded tensor that each one replaces. out: the results, side by
    side. row_dims: the row dimension of each result.
    """

    call: Call
    operands: Mapping[int, Operand]
    out: Buffer
    row_dims: tuple[int, ...]

    @torch.inference_mode()
    def run(self, view: View) -> None:
        """Computes the rows of the out buffer. view: returns a buffer's rows, as NativeModel._view."""
        results = _results(self.call, {key: operand.value(view) for key, operand in self.operands.items()})
        parts = [
            each.movedim(dim, 0).reshape(each.shape[dim], -1).float()
            for each, dim in zip(results, self.row_dims, strict=True)
        ]
        _tensor(view(self.out))[:] = torch.cat(parts, dim=1)


def _tensor(rows: np.ndarray) -> torch.Tensor:
    """Returns a view of float32 rows, or of the bits of bfloat16 ones."""
    found = torch.from_numpy(rows)
    return found.view(torch.bfloat16) if rows.dtype == np.uint16 else found


def _results(call: Call, values: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """Returns the operator's results for values other than the recorded ones."""

    def now(recorded: torch.Tensor) -> torch.Tensor:
        return values.get(id(recorded), recorded)

    options = dict(zip(call.options, mapped(call.options.values(), now), strict=True))
    found = call.function(*mapped(call.arguments, now), **options)
    return [each for each in (found if isinstance(found, tuple | list) else [found]) if isinstance(each, torch.Tensor)]


def check_row_by_row(call: Call, operands: Sequence[torch.Tensor]) -> None:
    """Raises UnsuitableModelError if a row of the results depends on other rows, or on the number of rows."""
    generator = torch.Generator().manual_seed(0)
    whole, part = {}, {}
    for each in operands:
        value = (
            torch.randn(each.shape, generator=generator).to(each.dtype) if each.is_floating_point() else each.clone()
        )
        whole[id(each)] = value
        part[id(each)] = value.index_select(row_dim(value), torch.tensor(SAMPLE))
    try:
        pairs = list(zip(_results(call, whole), _results(call, part), strict=True))
    except (RuntimeError, IndexError, ValueError) as error:
        raise UnsuitableModelError(f"{call.name} cannot be computed for another number of rows") from error
    for every, few in pairs:
        expected = every.index_select(row_dim(every), torch.tensor(SAMPLE))
        if expected.shape != few.shape or not torch.allclose(expected.float(), few.float(), 1e-4, 1e-5, equal_nan=True):
            raise UnsuitableModelError(f"{call.name} mixes rows")
