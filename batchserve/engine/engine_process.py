"""Runs the engine loop in a separate process. This is the front end's side; engine_subprocess.py is the other.

A Python interpreter runs one thread at a time. In the front end's process, every step would wait for the work of its
streams (docs/performance.md, "The engine's own process").
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import queue
import signal
import subprocess
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING

from batchserve.engine.input_processor import InputProcessor
from batchserve.engine.launch import LaunchedProcess
from batchserve.engine.messages import (
    End,
    Failed,
    Message,
    NotBuilt,
    Progress,
    Reading,
    ReadMetrics,
    Ready,
    Reply,
)
from batchserve.errors import EngineFaultError
from batchserve.logs import adopt_library_loggers
from batchserve.metrics import MetricsReading

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.config import EngineConfig

READING_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 120.0  # must cover a last step and saving a large draft cache
# The system kills a process that exceeds the memory. C code that gets no memory may crash or abort.
MEMORY_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
logger = logging.getLogger(__name__)


class EngineProcess:
    """An EngineHost over a pipe to the engine's process. The engine ends with this process, however that ends."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[str], None] | None = None,
        launched: LaunchedProcess | None = None,
    ) -> None:
        """Starts the process, unless it was launched before, and waits for its engine.

        Raises what build_engine does; EngineFaultError if the process died.
        """
        self._outbox: queue.SimpleQueue[Message | ReadMetrics | None] = queue.SimpleQueue()  # None ends the writer
        self._is_ending = False
        launched = launched or LaunchedProcess()
        self._process, self._pipe = launched.process, launched.pipe
        # A fork of this process would keep the pipe open and thus the engine alive.
        os.register_at_fork(after_in_child=partial(_close_pipe, weakref.ref(self)))
        try:
            ready = self._ask_for(config, on_progress or (lambda message: None))
            facts = ready.facts
            if ready.info.has_tokenizer and facts.tokenizer is None:  # one with Python code of its own
                from batchserve.runner.model_folder import resolve_model
                from batchserve.runner.tokenizer import load_tokenizer

                adopt_library_loggers()
                tokenizer = load_tokenizer(resolve_model(config.model), config)
                facts = dataclasses.replace(facts, tokenizer=tokenizer)
        except BaseException:
            launched.end()
            raise
        self.info = ready.info
        self.processor = InputProcessor(facts, ready.info.max_model_len, config, ready.limits)
        self.metrics = RemoteMetrics(lambda: self._outbox.put(ReadMetrics()))

    def _ask_for(self, config: EngineConfig, on_progress: Callable[[str], None]) -> Ready:
        try:
            self._pipe.send(config)
            while isinstance(said := self._pipe.recv(), Progress):
                on_progress(said.message)
        except (EOFError, OSError):
            raise EngineFaultError(f"the engine's process ended while it started: {self._how()}") from None
        if isinstance(said, NotBuilt):
            raise said.error
        assert isinstance(said, Ready)
        return said

    def start(self, on_reply: Callable[[Reply], None]) -> None:
        threading.Thread(target=self._read, args=(on_reply,), name="batchserve-replies", daemon=True).start()
        threading.Thread(target=self._write, name="batchserve-messages", daemon=True).start()

    def _read(self, on_reply: Callable[[Reply], None]) -> None:
        try:
            while True:
                said = self._pipe.recv()
                if isinstance(said, Reading):
                    self.metrics.take(said.reading)
                elif not self._tell(on_reply, said):
                    break
        except (EOFError, OSError):
            pass
        except Exception:  # a reply that cannot be decoded
            logger.exception("the engine's process is not understood")
        self._outbox.put(None)
        self.metrics.end()
        if not self._is_ending:
            self._process.kill()
            self._tell(on_reply, Failed(EngineFaultError(f"the engine's process ended: {self._how()}"), False))
        self._pipe.close()

    def _tell(self, on_reply: Callable[[Reply], None], reply: Reply) -> bool:
        """Passes a reply on. Returns False if the asyncio loop was closed without shutdown()."""
        try:
            on_reply(reply)
        except RuntimeError:
            return False
        return True

    def _write(self) -> None:
        """Writes messages in a separate thread, so that send() never waits for the engine to read."""
        try:
            while (message := self._outbox.get()) is not None:
                self._pipe.send(message)
        except OSError:  # the process has ended, which _read reports
            pass
        except Exception:
            logger.exception("a message cannot be sent to the engine's process, which is ended")
            self._process.kill()

    def _how(self) -> str:
        status = self._process.wait()
        if status >= 0:
            return f"exit status {status}"
        return f"killed by signal {-status}" + (", as for want of memory" if -status in MEMORY_SIGNALS else "")

    def send(self, message: Message) -> None:
        self._is_ending = self._is_ending or isinstance(message, End)
        self._outbox.put(message)

    def join(self) -> None:
        try:
            self._process.wait(JOIN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.error("the engine's process did not end within %g s, and is killed", JOIN_TIMEOUT_S)
            self._process.kill()
        if self._process.wait() != 0:
            logger.error("the engine's process did not end in order: %s", self._how())

    def kill(self) -> None:
        self._process.kill()


class RemoteMetrics:
    """The MetricsSource of an engine in another process. Gives the last reading if the process does not answer.

    Concurrent readers wait for the same answer.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._has_come = threading.Event()
        self._asked_s = -math.inf
        self._is_over = False
        self._last, self._last_s = MetricsReading(), time.monotonic()

    def take(self, reading: MetricsReading) -> None:
        """Stores a reading that has arrived."""
        with self._lock:
            self._last, self._last_s = reading, time.monotonic()
            self._has_come.set()

    def end(self) -> None:
        """Ends the wait for readings: no more will arrive."""
        with self._lock:
            self._is_over = True
            self._has_come.set()

    def reading(self) -> MetricsReading:
        now_s = time.monotonic()
        with self._lock:
            is_waited_for = not self._has_come.is_set() and now_s - self._asked_s < READING_TIMEOUT_S
            is_asking = not is_waited_for and not self._is_over
            if is_asking:
                self._has_come.clear()
                self._asked_s = now_s
        if is_asking:
            self._ask()
        self._has_come.wait(READING_TIMEOUT_S)
        with self._lock:
            return dataclasses.replace(self._last, age_s=time.monotonic() - self._last_s)


def _close_pipe(ref: weakref.ref[EngineProcess]) -> None:
    engine = ref()
    if engine is not None:
        engine._pipe.close()
