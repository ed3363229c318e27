"""The thread policy of the CPU path. It only works before torch is imported, so this module imports nothing heavy."""

from __future__ import annotations

import os
import sys
import warnings

# Workers that sleep between parallel regions wake too late: a step has hundreds of regions of tens of microseconds.
# Endless spinning is worse: beside a busy neighbour it is 10 to 50 times slower. So they spin, for a bounded time.
POLICY = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}


def apply_thread_policy() -> bool:
    """Set the OpenMP wait policy unless the user has set one; warns and returns False when torch came first."""
    if "OMP_WAIT_POLICY" in os.environ:  # for GNU's OpenMP a spin count would count for more
        return True
    if "torch" in sys.modules:
        warnings.warn(
            "torch was imported before batchserve, so its thread policy could not be set and steps on a CPU are "
            "slower. Import batchserve first, or set OMP_WAIT_POLICY=active GOMP_SPINCOUNT=20000.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    for name, value in POLICY.items():
        os.environ.setdefault(name, value)
    return True
