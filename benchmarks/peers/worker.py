"""The measuring program's side of an engine's process: start it, ask it, know its memory, end it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from batchserve.native.threads import POLICY
from benchmarks.common import ROOT
from benchmarks.peers.environments import PeerError
from benchmarks.peers.processes import pss_bytes, tree
from benchmarks.peers.protocol import Prompts

LOAD_TIMEOUT_S, ROUND_TIMEOUT_S, END_TIMEOUT_S = 500.0, 400.0, 30.0
LOG_TAIL_LINES = 10


@dataclass(frozen=True, slots=True)
class Command:
    """How an engine is started: a module of this package, who runs it, and its load message."""

    name: str
    module: str
    load: dict[str, Any]
    python: Path = field(default_factory=lambda: Path(sys.executable))


@dataclass(frozen=True, slots=True)
class Answered:
    """What one round brought."""

    seconds: float
    token_ids: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


class Worker:
    """An engine's process; a context manager, which ends it and all that it has started. Raises PeerError."""

    def __init__(self, command: Command) -> None:
        self.name = command.name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            (str(command.python), "-m", f"benchmarks.peers.{command.module}"),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            # What this process has set for its own engine is not for others: theirs waits in its own way.
            env={name: value for name, value in os.environ.items() if POLICY.get(name) != value},
        )
        self._rest = b""
        try:
            ready = self._ask({"op": "load", **command.load}, LOAD_TIMEOUT_S)
        except BaseException:
            self.end()
            raise
        self.load_s: float = ready["seconds"]
        self._engine_pid: int = ready["engine_pid"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def round(self, prompts: Prompts, max_tokens: int, drafts: bool) -> Answered:
        """All prompts at once; every answer has just `max_tokens` tokens."""
        asked = {"op": "round", "prompts": prompts, "max_tokens": max_tokens, "drafts": drafts}
        done = self._ask(asked, ROUND_TIMEOUT_S)
        lengths = [len(answer) for answer in done["token_ids"]]
        if lengths != [max_tokens] * len(prompts):
            raise PeerError(f"{self.name}: answers have {lengths} tokens, where each must have {max_tokens}")
        return Answered(done["seconds"], done["token_ids"])

    def pss_bytes(self) -> int | None:
        return pss_bytes(self._engine_pid)

    def end(self) -> None:
        """Ask it to end, and then make it."""
        started = tree(self._process.pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.write(b'{"op": "end"}\n')
            self._process.stdin.close()
        for give_up in (None, self._process.terminate, self._process.kill):
            if give_up is not None:
                give_up()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)
                break
        if self._process.returncode == -signal.SIGKILL:  # it could not end what it had started
            for pid in started[1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        self._process.stdout.close()
        self._log.close()

    def _ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed("ended") from None
        answer: dict[str, Any] = json.loads(self._line(timeout_s))
        if answer["event"] == "error":
            raise PeerError(f"{self.name}: {answer['message']}")
        return answer

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise self._failed(f"did not answer within {timeout_s:.0f} s")
                read = self._process.stdout.read1(1 << 20)  # type: ignore[attr-defined]
                if not read:
                    raise self._failed("ended")
                self._rest += read
        line, self._rest = self._rest.split(b"\n", 1)
        return line

    def _failed(self, what: str) -> PeerError:
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return PeerError("\n".join([f"{self.name}: its process {what}; its log ends in:", *tail]))
