"""vLLM's or llama.cpp's HTTP server, asked from this process for whole answers. Only the standard library.

Drafts are an option of a server, so there is one with and one without them. Servers listen on loopback alone.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.protocol import Prompts, serve

HOST = "127.0.0.1"
START_TIMEOUT_S, ANSWER_TIMEOUT_S, END_TIMEOUT_S = 400.0, 300.0, 20.0
POLL_S = 0.1
LOG_TAIL_LINES = 15


class HttpServer:
    """A client of a server that this process has started.

    Each request has a connection of its own: the servers close those that are idle between two rounds.
    """

    def __init__(self, kind: str, port: int, process: subprocess.Popen[bytes], drafts: bool) -> None:
        self._kind, self._port, self._process, self._drafts = kind, port, process, drafts

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self, prompts: Prompts, max_tokens: int, drafts: bool) -> list[list[int]]:
        if drafts != self._drafts:
            raise ValueError(f"drafts = {drafts}: this server was started with {self._drafts}")
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self._one, prompts, [max_tokens] * len(prompts)))

    def _one(self, prompt: list[int], max_tokens: int) -> list[int]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=ANSWER_TIMEOUT_S)
        try:
            return self._asked(connection, prompt, max_tokens)
        finally:
            connection.close()

    def _asked(self, connection: http.client.HTTPConnection, prompt: list[int], max_tokens: int) -> list[int]:
        path, body = (llamacpp_request if self._kind == "llamacpp" else vllm_request)(prompt, max_tokens)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"{self._kind}: HTTP {response.status}: {answer}")
        tokens: list[int] = answer["tokens"] if self._kind == "llamacpp" else answer["choices"][0]["token_ids"]
        return tokens

    def is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def llamacpp_request(prompt: list[int], max_tokens: int) -> tuple[str, dict[str, Any]]:
    """Greedy is top_k 1 alone, which spares it the other samplers."""
    sampling = {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1}
    fixed = {"ignore_eos": True, "cache_prompt": False, "return_tokens": True, "stream": False}
    return "/completion", {"prompt": prompt, "n_predict": max_tokens, **sampling, **fixed}


def vllm_request(prompt: list[int], max_tokens: int) -> tuple[str, dict[str, Any]]:
    """`model` is left out: there is but one."""
    fixed = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True, "stream": False}
    return "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **fixed}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port: int = taken.getsockname()[1]
        return port


@contextmanager
def load(message: dict[str, Any]) -> Iterator[HttpServer]:
    """The message has the command, in which {port} stands for the port, and what it needs in its environment."""
    port = free_port()
    command = [part.replace("{port}", str(port)) for part in message["command"]]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **message["environment"]}
        )
        try:
            server = HttpServer(message["kind"], port, process, message["drafts"])
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not server.is_healthy():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    log.seek(0)
                    tail = log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
                    raise RuntimeError("\n".join([f"{command[0]} did not start; its log ends in:", *tail]))
                time.sleep(POLL_S)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


if __name__ == "__main__":
    serve(load)
