"""`batchserve run-batch`: asks all requests of a file, some at once, and writes each result as it comes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchserve.client_options import https_context
from batchserve.errors import ConfigError, shortened
from batchserve.http_client import HttpClient, HttpFailure, Response, ServerUrl, UnreachableError
from batchserve.interrupts import interrupts_end_the_process, run_until_interrupted
from batchserve.logs import configure_logging
from batchserve.option_checks import at_least
from batchserve.progress import progress, progress_bar
from batchserve.run_batch.requests import BatchRequest, read_requests
from batchserve.run_batch.results import BUSY, BatchResult, ResultFile

if TYPE_CHECKING:
    import ssl

    from batchserve.config import EngineConfig
    from batchserve.server.grpc.tls import ClientTls

MAX_CONCURRENCY, MAX_BODY_CHARS = 4096, 200
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of a batch. `batchserve run-batch --help` explains each. url: None loads an engine here."""

    input: Path
    output: Path
    concurrency: int = 16
    retries: int = 5
    url: str | None = None

    def __post_init__(self) -> None:
        at_least("concurrency", self.concurrency, 1, MAX_CONCURRENCY)
        at_least("retries", self.retries, 0)
        if self.url is not None:
            ServerUrl.parse(self.url)
        if os.path.realpath(self.input) == os.path.realpath(self.output):
            raise ConfigError(f"OUTPUT = {str(self.output)!r}: must be another file than INPUT")


def run_batch(
    options: BatchOptions, config: EngineConfig | None = None, key: str | None = None, tls: ClientTls | None = None
) -> int:
    """Answers all requests that have no response yet. Returns the exit status. Raises ConfigError before any is asked.

    config: of the engine that is loaded here if there is no url.
    """
    if config is not None and options.concurrency > (most := config.max_num_seqs + config.max_waiting):
        bound = f"at most {most}, max_num_seqs and max_waiting together"
        raise ConfigError(f"concurrency = {options.concurrency}: must be {bound}")
    https = None if options.url is None else https_context(options.url, tls)
    requests = read_requests(options.input)
    with ResultFile(options.output) as results:
        done = results.resume(request.custom_id for request in requests)
        left = [request for request in requests if request.custom_id not in done]
        if done:
            told = f"{len(done)} of {len(requests)} requests have a response already and are skipped"
            progress(f"{options.output}: {told}")
        num_errors = sum(not is_answered for is_answered in done.values())
        batch, is_interrupted = Batch(options, results), False
        try:
            if left:
                is_interrupted = asyncio.run(_ask(batch, left, _client(options.url, config, key, https)))
        finally:
            num_errors += batch.num_errors
            _tell(len(requests), num_errors, len(left) - batch.num_ended)
    if is_interrupted:
        return 128 + signal.SIGINT
    return 1 if num_errors else 0


def _tell(num_requests: int, num_errors: int, num_left: int) -> None:
    told = f"{num_requests - num_errors - num_left} of {num_requests} requests have an answer, {num_errors} an error"
    progress(f"{told}; {num_left} are left, with which the same command goes on" if num_left else told)


class Batch:
    """Requests that are being asked. num_ended: those with a line in the output. num_errors: those with an error."""

    def __init__(self, options: BatchOptions, results: ResultFile, sleep: Sleep = asyncio.sleep) -> None:
        self._options, self._results, self._sleep = options, results, sleep
        self.num_ended = self.num_errors = 0

    async def run(self, client: HttpClient, requests: list[BatchRequest], on_done: Callable[[], None]) -> None:
        """Asks all, `concurrency` at once, in order. Raises ConfigError if the output cannot be written.

        Raises UnreachableError if no connection can be made: then no request gets a line that has not one yet.
        """
        left = iter(requests)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._options.concurrency, len(requests))):
                    group.create_task(self._one_after_the_other(client, left, on_done))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _one_after_the_other(
        self, client: HttpClient, left: Iterator[BatchRequest], on_done: Callable[[], None]
    ) -> None:
        for request in left:
            result = await self._result(client, request)
            self._results.add(result)
            self.num_ended += 1
            self.num_errors += not result.is_answered
            on_done()

    async def _result(self, client: HttpClient, request: BatchRequest) -> BatchResult:
        for attempt in range(self._options.retries + 1):
            is_last = attempt == self._options.retries
            retry_s = min(FIRST_RETRY_S * 2**attempt, LONGEST_RETRY_S)
            try:
                response = await client.request("POST", request.url, request.body)
            except HttpFailure as error:
                if is_last and isinstance(error, UnreachableError):
                    raise
                if is_last:
                    return BatchResult(request.custom_id, error=str(error))
            else:
                if is_last or response.status not in BUSY:
                    return result_of(request, response)
                retry_s = _retry_after_s(response, retry_s)
            await self._sleep(retry_s)
        raise AssertionError("the last attempt has a result")


def result_of(request: BatchRequest, response: Response) -> BatchResult:
    """Returns the result that a response is. A body that is not JSON becomes an error's message; if the status says
    that it is an answer, there is none.
    """
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        text = response.body.decode(errors="replace")
        if 200 <= response.status < 300:
            what = f"status {response.status} with a body that is no JSON object: {shortened(text, MAX_BODY_CHARS)}"
            return BatchResult(request.custom_id, error=what)
        body = {"error": {"message": text, "type": "not_json", "param": None, "code": None}}
    answer_id = body.get("id")
    request_id = response.headers.get("x-request-id") or answer_id or ""
    return BatchResult(request.custom_id, response.status, str(request_id), body)


def _retry_after_s(response: Response, default_s: float) -> float:
    """Returns how long a server asks to wait, or the default if it does not say so in seconds."""
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return default_s
    return min(max(seconds, 0.0), LONGEST_RETRY_S) if seconds == seconds else default_s


async def _ask(batch: Batch, requests: list[BatchRequest], connected: AbstractAsyncContextManager[HttpClient]) -> bool:
    """Asks all. Returns whether Ctrl-C ended it."""
    async with connected as client:
        with progress_bar("answering", len(requests)) as on_done:
            return await run_until_interrupted(batch.run(client, requests, on_done))


@asynccontextmanager
async def _client(
    url: str | None, config: EngineConfig | None, key: str | None, https: ssl.SSLContext | None
) -> AsyncIterator[HttpClient]:
    """Connects to the server at a URL, or else to one that is started here."""
    if url is None:
        assert config is not None
        async with local_server(config) as local, HttpClient(ServerUrl.parse(local)) as client:
            yield client
        return
    async with HttpClient(ServerUrl.parse(url), key=key, tls=https) as client:
        yield client


@asynccontextmanager
async def local_server(config: EngineConfig) -> AsyncIterator[str]:
    """Serves a model on a free loopback port. Yields its URL. Raises what AsyncEngine.start raises."""
    from batchserve.engine.async_engine import AsyncEngine
    from batchserve.server.lifecycle import GenerationServer
    from batchserve.server_config import ServerConfig
    from batchserve.version import __version__

    configure_logging(logging.WARNING)  # below that, the server and its engine log each request
    server = GenerationServer(ServerConfig(port=0, http_port=0, has_reflection=False), __version__)
    try:
        await server.bind()
        with interrupts_end_the_process():  # loading cannot be interrupted otherwise
            engine = await AsyncEngine.start(config, progress, own_process=True)
        await server.open(engine)
        yield f"http://{server.http_address}"
    finally:
        await server.drain()
