"""Chooses which of a processor's instruction sets compiled kernels use.

A lower level than the processor's is useful for tests, for comparisons and for ruling out a kernel. It has to be chosen
before the first kernel is compiled or loaded, and applies to the whole process and its children.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable

from batchserve.errors import ConfigError

AUTO = "auto"
# Levels from lowest to highest, each with the features that kernels need in addition to those of the lower levels.
FEATURES: dict[str, tuple[str, ...]] = {
    "sse": (),
    "avx2": ("avx2", "fma"),
    "avx512": ("avx512f",),
    "avx512_bf16": ("avx512bf16",),
    "amx": ("amx-tile", "amx-bf16"),
}
LEVELS = tuple(FEATURES)
INSTRUCTION_SETS = (AUTO, *LEVELS)
# Prefixes of feature names and the lowest level that has these features; the first matching prefix counts.
_LEVEL_OF_NAME = {
    "amx": "amx", "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_bf16", "avx512": "avx512", "avx10": "avx512",
    "avx": "avx2", "fma": "avx2", "f16c": "avx2", "xop": "avx2", "vaes": "avx2", "vpclmulqdq": "avx2",
}  # fmt: skip


def level_of(features: Iterable[str]) -> str:
    """Returns the highest level that a processor's features support; "" if it is not an x86-64 processor."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ""
    found, there = LEVELS[0], set(features)
    for level, needed in FEATURES.items():
        if not there.issuperset(needed):
            break
        found = level
    return found


def multiplies_bfloat16() -> bool:
    """Returns whether bfloat16 is served by default on this processor: if it has what oneDNN needs, too."""
    from llvmlite import binding

    host = dict(binding.get_host_cpu_features())
    return all(host.get(name, False) for name in ("avx512bw", "avx512vl", "avx512dq"))


def choose_instruction_set(level: str) -> None:
    """Makes all kernels use one of INSTRUCTION_SETS.

    Raises ConfigError if the processor lacks it, or if numba has already been imported with another one.
    """
    if level == AUTO:
        return
    from llvmlite import binding

    host = dict(binding.get_host_cpu_features())
    highest = level_of(name for name, is_there in host.items() if is_there)
    there = LEVELS[: LEVELS.index(highest) + 1] if highest else ()
    if level not in there:
        raise ConfigError(f"instruction_set = {level!r}: must be one of {', '.join((AUTO, *there))} on this processor")
    features = ",".join(
        f"{'+' if is_there and _lowest_level(name) <= LEVELS.index(level) else '-'}{name}"
        for name, is_there in host.items()
    )
    if os.environ.get("NUMBA_CPU_FEATURES") == features:
        return
    if "numba" in sys.modules:
        raise ConfigError(
            f"instruction_set = {level!r}: must be chosen before kernels are loaded; a program calls "
            "batchserve.choose_instruction_set before it takes LLM or AsyncEngine from batchserve"
        )
    os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = binding.get_host_cpu_name(), features


def _lowest_level(feature: str) -> int:
    """Returns the index in LEVELS of the lowest level that has a feature."""
    return next((LEVELS.index(level) for start, level in _LEVEL_OF_NAME.items() if feature.startswith(start)), 0)
