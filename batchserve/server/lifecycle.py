"""The server's life cycle: bind, warm up, serve, drain. While the model loads, requests are refused with the reason."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from batchserve.engine.backpressure import BackpressureLimits
from batchserve.errors import ConfigError, EngineFaultError
from batchserve.hosts import is_loopback
from batchserve.server.grpc.server import GrpcServer
from batchserve.server.health import ServingStatus
from batchserve.server.http.server import HttpServer
from batchserve.server.keys import NO_PRIORITY_BOUND, Caller, KeyStore
from batchserve.server.metrics_endpoint import MetricsEndpoint
from batchserve.server.metrics_text import MetricsText
from batchserve.server.open_calls import OpenCalls
from batchserve.server.stall_watch import watch_for_stalls
from batchserve.server.tasks import either
from batchserve.server.tracing import Tracing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from batchserve.engine.async_engine import AsyncEngine
    from batchserve.server_config import ServerConfig

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 5.0
HURRIED_S = 10.0  # after a second signal: time for a last step and for saving the draft cache
QUIET_S = 0.15
ARRIVALS_TIMEOUT_S = 1.0


class GenerationServer:
    """Call bind(), open(engine), drain(). Before open and from drain on, requests get UNAVAILABLE with RetryInfo."""

    def __init__(self, config: ServerConfig, version: str) -> None:
        self._config, self._version = config, version
        self._engine: AsyncEngine | None = None
        self._watching: asyncio.Task[None] | None = None
        self._is_loopback = is_loopback(config.host)
        anybody = Caller(is_admin=self._is_loopback, max_priority=NO_PRIORITY_BOUND)
        unread = BackpressureLimits(config.max_unread_deltas, config.unread_timeout_s)
        self._calls = OpenCalls(unread, KeyStore(config.keys, anybody), logs_prompts=config.has_prompt_logs)
        self._status = ServingStatus()
        self._metrics = MetricsText(
            self._calls.failed_calls, self._calls.tenants if config.has_tenant_metrics else None
        )
        self._endpoint: MetricsEndpoint | None = None
        self._grpc = GrpcServer(config, version, self._calls)
        self._http = HttpServer(config, version, self._calls, self._status, self._metrics) if config.has_http else None
        self.http_address: str | None = None  # HOST:PORT, once it is bound

    async def bind(self) -> str:
        """Starts listening as NOT_SERVING. Returns gRPC's HOST:PORT with the actual port. Raises ConfigError."""
        self._check_exposure()
        if self._config.metrics_port is not None:
            address = self._config.host, self._config.metrics_port
            self._endpoint = MetricsEndpoint(*address, self._metrics, self._status, self._calls.keys)
            logger.info("metrics on http://%s", self._endpoint.address)
        if self._http is not None:
            self.http_address = await self._http.bind()
        return await self._grpc.bind()

    async def open(self, engine: AsyncEngine) -> None:
        """Serves from this engine, which must be warm. The server owns the engine from now on.

        Where other machines may call without keys, requests share no drafts and no K/V unless a scope has been chosen.
        """
        self._engine = engine
        if not self._is_loopback and not self._calls.keys.has_keys:
            engine.isolate_default_scope()
        self._metrics.show(engine.metrics, engine.info.name)
        if self._config.otlp_endpoint is not None:
            self._calls.tracing = Tracing.to(self._config.otlp_endpoint, self._version, engine.info.name)
        self._calls.open(engine)
        self._watching = asyncio.create_task(self._watch(engine))
        await self._set_serving(None)

    async def drain(self, hurry: asyncio.Event | None = None) -> bool:
        """Refuses new requests, lets those in flight end within `drain_timeout_s`, ends the rest and stops listening.

        Returns True if all ended by themselves. Setting `hurry` ends the wait early. Repeated calls are harmless.
        """
        if self._watching is not None:
            self._watching.cancel()
        self._status.trouble = "draining"
        await self._grpc.tell_draining()
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
        if self._http is not None:
            await self._http.stop()
        await self._grpc.stop()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        if self._calls.tracing is not None:
            await asyncio.to_thread(self._calls.tracing.shutdown)
            self._calls.tracing = None
        return is_drained

    def reload(self) -> None:
        """Reads the file of keys again, in a thread: it may be long."""
        asyncio.get_running_loop().run_in_executor(None, self._calls.keys.reload)

    @property
    def stop_asked(self) -> asyncio.Event:
        """Set by a signal, and by an admin's Drain."""
        return self._calls.stop_asked

    def _check_exposure(self) -> None:
        """Raises ConfigError if other machines could call without keys, and nobody has said that they may."""
        config = self._config
        if self._is_loopback:
            return
        if not self._calls.keys.has_keys and not config.allow_unauthenticated:
            raise ConfigError(
                f"host = {config.host!r}: must be loopback without keys; --keys FILE names callers, "
                "--allow-unauthenticated lets anybody call who reaches the port"
            )
        if self._calls.keys.has_keys and config.tls_certificate is None:
            logger.warning("keys come over the network as they are: there is no --tls-certificate")
        if not self._calls.keys.has_keys:
            logger.warning(
                "anybody who reaches %s may call; requests that name no draft scope share no drafts", config.host
            )

    async def _watch(self, engine: AsyncEngine) -> None:
        async def tell(goes_on: bool) -> None:
            trouble = None if goes_on else "stalled: a step of the engine does not end"
            await self._set_serving(trouble, is_alive=goes_on)

        await either(engine.wait_failed(), watch_for_stalls(engine, self._config.stall_timeout_s, tell))
        await self._set_serving("failed: the engine takes no requests any more", is_alive=False)

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

    async def _set_serving(self, trouble: str | None, *, is_alive: bool = True) -> None:
        """Publishes the serving status. trouble: the reason for not serving; None while serving."""
        self._status.trouble, self._status.is_alive = trouble, is_alive
        await self._grpc.tell(is_serving=trouble is None)


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
    if config.keys is not None:  # by default the signal ends the process
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
    try:
        address = await server.bind()
        logger.info("warming up; %s answers UNAVAILABLE until then", address)
        engine = await start_engine()
        stop, hurry = server.stop_asked, _handle_signals(server)
        await server.open(engine)
        announce(f"listening on {address}")
        if server.http_address is not None:
            announce(f"HTTP on {'http' if config.tls_certificate is None else 'https'}://{server.http_address}")
        await either(stop.wait(), engine.wait_failed())
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


def _handle_signals(server: GenerationServer) -> asyncio.Event:
    """SIGTERM and SIGINT ask the server to stop. Returns an event that a second of them sets."""
    stop, hurry, loop = server.stop_asked, asyncio.Event(), asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return hurry


async def _unless_hurried(draining: Coroutine[Any, Any, bool], hurry: asyncio.Event | None) -> bool:
    if hurry is None:
        return await draining
    return await either(draining, hurry.wait()) or False


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
