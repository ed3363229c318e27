"""The HTTP endpoint for Prometheus metrics and the serving status."""

from __future__ import annotations

import logging
import re
import socket
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from batchserve.errors import ConfigError
from batchserve.metrics import (
    AGE,
    CALIBRATION,
    COUNTERS,
    EDGES,
    FAILED_CALLS,
    FAULTS,
    GAUGES,
    HISTOGRAMS,
    LOAD,
    PREFIX,
    Histogram,
    MetricsSource,
)

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Mapping

logger = logging.getLogger(__name__)
REQUEST_TIMEOUT_S = 30.0
METHODS = ("GET", "HEAD")
ACCEPT_VERSION = re.compile(r"version=([^;,]*)")
SOUND_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){0,3}", re.ASCII)  # what prometheus_client can compare without an error
PLAIN_TEXT = "text/plain; charset=utf-8"


def join_address(host: str, port: int) -> str:
    """Returns HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class MetricsEndpoint:
    """Serves /metrics and /healthz from its own thread until closed. Port 0 picks a free port. Raises ConfigError.

    Before `show` the only metric is the number of failed calls by reason. `trouble` says in a few words why the server
    is not serving. It is None while the server is serving.
    """

    def __init__(self, host: str, port: int, failed_calls: Counter[str]) -> None:
        self.trouble: str | None = "warming up"
        self._is_faulty = False
        self._registry = CollectorRegistry()
        self._registry.register(_FailedCallsCollector(failed_calls))
        try:
            self._server = _HttpServer((host, port), self)
        except (OSError, OverflowError) as error:  # OverflowError: port number out of range
            raise ConfigError(
                f"host:metrics_port = {join_address(host, port)}: cannot listen there ({error})"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="batchserve-metrics", daemon=True
        )
        self._thread.start()
        self.address = join_address(host, self._server.server_address[1])

    def show(self, metrics: MetricsSource) -> None:
        """Adds the engine's metrics."""
        self._registry.register(_EngineCollector(metrics))

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        """Returns (status, content type, body) for a path."""
        if path == "/metrics":
            return self._figures(accept)
        if path == "/healthz":
            trouble = self.trouble
            status = HTTPStatus.OK if trouble is None else HTTPStatus.SERVICE_UNAVAILABLE
            return status, PLAIN_TEXT, f"{trouble or 'serving'}\n".encode()
        return HTTPStatus.NOT_FOUND, PLAIN_TEXT, b"not found: there are /metrics and /healthz\n"

    def _figures(self, accept: str) -> tuple[HTTPStatus, str, bytes]:
        if not all(SOUND_VERSION.fullmatch(version.strip()) for version in ACCEPT_VERSION.findall(accept)):
            accept = ""  # falls back to the plain format
        encode, content_type = choose_encoder(accept)
        try:
            body = encode(self._registry)
        except Exception:
            # Only the first of several failures in a row is logged as an error: a scrape comes every few seconds.
            logger.log(logging.DEBUG if self._is_faulty else logging.ERROR, "metrics: cannot be read", exc_info=True)
            self._is_faulty = True
            return HTTPStatus.INTERNAL_SERVER_ERROR, PLAIN_TEXT, b"the figures cannot be read\n"
        self._is_faulty = False
        return HTTPStatus.OK, content_type, body


class _HttpServer(ThreadingHTTPServer):
    request_queue_size = 128  # the default is five: a sixth simultaneous connection waits for a second
    daemon_threads = True

    def __init__(self, address: tuple[str, int], endpoint: MetricsEndpoint) -> None:
        # A numeric address has one address family. A host name gets the first family that it resolves to.
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self.endpoint = endpoint
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Binds without http.server's host name look-up, which may take seconds."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs at debug level: a client that hangs up or does not send HTTP is not a server error."""
        logger.debug("metrics: a connection of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Handles one connection in its own thread. A client that sends nothing times out."""

    server: _HttpServer
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "batchserve", ""

    def handle(self) -> None:
        with suppress(TimeoutError):
            super().handle()

    def parse_request(self) -> bool:
        """Refuses methods other than GET and HEAD as not allowed. http.server would call them unsupported."""
        if not super().parse_request():
            return False
        if self.command not in METHODS:
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, PLAIN_TEXT, b"method not allowed: GET or HEAD\n")
            self.close_connection = True  # the request's body is left unread
            return False
        return True

    def do_GET(self) -> None:
        """Answers GET, and HEAD without the body."""
        path = self.path.partition("?")[0]
        self._send(*self.server.endpoint.answer(path, self.headers.get("Accept", "")))

    do_HEAD = do_GET

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", ", ".join(METHODS))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        logger.debug("metrics: " + format, *arguments)


class _FailedCallsCollector(Collector):
    def __init__(self, failed_calls: Counter[str]) -> None:
        self._failed_calls = failed_calls

    def collect(self) -> Iterator[Metric]:
        yield _counter(FAILED_CALLS, "reason", dict(self._failed_calls))


class _EngineCollector(Collector):
    def __init__(self, metrics: MetricsSource) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        read = self._metrics.reading()
        for name, value in read.values.items():
            yield CounterMetricFamily(PREFIX + name, COUNTERS[name], value=value)
        for name, value in read.gauges.items():
            yield GaugeMetricFamily(PREFIX + name, GAUGES[name], value=value)
        for name, value in read.load.items():
            yield GaugeMetricFamily(PREFIX + name, LOAD[name], value=value)
        ((name, text),) = AGE.items()
        yield GaugeMetricFamily(PREFIX + name, text, value=read.age_s)
        tested, accepted = (
            CounterMetricFamily(PREFIX + name, text, labels=("drafter", "depth")) for name, text in EDGES.items()
        )
        (error,) = (GaugeMetricFamily(PREFIX + name, text, labels=("drafter",)) for name, text in CALIBRATION.items())
        for drafter, scored in read.acceptance.items():
            for depth, num_tested, num_accepted in zip(scored.depths, scored.tested, scored.accepted, strict=True):
                tested.add_metric((drafter, depth), num_tested)
                accepted.add_metric((drafter, depth), num_accepted)
            error.add_metric((drafter,), scored.calibration_error)
        yield from (tested, accepted, error, _counter(FAULTS, "where", read.faults))
        for name, (text, _) in HISTOGRAMS.items():
            histogram = read.histograms[name]
            yield HistogramMetricFamily(PREFIX + name, text, buckets=_buckets(histogram), sum_value=histogram.total)


def _counter(described: Mapping[str, str], label: str, counts: Mapping[str, int]) -> Metric:
    """Returns a counter family with one label."""
    ((name, text),) = described.items()
    family = CounterMetricFamily(PREFIX + name, text, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Returns (upper bound, number of values up to it) for each bucket."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
