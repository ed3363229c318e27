"""The server's life cycle: bind, warm up, serve, drain. While the model loads, requests are refused with the reason."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from batchserve.engine.backpressure import BackpressureLimits
from batchserve.errors import ConfigError, EngineFaultError
from batchserve.hosts import is_loopback
from batchserve.server.grpc.servicer import SERVICE, SERVICE_NAME, GenerationServicer
from batchserve.server.grpc.status import is_worth_logging
from batchserve.server.grpc.tls import server_credentials
from batchserve.server.grpc.wire import MalformedRequestInterceptor
from batchserve.server.metrics_endpoint import MetricsEndpoint, join_address
from batchserve.server.open_calls import OpenCalls
from batchserve.server.stall_watch import watch_for_stalls
from batchserve.v1 import generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

    from batchserve.config import ServerConfig
    from batchserve.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

# Time to send the last statuses after the requests have ended. Reflection streams never end by themselves.
FLUSH_GRACE_S = 1.0
STATUS_TIMEOUT_S = 5.0
HURRIED_S = 10.0  # after a second signal: time for a last step and for saving the draft cache
QUIET_S = 0.15
ARRIVALS_TIMEOUT_S = 1.0
MIN_PING_INTERVAL_MS = 5000
KEEPALIVE_MS = 60_000
MAX_METADATA_BYTES = 16 << 10
MOST_PENDING_CALLS = 1 << 20
GRPC_LOGGER = "grpc._cython.cygrpc"
T = TypeVar("T")


class GenerationServer:
    """Call bind(), open(engine), drain(). Before open and from drain on, requests get UNAVAILABLE with RetryInfo."""

    def __init__(self, config: ServerConfig, version: str) -> None:
        self._config = config
        self._engine: AsyncEngine | None = None
        self._metrics: MetricsEndpoint | None = None
        self._watching: asyncio.Task[None] | None = None
        self._calls = OpenCalls(BackpressureLimits(config.max_unread_deltas, config.unread_timeout_s))
        servicer = GenerationServicer(version, self._calls)
        logging.getLogger(GRPC_LOGGER).addFilter(is_worth_logging)
        self._health = _Health()
        self._grpc = grpc.aio.server(
            interceptors=[MalformedRequestInterceptor(SERVICE, self._calls)],
            options=_channel_arguments(config),
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, self._grpc)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        if config.has_reflection:
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(_Reflection(names, self._health), self._grpc)

    async def bind(self) -> str:
        """Starts listening as NOT_SERVING. Returns HOST:PORT with the actual port. Raises ConfigError on failure."""
        if self._config.metrics_port is not None:
            self._metrics = MetricsEndpoint(self._config.host, self._config.metrics_port, self._calls.failed_calls)
            logger.info("metrics on http://%s", self._metrics.address)
        await self._set_serving("warming up")
        wanted = join_address(self._config.host, self._config.port)
        credentials = server_credentials(self._config)
        try:
            if credentials is None:
                port = self._grpc.add_insecure_port(wanted)
            else:
                port = self._grpc.add_secure_port(wanted, credentials)
        except RuntimeError as error:
            reason = _why_not_bound(self._config.host, self._config.port) or error
            raise ConfigError(f"host:port = {wanted}: cannot listen there ({reason})") from error
        await self._grpc.start()
        return join_address(self._config.host, port)

    async def open(self, engine: AsyncEngine) -> None:
        """Serves from this engine, which must be warm. The server owns the engine from now on.

        On a non-loopback address, callers share no drafts and no KV cache unless a scope has been chosen.
        """
        self._engine = engine
        if not is_loopback(self._config.host):
            engine.isolate_default_scope()
        if self._metrics is not None:
            self._metrics.show(engine.metrics)
        self._calls.open(engine)
        self._watching = asyncio.create_task(self._watch(engine))
        await self._set_serving(None)

    async def drain(self, hurry: asyncio.Event | None = None) -> bool:
        """Refuses new requests, lets those in flight end within `drain_timeout_s`, ends the rest and stops listening.

        Returns True if all ended by themselves. Setting `hurry` ends the wait early. Repeated calls are harmless.
        """
        if self._watching is not None:
            self._watching.cancel()
        self._show_trouble("draining")
        await self._health.enter_graceful_shutdown()
        self._calls.close("the server is draining")
        is_drained = True
        if self._engine is not None:
            try:
                is_drained = await _unless_hurried(self._requests_ended(self._engine), hurry)
            finally:
                await _shut_down(self._engine, hurry)
        await self._arrivals_ended()
        # Every call has ended by now. The wait for clients that do not read their answer is short.
        await _unless_hurried(self._answers_read(), hurry)
        self._health.end()
        await self._grpc.stop(FLUSH_GRACE_S)
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        return is_drained

    async def _watch(self, engine: AsyncEngine) -> None:
        async def tell(goes_on: bool) -> None:
            await self._set_serving(None if goes_on else "stalled: a step of the engine does not end")

        await _either(engine.wait_failed(), watch_for_stalls(engine, self._config.stall_timeout_s, tell))
        await self._set_serving("failed: the engine takes no requests any more")

    async def _requests_ended(self, engine: AsyncEngine) -> bool:
        """True if, in time, the engine has finished all requests and the clients have read their answers."""
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                is_drained = await engine.drain(self._config.drain_timeout_s)
                await self._calls.wait_idle()
        except TimeoutError:
            return False
        return is_drained

    async def _answers_read(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                await self._calls.wait_idle()
                return True
        return False

    async def _arrivals_ended(self) -> None:
        """Waits until no call has arrived for QUIET_S, but no longer than ARRIVALS_TIMEOUT_S.

        gRPC hands over calls one at a time and cancels the remaining ones when it stops. Their clients would see
        CANCELLED while all others see UNAVAILABLE.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(ARRIVALS_TIMEOUT_S):
                seen = -1
                while seen != self._calls.num_calls:
                    seen = self._calls.num_calls
                    await asyncio.sleep(QUIET_S)

    async def _set_serving(self, trouble: str | None) -> None:
        """Publishes the serving status. trouble: the reason for not serving; None while serving."""
        self._show_trouble(trouble)
        is_serving = trouble is None
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE_NAME):
            await self._health.set(service, status)

    def _show_trouble(self, trouble: str | None) -> None:
        if self._metrics is not None:
            self._metrics.trouble = trouble


