"""Reports progress while kernels are compiled, which takes up to a minute on the first start and no time later."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

NOTICEABLE_S = 0.5  # loading kernels takes less


class Part(NamedTuple):
    """Kernels that one call compiles or loads from the cache. usual_s: roughly how long compiling them takes."""

    name: str
    usual_s: float
    compile_kernels: Callable[[], None]


def compile_parts(
    parts: Sequence[Part], say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
) -> None:
    """Compiles the parts in order. If that takes noticeable time, reports the next part and the estimated time left."""
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
