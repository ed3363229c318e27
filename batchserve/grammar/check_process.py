"""The process that GrammarChecker starts: compiles each grammar that it is sent, and says why that fails.

Its arguments are the pipe's file descriptor, and the most seconds of the processor's time and bytes that one grammar
may take: the system ends a process that takes more. It ends when the other end of the pipe is closed.
"""

from __future__ import annotations

import math
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from batchserve.errors import GrammarError
from batchserve.grammar.compiler import Vocabulary, compile_grammar


def main() -> None:
    """Answers each grammar with the reason for refusing it, or an empty text. The first message is the vocabulary."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    max_seconds, max_bytes = float(sys.argv[2]), int(sys.argv[3])
    with suppress(EOFError, OSError):
        vocabulary: Vocabulary = pipe.recv()
        try:
            tokenizer = vocabulary.load()
        except GrammarError as error:
            pipe.send(str(error))
            return
        _limit_memory(max_bytes)
        pipe.send("")
        while True:
            grammar = pipe.recv()
            _limit_time(max_seconds)
            try:
                compile_grammar(grammar, tokenizer)
            except (GrammarError, MemoryError) as error:
                pipe.send(str(error) or "it takes too much memory to compile")
            else:
                pipe.send("")


def _limit_time(seconds: float) -> None:
    """Bounds the processor's time for the next grammar."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime + seconds), most))


def _limit_memory(num_bytes: int) -> None:
    """Bounds the address space from now on, where the system says how much is used."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        used = pages * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, most))
