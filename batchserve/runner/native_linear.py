"""Runs a model's linears as native products if the whole model cannot be a native program. CPU only.

Nothing here depends on the model: a module is swapped by its type, a Linear or a Conv1D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from batchserve.attention.matrix_code import PAIRS, TILE
from batchserve.native import openmp, pages
from batchserve.native.futex import sleep_function
from batchserve.program import instructions as at
from batchserve.program.instructions import Kernel, Op, assemble, two_floats
from batchserve.program.interpreter import run_loop
from batchserve.program.operations import operation
from batchserve.program.packing import pack
from batchserve.program.product import SCRATCH_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = (torch.float32, torch.bfloat16)
LINE = 64


class Workspace:
    """Memory that all linears of a model share, as they run one after the other."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._scratch = np.zeros(0, np.uint8)

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns rows [>= num_rows, width zero-padded to a cache line]. Kernels also read the last tile's rest."""
        found = self._rows.get((width, dtype))
        if found is None or len(found) < num_rows:
            height = max(2 * TILE, 1 << (num_rows - 1).bit_length())
            found = self._rows[width, dtype] = torch.zeros(height, -(-width // PAIRS) * PAIRS, dtype=dtype)
        return found

    def scratch(self, num_threads: int) -> int:
        """Returns the address of SCRATCH_BYTES for each thread."""
        if self._scratch.nbytes < SCRATCH_BYTES * num_threads + LINE:
            self._scratch = pages.zeros(SCRATCH_BYTES * num_threads + LINE, np.uint8)
        return -(-self._scratch.ctypes.data // LINE) * LINE


class WeightFacts(NamedTuple):
    """Stands in for packed weights where a model's code reads their dtype or shape. Computing with it fails."""

    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


class NativeLinear(torch.nn.Module):
    """A linear layer over packed weights. The result of a row has the same bits whatever other rows there are."""

    def __init__(self, workspace: Workspace, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = WeightFacts(weight.dtype, weight.shape, weight.device)
        self.bias = None if bias is None else WeightFacts(bias.dtype, bias.shape, bias.device)
        self._workspace, self._dtype = workspace, weight.dtype
        self._packed, self._bias = pack(weight), None if bias is None else bias.detach().float().contiguous()
        kernel = self._packed.kernel
        self._x_dtype = torch.float32 if kernel in (Kernel.FLOATS, Kernel.WIDENED) else torch.bfloat16
        self._product = assemble([{
            at.OP: Op.PRODUCT, at.CODE: operation(Op.PRODUCT, kernel), at.COLUMNS: self.out_features, at.KERNEL: kernel,
            at.NUM_WORDS: self._packed.num_words, at.FACTORS: two_floats(1.0),
            at.WEIGHT: self._packed.words.ctypes.data, at.BY_BLOCK: self._packed.block_bytes,
            at.BIAS: 0 if self._bias is None else self._bias.data_ptr(),
            at.OUT_IS_BF16: int(weight.dtype == torch.bfloat16),
            at.BY_OUT: self.out_features * weight.element_size(),
        }])  # fmt: skip
        self._step = np.zeros(at.STEP_SIZE, np.int64)
        self._step[at.INSTRUCTIONS], self._step[at.NUM_INSTRUCTIONS] = self._product.ctypes.data, 1
        self._step[at.BY_SCRATCH], self._step[at.SLEEP] = SCRATCH_BYTES, sleep_function()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, num_threads = x.numel() // self.in_features, openmp.given(torch.get_num_threads())
        rows = self._workspace.rows(num_rows, self.in_features, self._x_dtype)
        rows[:num_rows, : self.in_features] = x.reshape(num_rows, self.in_features)
        out = torch.empty(*x.shape[:-1], self.out_features, dtype=self._dtype)
        product, step = self._product[0], self._step
        product[at.X], product[at.BY_X] = rows.data_ptr(), rows.stride(0) * rows.element_size()
        product[at.OUT], product[at.NEXT] = out.data_ptr(), 0
        step[at.NUM_ROWS], step[at.NUM_THREADS] = num_rows, num_threads
        step[at.SCRATCH], step[at.THREAD], step[at.ARRIVED] = self._workspace.scratch(num_threads), 0, 0
        openmp.run(cast("int", run_loop().address), step.ctypes.data, num_threads)
        return out


@torch.inference_mode()
def swap_linears(model: PreTrainedModel, workspace: Workspace) -> int:
    """Swaps every linear of the model in place. Returns the number of swapped linears."""
    swapped = 0
    module: Any
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) in (torch.nn.Linear, Conv1D):
                weight = module.weight if type(module) is torch.nn.Linear else module.weight.t()
                setattr(parent, name, NativeLinear(workspace, weight, module.bias))
                swapped += 1
    return swapped
