"""Runs a real server in its own process and ends it whatever happens to the demo."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import deque
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchserve.errors import BatchserveError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

TERMINATE_TIMEOUT_S = 10.0
EXIT_GRACE_S = 1.0
LOG_TAIL_LINES = 15


class ServerProcessError(BatchserveError):
    """Raised if the server's process ends by itself. The message contains the end of its log."""

    reason = "SERVER_FAILED"


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Where a server listens: with gRPC on HOST:PORT, with HTTP at a URL; and the pid of its process."""

    address: str
    url: str
    pid: int


@asynccontextmanager
async def running_server(options: Sequence[str], on_log: Callable[[str], None]) -> AsyncIterator[RunningServer]:
    """Runs `batchserve serve` with these options on free loopback ports. Yields it once it has said where it listens.

    Until then `on_log` gets the server's log, line by line. The process has ended when the context is left.
    """
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "batchserve.cli",
            "serve",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--http-port",
            "0",
            *options,
        ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
    assert process.stdout is not None
    assert process.stderr is not None
    is_ready = asyncio.Event()
    logging = asyncio.create_task(_forward(process.stderr, tail, on_log, is_ready))
    try:
        address = await _announced(process.stdout, r"listening on (\S+)")
        url = await _announced(process.stdout, r"HTTP on (\S+)")
        if address is None or url is None:
            await logging
            raise _died("before it was ready", tail)
        is_ready.set()
        try:
            yield RunningServer(address, url, process.pid)
        except BatchserveError as error:
            if await _has_ended(process):
                raise _died("while it was serving", tail) from error
            raise
    finally:
        await _end(process)
        logging.cancel()
        with suppress(asyncio.CancelledError):
            await logging


async def _announced(stdout: asyncio.StreamReader, said: str) -> str | None:
    async for line in stdout:
        match = re.fullmatch(said, line.decode(errors="replace").strip())
        if match is not None:
            return match[1]
    return None


async def _forward(
    stderr: asyncio.StreamReader, tail: deque[str], on_log: Callable[[str], None], is_ready: asyncio.Event
) -> None:
    """Reads the log to its end, even if it is no longer shown, because a full pipe would block the server."""
    async for line in stderr:
        # A progress bar writes many states into one line. Only the last one counts.
        text = line.decode(errors="replace").rstrip().rsplit("\r", 1)[-1]
        tail.append(text)
        if not is_ready.is_set():
            on_log(text)


def _died(when: str, tail: deque[str]) -> ServerProcessError:
    return ServerProcessError("\n".join([f"the server ended {when}; its log ends in:", *tail]))


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """True if the process ends within EXIT_GRACE_S. The connection breaks shortly before the process is gone."""
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), EXIT_GRACE_S)
    return process.returncode is not None


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), TERMINATE_TIMEOUT_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
