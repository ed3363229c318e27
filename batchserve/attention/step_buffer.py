"""Several arrays of one step in one buffer, so that they reach the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from typing import Self

ALIGNMENT = 16  # bytes, of every field: kernels load vectors of so many
TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class StepLayout:
    """Where each array stands in a buffer of bytes: name -> dtype and shape.

    Made from one step's arrays, or once from the largest that may come: then the places never change, as CUDA graphs
    need it, and shorter arrays fill the beginning of theirs.
    """

    def __init__(self, fields: Mapping[str, tuple[np.dtype[np.generic], tuple[int, ...]]]) -> None:
        self._fields: dict[str, tuple[int, int, np.dtype[np.generic], tuple[int, ...]]] = {}
        end = 0
        for name, (dtype, shape) in fields.items():
            size = int(np.prod(shape)) * dtype.itemsize
            self._fields[name] = (end, size, dtype, shape)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """The layout that these arrays fill."""
        return cls({name: (array.dtype, array.shape) for name, array in arrays.items()})

    def pack(self, arrays: Mapping[str, np.ndarray], host: torch.Tensor) -> None:
        """Write the arrays to their places in `host`, uint8 [num_bytes] on the CPU; ValueError where one has none."""
        memory = host.numpy()
        for name, array in arrays.items():
            start, size, dtype, _ = self._fields[name]
            if array.dtype != dtype or array.nbytes > size:
                raise ValueError(f"{name}: {array.nbytes} bytes of {array.dtype}, the buffer has {size} of {dtype}")
            memory[start : start + array.nbytes].view(dtype)[:] = array.reshape(-1)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays as tensors inside of `buffer`, uint8 [num_bytes] on any device."""
        return {
            name: buffer[start : start + size].view(TORCH_DTYPES[dtype]).view(shape)
            for name, (start, size, dtype, shape) in self._fields.items()
        }


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """The arrays (int32 or int64) on the device, by one asynchronous copy.

    The pinned buffer is torch's own: it is not handed out again before the copy is done.
    """
    layout = StepLayout.of(arrays)
    host = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    layout.pack(arrays, host)
    return layout.views(host.to(device, non_blocking=True))
