"""Element types of models, by name."""

from __future__ import annotations

from typing import Any

import numpy as np

# How NumPy holds each: it has no bfloat16, of which it only sees the bits.
HELD_AS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
}


def item_bytes(dtype: str) -> int:
    """Returns the size of an element."""
    return HELD_AS[dtype].itemsize
