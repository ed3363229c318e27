"""The process that engine/engine_process.py starts: builds an engine and runs its loop, until the pipe says otherwise.

Its arguments are the pipe's number, and from which level on and in which format the front logs. Signals are the
front's: whoever stops a server may send them to all of its processes.
"""

from __future__ import annotations

import gc
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
from batchserve.free_memory import memory_errors_named
from batchserve.logs import adopt_library_loggers, configure_logging
from batchserve.native.threads import apply_thread_policy

if TYPE_CHECKING:
    from batchserve.config import EngineConfig
    from batchserve.engine.engine_loop import EngineLoop

ORPHAN_TIMEOUT_S = 30.0  # a last step, and saving a draft cache, have to fit into it
logger = logging.getLogger(__name__)


class Pipe:
    """Any thread may write."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, what: object) -> None:
        """To nobody where the front has gone: whoever receives sees that, and ends the engine."""
        with suppress(OSError), self._sending:
            self._connection.send(what)

    def receive(self) -> Any:
        """None where the front has gone."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None


def main() -> None:
    """Run one engine."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which whatever is started from here would inherit
    configure_logging(int(sys.argv[2]), sys.argv[3])
    apply_thread_policy()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    pipe = Pipe(Connection(descriptor))
    config: EngineConfig | None = pipe.receive()
    if config is None:
        return
    built: Future[EngineLoop] = Future()
    reader = threading.Thread(target=_read, args=(pipe, built), name="batchserve-messages", daemon=True)
    reader.start()  # at once: the front may go while the model is being loaded
    try:
        with memory_errors_named(f"to serve {config.model!r}"):
            loop = _build(config, pipe)
    except Exception as error:
        if not isinstance(error, BatchserveError):
            logger.exception("the engine cannot be built")
        pipe.send(NotBuilt(_portable(error)))
        return
    built.set_result(loop)
    # What is there now stays; to look through all of it again would hold up a step.
    gc.collect()
    gc.freeze()
    try:
        loop.run()
        _answer(pipe, loop)  # what the end came to, which nobody may have asked for in time
    finally:
        gc.unfreeze()  # what is never collected extension modules call a leak, on standard error


def _build(config: EngineConfig, pipe: Pipe) -> EngineLoop:
    from batchserve.engine.engine_loop import EngineLoop
    from batchserve.startup.build import build_engine

    adopt_library_loggers()
    built = build_engine(config, lambda message: pipe.send(Progress(message)), is_serving=True)
    pipe.send(Ready(built.info, built.processor.facts.without_tokenizer(), built.processor.limits))
    return EngineLoop(built, config.draft.draft_cache, pipe.send)


def _read(pipe: Pipe, built: Future[EngineLoop]) -> None:
    try:
        while (message := pipe.receive()) is not None:
            if isinstance(message, ReadMetrics):
                _answer(pipe, built.result())
            else:
                built.result().inbox.put(message)
    except Exception:  # nobody would hear of requests any more, nor of the end
        logger.exception("the front is not understood")
        os._exit(1)
    if built.done():  # the front has gone: what the drafter shares is saved all the same
        built.result().inbox.put(End())
        time.sleep(ORPHAN_TIMEOUT_S)
    os._exit(1)


def _answer(pipe: Pipe, loop: EngineLoop) -> None:
    """Figures, in the midst of a step; without an answer the front has those that it was told last."""
    try:
        reading = loop.metrics.reading()
    except Exception:
        logger.exception("the metrics cannot be read")
    else:
        pipe.send(Reading(reading))


def _portable(error: Exception) -> Exception:
    """One that the front can raise, too."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
