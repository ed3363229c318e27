"""Compiles the grammars of new requests in a thread of its own, so that no step waits for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from batchserve.engine.messages import Compiled
from batchserve.errors import EngineFaultError, GrammarError, one_line
from batchserve.grammar.state import GrammarState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.errors import BatchserveError
    from batchserve.grammar.compiler import GrammarCompiler
    from batchserve.request import Request


def give_grammar(request: Request, grammars: GrammarCompiler, vocab_size: int) -> None:
    """Puts a request at the beginning of its grammar, if it has one. May take seconds. Raises GrammarError."""
    sampling, adjustments = request.sampling, request.adjustments
    if sampling.grammar is not None and adjustments is not None:
        ignored = sampling.ignored_end_token_ids
        adjustments.grammar = GrammarState(sampling.grammar, grammars, vocab_size, ignored)


class GrammarQueue:
    """Passes requests on in the order of their arrival, each as soon as its grammar is compiled."""

    def __init__(self, grammars: GrammarCompiler, vocab_size: int, done: Callable[[Compiled], None]) -> None:
        """done: is called in another thread."""
        self._grammars, self._vocab_size, self._done = grammars, vocab_size, done
        self._thread = ThreadPoolExecutor(1, "batchserve-grammars")

    def add(self, ticket: int, request: Request) -> None:
        self._thread.submit(self._compile, ticket, request)

    def _compile(self, ticket: int, request: Request) -> None:
        error: BatchserveError | None = None
        try:
            give_grammar(request, self._grammars, self._vocab_size)
        except GrammarError as refused:
            error = refused
        except Exception as fault:
            error = EngineFaultError(f"request_id = {request.request_id!r}: its grammar: {one_line(fault)}")
        self._done(Compiled(ticket, error))

    def close(self) -> None:
        """Drops what has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)
