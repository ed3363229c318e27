"""What an engine's process and the program that measures it say to each other: JSON, one object a line.

    -> {"op": "load", ...}
    <- {"event": "ready", "engine_pid": N, "seconds": S}
    -> {"op": "round", "prompts": [[id, ...], ...], "max_tokens": N, "drafts": false}
    <- {"event": "done", "seconds": S, "token_ids": [[id, ...], ...]}
    -> {"op": "end"}

Anything that goes wrong is {"event": "error", "message": TEXT}. Requests come on standard input, answers go to what was
standard output at the start: whatever else a library prints there goes to standard error. Only the standard library is
imported here, because each engine's environment runs it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

Prompts = list[list[int]]


class Engine(Protocol):
    """An engine that is loaded."""

    @property
    def pid(self) -> int:
        """Of the process whose tree holds the engine's memory."""

    def answer(self, prompts: Prompts, max_tokens: int, drafts: bool) -> list[list[int]]:
        """Each prompt's greedy continuation of just `max_tokens` tokens; all prompts at once."""


Loader = Callable[[dict[str, Any]], AbstractContextManager[Engine]]


def serve(loader: Loader, arguments: Sequence[str] = ()) -> None:
    """Load what the first line asks for and answer rounds until the input ends, "end" or SIGTERM.

    However it ends, the loader's context is left, which ends what it has started.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    line = sys.stdin.readline()
    if not line:
        return
    try:
        started_s = time.perf_counter()
        with loader(json.loads(line)) as engine:
            say({"event": "ready", "engine_pid": engine.pid, "seconds": time.perf_counter() - started_s})
            for line in sys.stdin:
                message = json.loads(line)
                if message["op"] == "end":
                    return
                say(_round(engine, message))
    except Exception as error:  # told to the program that measures; this process ends
        say({"event": "error", "message": f"{type(error).__name__}: {error}"})
        raise


def _round(engine: Engine, message: dict[str, Any]) -> dict[str, Any]:
    started_s = time.perf_counter()
    token_ids = engine.answer(message["prompts"], message["max_tokens"], message["drafts"])
    return {"event": "done", "seconds": time.perf_counter() - started_s, "token_ids": token_ids}
