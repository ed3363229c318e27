"""Helpers for the arguments of AsyncEngine's calls: deadlines, sizes, and checks in a thread."""

from __future__ import annotations

import asyncio
import math
import numbers
from collections.abc import Sized
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from batchserve.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")
INLINE_SIZE = 4096  # characters or token ids; shorter prompts are processed on the loop, a thread would take longer


def seconds_of(deadline_s: object) -> float | None:
    """Converts a deadline to a float, possibly infinite. Raises InvalidRequestError if it is no number or too large."""
    if deadline_s is None:
        return None
    with suppress(OverflowError):
        is_number = isinstance(deadline_s, numbers.Real) and not isinstance(deadline_s, bool)
        if is_number and not math.isnan(seconds := float(deadline_s)):  # type: ignore[arg-type]
            return seconds
    raise InvalidRequestError("INVALID_DEADLINE", "deadline_s", deadline_s, "a number of seconds")


def size_of(prompt: object) -> int:
    """Returns the length of a prompt in characters or token ids; 0 if it has no length."""
    with suppress(TypeError):  # NumPy scalars are Sized, too
        return len(prompt) if isinstance(prompt, Sized) else 0
    return 0


async def run_off_loop(
    size: int, call: Callable[..., T], *arguments: object, thread: ThreadPoolExecutor | None = None
) -> T:
    """Returns the call's result. Calls in a thread if the input is so large that the call would block the loop.

    thread: None is one of the loop's.
    """
    if size > INLINE_SIZE:
        return await asyncio.get_running_loop().run_in_executor(thread, partial(call, *arguments))
    return call(*arguments)