class _Health(health.aio.HealthServicer):  # type: ignore[name-defined,misc]
    """gRPC's health service. Its watch streams end with the server: if gRPC cancelled them they would print a trace."""

    def __init__(self) -> None:
        super().__init__()
        self._is_over = asyncio.Event()

    async def List(self, request: Any, context: Any) -> health_pb2.HealthListResponse:
        """Returns the status of each service. gRPC's own version fails with a traceback in the log."""
        names = ("", SERVICE_NAME)
        statuses = {name: await self.Check(health_pb2.HealthCheckRequest(service=name), context) for name in names}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: Any, context: Any) -> None:
        """Streams the current status and each later one."""
        await _either(super().Watch(request, context), self.ended())

    def end(self) -> None:
        """Ends every watch stream."""
        self._is_over.set()

    async def ended(self) -> None:
        """Waits for end()."""
        await self._is_over.wait()


class _Reflection(reflection.aio.ReflectionServicer):  # type: ignore[name-defined,misc]
    """gRPC's reflection service. Its streams end together with the watch streams, for the same reason."""

    def __init__(self, names: Sequence[str], watchers: _Health) -> None:
        super().__init__(names)
        self._watchers = watchers

    async def ServerReflectionInfo(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Yields a response to each request."""
        async for response in super().ServerReflectionInfo(self._until_the_end(requests), context):
            yield response

    async def _until_the_end(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async def following() -> Any:
            return await anext(requests, None)

        while (request := await _either(following(), self._watchers.ended())) is not None:
            yield request


async def serve(
    config: ServerConfig,
    version: str,
    start_engine: Callable[[], Awaitable[AsyncEngine]],
    announce: Callable[[str], None],
) -> None:
    """Runs a server in this process until SIGTERM or SIGINT. A second signal ends the drain's wait.

    Announces 'listening on HOST:PORT' once requests are answered. Raises what `start_engine` raises.
    """
    # Before the engine is warm nothing is in flight, and loading cannot be interrupted. A signal ends the process now.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_at_once)
    server = GenerationServer(config, version)
    try:
        address = await server.bind()
        logger.info("warming up; %s answers UNAVAILABLE until then", address)
        engine = await start_engine()
        stop, hurry = _stop_signals()
        await server.open(engine)
        announce(f"listening on {address}")
        await _either(stop.wait(), engine.wait_failed())
    except BaseException:
        await server.drain()
        raise
    if not stop.is_set():
        # Ending the process lets a supervisor restart it.
        await server.drain(hurry)
        raise EngineFaultError("the engine has failed and cannot go on")
    logger.info("draining: waiting at most %g s for the requests in flight", config.drain_timeout_s)
    is_drained = await server.drain(hurry)
    logger.info("stopped; %s", "every request had ended" if is_drained else "the requests still in flight were ended")


def _end_at_once(number: int, _: object) -> None:
    """Ends the process as if it had no handler. Also ends process 1 of a container, which the kernel would spare."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _stop_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Returns (event set by the first SIGTERM or SIGINT, event set by the second)."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop, hurry


async def _unless_hurried(draining: Coroutine[Any, Any, bool], hurry: asyncio.Event | None) -> bool:
    if hurry is None:
        return await draining
    return await _either(draining, hurry.wait()) or False


async def _shut_down(engine: AsyncEngine, hurry: asyncio.Event | None) -> None:
    """Waits for the engine to end. Kills it HURRIED_S after `hurry` is set, because it may hang forever."""

    async def kill() -> None:
        assert hurry is not None
        await hurry.wait()
        await asyncio.sleep(HURRIED_S)
        logger.error("the engine did not end within %g s, and is killed", HURRIED_S)
        engine.kill()

    killing = None if hurry is None else asyncio.create_task(kill())
    try:
        await engine.shutdown()
    finally:
        if killing is not None:
            killing.cancel()


async def _either(first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, Any]) -> T | None:
    """Waits for one of the two and cancels the other. Returns the result of `first`, None if it did not finish."""
    tasks = [asyncio.create_task(first), asyncio.create_task(second)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _why_not_bound(host: str, port: int) -> str | None:
    """Returns the operating system's reason, which gRPC does not pass on. None if listening there works now."""
    try:
        family = socket.getaddrinfo(host, port)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return error.strerror
    return None


def _channel_arguments(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_receive_bytes),
        # By default gRPC refuses metadata at random if its size is between these two limits.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # On by default on Linux, where a second server on the same port would silently take half of the connections.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # Above this number of pending calls gRPC cancels some at random. The server's own refusals give a reason.
        ("grpc.server.max_pending_requests", MOST_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING_CALLS),
        # A client whose machine or process has stopped answers no ping. Its calls end with the connection.
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
        # By default gRPC sends GOAWAY to a client that pings more often than every five minutes.
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ]
