"""The process that engine/engine_process.py starts. It builds an engine and runs its loop until End or a closed pipe.

Its arguments are the pipe's file descriptor, and the front end's log level and log format. It ignores signals, which
are for the front end: a server may be stopped by signals to all of its processes.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from batchserve.engine.messages import End, NotBuilt, Progress, Reading, ReadMetrics, Ready
from batchserve.errors import BatchserveError
from batchserve.free_memory import name_memory_errors
from batchserve.logs import adopt_library_loggers, configure_logging
from batchserve.native.threads import apply_thread_policy

if TYPE_CHECKING:
    from batchserve.config import EngineConfig
    from batchserve.engine.engine_loop import EngineLoop

ORPHAN_TIMEOUT_S = 30.0  # must cover a last step and saving a draft cache
logger = logging.getLogger(__name__)


class Pipe:
    """The pipe to the front end. Any thread may send."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, what: object) -> None:
        """Sends an object. Does nothing if the front end is gone: the reader thread sees that and ends the engine."""
        with suppress(OSError), self._sending:
            self._connection.send(what)

    def receive(self) -> Any:
        """Returns the next object; None if the front end is gone."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None


def main() -> None:
    """Runs one engine."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which child processes would inherit
    configure_logging(int(sys.argv[2]), sys.argv[3])
    apply_thread_policy()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    pipe = Pipe(Connection(descriptor))
    with suppress(Exception):  # it is raised again, and reported, where the module is used
        importlib.import_module("batchserve.startup.build")  # while the front end still imports what it needs
    config: EngineConfig | None = pipe.receive()
    if config is None:
        return
    built: Future[EngineLoop] = Future()
    reader = threading.Thread(target=_read, args=(pipe, built), name="batchserve-messages", daemon=True)
    reader.start()  # now, because the front end may end while the model is being loaded
    try:
        with name_memory_errors(f"to serve {config.model!r}"):
            loop = _build(config, pipe)
    except Exception as error:
        if not isinstance(error, BatchserveError):
            logger.exception("the engine cannot be built")
        pipe.send(NotBuilt(_portable(error)))
        return
    built.set_result(loop)
    # The present objects stay alive. If the garbage collector visited them all again, it would delay a step.
    gc.collect()
    gc.freeze()
    try:
        loop.run()
        _answer(pipe, loop)  # the final metrics, which the front end may not have asked for in time
    finally:
        gc.unfreeze()  # extension modules report frozen objects as leaks on standard error


def _build(config: EngineConfig, pipe: Pipe) -> EngineLoop:
    from batchserve.engine.engine_loop import EngineLoop
    from batchserve.startup.build import build_engine

    adopt_library_loggers()
    built = build_engine(config, lambda message: pipe.send(Progress(message)), is_serving=True)
    pipe.send(Ready(built.info, built.processor.facts.without_python_tokenizer(), built.processor.limits))
    return EngineLoop(built, config.draft.draft_cache, pipe.send)


def _read(pipe: Pipe, built: Future[EngineLoop]) -> None:
    try:
        while (message := pipe.receive()) is not None:
            if isinstance(message, ReadMetrics):
                _answer(pipe, built.result())
            else:
                built.result().inbox.put(message)
    except Exception:  # without this thread neither requests nor End arrive
        logger.exception("the front is not understood")
        os._exit(1)
    if built.done():  # the front end is gone; the draft cache is still saved
        built.result().inbox.put(End())
        time.sleep(ORPHAN_TIMEOUT_S)
    os._exit(1)


def _answer(pipe: Pipe, loop: EngineLoop) -> None:
    """Sends the metrics, even during a step. Without an answer the front end uses the last reading."""
    try:
        reading = loop.metrics.reading()
    except Exception:
        logger.exception("the metrics cannot be read")
    else:
        pipe.send(Reading(reading))


def _portable(error: Exception) -> Exception:
    """Returns the error if it can be pickled, else a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
