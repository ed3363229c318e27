"""Packs several arrays of one step into one buffer, so that they reach the device in one copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from typing import Self

ALIGNMENT = 16  # bytes, of every field: kernels load vectors of this size
TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class Event(Protocol):
    """The methods of torch.cuda.Event that are used here."""

    def record(self) -> Any: ...

    def synchronize(self) -> Any: ...


class StepLayout:
    """The offset of each array in a buffer of bytes. fields: name -> dtype and shape.

    Made from one step's arrays, or once from the largest possible ones. In the second case the offsets never change, as
    CUDA graphs require, and shorter arrays fill the beginning of their fields.
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
        """Returns the layout that these arrays fill."""
        return cls({name: (array.dtype, array.shape) for name, array in arrays.items()})

    def pack(self, arrays: Mapping[str, np.ndarray], host: torch.Tensor) -> None:
        """Writes the arrays to `host`, uint8 [num_bytes] on the CPU. Raises ValueError for one that does not fit."""
        memory = host.numpy()
        for name, array in arrays.items():
            start, size, dtype, _ = self._fields[name]
            if array.dtype != dtype or array.nbytes > size:
                raise ValueError(f"{name}: {array.nbytes} bytes of {array.dtype}, the buffer has {size} of {dtype}")
            memory[start : start + array.nbytes].view(dtype)[:] = array.reshape(-1)

    def arrays(self, host: torch.Tensor) -> dict[str, np.ndarray]:
        """Returns the fields of `host` (see pack()) as arrays that can be filled in place."""
        memory = host.numpy()
        return {
            name: memory[start : start + size].view(dtype).reshape(shape)
            for name, (start, size, dtype, shape) in self._fields.items()
        }

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the fields of `buffer`, uint8 [num_bytes] on any device, as tensors."""
        return {
            name: buffer[start : start + size].view(TORCH_DTYPES[dtype]).view(shape)
            for name, (start, size, dtype, shape) in self._fields.items()
        }


class BufferRing:
    """Buffers for copies to a device (pinned for CUDA), used in turn: one is filled while others may be in flight.

    make_event: makes an event that marks a point in the device's queue (default: CUDA events; none on a CPU, where
    copies are synchronous).
    """

    def __init__(
        self, num_bytes: int, device: torch.device, count: int = 3, make_event: Callable[[], Event] | None = None
    ) -> None:
        is_cuda = device.type == "cuda"
        self.buffers = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(count)]
        self._make_event = make_event or (torch.cuda.Event if is_cuda else None)
        self._events: list[Event | None] = [None] * count
        self.turn = 0

    def take(self) -> torch.Tensor:
        """Returns the next buffer, uint8 [num_bytes] at index `turn`, once all copies out of it are done."""
        event = self._events[self.turn]
        if event is not None:
            event.synchronize()
        return self.buffers[self.turn]

    def sent(self) -> None:
        """Notes that all copies out of the last taken buffer are queued, and moves on to the next buffer."""
        if self._make_event is not None:
            event = self._events[self.turn] = self._events[self.turn] or self._make_event()
            event.record()
        self.turn = (self.turn + 1) % len(self.buffers)


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies the arrays (int32 or int64) to the device in one asynchronous copy; returns them as tensors there.

    The pinned buffer is torch's own: torch does not reuse it before the copy is done.
    """
    layout = StepLayout.of(arrays)
    host = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    layout.pack(arrays, host)
    return layout.views(host.to(device, non_blocking=True))
