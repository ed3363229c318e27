"""The process of a rank other than 0: repeats what rank 0 does to its K/V memory, and computes its part of each step.

Its arguments are the pipe's file descriptor, and rank 0's log level and log format. It ends with rank 0, whose signals
it ignores.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from batchserve.free_memory import describe_out_of_memory
from batchserve.logs import adopt_library_loggers, configure_logging
from batchserve.native.threads import apply_thread_policy
from batchserve.parallel.messages import Built, OutOfMemory, Rank, Refused, Step, StepResult, packed, unpacked
from batchserve.parallel.mirror import repeat_changes
from batchserve.parallel.paths import gather_paths

if TYPE_CHECKING:
    from batchserve.startup.prepared import PreparedModel

logger = logging.getLogger(__name__)


def main() -> None:
    """Runs one rank."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # for the front end only
    configure_logging(int(sys.argv[2]), sys.argv[3])
    apply_thread_policy()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    pipe: Connection[Any, Any] = Connection(descriptor)
    with suppress(EOFError, OSError):  # rank 0 has ended
        _run(pipe, unpacked(pipe.recv_bytes()))


def _run(pipe: Connection[Any, Any], rank: Rank) -> None:
    if rank.cores:
        os.sched_setaffinity(0, rank.cores)
    try:
        prepared = _prepare(rank)
    except Exception as error:
        pipe.send_bytes(packed(Refused(error)))
        return
    gc.collect()
    gc.freeze()
    pipe.send_bytes(packed(Built.of(prepared)))
    while True:
        step = unpacked(pipe.recv_bytes())
        try:
            answer = _step(prepared, step)
        except Exception as error:
            logger.exception("rank %d cannot go on", rank.number)
            pipe.send_bytes(packed(Refused(RuntimeError(f"{type(error).__name__}: {error}"))))
            return
        pipe.send_bytes(packed(answer))


def _prepare(rank: Rank) -> PreparedModel:
    from batchserve.native.instruction_set import choose_instruction_set
    from batchserve.startup.prepare import prepare

    adopt_library_loggers()
    choose_instruction_set(rank.config.instruction_set)
    prepared = prepare(rank.config, lambda message: logger.debug("rank %d: %s", rank.number, message))
    prepared.executor.bind_thread()
    return prepared


def _step(prepared: PreparedModel, step: Step) -> StepResult | OutOfMemory:
    executor, allocator = prepared.executor, prepared.executor.allocator
    repeat_changes(allocator, step.changes)  # type: ignore[arg-type]  # a CPU's
    try:
        tokens = executor.launch(step.batch).wait()
    except (RuntimeError, MemoryError) as error:
        want = describe_out_of_memory(f"for a step of {step.batch.num_rows} rows", error)
        if want is None:
            raise
        return OutOfMemory(want)
    return StepResult(tokens, gather_paths(allocator, step.batch, tokens))  # type: ignore[arg-type]
