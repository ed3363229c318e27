"""A real `batchserve serve` in a process of its own."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 60.0
LOG_TAIL_LINES = 20


class ServerError(Exception):
    """The server did not become ready, or did not end well; the message has the end of its log."""


class _Lines:
    """What a pipe says, read to its end by a thread: a full pipe would stop the server."""

    def __init__(self, pipe: IO[str]) -> None:
        self.tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self.queue: queue.Queue[str | None] = queue.Queue()
        self.thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self.thread.start()

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            self.tail.append(line.rstrip())
            self.queue.put(line)
        self.queue.put(None)


@contextmanager
def running_server(options: Sequence[str]) -> Iterator[str]:
    """`batchserve serve` on a free loopback port; yields HOST:PORT once its health is SERVING.

    Leaving the context ends the process by its own handle: SIGTERM, then SIGKILL. Raises ServerError when it does not
    get ready in time, dies early or does not drain to exit status 0.
    """
    command = [
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
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    assert process.stdout is not None
    assert process.stderr is not None
    out, log = _Lines(process.stdout), _Lines(process.stderr)
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        try:
            address = _announced_address(out, deadline_s)
            _wait_until_serving(address, deadline_s)
        except ServerError as error:
            process.kill()
            log.thread.join(END_TIMEOUT_S)
            raise ServerError("\n".join([str(error), *log.tail])) from None
        yield address
    finally:
        has_died = process.poll() is not None
        status = _end(process)
        out.thread.join(END_TIMEOUT_S)
        log.thread.join(END_TIMEOUT_S)
    if has_died or status != 0:
        how = "died during the run" if has_died else "did not end well"
        raise ServerError("\n".join([f"the server {how}: exit status {status}", *log.tail]))


def _announced_address(out: _Lines, deadline_s: float) -> str:
    while True:
        try:
            line = out.queue.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise ServerError(f"the server did not say its address within {START_TIMEOUT_S:.0f} s") from None
        if line is None:
            raise ServerError("the server ended before it said its address")
        if match := re.fullmatch(r"listening on (\S+)", line.strip()):
            return match[1]


def _wait_until_serving(address: str, deadline_s: float) -> None:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline_s:
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
            except grpc.RpcError:
                answer = health_pb2.HealthCheckResponse()
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            time.sleep(0.1)
    raise ServerError(f"the server's health was not SERVING within {START_TIMEOUT_S:.0f} s")


def _end(process: subprocess.Popen[str]) -> int:
    process.terminate()
    try:
        return process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
