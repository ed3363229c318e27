"""Checks grammars in another process, which can be killed: some take minutes to compile, or all memory."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import weakref
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from batchserve.errors import EngineFaultError, one_line
from batchserve.interpreter import python

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.grammar.compiler import Vocabulary
    from batchserve.grammar.definition import Grammar

CHILD = "from batchserve.grammar.check_process import main; main()"
MAX_SECONDS, MAX_GROWTH_BYTES = 2.0, 256 << 20  # of the processor's time, and of memory, for one grammar
MAX_START_SECONDS = 60.0
MAX_WAIT_S = 60.0  # the process has a bound of its own on its processor's time
MAX_TRIES = 2
MEMORY_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)  # of code that gets no memory
MAX_KNOWN = 256  # grammars whose outcome is remembered


class GrammarChecker:
    """Decides which grammars can be followed. Thread-safe; the process starts when it is first needed."""

    def __init__(self, vocabulary: Callable[[], Vocabulary | None]) -> None:
        """vocabulary: returns that of the model; None if it has no tokenizer that the library can read."""
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any]
        self._refusals: dict[Grammar, str] = {}  # the oldest first
        self._is_closed = False
        self._lock = threading.Lock()

    def is_known(self, grammar: Grammar) -> bool:
        """Whether refusal() has its answer at hand."""
        return grammar in self._refusals

    def refusal(self, grammar: Grammar) -> str:
        """Returns why a grammar cannot be followed; empty if it can. May take seconds.

        Raises EngineFaultError if that cannot be told, because there is no process to check it.
        """
        known = self._refusals.get(grammar)  # without the lock, which may be held for seconds
        if known is not None:
            return known
        with self._lock:
            known = self._refusals.get(grammar)
            found = self._refusals[grammar] = self._checked(grammar) if known is None else known
            if len(self._refusals) > MAX_KNOWN:
                del self._refusals[next(iter(self._refusals))]
            return found

    def _checked(self, grammar: Grammar) -> str:
        for _ in range(MAX_TRIES):
            if self._process is None and (refusal := self._start()):
                return refusal
            assert self._process is not None
            try:
                self._pipe.send(grammar)
                if self._pipe.poll(MAX_WAIT_S):
                    return str(self._pipe.recv())
                status = 0
            except (EOFError, OSError):
                status = self._process.wait()
            self._end()
            if self._is_closed:
                break
            if -status == signal.SIGXCPU:
                return f"it takes more than {MAX_SECONDS:g} s to compile"
            if -status in MEMORY_SIGNALS:
                return f"it takes more than {MAX_GROWTH_BYTES >> 20} MiB to compile"
        raise EngineFaultError(f"the process that checks grammars has ended {MAX_TRIES} times, or does not answer")

    def _start(self) -> str:
        """Starts the process. Returns why no grammar can be followed with this model; empty if some can."""
        vocabulary = self._vocabulary()
        if vocabulary is None:
            return "the model has no tokenizer that can be used with grammars"
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    python(CHILD, str(theirs.fileno()), str(MAX_SECONDS), str(MAX_GROWTH_BYTES)),
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a terminal's Ctrl-C is for this process only
                )
            weakref.finalize(self, _end, self._process)  # of an engine that nobody shuts down, such as LLM's
            self._pipe = Connection(ours.detach())
            self._pipe.send(vocabulary)
            if not self._pipe.poll(MAX_START_SECONDS):
                raise TimeoutError(f"no answer within {MAX_START_SECONDS:g} s")
            refusal = str(self._pipe.recv())
        except (EOFError, OSError) as error:
            self._end()
            raise EngineFaultError(f"the process that checks grammars cannot be started: {one_line(error)}") from None
        if refusal:
            self._end()
        return refusal

    def close(self) -> None:
        """Ends the process, if it runs, whatever it is compiling. It also ends when this process does."""
        self._is_closed, process = True, self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None
            self._pipe.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
