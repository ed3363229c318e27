"""What is said while kernels are compiled: nothing where they are only loaded, else which, of how many, how long."""

from __future__ import annotations

import pytest

from batchserve.native.compile_progress import Part, compile_parts


def said(seconds: list[float]) -> tuple[list[str], list[float]]:
    """With parts that usually take 1, 2, 3... seconds and now these; also when each line came."""
    now, lines, times = [0.0], [], []

    def say(line: str) -> None:
        lines.append(line)
        times.append(now[0])

    def part(number: int, takes_s: float) -> Part:
        return Part(f"part {number}", number, lambda: now.__setitem__(0, now[0] + takes_s))

    compile_parts([part(number, takes_s) for number, takes_s in enumerate(seconds, 1)], say, lambda: now[0])
    return lines, times


@pytest.mark.faults
def test_each_part_that_is_compiled_is_named_with_the_time_left() -> None:
    lines, times = said([2.0, 4.0, 6.0])
    assert lines == [
        "compiling kernels: part 2 (2 of 3), about 10 s left",
        "compiling kernels: part 3 (3 of 3), about 6 s left",
        "kernels are prepared after 12 s",
    ]
    assert times == [2.0, 6.0, 12.0]


def test_nothing_is_said_of_kernels_that_are_only_loaded() -> None:
    assert said([0.01, 0.02, 0.03]) == ([], [])
    assert said([]) == ([], [])
