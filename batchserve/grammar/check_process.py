"""The process that GrammarChecker starts: compiles each grammar that it is sent, and says why that fails.

Its argument is the pipe's file descriptor. It ends when the other end of the pipe is closed.
"""

from __future__ import annotations

import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from batchserve.errors import GrammarError
from batchserve.grammar.compiler import Vocabulary, compile_grammar

MAX_GROWTH_BYTES = 256 << 20  # that one grammar may take


def main() -> None:
    """Answers each grammar with the reason for refusing it, or an empty text. The first message is the vocabulary."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with suppress(EOFError, OSError):
        vocabulary: Vocabulary = pipe.recv()
        try:
            tokenizer = vocabulary.load()
        except GrammarError as error:
            pipe.send(str(error))
            return
        _limit_memory()
        pipe.send("")
        while True:
            grammar = pipe.recv()
            try:
                compile_grammar(grammar, tokenizer)
            except (GrammarError, MemoryError) as error:
                pipe.send(str(error) or "it takes too much memory to compile")
            else:
                pipe.send("")


def _limit_memory() -> None:
    """Bounds the address space from now on, where the system says how much is used."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        used = pages * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_GROWTH_BYTES, most))
