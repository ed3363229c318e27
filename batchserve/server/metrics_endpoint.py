"""The engine's metrics for Prometheus, and whether the server is serving, over HTTP."""

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
SOUND_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){0,3}", re.ASCII)  # all that prometheus_client compares without an error
PLAIN_TEXT = "text/plain; charset=utf-8"


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class MetricsEndpoint:
    """Serves /metrics and /healthz from a thread of its own until closed; port 0 picks a free one. Raises ConfigError.

    Before `show` there are only the calls that failed, by reason. `trouble` is what keeps the server from serving, in
    a few words; None: nothing does.
    """

    def __init__(self, host: str, port: int, failed_calls: Counter[str]) -> None:
        self.trouble: str | None = "warming up"
        self._is_faulty = False
        self._registry = CollectorRegistry()
        self._registry.register(_FailedCallsCollector(failed_calls))
        try:
            self._server = _HttpServer((host, port), self)
        except (OSError, OverflowError) as error:  # OverflowError: no port has that number
            raise ConfigError(
                f"host:metrics_port = {join_address(host, port)}: cannot listen there ({error})"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="batchserve-metrics", daemon=True
        )
        self._thread.start()
        self.address = join_address(host, self._server.server_address[1])

    def show(self, metrics: MetricsSource) -> None:
        """From now on these, of the one engine."""
        self._registry.register(_EngineCollector(metrics))

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        """(status, content type, body) of what is asked for."""
        if path == "/metrics":
            return self._figures(accept)
        if path == "/healthz":
            trouble = self.trouble
            status = HTTPStatus.OK if trouble is None else HTTPStatus.SERVICE_UNAVAILABLE
            return status, PLAIN_TEXT, f"{trouble or 'serving'}\n".encode()
        return HTTPStatus.NOT_FOUND, PLAIN_TEXT, b"not found: there are /metrics and /healthz\n"

    def _figures(self, accept: str) -> tuple[HTTPStatus, str, bytes]:
        if not all(SOUND_VERSION.fullmatch(version.strip()) for version in ACCEPT_VERSION.findall(accept)):
            accept = ""  # answered in the plain format
        encode, content_type = choose_encoder(accept)
        try:
            body = encode(self._registry)
        except Exception:
            # Logged when it begins: a scrape comes every few seconds.
            logger.log(logging.DEBUG if self._is_faulty else logging.ERROR, "metrics: cannot be read", exc_info=True)
            self._is_faulty = True
            return HTTPStatus.INTERNAL_SERVER_ERROR, PLAIN_TEXT, b"the figures cannot be read\n"
        self._is_faulty = False
        return HTTPStatus.OK, content_type, body


class _HttpServer(ThreadingHTTPServer):
    request_queue_size = 128  # by default five: the sixth that comes at once waits for a second
    daemon_threads = True

    def __init__(self, address: tuple[str, int], endpoint: MetricsEndpoint) -> None:
        # An address without a name is in the family that it is written in, a name in the first that it has.
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self.endpoint = endpoint
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without http.server's look-up of the host's name, which may take seconds."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up, or sends no HTTP, is no error of ours."""
        logger.debug("metrics: a connection of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One connection, in a thread of its own; one that sends nothing is not waited for without end."""

    server: _HttpServer
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "batchserve", ""

    def handle(self) -> None:
        with suppress(TimeoutError):
            super().handle()

    def parse_request(self) -> bool:
        """Refuses methods that change something, which http.server would call unknown."""
        if not super().parse_request():
            return False
        if self.command not in METHODS:
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, PLAIN_TEXT, b"method not allowed: GET or HEAD\n")
            self.close_connection = True  # its body is left unread
            return False
        return True

    def do_GET(self) -> None:
        """What lies at the path; HEAD: without its body."""
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
    """One counter by one label."""
    ((name, text),) = described.items()
    family = CounterMetricFamily(PREFIX + name, text, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """(upper bound, how many are not above it)."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
