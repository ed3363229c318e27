"""Programmatic dependent launch, on NVIDIA GPUs since Hopper: a kernel starts while the one before it finishes.

Such a kernel may start as soon as all programs of the kernel before it have signalled. It waits until that kernel has
ended and its writes are visible, before it touches memory that may still be written or read. A kernel signals only
after its own wait, so when a kernel starts, all kernels but the one before it have ended.
"""

from __future__ import annotations

import torch

HOPPER = (9, 0)


def can_overlap(device: torch.device) -> bool:
    """True if the device's kernels can be launched like this."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= HOPPER


def launch_options(*, overlaps: bool) -> dict[str, bool]:
    """Returns the launch options of a Triton kernel with a constant OVERLAPS. Older Triton versions lack launch_pdl."""
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}
