"""What is said while kernels are compiled, which takes up to a minute at the first start and nothing later."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

NOTICEABLE_S = 0.5  # to load kernels takes less


class Part(NamedTuple):
    """Kernels that are compiled, or loaded from the cache, by one call; usual_s: what compiling them takes, roughly."""

    name: str
    usual_s: float
    compile_kernels: Callable[[], None]


def compile_parts(
    parts: Sequence[Part], say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
) -> None:
    """Prepare one part after the other. Once that takes time: which is next, and about how long the rest will take."""
    began_s, usual_s = clock(), 0.0
    for number, part in enumerate(parts, 1):
        taken_s = clock() - began_s
        if taken_s > NOTICEABLE_S:
            left_s = sum(each.usual_s for each in parts[number - 1 :]) * taken_s / usual_s
            say(f"compiling kernels: {part.name} ({number} of {len(parts)}), about {max(1.0, left_s):.0f} s left")
        part.compile_kernels()
        usual_s += part.usual_s
    if clock() - began_s > NOTICEABLE_S:
        say(f"kernels are prepared after {clock() - began_s:.0f} s")
