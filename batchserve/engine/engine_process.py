"""The engine loop in a process of its own, as its front sees it; engine/child.py is the other side.

One Python interpreter runs one thread at a time: in the front's process, every step would wait for what its streams do
(docs/performance.md, "The engine's own process").
"""

from __future__ import annotations

import dataclasses
import importlib
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from batchserve.engine.input_processor import InputProcessor
from batchserve.engine.messages import (
    End,
    Failed,
    Message,
    NotBuilt,
    Reading,
    ReadMetrics,
    Ready,
    Reply,
)
from batchserve.errors import EngineFaultError
from batchserve.metrics import MetricsReading

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.config import EngineConfig

READING_TIMEOUT_S = 5.0


class EngineProcess:
    """async_engine.Back over a pipe. The engine ends with this process, however that ends."""

    def __init__(self, config: EngineConfig, on_progress: Callable[[str], None] | None = None) -> None:
        """Start the process and wait for its engine. Raises what build_engine does; EngineFaultError if it died."""
        self._sending = threading.Lock()  # the event loop's messages, and requests for metrics
        self._is_ending = False
        self._process, self._pipe = _start()
        try:
            self._pipe.send(config)
            # Takes seconds, in which the engine is being built.
            threading.Thread(target=importlib.import_module, args=("batchserve.runner.loader",), daemon=True).start()
            ready = self._wait_ready(on_progress or (lambda message: None))
            from batchserve.runner.loader import load_tokenizer, resolve_model

            tokenizer = load_tokenizer(resolve_model(config.model), config)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self.info = ready.info
        self.processor = InputProcessor(
            dataclasses.replace(ready.facts, tokenizer=tokenizer), ready.info.max_model_len, config, ready.limits
        )
        self.metrics = RemoteMetrics(lambda: self._write(ReadMetrics()))

    def _wait_ready(self, on_progress: Callable[[str], None]) -> Ready:
        while True:
            try:
                said = self._pipe.recv()
            except (EOFError, OSError):
                raise EngineFaultError(f"the engine's process ended while it started: {self._how()}") from None
            if isinstance(said, NotBuilt):
                raise said.error
            if isinstance(said, Ready):
                return said
            on_progress(said.message)

    def start(self, on_reply: Callable[[Reply], None]) -> None:
        threading.Thread(target=self._read, args=(on_reply,), name="batchserve-replies", daemon=True).start()

    def _read(self, on_reply: Callable[[Reply], None]) -> None:
        try:
            while True:
                said = self._pipe.recv()
                if isinstance(said, Reading):
                    self.metrics.take(said.reading)
                else:
                    on_reply(said)
        except (EOFError, OSError):
            self.metrics.is_over = True
            if not self._is_ending:
                error = EngineFaultError(f"the engine's process ended: {self._how()}")
                on_reply(Failed(error, is_consistent=False))
        except RuntimeError:  # the asyncio loop was closed without shutdown(): nobody listens any more
            self._process.kill()

    def _how(self) -> str:
        status = self._process.wait()
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"

    def send(self, message: Message) -> None:
        self._is_ending = self._is_ending or isinstance(message, End)
        self._write(message)

    def _write(self, message: Message | ReadMetrics) -> None:
        try:
            with self._sending:
                self._pipe.send(message)
        except OSError:  # it has ended: whoever reads the replies says so
            pass

    def join(self) -> None:
        self._process.wait()


class RemoteMetrics:
    """MetricsSource of an engine in another process: where that does not answer, what it has answered last."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self.is_over = False  # nobody answers any more
        self._ask = ask
        self._asking = threading.Lock()
        self._has_come = threading.Event()
        self._last = MetricsReading()

    def take(self, reading: MetricsReading) -> None:
        """An answer has come."""
        self._last = reading
        self._has_come.set()

    def reading(self) -> MetricsReading:
        with self._asking:
            self._has_come.clear()
            self._ask()
            if not self.is_over:
                self._has_come.wait(READING_TIMEOUT_S)
            return self._last


def _start() -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    """The process, which says what it has to say on standard error, and this side of the pipe to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "batchserve.engine.child", str(theirs.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()])
    return process, Connection(ours.detach())
