"""Several arrays of one step in one buffer, so that they reach the device in one copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from typing import Self

ALIGNMENT = 16  # bytes, of every field: kernels load vectors of so many
TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class Event(Protocol):
    """As torch.cuda.Event."""

    def record(self) -> Any: ...

    def synchronize(self) -> Any: ...


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

    def arrays(self, host: torch.Tensor) -> dict[str, np.ndarray]:
        """The arrays inside of `host`, as pack() takes it, to be filled there."""
        memory = host.numpy()
        return {
            name: memory[start : start + size].view(dtype).reshape(shape)
            for name, (start, size, dtype, shape) in self._fields.items()
        }

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays as tensors inside of `buffer`, uint8 [num_bytes] on any device."""
        return {
            name: buffer[start : start + size].view(TORCH_DTYPES[dtype]).view(shape)
            for name, (start, size, dtype, shape) in self._fields.items()
        }


class BufferRing:
    """Buffers for copies to a device (pinned for CUDA) that take turns: one is filled while others may be in flight.

    make_event: what marks a place in the device's queue (default: CUDA events; none on a CPU, where copies are done at
    once).
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
        """The next of the buffers, uint8 [num_bytes], number `turn` of them, once all copies out of it are done."""
        event = self._events[self.turn]
        if event is not None:
            event.synchronize()
        return self.buffers[self.turn]

    def sent(self) -> None:
        """All copies out of the buffer that was taken last are queued."""
        if self._make_event is not None:
            event = self._events[self.turn] = self._events[self.turn] or self._make_event()
            event.record()
        self.turn = (self.turn + 1) % len(self.buffers)


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """The arrays (int32 or int64) on the device, by one asynchronous copy.

    The pinned buffer is torch's own: it is not handed out again before the copy is done.
    """
    layout = StepLayout.of(arrays)
    host = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    layout.pack(arrays, host)
    return layout.views(host.to(device, non_blocking=True))
