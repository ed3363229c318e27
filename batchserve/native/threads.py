"""The thread policy of the CPU path. It must be set before torch is imported, so this module imports nothing heavy."""

from __future__ import annotations

import os
import sys
import warnings

# Workers that sleep between parallel regions wake too late: a step has hundreds of regions of tens of microseconds.
# Endless spinning is worse: next to another busy process it is 10 to 50 times slower. So they spin for a bounded time.
POLICY = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}


def apply_thread_policy() -> bool:
    """Sets the OpenMP wait policy unless the user has set one. If torch was imported first, warns and returns False."""
    if "OMP_WAIT_POLICY" in os.environ:  # our spin count would override it in GNU's OpenMP
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
