"""Kernels that begin while the one before them ends: programmatic dependent launch, of NVIDIA's GPUs since Hopper.

A kernel that is launched so may begin as soon as all programs of the one before it have said so. It waits until that
one has ended, and all that it wrote can be seen, before it touches what may still be written or read. Whoever lets the
next one begin has waited itself: so when a kernel begins, all but the one before it have ended.
"""

from __future__ import annotations

import torch

HOPPER = (9, 0)


def can_overlap(device: torch.device) -> bool:
    """Whether kernels of this device can be launched so."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= HOPPER


def launch_options(*, overlaps: bool) -> dict[str, bool]:
    """What a Triton kernel with a constant OVERLAPS is launched with. Older versions of Triton know no such option."""
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}
